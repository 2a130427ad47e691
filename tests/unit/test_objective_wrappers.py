"""What stands around an objective where it is judged has the marks of the job's own: by them a
layout chooses in which form a head's outputs are handed over."""

from __future__ import annotations

import pytest

from phalanx.nn.objective import (
    Objective,
    causal_cross_entropy,
    classification_cross_entropy,
    token_cross_entropy,
)
from phalanx.verify.compare_steps import wrap_objective_to_record_means

OBJECTIVES = (causal_cross_entropy(16), token_cross_entropy, classification_cross_entropy)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_wrapped_objective_keeps_its_marks(objective: Objective) -> None:
    wrapped = wrap_objective_to_record_means(objective, [], [])
    for mark in ("reads_vocabulary_parts", "takes_classes"):
        assert getattr(wrapped, mark, False) == getattr(objective, mark, False), mark
    assert getattr(objective, "takes_classes", False)
