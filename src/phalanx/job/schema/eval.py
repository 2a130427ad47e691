"""The section [eval]."""

from __future__ import annotations

from typing import Literal

from phalanx.job.schema.base import Count, Positive, Section, Text


class Eval(Section):
    """The evaluation of the model on held-out data."""

    tokens: Count = 262144
    """Held-out tokens of one evaluation, at most what there is (0: none).

    Of your own dataset: samples.
    """
    every_steps: Positive | None = None
    """Evaluate each time this many steps are done, besides the end."""
    keep_best: bool = False
    """Save whenever an evaluation is the best so far, and name that checkpoint in RUN/best.json."""
    metric: Text = "loss"
    """The measure that evaluations are compared by: "loss", or the name of a metric of your own
    objective."""
    mode: Literal["min", "max"] | None = None
    """The best value of eval.metric: the lowest (min) or the highest (max); must be set for a
    metric of your own."""
