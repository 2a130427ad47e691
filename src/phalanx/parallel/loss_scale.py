"""Loss scaling for fp16: gradients are computed of scale x loss, so that small ones are not rounded
to zero.

Dynamic (Micikevicius et al. 2018): a step whose gradients overflow on any rank is skipped by all
and halves the scale, which doubles again after so many good steps. Powers of two change no digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from phalanx.core.errors import CheckpointError, NumericsError
from phalanx.plan.plan import Plan

MIN_LOSS_SCALE = 1.0
"""A step that overflows below it has gradients, or activations, beyond 65504 whatever the scale."""
MAX_LOSS_SCALE = 2.0**40


@dataclass
class LossScale:
    """The same on all ranks: it changes by facts that they agree on. `growth_steps` 0: fixed."""

    scale: float
    growth_steps: int
    good_steps: int = 0

    @property
    def is_dynamic(self) -> bool:
        return self.growth_steps > 0

    def adjust_after_step(self, *, finite: bool) -> None:
        """Adjust the scale to the outcome of a step.

        Raises NumericsError where a smaller scale would not help.
        """
        if not self.is_dynamic:
            return
        if not finite:
            if self.scale / 2 < MIN_LOSS_SCALE:
                raise NumericsError(
                    f"fp16 overflows even with a loss scale of {self.scale:g}",
                    why=(
                        "loss, activations or gradients exceed 65504, or are not finite in any type"
                    ),
                    fix=(
                        'set precision.compute = "bf16", or lower optim.lr; a large'
                        " train.loss_chunk_tokens adds up more in fp16, too"
                    ),
                )
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_steps:
            # A scale that a job began above the ceiling stays as it is.
            self.scale, self.good_steps = min(self.scale * 2, max(self.scale, MAX_LOSS_SCALE)), 0

    def state_to_save(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_saved_state(self, facts: dict[str, Any]) -> None:
        """Take over what a checkpoint says. A fixed scale is the job's."""
        if self.is_dynamic:
            self.scale, self.good_steps = float(facts["scale"]), int(facts["good_steps"])


# By a constant, and not by each microbatch's own number of targets: gradients are sums over targets
# then, and dividing by all targets of the step is exact with masked targets and uneven
# microbatches.
@dataclass(frozen=True)
class LossNormalizer:
    """Multiplies a loss before the backward, and says what undoes that in gradients.

    `constant` is about the number of targets of a rank: with it gradients are of a usual size
    while they are reduced, and the exact number of targets is known only afterwards.
    """

    constant: float
    loss_scale: LossScale | None

    @property
    def loss_multiplier(self) -> float:
        """The number that a loss is multiplied by."""
        return self._scale_or_one / self.constant

    @property
    def _scale_or_one(self) -> float:
        if self.loss_scale is None:
            return 1.0
        return self.loss_scale.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The share of the loss that gradients are taken of."""
        loss = loss / self.constant
        if self.loss_scale is None:
            return loss
        return loss * self.loss_scale.scale

    def gradient_multiplier(self, num_targets: float, num_ranks: int) -> float:
        """The factor that makes gradients, a mean over `num_ranks`, those of the loss per
        target."""
        return num_ranks * self.constant / num_targets / self._scale_or_one


def build_loss_normalizer(plan: Plan) -> LossNormalizer:
    """Build the normalizer of a plan's loss; fp16 alone scales it."""
    scale = None
    if plan.loss_scaling is not None:
        scale = LossScale(plan.loss_scaling.initial, plan.loss_scaling.growth_steps)
    targets = plan.targets_per_rank
    if plan.is_layout_free:
        # Of a microbatch: the same on any number of ranks.
        targets //= plan.num_microbatches
    return LossNormalizer(float(targets), scale)


def require_valid_loss_scale_state(facts: Any, where: str) -> None:
    """Raises CheckpointError for what no loss scale has said."""
    try:
        if 0 < float(facts["scale"]) < float("inf") and int(facts["good_steps"]) >= 0:
            return
    except (KeyError, TypeError, ValueError):
        pass
    raise CheckpointError(f"its loss scale is {facts!r}", where=where)
