"""Events of what a model is judged by on the way: held-out losses, baselines, generated text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phalanx.observe.events.base import Event


@dataclass(frozen=True)
class EvalFinished(Event):
    """Loss per target on held-out data, from rank 0; nats per token for models of text.

    `loss_by_source`: of each source of a mixture, where there are several. `metrics`: means of what
    the objective measures besides. `best_step` and `best_loss` are those of the best evaluation of
    the run so far, this one included (step 0: none could be compared); `judged_by` is the metric
    that it is the best by (eval.metric), and `best_value` its value there. With eval.keep_best, the
    best is saved and named in RUN/best.json before this is said.
    """

    step: int
    loss: float
    num_targets: int
    wall_s: float
    loss_by_source: dict[str, float] = field(default_factory=dict)
    best_step: int = 0
    best_loss: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)
    judged_by: str = "loss"
    best_value: float = math.nan

    def value_of(self, metric: str) -> float:
        """The loss or a metric; NaN where it was not measured."""
        if metric == "loss":
            return self.loss
        return self.metrics.get(metric, math.nan)

    @property
    def best(self) -> float:
        """The best evaluation's value of `judged_by`."""
        if self.judged_by == "loss":
            return self.best_loss
        return self.best_value


@dataclass(frozen=True)
class BaselineMeasured(Event):
    """The loss (nats per token) of an n-gram model that was fitted on the same training split, on
    the same held-out tokens."""

    name: str
    loss: float
    num_targets: int
    wall_s: float


@dataclass(frozen=True)
class TextGenerated(Event):
    """A text that the model wrote after `prompt`. From rank 0."""

    step: int
    prompt: str
    text: str
