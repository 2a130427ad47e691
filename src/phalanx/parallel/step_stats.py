"""LocalLoss and StepStats: a step's sums on one rank, and what they are over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.core.deprecated import warn_renamed


@dataclass(frozen=True)
class LocalLoss:
    """This rank's sums over the microbatches of a step: 0-d fp64 tensors, not yet reduced."""

    loss_sum: torch.Tensor
    num_targets: torch.Tensor
    by_microbatch: tuple[torch.Tensor, ...] = ()
    """The terms of `loss_sum`, where the bits of the sum over ranks must not depend on their
    number."""


@dataclass(frozen=True)
class StepStats:
    """A step over all ranks. `loss` is per target; `grad_norm` is exact and before clipping.

    `finite`: loss and every gradient are. When it is False, or `num_targets` is 0, gradients were
    left as they were and the step must not be applied. `flags` are the sums over ranks of what each
    rank handed in.
    """

    loss: float
    num_targets: int
    grad_norm: float
    finite: bool
    flags: tuple[float, ...] = ()
    sent_bytes: int = 0
    """Bytes that this rank sent to reduce gradients; weights that are gathered are not counted."""
    sent_tp_bytes: int = 0
    """Bytes that this rank sent over tp; 0 in compiled code, where nobody counts."""
    sent_cp_bytes: int = 0
    sent_ep_bytes: int = 0
    sent_pp_bytes: int = 0
    loss_scale: float = 0.0
    """What the loss of this step was multiplied by; 0: nothing was scaled."""
    scale_adapts: bool = False
    block_grad_norms: tuple[float, ...] = ()
    """By block of the model, where they were asked for; before clipping, as `grad_norm`."""
    block_squares: tuple[float, ...] = ()
    """The sums over ranks of the squares that each handed in."""

    @property
    def reason_to_skip(self) -> str | None:
        """Why the step must not be applied, or None.

        "overflow" is one that a smaller loss scale answers.
        """
        if self.num_targets == 0:
            return "no_targets"
        if self.finite:
            return None
        if self.scale_adapts:
            return "overflow"
        return "nonfinite_gradients"

    @property
    def should_apply(self) -> bool:
        """True if the optimizer may apply the gradients of this step."""
        return self.reason_to_skip is None

    @property
    def usable(self) -> bool:
        """The old name of `should_apply`."""
        warn_renamed("usable", "should_apply")
        return self.should_apply

    @property
    def votes(self) -> tuple[float, ...]:
        """The old name of `flags`."""
        warn_renamed("votes", "flags")
        return self.flags
