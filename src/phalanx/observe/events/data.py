"""Events of the data that ranks read."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.observe.events.base import Event


@dataclass(frozen=True)
class SamplesRead(Event):
    """The samples that a rank read for a step that is done, in order (observe.samples).

    `ranges`: first, beyond, first, beyond, ... of global sample numbers. `xxh3`: checksum of all
    that was delivered for them.
    """

    step: int
    data_parallel_rank: int
    data_parallel_size: int
    ranges: list[int]
    xxh3: str


@dataclass(frozen=True)
class LoaderWorkerReplaced(Event):
    """A process that reads ahead died or was silent for too long; another does `step` and what
    follows."""

    step: int
    reason: str
