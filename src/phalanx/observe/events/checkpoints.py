"""Events of checkpoints: saved, postponed, removed, failed, unusable."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.observe.events.base import Event


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint was committed; `path` is relative to the run directory, or a URL. From rank 0.

    `stall_s`: how long training stood still for it. `num_new_bytes` were written, the rest was
    there (-1: not said).
    """

    step: int
    path: str
    num_bytes: int
    wall_s: float
    stall_s: float = 0.0
    num_new_bytes: int = -1


@dataclass(frozen=True)
class CheckpointPostponed(Event):
    """A save was due while that of `saving_step`, begun `since_s` ago, was still being written.

    It comes after the first step that finds the other done. From rank 0, once.
    """

    step: int
    saving_step: int
    since_s: float


@dataclass(frozen=True)
class CheckpointIntervalChosen(Event):
    """checkpoint.every = "auto" saves each `interval_s` from here on: the square root of 2 x
    `stall_s`, which training stands still for a save, x `mtbf_s` (Young 1974, Daly 2006), but at
    least `save_s`, which a save takes.

    From rank 0.
    """

    step: int
    interval_s: float
    stall_s: float
    save_s: float
    mtbf_s: float


@dataclass(frozen=True)
class CheckpointsRemoved(Event):
    """Checkpoints that checkpoint.keep_last and keep_every do not keep are gone; one that stays
    was verified before."""

    steps: list[int]


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A save failed on some rank; the checkpoints before it stand. From rank 0.

    `training_goes_on`: another save is tried later; False for the last one of a job, and in earlier
    releases.
    """

    step: int
    path: str
    reason: str
    training_goes_on: bool = False


@dataclass(frozen=True)
class CheckpointUnusable(Event):
    """A checkpoint is damaged or does not fit, and an older one is tried instead
    (checkpoint.fallback).

    From rank 0.
    """

    step: int
    path: str
    reason: str
