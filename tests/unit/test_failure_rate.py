"""A rate of failures, beside the number that it is of."""

from __future__ import annotations

import math

import pytest

from phalanx.observe.events import Envelope, ReliabilityMeasured
from phalanx.observe.failure_rate import bound_time_between_failures, describe_failure_rate
from phalanx.observe.words import describe_event


def sum_poisson(most: int, mean: float) -> float:
    """The probability of at most so many events where `mean` are expected."""
    return sum(math.exp(-mean) * mean**count / math.factorial(count) for count in range(most + 1))


@pytest.mark.parametrize("num_failures", [2, 3, 10, 50])
def test_the_limits_are_those_of_a_poisson_count(num_failures: int) -> None:
    least_s, most_s = bound_time_between_failures(num_failures, 1.0)
    # Were failures as frequent as the one limit says, so few would come once in forty times; were
    # they as rare as the other, so many.
    assert sum_poisson(num_failures, 1 / least_s) == pytest.approx(0.025, abs=0.001)
    assert 1 - sum_poisson(num_failures - 1, 1 / most_s) == pytest.approx(0.025, abs=0.004)


def test_one_failure_gives_a_least_time_alone_and_none_nothing() -> None:
    least_s, most_s = bound_time_between_failures(1, 1.0)
    assert sum_poisson(1, 1 / least_s) == pytest.approx(0.05, abs=0.001)
    assert most_s == math.inf
    assert all(map(math.isnan, bound_time_between_failures(0, 1.0)))


def test_a_rate_is_said_with_its_number_and_never_of_one_failure() -> None:
    assert describe_failure_rate(3, 3600.0) == (
        "3 failures in 1 h 00 m, one each 20 m 00 s (6 m 51 s to 1 h 39 m with 95 % confidence)"
    )
    assert describe_failure_rate(1, 5.9) == (
        "1 failure in 5.9 s (in the mean at least 1.2 s between two, with 95 % confidence)"
    )
    event = ReliabilityMeasured(0, 3600.0, 0.9, 1.0, 1, 3600.0, 0.2, 38.0)
    text = describe_event(Envelope(event, -1, 0, 1e9, seq=0, monotonic_s=1.0))
    assert text == (
        "hour 1: goodput 90.0%; 1 failure in 1 h 00 m (in the mean at least 12 m 41 s between two,"
        " with 95 % confidence)"
    )
    event = ReliabilityMeasured(0, 3600.0, 0.9, 1.0, 2, 1800.0, 0.2, 27.0)
    text = describe_event(Envelope(event, -1, 0, 1e9, seq=0, monotonic_s=1.0))
    assert text.endswith("; if failures go on like that, a save each 27.0 s loses least")
