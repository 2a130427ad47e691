"""What `phalanx bench scaling` says of an efficiency."""

from __future__ import annotations

import pytest

from phalanx.cli._bench_scaling import describe_scaling
from phalanx.run.scaling import ScalingPoint, ScalingResult


@pytest.mark.parametrize(
    ("efficiency", "is_good", "words"),
    [
        (0.5, False, "below the 80 % that guides ask for"),
        (0.95, True, "at least the 80 % that guides ask for"),
        (23.5, False, "says little of scaling"),
    ],
)
def test_an_efficiency_far_above_linear_is_not_praised(
    efficiency: float, is_good: bool, words: str
) -> None:
    first = ScalingPoint(1, "one rank", 2, 0.28, 100.0, 1.0)
    second = ScalingPoint(2, "dp=2", 4, 0.012, 200.0 * efficiency, efficiency)
    assert second.is_good is is_good
    assert second.to_json()["is_credible"] is (efficiency < 1.2)
    result = ScalingResult((first, second), (), is_strong=False)
    verdict = list(describe_scaling(result))[-1]
    assert words.replace("80 %", "80%") in verdict
    assert ("guides" in verdict) is (efficiency < 1.2)
