"""When remaining ranks must be killed, after what happened to the others."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.black_box import BlackBox
from phalanx.core.errors import ExitCode
from phalanx.launch.attempt_end import AttemptEnd, RankExit
from phalanx.launch.end_record import EndRecord
from phalanx.launch.kill_deadline import (
    CAUSE_WINDOW_S,
    EXIT_AFTER_FAILED_STOP_S,
    EXIT_AFTER_KILL_TIMEOUT_S,
    EXIT_AFTER_REPORT_WINDOW_S,
    SUSPECT_WINDOW_S,
    WAIT_FOR_ATTEMPT_LIMIT_S,
    WAIT_FOR_ATTEMPT_WINDOW_S,
    KillDeadline,
)
from phalanx.launch.launch_spec import LaunchSpec
from phalanx.launch.paths import black_box_path
from phalanx.launch.stop_request import StopRequest

NOW_S = 100.0
GRACE_S = 30.0
NO_ATTEMPTS: Any = None


class TwoRanks:
    def __init__(self, run_dir: Path, *, keeps_ranks: bool = False) -> None:
        spec = LaunchSpec("", NO_ATTEMPTS, 2, run_dir, (), grace_s=GRACE_S, keeps_ranks=keeps_ranks)
        self.end, self.stop = AttemptEnd(0), StopRequest()
        self.deadline = KillDeadline(self.end, 2, spec, self.stop)

    def lose(self, rank: int, number: int) -> None:
        """A signal ends the process of a rank."""
        self.end.exits[rank] = RankExit(rank, None, number, False, NOW_S, 0.0)
        self.deadline.note_failure(NOW_S)

    def compute_delay_s(self) -> float:
        return self.deadline.compute_s() - NOW_S


def test_without_a_failure_or_a_stop_ranks_may_run_for_ever(tmp_path: Path) -> None:
    ranks = TwoRanks(tmp_path)
    assert ranks.deadline.compute_s() == math.inf
    assert not ranks.deadline.has_failed


@pytest.mark.parametrize(
    ("number", "keeps_ranks", "delay_s"),
    [
        (signal.SIGKILL, False, CAUSE_WINDOW_S),
        # What others lived through is kept: they get time to notice, and to wait.
        (signal.SIGKILL, True, WAIT_FOR_ATTEMPT_WINDOW_S),
        # A watchdog may have ended it because of another one.
        (signal.SIGABRT, True, SUSPECT_WINDOW_S),
    ],
)
def test_after_a_death_the_others_get_time_to_say_what_they_know(
    tmp_path: Path, number: int, keeps_ranks: bool, delay_s: float
) -> None:
    ranks = TwoRanks(tmp_path, keeps_ranks=keeps_ranks)
    ranks.lose(1, number)
    assert ranks.compute_delay_s() == pytest.approx(delay_s)
    assert ranks.deadline.waits_for_survivors() == (delay_s == WAIT_FOR_ATTEMPT_WINDOW_S)
    ranks.lose(0, number)
    if not ranks.deadline.waits_for_survivors():
        # No rank is left that could say more.
        assert ranks.compute_delay_s() == pytest.approx(CAUSE_WINDOW_S)


def test_time_without_a_processor_does_not_count_up_to_a_limit(tmp_path: Path) -> None:
    ranks = TwoRanks(tmp_path, keeps_ranks=True)
    ranks.lose(1, signal.SIGKILL)
    ranks.deadline.note_processor_lack(4.0)
    assert ranks.compute_delay_s() == pytest.approx(WAIT_FOR_ATTEMPT_WINDOW_S + 4.0)
    ranks.deadline.note_processor_lack(400.0)
    assert ranks.compute_delay_s() == pytest.approx(WAIT_FOR_ATTEMPT_LIMIT_S)


def test_a_server_without_a_processor_has_longer_to_tell_that_ranks_are_killed(
    tmp_path: Path,
) -> None:
    """Killed too early it takes the survivors along, and what they hold."""
    ranks = TwoRanks(tmp_path, keeps_ranks=True)
    ranks.lose(1, signal.SIGKILL)
    ranks.deadline.note_processor_lack(4.0)
    assert not ranks.deadline.has_killed
    ranks.deadline.note_kill(NOW_S)
    # What it was without before the order was of another deadline.
    for lack_s in (0.0, 5.0):
        ranks.deadline.note_processor_lack(4.0 + lack_s)
        due_s = ranks.deadline.compute_server_due_s()
        assert due_s == pytest.approx(NOW_S + EXIT_AFTER_KILL_TIMEOUT_S + lack_s)
    ranks.deadline.note_processor_lack(400.0)
    due_s = ranks.deadline.compute_server_due_s()
    assert due_s == pytest.approx(NOW_S + WAIT_FOR_ATTEMPT_LIMIT_S)


def test_a_stop_ends_with_its_grace_or_soon_after_a_failure(tmp_path: Path) -> None:
    ranks = TwoRanks(tmp_path)
    ranks.stop.signal = signal.SIGTERM
    ranks.deadline.begin_grace(NOW_S)
    assert ranks.compute_delay_s() == pytest.approx(GRACE_S)
    assert not ranks.deadline.is_grace_over(NOW_S + GRACE_S - 1)
    # The first one counts.
    ranks.deadline.begin_grace(NOW_S + 10)
    ranks.deadline.note_report(NOW_S)
    assert ranks.compute_delay_s() == pytest.approx(EXIT_AFTER_REPORT_WINDOW_S + CAUSE_WINDOW_S)
    BlackBox(black_box_path(tmp_path, 0)).write(1, "forward")
    after_training_s = EXIT_AFTER_REPORT_WINDOW_S + EXIT_AFTER_FAILED_STOP_S
    assert ranks.compute_delay_s() == pytest.approx(after_training_s)


def test_survivors_that_were_asked_to_stop_are_waited_for_if_they_may_hold_steps(
    tmp_path: Path,
) -> None:
    ranks = TwoRanks(tmp_path, keeps_ranks=True)
    ranks.stop.signal = signal.SIGTERM
    ranks.lose(1, signal.SIGKILL)
    assert not ranks.deadline.waits_for_survivors()
    assert ranks.compute_delay_s() == pytest.approx(CAUSE_WINDOW_S)
    # They had trained in the attempt before.
    ranks.end.num_kept = 1
    ranks.deadline.note_processor_lack(4.0)
    assert ranks.compute_delay_s() == pytest.approx(GRACE_S / 2 + 4.0)
    ranks.end.num_kept = 0
    BlackBox(black_box_path(tmp_path, 0)).write(1, "forward")
    assert ranks.deadline.waits_for_survivors()


def test_the_grace_of_a_stop_goes_on_over_attempts(tmp_path: Path) -> None:
    stop = StopRequest(signal.SIGTERM, asked_s=NOW_S)
    spec = LaunchSpec("", NO_ATTEMPTS, 2, tmp_path, (), grace_s=GRACE_S, keeps_ranks=True)
    deadline = KillDeadline(AttemptEnd(1), 2, spec, stop)
    # Ranks agree on it later.
    deadline.begin_grace(NOW_S + 10)
    assert deadline.compute_s() == NOW_S + GRACE_S


def test_stacks_are_waited_for(tmp_path: Path) -> None:
    ranks = TwoRanks(tmp_path)
    ranks.lose(1, signal.SIGKILL)
    ranks.deadline.postpone(NOW_S + 7)
    assert ranks.compute_delay_s() == pytest.approx(7)


def test_the_wait_for_last_exits_counts_from_the_first_one(tmp_path: Path) -> None:
    deadline = TwoRanks(tmp_path).deadline
    assert deadline.compute_exit_wait_s(NOW_S) == -math.inf
    deadline.begin_last_exits(NOW_S)
    deadline.begin_last_exits(NOW_S + 3)
    assert deadline.compute_exit_wait_s(NOW_S + 10) == 10.0


def test_ranks_that_train_on_without_their_store_are_not_leaving(tmp_path: Path) -> None:
    """One of them that is stopped for a moment was killed."""
    ranks = TwoRanks(tmp_path, keeps_ranks=True)
    ranks.end.store_loss = "killed by SIGKILL"
    assert not ranks.deadline.waits_for_survivors()
    ranks.deadline.note_failure(NOW_S)
    assert ranks.deadline.waits_for_survivors()


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.PREEMPTED])
def test_only_ranks_with_nothing_left_to_do_are_done(tmp_path: Path, code: ExitCode) -> None:
    ranks = TwoRanks(tmp_path)
    ranks.end.records[0] = EndRecord(ExitCode.OK)
    assert not ranks.end.is_work_done(2)
    ranks.end.records[1] = EndRecord(code)
    assert ranks.end.is_complete(2)
    assert ranks.end.is_work_done(2) == (code == ExitCode.OK)
