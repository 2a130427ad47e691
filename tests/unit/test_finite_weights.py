"""Weights that are not finite: what is found of them, and what is decided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch

from phalanx.core.errors import NumericsError
from phalanx.core.roll_back import RollBackRequest
from phalanx.parallel.step_stats import StepStats
from phalanx.resilience.guards import NonFiniteWeightsGuard
from phalanx.train.finite_weights import FiniteWeights, describe_broken_weights

GOOD = StepStats(2.0, 8, 1.0, finite=True)
BAD = StepStats(math.nan, 8, math.nan, finite=False)
EMPTY = StepStats(0.0, 0, 0.0, finite=True)
OVERFLOW = StepStats(1.0, 8, math.inf, finite=False, loss_scale=128.0, scale_adapts=True)


def guard(
    broken: Mapping[int, Sequence[str]], *, may_roll_back: bool = True, reads_on: bool = False
) -> NonFiniteWeightsGuard:
    return NonFiniteWeightsGuard(
        lambda: broken, lambda: 72, may_roll_back=may_roll_back, reads_on=reads_on
    )


def broken_module() -> torch.nn.ParameterDict:
    """One with an infinity and a NaN by design."""
    names = ("a", "mask", "unused", "frozen")
    module = torch.nn.ParameterDict({n: torch.nn.Parameter(torch.ones(3, 2)) for n in names})
    module["empty"] = torch.nn.Parameter(torch.ones(0))
    module["two_bytes"] = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    module["one_byte"] = torch.nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))
    module["frozen"].requires_grad_(False)
    with torch.no_grad():
        module["mask"][0, 0] = -math.inf
        module["unused"][0, 0] = module["frozen"][0, 0] = math.nan
    return module


def test_what_became_nan_or_infinite_is_found_and_not_what_is_so_by_design() -> None:
    module = broken_module()
    weights = FiniteWeights(cast(Any, module))
    weights.remember(is_beginning=True)
    assert weights.list_broken() == []
    with torch.no_grad():
        module["a"][2, 1] = math.inf
        module["two_bytes"][1] = math.nan
    assert weights.list_broken() == ["a", "two_bytes"]
    assert describe_broken_weights(["a"]) == "a is not finite"
    assert describe_broken_weights(["a", "two_bytes"]) == "a and 1 more are not finite"


def test_of_a_run_that_goes_on_they_are_by_design_from_the_first_finite_step_on() -> None:
    """It may go on from weights that had been broken before; and what breaks in that step, after it
    was read, does not become so."""
    module = broken_module()
    weights = FiniteWeights(cast(Any, module))
    assert weights.list_broken() == ["mask", "unused"]
    weights.remember(is_beginning=False)
    assert weights.list_broken() == ["mask", "unused"]
    with torch.no_grad():
        module["a"][2, 1] = math.inf
    weights.note_finite_step()
    assert weights.list_broken() == ["a"]


def test_steps_that_are_not_finite_by_their_samples_change_nothing() -> None:
    looked = guard({})
    assert [looked.reason_to_skip(1, each) for each in (GOOD, BAD, EMPTY, OVERFLOW)] == [None] * 4
    unasked = guard({0: ["a"]})
    assert [unasked.reason_to_skip(1, each) for each in (GOOD, EMPTY)] == [None] * 2


@pytest.mark.parametrize("found", [BAD, OVERFLOW], ids=["bf16", "fp16"])
def test_the_run_goes_back_to_before_the_last_step_that_was_finite(found: StepStats) -> None:
    asked = guard({1: ["a"]})
    asked.reason_to_skip(7, GOOD)
    asked.reason_to_skip(8, EMPTY)
    with pytest.raises(RollBackRequest) as caught:
        asked.reason_to_skip(9, found)
    back = caught.value.roll_back
    assert (back.kind, back.step, back.not_after_step) == ("nonfinite_weights", 9, 6)
    assert (back.rank, back.skip_to_sample) == (1, -1)
    again = guard({0: ["a"], 1: ["a"]}, reads_on=True)
    with pytest.raises(RollBackRequest) as caught:
        again.reason_to_skip(9, found)
    back = caught.value.roll_back
    # The first step of an attempt: the checkpoint that it began with holds them.
    assert (back.not_after_step, back.rank, back.skip_to_sample) == (7, -1, 72)
    empty_first = guard({0: ["a"]})
    empty_first.reason_to_skip(9, EMPTY)
    with pytest.raises(RollBackRequest) as caught:
        empty_first.reason_to_skip(10, found)
    assert caught.value.roll_back.not_after_step == 7


def test_without_leave_to_go_back_the_run_ends_and_says_which_checkpoints_are_good() -> None:
    told = guard({0: ["a", "b"]}, may_roll_back=False)
    told.reason_to_skip(7, GOOD)
    with pytest.raises(NumericsError, match="a and 1 more are not finite on rank 0") as caught:
        told.reason_to_skip(8, BAD)
    assert "not after step 6" in str(caught.value)
    with pytest.raises(NumericsError, match="the weights that the run begins with"):
        guard({0: ["a"]}).reason_to_skip(1, BAD)
