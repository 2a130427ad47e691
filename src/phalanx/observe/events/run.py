"""Events of a run as a whole: its beginning, its end, and what it began with."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.observe.events.base import Event


@dataclass(frozen=True)
class RunStarted(Event):
    """Once per attempt, from rank 0, before the first step.

    `step` is where training continues (0: from the start).

    `plain_bytes`: what a rank would send in a step to reduce gradients as they are (0: nobody
    counted).

    `collectives`: what the ranks exchange tensors through ("shared memory", "gloo", "nccl"); empty
    of one rank.
    """

    run: str
    job_digest: str
    world_size: int
    step: int
    total_steps: int
    device: str
    layout: dict[str, int]
    restored_from: str = ""
    startup_s: float = 0.0
    plain_bytes: int = 0
    collectives: str = ""


@dataclass(frozen=True)
class WeightsTaken(Event):
    """Training starts from weights that were there (model.init_from), instead of random ones.

    From rank 0.

    `imported_from`: what an imported checkpoint came from. `num_cast`: so many had another type.
    """

    checkpoint: str
    step: int
    num_tensors: int
    imported_from: str = ""
    num_cast: int = 0


@dataclass(frozen=True)
class StopRequested(Event):
    """All ranks agreed to stop after `step`. `reason`: "sigterm" (SIGHUP, SIGUSR1 and SIGUSR2 are
    taken as it) | "sigint" | "more_ranks" (the run goes on with more ranks)."""

    step: int
    reason: str


@dataclass(frozen=True)
class RunFinished(Event):
    """The last event of a run. `status`: "finished" | "preempted" | "interrupted" | "failed".

    `step`: the last one that was done, saved or not; of runs of earlier releases the newest saved.
    """

    status: str
    exit_code: int
    step: int
    wall_s: float
