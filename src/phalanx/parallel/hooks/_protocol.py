"""What a hook is handed, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from phalanx.parallel.wire import Wire

ERROR = "error"


@dataclass(frozen=True)
class CompressionOptions:
    """Settings of the job for hooks: rank of PowerSGD, the fraction that top-k sends, and the
    seed of random numbers."""

    rank: int
    fraction: float
    seed: int


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient: this rank's on the way in, the mean over ranks on the way out, in
    the same storage.

    Hooks go by parameters, never by buckets, which torch cuts otherwise in the first step than in
    later ones: what becomes of a gradient is then a function of it alone, and a run that is
    continued repeats it.
    """

    name: str
    tensor: torch.Tensor
    slots: dict[str, torch.Tensor] = field(default_factory=dict)


class Hook(Protocol):
    """`keeps_error`: what is not sent in a step is added to the next one's gradient (error
    feedback).

    A file with such a hook says so at its top level, too, as `KEEPS_ERROR = True`: the plan counts
    the bytes of the errors, and reads files without importing torch.
    """

    keeps_error: bool

    def shared_slots(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """State of a parameter that is the same on all ranks (the error is not, and comes by
        itself)."""

    def reduce(self, gradients: Sequence[Gradient], wire: Wire) -> list[torch.Tensor]:
        """Make each gradient the mean over ranks, the same bits on all; return what this rank did
        not send of each.

        Over all ranks, mean and what is kept add up: mean before = mean after + mean of what is
        kept. A hook without error feedback returns nothing. A gradient that is not finite on some
        rank must not be finite after.
        """
