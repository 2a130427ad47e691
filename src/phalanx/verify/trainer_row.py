"""The row of a run through the trainer: a second loop writes the reference, all ranks train, stop
and resume, and what they observed is compared."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.verify.row import Row
from phalanx.verify.trainer_batches import TrainerRunBatches, make_run_batches
from phalanx.verify.trainer_cases import (
    LOSS_SCALE_VARIANT,
    NOT_JUDGED_PARTS,
    RESUMED_ELSEWHERE,
    TrainerCase,
    explain_no_trainer_run,
    list_replaced_scale_numbers,
)
from phalanx.verify.trainer_facts import FACTS_FILE_NAME, AttemptObservation
from phalanx.verify.trainer_reference import SecondLoopReader, write_second_loop_reference
from phalanx.verify.trainer_run import TrainerRun
from phalanx.verify.trainer_verdict import RunComparator


@dataclass(frozen=True)
class TrainerRowContext:
    """The place where runs through the trainer are judged: the group of ranks, a directory that all
    of them see, and the job's own dataset if it has one."""

    mesh: Mesh
    run_dir: Path
    data_dir: Path | None
    model_name: str


def compare_trainer_run(job: Job, case: TrainerCase, trainer_place: TrainerRowContext) -> Row:
    """The row of one case of `make_trainer_cases`; `job` is that of `make_trainer_job`.
    Collective."""
    began = time.monotonic()
    refusal = explain_no_trainer_run(job)
    if refusal:
        return _build_refused_row(case, trainer_place, refusal)
    batches = make_run_batches(job, case.plan, trainer_place.data_dir)
    readers: list[SecondLoopReader] = []
    for plan in (case.plan, case.other_plan):
        reader = _open_or_write_reference(job, case, plan.num_microbatches, batches, trainer_place)
        if isinstance(reader, str):
            return _build_refused_row(case, trainer_place, reader)
        readers.append(reader)
    run = TrainerRun(job, case, batches, trainer_place.run_dir / case.name, *readers)
    try:
        result = run.run()
    except LayoutError as error:
        # About the module, before any step, and the same on every rank.
        return _build_refused_row(case, trainer_place, str(error))
    gathered = trainer_place.mesh.gather_json([attempt.to_json() for attempt in result.attempts])
    by_rank = [[AttemptObservation.from_json(body) for body in bodies] for bodies in gathered]
    is_scaled = case.name.endswith(LOSS_SCALE_VARIANT)
    comparator = RunComparator(
        by_rank,
        readers[0].recording_phase,
        readers[0 if result.other_refusal else 1].recording_phase,
        batch_size=job.train.global_batch_size,
        is_scaled=is_scaled,
        compress=case.plan.parallel.compress,
    )
    first = comparator.find_first_difference()
    judged, not_judged = list(comparator.list_judged_parts()), comparator.list_untested_parts()
    reason = result.other_refusal
    if case.has_other_layout and not reason:
        judged.append(RESUMED_ELSEWHERE)
    else:
        of_other = f": {case.other_name} refuses the module ({reason})" if reason else ""
        not_judged = (*not_judged, RESUMED_ELSEWHERE + of_other)
    if is_scaled:
        not_judged = (*not_judged, *list_replaced_scale_numbers(job))
    return Row(
        layout=case.name,
        parallel=case.parallel,
        model=trainer_place.model_name,
        dtype="float64",
        ok=first is None,
        errors=comparator.errors(),
        tolerance=comparator.tolerance,
        first=first,
        notes=comparator.notes(),
        judged=tuple(judged),
        not_judged=(*not_judged, *NOT_JUDGED_PARTS),
        compress=case.plan.parallel.compress,
        wall_s=round(time.monotonic() - began, 3),
    )


def _open_or_write_reference(
    job: Job,
    case: TrainerCase,
    num_microbatches: int,
    batches: TrainerRunBatches,
    trainer_place: TrainerRowContext,
) -> SecondLoopReader | str:
    """The reference in so many microbatches, which rank 0 writes where it is not there yet; or why
    there is none. Collective."""
    directory = trainer_place.run_dir / f"trainer-reference-{num_microbatches}"
    failure = ""
    if trainer_place.mesh.rank == 0 and not (directory / FACTS_FILE_NAME).exists():
        failure = write_second_loop_reference(directory, job, case.plan, batches, num_microbatches)
    failure = trainer_place.mesh.gather_json(failure)[0]
    return failure or SecondLoopReader(directory)


def _build_refused_row(case: TrainerCase, trainer_place: TrainerRowContext, reason: str) -> Row:
    return Row(
        case.name, case.parallel, trainer_place.model_name, "float64", None, {}, 0.0, refused=reason
    )
