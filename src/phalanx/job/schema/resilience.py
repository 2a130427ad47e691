"""The section [resilience]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from phalanx.job.schema.base import Count, Positive, PositiveFloat, Section


class Resilience(Section):
    """Reactions to failures, and failures to rehearse."""

    max_restarts: Count = 3
    """Restarts within an hour before the run is given up (exit 10). They count no longer
    when it goes on for 10 minutes and saves a checkpoint 10 steps after the last failure."""
    outage_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 300.0
    """Seconds for which a run waits for a file server or a network that is away: ranks start again
    at once, then after 1, 2, 4 s and so on, at most 30, and that counts as one restart. 0: like any
    other failure."""
    grace_s: PositiveFloat = 25.0
    """Seconds the ranks have to save after SIGTERM."""
    collective_timeout_s: PositiveFloat = 600.0
    """A collective that takes longer fails on every rank."""
    hang_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Seconds without progress of any rank in a step after which the ranks that cause it are killed
    and started again (docs/hangs.md); 0 never does.

    Default: 4, or eight of the slowest steps of this run if that is longer.
    """
    hang_long_s: PositiveFloat = 60.0
    """The same for work that takes longer than a step: start, opening data, evaluation, saves, and
    the first steps of an attempt (docs/hangs.md); hang_s if that is longer."""
    rendezvous_s: PositiveFloat | None = None
    """Seconds in which all ranks must have started; null is 20 for ranks that phalanx starts, 300
    for those of another launcher."""
    min_ranks: Positive | None = None
    """The fewest ranks to go on with when some do not come back: data parallelism shrinks,
    accumulation grows, and all ranks are tried again at a checkpoint. null: all, or none."""
    keep_ranks: bool = True
    """Ranks that only lost another one keep their process and what they hold of the state when it
    is started again; false starts all of them anew from the newest checkpoint."""
    check_collectives: Literal["off", "sampled", "all"] = "off"
    """Ranks compare each collective that they are about to call ("all"), or every 32nd with all
    before it ("sampled"), and stop with both lines where they differ (docs/where.md)."""
    check_collectives_wait_s: PositiveFloat = 30.0
    """Seconds that a rank waits in a collective that another one has not called before that is an
    error, where collectives are checked; a save or an evaluation of one rank alone must fit in."""
    on_oom: Literal["stop", "recompute"] = "stop"
    """When a rank has no memory left: stop (exit 7) and say what would need less; or go on with
    train.recompute = "full"."""
    on_loss_spike: Literal["warn", "skip", "rollback"] = "warn"
    """With a loss far above the last ones: say so; or leave out the update of that step; or that,
    and after three in a row go back to a checkpoint and read on behind their batches."""
    on_corruption: Literal["warn", "rollback", "stop"] = "rollback"
    """When replicas that had the same bits have others, or memory has changed: say so, go back to
    the newest checkpoint of when they were equal, or stop (exit 8) and leave all as it is."""
    check_memory_every: Count = 0
    """Steps between checks that parameters and the optimizer's state have not changed since the
    last update, on each rank, also of what no other rank holds; 0: none. 1 checks all steps."""
    max_rollbacks: Count = 3
    """Times that a run goes back by itself; then it says so and goes on."""
    max_skipped_steps: Count = 100
    """Steps in a row with non-finite gradients or without targets before the run is given up
    (exit 8)."""
    inject: tuple[str, ...] = ()
    """Faults to inject, for drills: "kill:rank=1,step=7,phase=backward"."""
