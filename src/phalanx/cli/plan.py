"""Choose a layout for a job, on this machine or a described cluster, and say why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli._options import JobArguments, JsonOption
from phalanx.cli._plan_keys import KeyOptions
from phalanx.cli._plan_options import (
    JOB_ARGUMENTS,
    AllKindsOption,
    AllRulesOption,
    AnchorsOption,
    AutotuneOption,
    ClusterOption,
    DryRunOption,
    ExplainOption,
    ForceOption,
    FromOption,
    GlobalBatchOption,
    GpuOption,
    GpusOption,
    InstanceOption,
    ModelOption,
    ModelsOption,
    NoCacheOption,
    NodesOption,
    OutOption,
    PageOption,
    RecutOption,
    SeqLenOption,
    SuggestOption,
    ValidateOption,
    VerifyOption,
    check_option_combination,
)

if TYPE_CHECKING:
    from phalanx.cli._plan_search import SearchOptions
    from phalanx.job.schema import Job
    from phalanx.plan.search.result import RankedLayout
    from phalanx.run.plan_job import PlannedJob

EXAMPLE = (
    "Example: phalanx plan model.preset=llama3-70b cluster.gpu=h100-sxm cluster.nodes=32"
    " data.seq_len=8192 train.global_batch_size=512"
)


def command(
    arguments: JobArguments = None,
    explain: ExplainOption = False,
    all_rules: AllRulesOption = False,
    page: PageOption = None,
    models: ModelsOption = False,
    suggest: SuggestOption = False,
    model: ModelOption = None,
    gpu: GpuOption = None,
    instance: InstanceOption = None,
    cluster: ClusterOption = None,
    nodes: NodesOption = None,
    gpus: GpusOption = None,
    seq_len: SeqLenOption = None,
    global_batch: GlobalBatchOption = None,
    out: OutOption = None,
    force: ForceOption = False,
    judge: VerifyOption = False,
    recut: RecutOption = None,
    dry_run: DryRunOption = False,
    all_kinds: AllKindsOption = False,
    no_cache: NoCacheOption = False,
    validate: ValidateOption = None,
    anchors: AnchorsOption = 0,
    from_run: FromOption = None,
    autotune: AutotuneOption = None,
    as_json: JsonOption = False,
) -> int:
    """Choose a layout for a job and say why, with memory per rank, for this machine or any other.

    The vocabulary is the job's or the data's, as `phalanx train` has it; nothing is built, and
    without --out nothing is written.
    """
    from phalanx.cli._json import print_errors_as_json
    from phalanx.cli._plan_search import SearchOptions

    words = list(arguments or [])
    keys = KeyOptions(model, gpu, instance, cluster, nodes, gpus, seq_len, global_batch)
    with print_errors_as_json(as_json):
        check_option_combination(
            {
                JOB_ARGUMENTS: words, "--explain": explain, "--rules": all_rules, "--page": page,
                "--models": models, "--suggest-rules": suggest, **keys.list_values(), "--out": out,
                "--force": force, "--verify": judge, "--recut": recut, "--dry-run": dry_run,
                "--all-kinds": all_kinds, "--no-cache": no_cache, "--validate": validate,
                "--anchors": anchors, "--from": from_run, "--autotune": autotune,
            }
        )  # fmt: skip
        if models:
            return _print_presets(as_json)
        if validate is not None:
            return _print_validation(validate, anchors, as_json=as_json)
        if suggest:
            return _print_suggestion(words, model, judge, as_json=as_json)
        words = keys.add_to(words)
        if from_run is not None:
            return _print_plan_from(from_run, words, as_json=as_json)
        if autotune is not None:
            return _print_autotune(autotune, words, as_json=as_json)
        if dry_run:
            return _print_dry_run(words, gpus, all_kinds, no_cache, as_json=as_json)
        if recut is not None:
            return _print_recut(words, recut, as_json=as_json)
        options = SearchOptions(
            gpus, out, force, as_json, page, None, all_rules, keys.list_given_names()
        )
        if explain:
            return _print_explained(words, options)
        return _print_plan_of_job(words, options)


def _print_validation(path: Path, anchors: int, *, as_json: bool) -> int:
    from phalanx.cli._plan_validate import print_validation

    return print_validation(path, anchors, as_json=as_json)


def _print_suggestion(
    words: Sequence[str], model: str | None, verify_too: bool, *, as_json: bool
) -> int:
    from phalanx.cli._suggest import print_suggestion

    return print_suggestion(words, model, verify_too=verify_too, as_json=as_json)


def _print_plan_from(run_dir: Path, words: Sequence[str], *, as_json: bool) -> int:
    from phalanx.cli._plan_from import print_plan_from

    return print_plan_from(run_dir, words, as_json=as_json)


def _print_autotune(count: int, words: Sequence[str], *, as_json: bool) -> int:
    from phalanx.cli._plan_autotune import run_and_print_autotune

    return run_and_print_autotune(count, words, as_json=as_json)


def _print_dry_run(
    words: Sequence[str], gpus: str | None, all_kinds: bool, no_cache: bool, *, as_json: bool
) -> int:
    from phalanx.cli._plan_dry_run import print_dry_run

    print_dry_run(
        _load_job(words), all_kinds=all_kinds, uses_cache=not no_cache, gpus=gpus, as_json=as_json
    )
    return 0


def _print_explained(words: Sequence[str], options: SearchOptions) -> int:
    """Print the formula of the term among `words`; without one where the values of the job come
    from."""
    from phalanx.cli._arguments import split_job_file_and_overrides
    from phalanx.cli._plan_advice import print_term_formula, split_explained_term
    from phalanx.core.errors import UsageError

    words, term = split_explained_term(words)
    job = _load_job(words)
    if term is None:
        from phalanx.cli._explain import print_explained_job

        if options.gpus is not None:
            raise UsageError("--explain without a term has no use for --gpus", fix="name a term")
        print_explained_job(
            job,
            *split_job_file_and_overrides(words),
            as_json=options.as_json,
            winner=_find_winner_to_explain(job),
        )
        return 0
    options = replace(options, term=term)
    if _needs_search(job, options.gpus, None):
        from phalanx.cli._plan_search import run_and_print_search

        return run_and_print_search(job, options)
    from phalanx.run.plan_advice import advise_on_planned_job

    advised = advise_on_planned_job(_plan_with_progress(job))
    print_term_formula(advised, term, as_json=options.as_json)
    return 0


def _find_winner_to_explain(job: Job) -> RankedLayout | None:
    """The layout that a plan of `job` proposes; None where it makes no search.

    Raises LayoutError where nothing fits.
    """
    from phalanx.cli._progress import show_progress_of_module
    from phalanx.core.errors import LayoutError
    from phalanx.run.search_job import can_predict_step_times, search_layouts_of_job

    if not can_predict_step_times(job):
        return None
    with show_progress_of_module() as tell:
        winner = search_layouts_of_job(job, tell=tell).result.winner
    if winner is None:
        raise LayoutError(
            "no layout fits, so there is none to explain",
            fix="see what would: the same command without --explain",
        )
    return winner


def _print_plan_of_job(words: Sequence[str], options: SearchOptions) -> int:
    """Plan the job of `words` and print the answer: a search's where the devices are known."""
    from phalanx.core.garbage import pausing_garbage_collection

    with pausing_garbage_collection():
        return _plan_and_print_job(words, options)


