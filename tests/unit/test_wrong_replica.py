"""Which rank is named where replicas came to differ and their steps are done again: the right one
or none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from phalanx.core.roll_back import RollBack, UnequalSteps
from phalanx.core.typed_json import from_json, to_json
from phalanx.run.rank_run import RollBacks
from phalanx.train.step_replay import find_wrong_rank

TRUTH = UnequalSteps(21, 23, ((9.0, 8.0, 7.0), (9.5, 8.5, 7.5)), ("a", "a"))
EPSILON = 2.0**-23


def changed(
    first: tuple[float, ...], second: tuple[float, ...], digests: tuple[str, str] = ("b", "c")
) -> UnequalSteps:
    return replace(TRUTH, losses=(first, second), digests=digests)


@pytest.mark.parametrize(
    ("before", "rank", "why"),
    [
        (changed((9.0, 8.0, 7.1), (9.5, 8.6, 7.6)), 1, "in step 22 the loss"),
        (changed((9.1, 8.1, 7.1), (9.5, 8.6, 7.6)), 0, "in step 21 the loss"),
        (changed((9.0, math.nan, 7.1), (9.5, 8.5, 7.6)), 0, "in step 22 the loss"),
        (changed((9.0, 8.0, 7.0), (9.5, 8.5, 7.5), ("a", "b")), 1, "its weights or its optim"),
        # What reached no gradient is told by the weights, whatever a loss says.
        (changed((9.0, 8.0, 7.0), (9.5, 8.6, 7.5), ("b", "a")), 0, "its weights or its optim"),
        (changed((9.0, 8.1, 7.1), (9.5, 8.6, 7.6)), -1, "the losses of 2 ranks"),
        # The healthy rank may be the first whose loss shows a tiny error that all have by then.
        (changed((9.0, 8.0 + 8 * EPSILON, 7.1), (9.5, 8.5, 7.6)), -1, "by no more than rounding"),
        (changed((9.0, 8.0, 7.0), (9.5, 8.5, 7.5)), -1, "no loss is another"),
        (changed((9.0, 8.0, 7.0), (9.5, 8.5, 7.5), ("a", "a")), -1, "no rank's weights or state"),
        (changed((8.0, 7.1), (9.5, 8.6, 7.6)), -1, "not all steps"),
    ],
)
def test_a_rank_is_named_only_where_steps_done_again_decide(
    before: UnequalSteps, rank: int, why: str
) -> None:
    found, words = find_wrong_rank(before, TRUTH, losses_tell=True)
    assert (found, why in words) == (rank, True), words


def test_losses_name_nobody_where_ranks_share_weights_or_samples() -> None:
    """A rank that holds no wrong weight may be the only one whose samples meet it."""
    before = changed((9.0, 8.0, 7.1), (9.5, 8.6, 7.6))
    assert find_wrong_rank(before, TRUTH, losses_tell=False)[0] == -1
    alone = replace(before, digests=("a", "b"))
    assert find_wrong_rank(alone, TRUTH, losses_tell=False)[0] == 1


def test_ranks_of_the_next_attempt_get_the_steps_if_they_are_as_many() -> None:
    roll_back = RollBack("corruption", 25, 20, "", unequal=changed((0.1, 1e-30, 7.1), (3.0,) * 3))
    sent = from_json(RollBacks, to_json(RollBacks((roll_back,), pending=True)))
    assert sent.find_unequal_steps(2) == roll_back.unequal
    assert sent.find_unequal_steps(1) is None
    later = RollBack("loss_spike", 40, 38, "")
    assert RollBacks((roll_back, later)).find_unequal_steps(2) is None
