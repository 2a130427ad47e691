"""The failure of a rank that reported none: by how its process ended."""

from __future__ import annotations

import signal
from dataclasses import replace

from phalanx.core.errors import ExitCode
from phalanx.launch.attempt_end import RankExit
from phalanx.launch.blamed_rank import (
    BlamedRank,
    describe_deaths_beside,
    describe_other_ranks_ends,
    hint_at_out_of_memory,
    read_black_boxes,
)
from phalanx.launch.hang_kinds import LEFT_EARLY
from phalanx.launch.log_excerpts import is_aborted_by_mismatch, read_log_end_explaining_death
from phalanx.launch.other_collective import blame_rank_in_other_collective
from phalanx.launch.positions import describe_waits_at_end
from phalanx.launch.rank_failure import RankFailure
from phalanx.launch.signals import format_signal_name

# Codes that phalanx gives to problems which a restart does not cure.
_DETERMINISTIC_EXIT_CODES = {int(code) for code in ExitCode} - {
    ExitCode.OK,
    ExitCode.INTERNAL,
    ExitCode.RESTART_BUDGET,
    ExitCode.PREEMPTED,
    ExitCode.INTERRUPTED,
}
# Python raises SystemExit for sys.exit, and that is reported with its line.
UNREPORTED_EXIT_HINT = " (by os._exit or C's exit, before the run was done)"


def blame_nonzero_exit_code(blamed: BlamedRank, code: int) -> RankFailure:
    """The failure of a rank whose entry returned a code that is neither success nor a stop, without
    a report."""
    failure = _build_failure_of_dead_process(blamed, "exit", f"ended with code {code}")
    if code in _DETERMINISTIC_EXIT_CODES:
        return replace(failure, exit_code=code, restartable=False)
    return failure


def blame_exit_without_record(blamed: BlamedRank, rank_exit: RankExit) -> RankFailure:
    """The failure of a process that ended without an end record: by a signal, or an exit behind our
    back. Whatever code that had, its work was not done."""
    if rank_exit.signal is None:
        failure = _build_failure_of_dead_process(
            blamed, "exit", f"exited with code {rank_exit.code}"
        )
        return replace(failure, hang_kind=LEFT_EARLY)
    detail = f"killed by {format_signal_name(rank_exit.signal)}"
    if rank_exit.oom_kill is not None:
        detail = f"killed by {rank_exit.oom_kill.describe()}"
    # A signal comes from outside: also before the first step another start may do better.
    failure = replace(
        _build_failure_of_dead_process(blamed, "signal", detail),
        restartable=True,
        is_oom_kill=rank_exit.oom_kill is not None,
    )
    if rank_exit.signal == signal.SIGABRT and is_aborted_by_mismatch(blamed.log_path):
        gloo_did = f"gloo aborted rank {blamed.rank}"
        return blame_rank_in_other_collective(failure, blamed, gloo_did)
    return failure


def _build_failure_of_dead_process(blamed: BlamedRank, cause: str, detail: str) -> RankFailure:
    rank, end = blamed.rank, blamed.end
    verb = f"was {detail}" if cause == "signal" else detail
    summary = f"rank {rank} {verb} {blamed.described_position}"
    summary += describe_deaths_beside(rank, end)
    hint = UNREPORTED_EXIT_HINT
    if cause == "signal" or rank in end.records:
        rank_exit = end.exits.get(rank)
        is_known = rank_exit is not None and rank_exit.is_oom_known
        hint = "" if is_known else hint_at_out_of_memory(detail)
    lines = [
        summary + hint,
        *describe_waits_at_end(read_black_boxes(end, blamed.run_dir), {}, rank),
        *read_log_end_explaining_death(end.exits.get(rank), blamed.log_path),
        *describe_other_ranks_ends(rank, None, end),
        f"log: {blamed.log_path}",
    ]
    return blamed.build_restartable_failure(cause, summary, detail, lines, detail)