def _plan_and_print_job(words: Sequence[str], options: SearchOptions) -> int:
    from phalanx.cli._plan_search import check_plan_files, run_and_print_search

    job = _load_job(words)
    needs_search = _needs_search(job, options.gpus, options.out)
    check_plan_files(options.out, options.page, force=options.force)
    if needs_search:
        return run_and_print_search(job, options)
    _print_planned(
        _plan_with_progress(job),
        words,
        options.page,
        as_json=options.as_json,
        all_rules=options.all_rules,
    )
    return 0


def _plan_with_progress(job: Job, *, checks_initial: bool = True) -> PlannedJob:
    """The plan of a job; how far its module is measured is shown on standard error."""
    from phalanx.cli._progress import show_progress_of_module
    from phalanx.run.plan_job import plan_job

    with show_progress_of_module() as tell:
        return plan_job(job, checks_initial=checks_initial, tell=tell)


def _load_job(words: Sequence[str]) -> Job:
    from phalanx.cli._arguments import split_job_file_and_overrides
    from phalanx.job.load import load_job
    from phalanx.plan.described_cluster import require_cluster_keys_have_effect

    job = load_job(*split_job_file_and_overrides(words))
    require_cluster_keys_have_effect(job)
    return job


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

    body = planned.to_json()
    if not as_json:
        _print_plan(planned, arguments)
    if page is not None or all_rules:
        # Only now: it imports numpy.
        from phalanx.run.plan_advice import advise_on_planned_job

        advised = advise_on_planned_job(planned)
        if all_rules:
            body["advice"] = advised.advice.to_json()
        if all_rules and not as_json:
            print_plan_details(advised, all_rules=True)
        if page is not None:
            write_page(advised, page)
    if as_json:
        print_json("plan", body, indent=1)
    elif page is not None:
        print(f"wrote   {page}")


def _needs_search(job: Job, gpus: str | None, out: Path | None) -> bool:
    """True where devices are known whose step times can be predicted.

    Raises UsageError for options that only a search reads where they are not.
    """
    from phalanx.cli._plan_search import build_unknown_gpus_error
    from phalanx.core.blas_threads import import_numpy_without_threads

    import_numpy_without_threads()  # before a search does, which multiplies no matrices
    from phalanx.run.search_job import can_predict_step_times

    if can_predict_step_times(job):
        return True
    if gpus is not None or out is not None:
        raise build_unknown_gpus_error("--gpus and --out are")
    return False


def _print_plan(planned: PlannedJob, arguments: Sequence[str]) -> None:
    from phalanx.job.user_dataset import is_own_dataset
    from phalanx.plan.explain import describe_plan
    from phalanx.run.next_command import build_next_line_after_planning

    lines = [
        *planned.data_lines,
        *describe_plan(planned.plan, of_samples=is_own_dataset(planned.job.data.source)),
    ]
    if planned.time is not None:
        lines.append(planned.time.describe())
    if planned.initial is not None:
        lines += planned.initial.summary_lines()
    if planned.has_trainable_data:
        lines.append(build_next_line_after_planning(arguments))
    print("\n".join(lines))


def _print_recut(words: Sequence[str], run_dir: Path, *, as_json: bool) -> int:
    from phalanx.cli._json import print_json
    from phalanx.run.recut import suggest_pipeline_cut_from_run

    planned = _plan_with_progress(_load_job(words), checks_initial=False)
    better = suggest_pipeline_cut_from_run(planned.job, planned.plan, run_dir)
    if as_json:
        print_json("recut", better.to_json(), indent=1)
    else:
        print("\n".join(better.lines()))
    return 0


def _print_presets(as_json: bool) -> int:
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
        return 0
    width = max(len(preset.name) for preset in presets)
    for preset in presets:
        size = "" if preset.num_params is None else format_count(preset.num_params)
        print(f"{preset.name:<{width}}  {size:>8}  {preset.family}".rstrip())
    return 0
