"""Events of checks: invariants, and the origin of a step that is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phalanx.observe.events.base import Event


@dataclass(frozen=True)
class InvariantChecked(Event):
    """Something that must hold in any training, checked while it trains (observe.invariants_every).

    `name`: "parameters_moved" | "optimizer_parameters" | "replicas_equal" | "targets_counted" |
    "expert_loads" | "unchanged_by_evaluation" (at each evaluation) | "memory_unchanged"
    (resilience.check_memory_every, from the rank itself). Each time that a check fails in another
    way than the one before, with `ok` False and what failed in `step`; and after each evaluation
    and at the end as a summary (`is_summary`) of this attempt so far: `ok` if no check failed,
    `num_checks` of them, the last in `step`, `num_failed`, the first of those in
    `first_failed_step`. From rank 0; of experts' loads from the first rank of each stage of a
    pipeline.

    `tensors`: names of those that failed, at most 20 of `num_tensors`; `replaced`: the last of
    these, in whose place something was put that FSDP has taken out again; `removed`: those of them
    that are no longer in the model; `ranks`: those that hold
    them otherwise than most, all holders where there is no majority. `expected` and `actual`: sums
    over all ranks where sums are compared. `looked_at`: in words, what the last check compared;
    `not_looked_at`: what it did not, and why.
    """

    step: int
    name: str
    ok: bool
    is_summary: bool = False
    num_checks: int = 0
    num_failed: int = 0
    first_failed_step: int = 0
    tensors: list[str] = field(default_factory=list)
    num_tensors: int = 0
    replaced: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    expected: float = math.nan
    actual: float = math.nan
    looked_at: str = ""
    not_looked_at: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ReplicasReplayed(Event):
    """Steps in which replicas came to differ have been done again, up to `step`, after the run had
    gone back. From rank 0, where no majority had named a rank.

    `failed_rank` is the one that had computed something else, -1 where that does not tell; `why` in
    words.
    """

    step: int
    failed_rank: int
    why: str


@dataclass(frozen=True)
class NonFiniteFound(Event):
    """The place where a step that is not finite began, found by computing its forwards once more,
    and the whole step where they are finite. From rank 0.

    `origin`: "output" (of the module `found_in`, the first one of the forward), "loss" (of the
    objective; all outputs are finite), "backward" (of the module `found_in`, or of the objective:
    the first that makes a gradient that is not finite of those that are; the forward is finite),
    "gradient" (of the parameter `found_in`, the one nearest to the loss, after reduction; the
    forward is finite, and no backward was seen to make it), "unknown" (computed again all is
    finite). `failed_rank`: whose it is, -1 where that is not known. `samples`: global numbers of
    the samples whose rows are not finite, at most 16; empty where the output, or its gradient, has
    no rows of samples. `why`: what was not finite before it; of "backward" the operation, by
    autograd's name. `was_repeated`: the whole step was computed again, is finite, and applied.
    `why_not_repeated`: of an origin "backward", "gradient" or "unknown" the reason why that is not
    so; empty in records of earlier releases, which have no "backward" either.
    """

    step: int
    origin: str
    found_in: str
    failed_rank: int
    microbatch: int = -1
    samples: list[int] = field(default_factory=list)
    why: str = ""
    was_repeated: bool = False
    why_not_repeated: str = ""
