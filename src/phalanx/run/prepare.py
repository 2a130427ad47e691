"""From a job to all that is decided before the first rank starts, whoever starts the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.checkpoint.facts import DATA_FACT
from phalanx.checkpoint.ownership.run_lock import RunLock
from phalanx.checkpoint.stores import Store, find_newest_readable_manifest
from phalanx.core.errors import LayoutError
from phalanx.core.files import create_writable_run_directory
from phalanx.core.open_files import raise_open_file_limit, require_open_files
from phalanx.data.corpus import CORPUS_FILE_NAME, Corpus, verify_corpus_checksums
from phalanx.data.prepare import prepare_corpus
from phalanx.job.costs import ModelCosts
from phalanx.job.model import find_vocab_size_of, require_model_reads_data
from phalanx.job.module_probe import measure_foreign_shape
from phalanx.job.schema import Job
from phalanx.job.user_dataset import count_loader_processes
from phalanx.launch.paths import refuse_symlinked_run_folders
from phalanx.plan.cluster import Cluster, detect_cluster
from phalanx.plan.described_cluster import require_cluster_is_this_machine
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.precision import keep_precision_of_run, replace_precision
from phalanx.run.choose_layout import choose_layout
from phalanx.run.data_counts import count_tokens_and_samples
from phalanx.run.directory import (
    DATA_FOLDER,
    JOB_FILE,
    PLAN_FILE,
    RunDirectory,
    hold_run_facts_files,
    refuse_existing_run,
)
from phalanx.run.initial_weights import (
    INIT_FILE_NAME,
    find_initial_checkpoint,
    find_shape_known_before_data,
)
from phalanx.run.mixed_rows import find_mixed_rows_warnings
from phalanx.run.needs import require_packages
from phalanx.run.resume import read_plan_of_run
from phalanx.run.store_claim import hold_claimed_store
from phalanx.run.tokens import JobTokens, find_job_tokens

# fp32 weights and two moments (AdamW's).
CHECKPOINT_BYTES_PER_PARAM = 12
# Of a rank, which has most: 30, 38 and 49 were open in one of 2, 4 and 8, and 9 and 24 more with 2
# and 6 workers (2026-11-29).
_OPEN_FILES, _OPEN_FILES_PER_RANK, _OPEN_FILES_PER_WORKER = 22, 4, 4


@dataclass(frozen=True)
class PreparedRun:
    """All that is decided before the first rank starts."""

    job: Job
    plan: Plan
    corpus: Corpus
    run_dir: Path
    lock: RunLock
    store: Store
    replan: Callable[[Job], Plan]
    """The plan of the run's job with other keys of its layout. Raises LayoutError."""
    chosen_keys: Mapping[str, Any]
    """The keys that a search chose where the job left its layout open, which `plan` has."""
    unverified: tuple[str, ...] = ()
    """Lines about tokens that were not compared with their checksums."""
    init_lines: tuple[str, ...] = ()
    """Lines about the weights that it starts from."""
    remove_run_directory: Callable[[], None] = lambda: None
    """Makes a new run as if it had never been: what is new of its directory goes when the run is
    left."""


