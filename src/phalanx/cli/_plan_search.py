"""`phalanx plan` for a cluster whose devices are known: the search for a layout, printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli._output_files import require_page_or_new_file, require_writable_place
from phalanx.cli._plan_keys import spell_keys_as_options
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import LayoutError, UsageError

if TYPE_CHECKING:
    from phalanx.job.schema import Job
    from phalanx.run.search_job import JobSearch


@dataclass(frozen=True)
class SearchOptions:
    """Options of the command line that a search reads."""

    gpus: str | None = None
    out: Path | None = None
    force: bool = False
    as_json: bool = False
    page: Path | None = None
    term: str | None = None
    """The term that --explain names."""
    all_rules: bool = False
    named_options: tuple[str, ...] = ()
    """The options of the command line that stand for a key of the job."""


def run_and_print_search(job: Job, options: SearchOptions) -> int:
    """Search, print the answer, write files; returns the exit code: 3 where nothing fits."""
    from phalanx.cli._json import build_json_body, print_json
    from phalanx.cli._plan_advice import (
        print_plan_details,
        print_term_formula,
        write_page,
        write_page_of_unfit_search,
    )
    from phalanx.core.errors import ExitCode
    from phalanx.plan.search.describe import format_search_result
    from phalanx.run.plan_advice import advise_on_search
    from phalanx.run.search_job import write_search_files

    counts = _parse_device_counts_option(options.gpus)
    if len(counts) > 1:
        return _print_scaling_table(job, counts, options)
    if counts:
        job = _set_num_devices(job, counts[0])
    searched = _search_and_spell_advice(job, options)
    advised = advise_on_search(searched)
    if options.term is not None:
        if advised is None:
            raise UsageError("nothing fits, so there are no numbers", fix="leave --explain out")
        print_term_formula(advised, options.term, as_json=options.as_json)
        return 0
    body = searched.result.to_json()
    if advised is not None:
        body["advice"] = advised.advice.to_json()
    if not options.as_json:
        # First, because a page takes a while, and a disk may be full.
        print("\n".join(format_search_result(searched.result, searched.task.cluster)))
        if advised is not None:
            print_plan_details(advised, all_rules=options.all_rules)
        sys.stdout.flush()
    files = []
    if options.out is not None:
        document = build_json_body("plan-search", body)
        files = write_search_files(searched, document, options.out, force=options.force)
        if advised is None:
            # Of an earlier plan, whose place this one takes.
            (options.out / "job.toml").unlink(missing_ok=True)
    for page in _list_page_files(options):
        if advised is None:
            write_page_of_unfit_search(searched, page)
        else:
            write_page(advised, page)
        files.append(page)
    if options.as_json:
        print_json("plan-search", body, indent=1)
    else:
        for file in dict.fromkeys(files):
            print(f"wrote   {file}")
    if searched.result.winner is None:
        return int(ExitCode.JOB)
    return 0


def check_plan_files(out: Path | None, page: Path | None, *, force: bool) -> None:
    """Raises UsageError or ResourceError where the files of a plan cannot be written, before the
    work that they would hold."""
    targets = []
    if out is not None:
        targets = [(out / name, "--out") for name in ("job.toml", "plan.json", "page.html")]
    for file, _ in targets:
        if file.exists() and not force:
            raise UsageError(
                "is there already",
                where=str(file),
                fix="give another --out, or --force to replace it",
            )
    if page is not None:
        require_page_or_new_file(page)
        targets.append((page, "--page"))
    for file, option in targets:
        try:
            require_writable_place(file, makes_folder=option == "--out")
        except OSError as error:
            raise build_path_resource_error(error, "writing the plan", file, place=option) from None


def _search_and_spell_advice(job: Job, options: SearchOptions) -> JobSearch:
    """The search for a job; changes that it, or its error, advises can be added to the command as
    they are."""
    from phalanx.cli._progress import show_progress_of_module
    from phalanx.run.search_job import search_layouts_of_job

    try:
        with show_progress_of_module() as tell:
            searched = search_layouts_of_job(job, tell=tell)
    except LayoutError as error:
        raise _spell_advice_of_error(error, options) from None
    nearest = [
        replace(fit, change=spell_keys_as_options(fit.change, options.named_options))
        for fit in searched.result.nearest
    ]
    return replace(searched, result=replace(searched.result, nearest=tuple(nearest)))


def _spell_advice_of_error(error: LayoutError, options: SearchOptions) -> LayoutError:
    fix = spell_keys_as_options(error.fix or "", options.named_options)
    return LayoutError(error.what, where=error.where, why=error.why, fix=fix or None)


def _list_page_files(options: SearchOptions) -> list[Path]:
    """The files that a page is written to: that of --page, and page.html of --out."""
    pages = []
    if options.page is not None:
        pages.append(options.page)
    if options.out is not None:
        pages.append(options.out / "page.html")
    return pages


def _parse_device_counts_option(text: str | None) -> list[int]:
    if text is None:
        return []
    from phalanx.plan.search.scaling import parse_device_counts

    return parse_device_counts(text)


def set_num_devices_of_job(job: Job, text: str) -> Job:
    """`job` on the one number of devices that `text` says.

    Raises UsageError for a range of them.
    """
    counts = _parse_device_counts_option(text)
    if len(counts) != 1:
        raise UsageError("one number of GPUs is needed", where="--gpus", fix=f"--gpus {counts[-1]}")
    return _set_num_devices(job, counts[0])


def build_unknown_gpus_error(options_are: str) -> UsageError:
    """The error for options that only a search reads, where no GPU is known: "--out is"."""
    return UsageError(
        f"{options_are} for a cluster of known GPUs, and this machine has none",
        fix="add --gpu NAME or --instance TYPE",
    )


def _set_num_devices(job: Job, num_devices: int) -> Job:
    """`job` on so many devices: whole nodes of those that it describes, or some of this machine."""
    from phalanx.job.copies import apply_job_keys
    from phalanx.plan.described_cluster import choose_cluster_of_job

    if not job.cluster.has_described_machine:
        return apply_job_keys(job, {"parallel.ranks": num_devices})
    per_node = choose_cluster_of_job(job).devices_per_node or num_devices
    nodes = -(-num_devices // per_node)
    return apply_job_keys(job, {"cluster.nodes": nodes, "parallel.ranks": num_devices})


def _print_scaling_table(job: Job, counts: Sequence[int], options: SearchOptions) -> int:
    from phalanx.cli._json import print_json
    from phalanx.cli._progress import show_progress_of_module
    from phalanx.core.errors import ExitCode
    from phalanx.plan.search.describe import find_counted_unit_of_task, format_scaling_table
    from phalanx.plan.search.scaling import search_per_device_count
    from phalanx.run.search_job import prepare_layout_search

    if options.out is not None:
        raise UsageError(
            "--out is for one number of GPUs", fix="leave --out out, or --gpus with one number"
        )
    if options.page is not None or options.term is not None or options.all_rules:
        raise UsageError(
            "--page, --rules and --explain are for one number of GPUs",
            fix="leave them out, or --gpus with one number",
        )
    with show_progress_of_module() as tell:
        task = prepare_layout_search(_set_num_devices(job, counts[-1]), tell=tell)
    rows = [
        replace(row, fix=spell_keys_as_options(row.fix, options.named_options))
        for row in search_per_device_count(task, counts)
    ]
    if options.as_json:
        body = {
            "counts": [row.to_json() for row in rows],
            "steps": task.job.train.steps,
            "precision": task.job.precision.compute,
            "price_note": task.cluster.price_note,
        }
        print_json("plan-scaling", body, indent=1)
    else:
        unit = find_counted_unit_of_task(task)
        print("\n".join(format_scaling_table(rows, task.job, task.cluster, unit=unit)))
    if all(row.winner is None for row in rows):
        return int(ExitCode.JOB)
    return 0
