"""The schedule that a job asks for, and the microbatches that it can be run with. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import LayoutError
from phalanx.core.units import plural
from phalanx.job.nearest import format_nearest_values, list_divisors
from phalanx.job.schema import Job
from phalanx.plan.pipeline.check import require_runnable_schedule
from phalanx.plan.pipeline.generate import (
    can_run_microbatches,
    get_default_stages_per_rank,
    require_stages_per_rank,
)
from phalanx.plan.pipeline.pipeline_plan import map_stages_to_ranks
from phalanx.plan.pipeline.schedule import Schedule, load_schedule_csv

DEFAULT_SCHEDULE = "1f1b"
MICROBATCHES_PER_HOP = 4  # (p - 1) / (m + p - 1) is a fifth where m is 4 (p - 1)


@dataclass(frozen=True)
class RequestedSchedule:
    """A schedule whose microbatches are not counted yet; or one from a file (`written`), where
    they are."""

    name: str
    num_ranks: int
    num_stages: int
    written: Schedule | None = None

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        if self.written is not None:
            return self.written.rank_of_stage
        return map_stages_to_ranks(self.name, self.num_ranks, self.num_stages // self.num_ranks)

    def can_run(self, num_microbatches: int) -> bool:
        if self.written is not None:
            return num_microbatches == self.written.num_microbatches
        return can_run_microbatches(self.name, self.num_ranks, num_microbatches)


def find_requested_schedule(job: Job) -> RequestedSchedule | None:
    """The schedule that a job asks for; None if pp is 1.

    Raises LayoutError for a file that cannot be read or run, or is for other ranks, and for stages
    per rank that a schedule cannot have.
    """
    num_ranks, file = job.parallel.degrees.pp, job.parallel.schedule_file
    if num_ranks == 1:
        return None
    if file is not None:
        written = load_schedule_csv(Path(file))
        require_runnable_schedule(written)
        if written.num_ranks != num_ranks:
            raise LayoutError(
                f"the schedule is for {plural(written.num_ranks, 'rank')}, and parallel.pp is"
                f" {num_ranks}",
                where=file,
                fix=(
                    f"set parallel.pp={written.num_ranks}"
                    if written.num_ranks > 1
                    else "write a line for each rank"
                ),
            )
        return RequestedSchedule(written.name, num_ranks, written.num_stages, written)
    name = job.parallel.schedule or DEFAULT_SCHEDULE
    per_rank = job.parallel.stages_per_rank or get_default_stages_per_rank(name)
    require_stages_per_rank(name, per_rank)
    return RequestedSchedule(name, num_ranks, num_ranks * per_rank)


def choose_pipeline_microbatches(
    job: Job, requested: RequestedSchedule, share: int, shares: int
) -> tuple[int, int]:
    """(micro_batch_size, microbatches per step) of a share of the batch, one of `shares`, that a
    pipeline works on.

    As the job says; else the largest microbatches that leave enough of them for a bubble of a
    fifth, or as many as there can be. Raises LayoutError for a number that the schedule cannot run,
    with the nearest that it can.
    """
    legal = [number for number in list_divisors(share) if requested.can_run(number)]
    if not legal:
        raise _build_indivisible_microbatches_error(requested, share, shares)
    micro = job.train.micro_batch_size
    if micro is None:
        # The fewest that are enough: larger microbatches make larger products.
        for chosen in legal:
            if chosen >= MICROBATCHES_PER_HOP * (requested.num_ranks - 1):
                break
        # Without a break `chosen` is the last: as many microbatches as there can be.
        return share // chosen, chosen
    # `nearest` wants them ascending, and more microbatches are smaller ones.
    sizes = sorted(share // number for number in legal)
    if micro not in sizes:
        problem = (
            f"train.micro_batch_size {micro} does not divide the {share} sequences of each of"
            f" {shares} pipelines"
        )
        if share % micro == 0:
            problem = (
                f"train.micro_batch_size {micro} makes {share // micro} microbatches of the {share}"
                " sequences of a pipeline, "
            )
            if requested.written is not None:
                problem += (
                    f"and {job.parallel.schedule_file} has {requested.written.num_microbatches}"
                )
            else:
                problem += (
                    f"which schedule {requested.name} on {requested.num_ranks} ranks cannot run"
                )
        raise LayoutError(problem, fix=f"nearest: {format_nearest_values(micro, sizes)}")
    return micro, share // micro


def _build_indivisible_microbatches_error(
    requested: RequestedSchedule, share: int, shares: int
) -> LayoutError:
    if requested.written is not None:
        needed = requested.written.num_microbatches
        problem = (
            f"schedule {requested.name} has {needed} microbatches, which do not divide the {share}"
            " sequences of a pipeline"
        )
    else:
        needed = next(number for number in range(1, 2**31) if requested.can_run(number))
        problem = (
            f"schedule {requested.name} on {requested.num_ranks} ranks needs {needed} microbatches,"
            f" and a pipeline has {share} sequences"
        )
    below = share // needed * needed
    batches = [number * shares for number in (below, below + needed) if number]
    return LayoutError(
        problem, fix=f"nearest train.global_batch_size: {' or '.join(map(str, batches))}"
    )
