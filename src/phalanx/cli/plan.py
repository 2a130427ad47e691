"""Choose a layout for a job on this machine and say why, with memory per rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli._options import JobArguments

if TYPE_CHECKING:
    from phalanx.job.schema import Job
    from phalanx.run.plan_job import PlannedJob

EXAMPLE = (
    "Example: phalanx plan model.preset=llama3-70b cluster.gpu=h100-sxm cluster.nodes=32"
    " data.seq_len=8192 train.global_batch_size=512"
)


def command(
    arguments: JobArguments = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Say where each value of the job comes from; with a TERM, print its formula.",
        ),
    ] = False,
    all_rules: Annotated[
        bool, typer.Option("--rules", help="Show every rule of thumb, also those that hold.")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option("--page", metavar="FILE", help="Write the plan as a page (HTML)."),
    ] = None,
    models: Annotated[
        bool, typer.Option("--models", help="List the presets of model.preset.")
    ] = False,
    suggest: Annotated[
        bool,
        typer.Option(
            "--suggest-rules", help="Propose sharding rules for tensor parallelism, and say why."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="A preset, a Hugging Face directory or config.json, or package.module:factory.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="Plan for GPUs of this kind: h100-sxm."),
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option("--instance", metavar="TYPE", help="Plan for machines of this type."),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster", metavar="FILE", help="Plan for the cluster that this file describes."
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, metavar="N", help="Machines of the cluster.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", metavar="N|A..B", help="GPUs in all; a range compares numbers of them."
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option("--seq-len", min=1, metavar="N", help="Tokens of a sequence (data.seq_len)."),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch", min=1, metavar="N", help="Sequences a step, over all ranks."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Write job.toml with the layout, and plan.json, there."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --out: replace files that are there.")
    ] = False,
    judge: Annotated[
        bool,
        typer.Option(
            "--verify", help="With --suggest-rules: judge them with parallel.tp=2 (phalanx verify)."
        ),
    ] = False,
    recut: Annotated[
        Path | None,
        typer.Option(
            "--recut",
            metavar="RUN",
            help="Cut a pipeline anew, by what the stages of this run took.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Build and run the real program with fake tensors: memory and every collective.",
        ),
    ] = False,
    all_kinds: Annotated[
        bool,
        typer.Option("--all-kinds", help="With --dry-run: every kind of rank."),
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="With --dry-run: run it again.")
    ] = False,
    validate: Annotated[
        Path | None,
        typer.Option(
            "--validate",
            metavar="FILE",
            help="Predict the measured runs of this JSONL file, and say how wrong that is.",
        ),
    ] = None,
    anchors: Annotated[
        int,
        typer.Option(
            "--anchors",
            metavar="K",
            min=0,
            help="With --validate: K rows of each source set a scale for its others.",
        ),
    ] = 0,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="Time and memory from what a small run measured."
        ),
    ] = None,
    autotune: Annotated[
        int | None,
        typer.Option(
            "--autotune", min=1, metavar="K", help="Run the K best layouts for a few steps."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> int:
    """Choose a layout for a job and say why, with memory per rank, for this machine or any other.

    The vocabulary is the job's or the data's, as `phalanx train` has it; nothing is built, and
    without --out nothing is written.
    """
    from phalanx.cli._arguments import split_job_file_and_overrides
    from phalanx.cli._json import print_errors_as_json
    from phalanx.cli._plan_advice import print_term_formula, split_explained_term
    from phalanx.cli._plan_search import SearchOptions, list_search_overrides, run_and_print_search
    from phalanx.core.errors import UsageError

    with print_errors_as_json(as_json):
        if models:
            _print_presets(as_json)
            return 0
        if anchors and validate is None:
            raise UsageError("--anchors is for --validate", fix="add --validate FILE.jsonl")
        if validate is not None:
            from phalanx.cli._plan_validate import print_validation

            return print_validation(validate, anchors, as_json=as_json)
        if suggest:
            from phalanx.cli._suggest import print_suggestion

            return print_suggestion(arguments or [], model, verify_too=judge, as_json=as_json)
        if from_run is not None:
            from phalanx.cli._plan_from import print_plan_from

            return print_plan_from(from_run, arguments or [], as_json=as_json)
        if autotune is not None:
            from phalanx.cli._plan_autotune import run_and_print_autotune

            return run_and_print_autotune(autotune, arguments or [], as_json=as_json)
        if judge:
            raise UsageError("--verify is for --suggest-rules", fix="use phalanx verify")
        term = None
        if explain:
            arguments, term = split_explained_term(arguments or [])
        job_file, overrides = split_job_file_and_overrides(arguments or [])
        overrides += list_search_overrides(
            model=model,
            gpu=gpu,
            instance=instance,
            cluster_file=cluster,
            nodes=nodes,
            seq_len=seq_len,
            global_batch=global_batch,
        )
        if explain and term is None:
            from phalanx.cli._explain import print_explained_job
            from phalanx.job.load import load_job

            print_explained_job(load_job(job_file, overrides), job_file, overrides, as_json=as_json)
            return 0
        from phalanx.job.load import load_job
        from phalanx.run.plan_job import plan_job

        job = load_job(job_file, overrides)
        if dry_run:
            from phalanx.cli._plan_dry_run import print_dry_run

            print_dry_run(
                job, all_kinds=all_kinds, uses_cache=not no_cache, gpus=gpus, as_json=as_json
            )
            return 0
        if all_kinds or no_cache:
            raise UsageError("--all-kinds and --no-cache are for --dry-run")
        if recut is None and _needs_search(job, gpus, out):
            options = SearchOptions(gpus, out, force, as_json, page, term, all_rules)
            return run_and_print_search(job, options)
        planned = plan_job(job, checks_initial=recut is None)
        if recut is not None:
            _print_recut(planned, recut, as_json)
        elif term is not None:
            from phalanx.run.plan_advice import advise_on_planned_job

            print_term_formula(advise_on_planned_job(planned), term, as_json=as_json)
        else:
            _print_planned(planned, arguments or [], page, as_json=as_json, all_rules=all_rules)
    return 0


def _print_planned(
    planned: PlannedJob,
    arguments: Sequence[str],
    page: Path | None,
    *,
    as_json: bool,
    all_rules: bool,
) -> None:
    """Print the plan of a job, with its rules where they are asked for, and write its page."""
    from phalanx.cli._json import print_json
    from phalanx.cli._plan_advice import print_plan_details, write_page

    if as_json:
        print_json("plan", planned.to_json(), indent=1)
    else:
        _print_plan(planned, arguments)
    if page is None and not all_rules:
        return
    # Only now: it imports numpy.
    from phalanx.run.plan_advice import advise_on_planned_job

    advised = advise_on_planned_job(planned)
    if all_rules and not as_json:
        print_plan_details(advised, all_rules=True)
    if page is not None:
        write_page(advised, page)
        if not as_json:
            print(f"wrote   {page}")


def _needs_search(job: Job, gpus: str | None, out: Path | None) -> bool:
    """True where devices are known whose step times can be predicted.

    Raises UsageError for options that only a search reads where they are not.
    """
    from phalanx.core.errors import UsageError
    from phalanx.run.search_job import has_known_devices

    if has_known_devices(job):
        return True
    if gpus is not None or out is not None:
        raise UsageError(
            "--gpus and --out are for a cluster of known GPUs, and this machine has none",
            fix="add --gpu NAME or --instance TYPE",
        )
    return False


def _print_plan(planned: PlannedJob, arguments: Sequence[str]) -> None:
    from phalanx.job.user_dataset import is_own_dataset
    from phalanx.plan.explain import describe_plan
    from phalanx.run.next_command import suggest_after_planning

    lines = [
        *planned.data_lines,
        *describe_plan(planned.plan, of_samples=is_own_dataset(planned.job.data.source)),
    ]
    if planned.time is not None:
        lines.append(planned.time.describe())
    if planned.initial is not None:
        lines += planned.initial.summary_lines()
    if planned.can_train_now:
        lines.append(suggest_after_planning(arguments))
    print("\n".join(lines))


def _print_recut(planned: PlannedJob, run_dir: Path, as_json: bool) -> None:
    from phalanx.cli._json import print_json
    from phalanx.run.recut import recut_pipeline_of_run

    better = recut_pipeline_of_run(planned.job, planned.plan, run_dir)
    if as_json:
        print_json("recut", better.to_json(), indent=1)
    else:
        print("\n".join(better.lines()))


def _print_presets(as_json: bool) -> None:
    from phalanx.cli._json import print_json
    from phalanx.core.units import format_count
    from phalanx.job.presets import list_presets

    presets = list_presets()
    if as_json:
        rows = [
            {"name": p.name, "family": p.family, "kind": p.kind, "num_params": p.num_params}
            for p in presets
        ]
        print_json("models", {"models": rows}, indent=1)
        return
    width = max(len(preset.name) for preset in presets)
    for preset in presets:
        size = "" if preset.num_params is None else format_count(preset.num_params)
        print(f"{preset.name:<{width}}  {size:>8}  {preset.family}".rstrip())
