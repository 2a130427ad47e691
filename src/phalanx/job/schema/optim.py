"""The section [optim]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from phalanx.job.schema.base import (
    Count,
    Fraction,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Text,
)


class Optim(Section):
    """The optimizer, and the learning rate over time."""

    kind: Text = "adamw"
    """An optimizer of phalanx (adamw, sgd), or package.module:build for your own build(groups,
    optim)."""
    lr: PositiveFloat | Literal["auto"] = "auto"
    """Peak learning rate. auto: 3e-3 for random weights; for weights that are trained already
    (model.init_from, hf:DIR with weights) 2e-5, and 1e-3 with sgd.

    An own optimizer gets the number.
    """
    lr_scaling: Literal["none", "auto", "linear", "sqrt"] = "none"
    """The rule by which lr follows the batch when it is not reference_batch_size: linear, in
    proportion (SGD; Goyal et al. 2017); sqrt, with its square root (Adam; Malladi et al. 2022);
    auto takes the optimizer's rule."""
    reference_batch_size: Positive | None = None
    """The train.global_batch_size that lr was tuned for."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of sgd."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat | Literal["auto"] = "auto"
    """Decoupled (adamw; auto: 0.1) or added to the gradient (sgd; auto: 0).

    Norms, biases, other vectors and embeddings do not decay.
    """
    clip_norm: PositiveFloat | None = 1.0
    """Global gradient norm above which gradients are scaled down; none when absent (clip_norm =
    "none")."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up. wsd: constant, then linear over the last decay_fraction."""
    warmup_steps: Count | None = None
    """Steps of linear warm-up; 0: none. Without it a tenth of train.steps, and 50 at most."""
    min_lr_ratio: Fraction = 0.1
    """Last learning rate over the peak."""
    decay_fraction: Fraction = 0.2
    """Part of the steps that wsd decays."""
