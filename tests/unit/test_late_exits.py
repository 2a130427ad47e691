"""Ranks that are done and do not end: who waits for the command hears of it, once."""

from __future__ import annotations

from phalanx.launch.late_exits import SAY_AFTER_S, SAY_NONE_LEFT_AFTER_S, LateExits


def test_the_wait_for_a_rank_that_does_not_end_is_told_once() -> None:
    late = LateExits()
    assert not late.describe([1], SAY_AFTER_S - 1, 80.0)
    assert not late.describe([], SAY_AFTER_S, 80.0)
    said = late.describe([1], SAY_AFTER_S, 80.0)
    assert "all work is done, but the process of rank 1 has not ended" in said
    assert "(atexit)" in said
    assert said.endswith("killed in 1 m 20 s")
    assert not late.describe([1], SAY_AFTER_S + 1, 79.0)
    assert late.describe_kill([1]).startswith("the process of rank 1 has still not ended: killed")


def test_a_kill_that_nobody_waited_for_is_not_told_so() -> None:
    assert not LateExits().describe_kill([0, 1])


def test_ranks_that_are_all_done_and_stay_are_told_once_and_not_killed() -> None:
    late = LateExits()
    assert not late.describe_none_left(2, 100.0)
    assert not late.describe_none_left(2, 99.0 + SAY_NONE_LEFT_AFTER_S)
    said = late.describe_none_left(2, 100.0 + SAY_NONE_LEFT_AFTER_S)
    assert "the processes of ranks 0, 1 have not ended after 1 m 00 s" in said
    assert said.endswith("Ctrl-C ends it")
    assert not late.describe_none_left(2, 500.0)
