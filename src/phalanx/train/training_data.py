"""The data of a training: batches, the objective that makes a loss of them, what is held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.observe.events import Event
from phalanx.parallel.executor import Objective
from phalanx.train.evaluation import HeldOutBatches


class Microbatches(Protocol):
    """The source of a step's data: a pure function of the step, so that resuming needs no state."""

    def step_microbatches(self, step: int) -> Sequence[Mapping[str, torch.Tensor]]: ...


def return_no_events(step: int) -> Sequence[Event]:
    """No events: there is nothing to record of a step besides what the trainer does."""
    return ()


@dataclass(frozen=True)
class TrainingData:
    """The batches of a training, and the objective that makes a loss of each.

    `held_out`, if it is given, is evaluated on the way and at the end. `source_weights`: what each
    source of it counts in the loss over all; without them, what its targets are. `records(step)`:
    events of a step that is done, besides the trainer's.
    """

    batches: Microbatches
    objective: Objective
    held_out: HeldOutBatches | None = None
    source_weights: Mapping[str, float] | None = None
    records: Callable[[int], Sequence[Event]] = return_no_events
    sample_numbers: Callable[[int], NDArray[np.int64]] | None = None
    """Of a step: the global numbers of this rank's samples, [microbatches, rows]."""