@contextlib.contextmanager
def prepare_run(
    job: Job,
    run_dir: Path,
    *,
    resume: bool,
    num_ranks: int | None,
    is_name_chosen: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[PreparedRun]:
    """Plan, lock the run directory and prepare the data. What cannot start leaves nothing behind.

    `num_ranks` is that of a launcher, None where the plan chooses. With `is_name_chosen` nobody
    asked for this directory: where another job has it by now, the run gets one beside it. `say`
    gets lines about a slow store. Raises PhalanxError for what the user can mend.
    """
    if not is_name_chosen:
        refuse_existing_run(run_dir, resume=resume)
    is_prepared = not is_name_chosen and (run_dir / DATA_FOLDER / CORPUS_FILE_NAME).exists()
    basis = _collect_plan_inputs_and_refuse_early(
        job, run_dir, resume=resume, num_ranks=num_ranks, is_prepared=is_prepared
    )
    directory = RunDirectory(run_dir, is_name_chosen=is_name_chosen)
    # The run's own lock comes first: of two jobs, one alone looks at the store and writes there.
    with (
        directory.hold() as lock,
        hold_claimed_store(job, directory.path, resume=resume, say=say) as store,
    ):
        run_dir = directory.path
        job, plan, corpus, chosen_keys, unverified = _prepare_data_and_plan(
            basis, run_dir, store, resume=resume
        )
        raise_open_file_limit()
        if num_ranks is None:
            # What ranks on several machines need has not been measured.
            require_open_files(_estimate_open_files(job, plan), "this job")

        def replan(laid_out: Job) -> Plan:
            return _plan_with_other_layout(basis, plan, corpus, laid_out)

        if not resume:
            # Now that the parameters are counted: a disk without room is refused at once.
            create_writable_run_directory(
                run_dir, needed_bytes=plan.num_params * CHECKPOINT_BYTES_PER_PARAM
            )
        initial, init_lines = _build_initial_weights_file(job, plan, store)
        facts = {JOB_FILE: job.to_json(), PLAN_FILE: plan.to_json(), **initial}
        with hold_run_facts_files(run_dir, lock, facts):
            # Once the facts are written it is a run, and can be resumed: it stays whatever comes.
            directory.keep_run_directory()
            run = PreparedRun(
                job,
                plan,
                corpus,
                run_dir,
                lock,
                store,
                replan,
                chosen_keys,
                unverified=tuple(unverified),
                init_lines=tuple(init_lines),
            )
            if not resume:
                run = replace(run, remove_run_directory=directory.remove_run_directory)
            yield run


@dataclass(frozen=True)
class _PlanInputs:
    """The job and what else the plan rests on, as far as it is known before the data is."""

    job: Job
    cluster: Cluster
    shape: ModelCosts | None
    earlier_plan: Plan | None
    tokens: JobTokens
    num_ranks: int | None


def _collect_plan_inputs_and_refuse_early(
    job: Job, run_dir: Path, *, resume: bool, num_ranks: int | None, is_prepared: bool
) -> _PlanInputs:
    """Find out what the plan rests on, and refuse what can be refused before anything is written:
    a machine, weights or a layout that do not fit the job. `is_prepared`: the run has its data."""
    linked_folders = []
    if resume and not is_prepared:
        linked_folders.append(DATA_FOLDER)
    refuse_symlinked_run_folders(run_dir, more=linked_folders)
    require_cluster_is_this_machine(job)
    cluster = detect_cluster(job.cluster.device)
    earlier_plan = None
    if resume:
        earlier_plan = read_plan_of_run(run_dir)
    if earlier_plan is not None and job.precision.compute == "auto":
        # Started again with the job file: the run has begun, in the precision it chose then.
        job = replace_precision(job, earlier_plan.precision)
    shape = measure_foreign_shape(job)
    require_packages(job, cluster.device)
    require_model_reads_data(job, shape)
    if not resume:
        # Weights that are not there or do not fit are refused before data is prepared.
        find_initial_checkpoint(job.model, find_shape_known_before_data(job))
    # A bad layout is refused before anything is written.
    choose_layout(job, cluster=cluster, num_ranks=num_ranks, shape=shape)
    tokens = find_job_tokens(job, is_prepared=is_prepared)
    return _PlanInputs(job, cluster, shape, earlier_plan, tokens, num_ranks)


def _prepare_data_and_plan(
    basis: _PlanInputs, run_dir: Path, store: Store, *, resume: bool
) -> tuple[Job, Plan, Corpus, Mapping[str, Any], list[str]]:
    """Prepare the data in the run directory, and plan.

    Returns the job in the precision that was chosen, its plan, the corpus, the keys that a search
    chose, and lines about tokens that were not verified.
    """
    job, tokens = basis.job, basis.tokens
    data_dir = run_dir / DATA_FOLDER
    # Asked before `prepare_corpus`, which writes it.
    is_new = not (data_dir / CORPUS_FILE_NAME).exists()
    fixed_size = find_vocab_size_of(job.model)
    newest = find_newest_readable_manifest(store)
    trained_on = "" if newest is None else newest.facts.get(DATA_FACT, "")
    corpus = prepare_corpus(
        job.data,
        data_dir,
        vocab_size=fixed_size,
        default_tokenizer=tokens.default,
        trained_on=trained_on,
    )
    unverified = verify_corpus_checksums(corpus, is_new=is_new)
    if is_new and newest is not None and not trained_on:
        unverified.append(
            f"the data was prepared again; step-{newest.step}, of an earlier release, does not say"
            " whether it was trained on the same"
        )
    vocab_size = fixed_size or corpus.vocab_size
    # Chosen again: the vocabulary, which only the data may say, is a part of the memory.
    chosen = choose_layout(
        job,
        cluster=basis.cluster,
        shape=basis.shape,
        vocab_size=vocab_size,
        num_ranks=basis.num_ranks,
    )
    plan = chosen.make_plan(
        job,
        cluster=basis.cluster,
        vocab_size=vocab_size,
        num_ranks=basis.num_ranks,
        shape=basis.shape,
        data=count_tokens_and_samples(corpus),
        more=tokens.list_corpus_remarks(corpus),
    )
    _refuse_images_of_wrong_size(corpus, plan.model_shape)
    plan = keep_precision_of_run(plan, basis.earlier_plan, basis.cluster)
    # A run is known by it, wherever it goes on.
    job = replace_precision(job, plan.precision)
    warn_of_mixed_rows = find_mixed_rows_warnings(job, plan, ask=not resume)
    plan = replace(plan, warnings=(*plan.warnings, *warn_of_mixed_rows))
    return job, plan, corpus, chosen.keys, unverified


def _estimate_open_files(job: Job, plan: Plan) -> int:
    """Files that one process of the run has open at once, about."""
    num_workers = count_loader_processes(job.data)
    return (
        _OPEN_FILES + _OPEN_FILES_PER_RANK * plan.world_size + _OPEN_FILES_PER_WORKER * num_workers
    )


def _plan_with_other_layout(basis: _PlanInputs, plan: Plan, corpus: Corpus, job: Job) -> Plan:
    """The plan of `job`, which is that of `plan` with other keys of the layout."""
    other = make_plan(
        job,
        cluster=basis.cluster,
        vocab_size=find_vocab_size_of(job.model) or corpus.vocab_size,
        shape=basis.shape,
        data=count_tokens_and_samples(corpus),
    )
    other = keep_precision_of_run(other, plan, basis.cluster)
    # A run is known by what the user said, wherever it is laid out.
    return replace(other, job_digest=plan.job_digest)


def _refuse_images_of_wrong_size(corpus: Corpus, shape: ModelCosts) -> None:
    """Raise the LayoutError that every rank would: samples of another size than a built-in model
    of images takes."""
    if corpus.user is None or not shape.reads_images:
        return
    model_size = [shape.num_channels, shape.image_size, shape.image_size]
    shapes = corpus.user.first_shapes
    image_size = shapes.get("inputs", shapes.get("images", model_size))
    if image_size != model_size:
        raise LayoutError(
            f"images are {_format_image_size(image_size)} (channels x height x width), and the"
            f" model takes {_format_image_size(model_size)}",
            where=f"data.source {corpus.user.source}",
            fix="set image_size and num_channels of the model, or resize the images",
        )


def _format_image_size(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))


def _build_initial_weights_file(
    job: Job, plan: Plan, store: Store
) -> tuple[dict[str, Any], list[str]]:
    """The file to write into the run directory, and lines to say, for model.init_from.

    Only step 0 reads it.
    """
    if job.model.init_from is None:
        return {}, []
    if store.folders():
        return {}, [
            "init    model.init_from is not read: the run continues from its own checkpoint"
        ]
    initial = find_initial_checkpoint(job.model, plan.model_shape)
    assert initial is not None
    return {INIT_FILE_NAME: initial.to_json()}, initial.summary_lines()
