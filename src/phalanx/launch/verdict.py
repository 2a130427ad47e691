"""The verdict on a failed attempt: the rank that failed first, the text for a person, and whether
starting again can help."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from phalanx.core.black_box_reader import LastPosition, read_last_position
from phalanx.core.errors import DataSourceError, ExitCode, OutOfMemoryError
from phalanx.core.roll_back import RollBack
from phalanx.launch.absence import AbsentRank, find_absent_rank
from phalanx.launch.attempt_end import AttemptEnd, RankExit
from phalanx.launch.hang_kinds import (
    ABSENT_COLLECTIVE,
    FROZEN,
    LEFT_EARLY,
    find_unusual_callers,
)
from phalanx.launch.log_excerpts import (
    is_aborted_by_mismatch,
    read_abort_reason,
    read_log_end_explaining_death,
    read_main_thread_stack,
)
from phalanx.launch.paths import black_box_path, rank_log_path
from phalanx.launch.positions import (
    describe_rank_position,
    describe_waits_at_end,
    read_furthest_position,
)
from phalanx.launch.progress_watch import HangVerdict
from phalanx.launch.rank_failure import LOST_CONNECTION, OUT_OF_MEMORY, RankFailure
from phalanx.launch.reports import STORE_ERROR_NAMES, ErrorReport, is_message_about_lost_peer
from phalanx.launch.signals import format_signal_name
from phalanx.launch.signature import remove_varying_text_from_failure
from phalanx.observe.rank_waits import RankState, find_group
from phalanx.observe.where_words import describe_collective, find_newest_call_site

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


def find_root_failure(end: AttemptEnd, run_dir: Path) -> RankFailure | None:
    """The failure of an attempt, or None if every rank finished or left in agreement."""
    if end.start_error is not None:
        return _blame_failed_startup(end.start_error)
    if end.hang is not None:
        return _blame_hang(end.hang, end, run_dir)
    earliest = _find_earliest_failure(end, run_dir)
    if earliest is None and not end.server_loss and end.exits.keys() <= end.records.keys():
        # They ended their work, with a store or without.
        return None
    if earliest is None or earliest.is_consequence:
        process_failure = _blame_server_or_store_process(end, run_dir)
        if earliest is None or end.server_loss or _have_missed_store(end):
            return process_failure
        absence = find_absent_rank(end.records, end.silent, _read_black_boxes(end, run_dir))
        if absence is not None:
            return _blame_absent_rank(absence, end, run_dir)
        if process_failure is not None:
            return process_failure
    return _explain_failure_of_rank(earliest.rank, end, run_dir)


def _explain_failure_of_rank(rank: int, end: AttemptEnd, run_dir: Path) -> RankFailure:
    """The failure of a rank by what it reported; else by its exit."""
    report = end.error_reports.get(rank)
    if report is not None and report.of_rank >= 0:
        # All ranks raise it: the first to do so is not to blame.
        rank = report.of_rank
    blamed = _BlamedRank(rank, end, run_dir, read_last_position(black_box_path(run_dir, rank)))
    if report is not None:
        return _explain_error_report(blamed, report)
    if rank in end.records:
        return _blame_nonzero_exit_code(blamed, end.records[rank].code)
    return _blame_exit_without_record(blamed, end.exits[rank])


def _explain_error_report(blamed: _BlamedRank, report: ErrorReport) -> RankFailure:
    if report.roll_back is not None:
        return _explain_roll_back(blamed, report.roll_back)
    if report.is_phalanx_error:
        if report.type == DataSourceError.__name__ and blamed.is_of_trained_run:
            return _blame_data_source(blamed, report)
        return _blame_phalanx_error(blamed, report)
    # A rank alone has nobody to lose: it was a connection of the user's own.
    end = blamed.end
    if report.secondary and len(end.exits.keys() | end.records.keys() | end.waiting.keys()) > 1:
        return _explain_lost_connection(blamed, report)
    return _blame_exception(blamed, report)


@dataclass(frozen=True)
class _BlamedRank:
    """The rank that failed first, as far as is known, and where it was last seen."""

    rank: int
    end: AttemptEnd
    run_dir: Path
    last_seen: LastPosition | None

    @property
    def describe_position(self) -> str:
        return describe_rank_position(self.last_seen, self.end.stepless)

    @property
    def log_path(self) -> Path:
        return rank_log_path(self.run_dir, self.rank, self.end.number)

    @property
    def has_done_steps(self) -> bool:
        return self.last_seen is not None and self.last_seen.step >= 1

    @property
    def is_of_trained_run(self) -> bool:
        """True if a step was done in this attempt, or an attempt came before this one."""
        return self.end.number > 0 or (self.last_seen is not None and self.last_seen.step > 1)

    def build_restartable_failure(
        self, cause: str, summary: str, detail: str, lines: Sequence[str], signature: str
    ) -> RankFailure:
        """A failure of this rank as most are: restarted once it has trained, and of no code of its
        own. `lines` are the report."""
        step, phase = _read_step_and_phase(self.last_seen)
        detected_s = 0.0
        if self.rank in self.end.exits:
            detected_s = self.end.exits[self.rank].detected_s
        return RankFailure(
            rank=self.rank,
            cause=cause,
            step=step,
            phase=phase,
            summary=summary,
            detail=detail,
            report="\n".join(lines),
            signature=signature,
            exit_code=ExitCode.INTERNAL,
            # What fails before the first step will fail there again.
            restartable=self.has_done_steps,
            detected_s=detected_s,
        )


def _read_step_and_phase(last_seen: LastPosition | None) -> tuple[int, str]:
    if last_seen is None:
        return 0, ""
    return last_seen.step, last_seen.phase


# What a rank raises that finds another one in another collective of their shared memory.
COLLECTIVES_DIFFER_ERROR = "CollectivesDifferError"


class _FailedRank(NamedTuple):
    """A rank that failed; sorts in the order in which they are examined."""

    is_consequence: bool
    time_monotonic_s: float
    rank: int


def _find_earliest_failure(end: AttemptEnd, run_dir: Path) -> _FailedRank | None:
    """The earliest cause; the earliest consequence where no cause is known."""
    failed: list[_FailedRank] = []
    reports = end.error_reports
    for rank in filter(end.has_rank_failed_or_died, end.exits.keys() | end.records.keys()):
        if rank in reports:
            is_consequence, time_s = reports[rank].secondary, reports[rank].time_monotonic_s
        elif rank in end.exits:
            is_consequence = _is_aborted_because_of_peer(end.exits[rank], end, run_dir)
            time_s = end.exits[rank].died_monotonic_s
        else:
            continue
        # Causes sort before consequences (False before True), then by time.
        failed.append(_FailedRank(is_consequence, time_s, rank))
    return min(failed, default=None)


def _is_aborted_because_of_peer(rank_exit: RankExit, end: AttemptEnd, run_dir: Path) -> bool:
    """True if C++ code of torch, NCCL's watchdog above all, ended the process because a peer was
    gone or did not come."""
    if rank_exit.signal != signal.SIGABRT:
        return False
    log = rank_log_path(run_dir, rank_exit.rank, end.number)
    return any(map(is_message_about_lost_peer, read_abort_reason(log)))


def _read_black_boxes(end: AttemptEnd, run_dir: Path) -> dict[int, LastPosition]:
    """The place where each rank was last seen, as far as its black box says."""
    last_seen_of: dict[int, LastPosition] = {}
    for rank in sorted(end.exits.keys() | end.records.keys() | end.silent.keys()):
        last_seen = read_last_position(black_box_path(run_dir, rank))
        if last_seen is not None:
            last_seen_of[rank] = last_seen
    # As they were before their stacks were asked for, which may have woken them.
    return last_seen_of | end.silent_places


def _blame_failed_startup(report: ErrorReport) -> RankFailure:
    """The failure of ranks that never started: a module that does not import, no process or port
    to be had."""
    text = report.traceback.rstrip()
    if report.is_phalanx_error:
        text = report.one_line
    return RankFailure(
        rank=-1,
        cause="exception",
        step=0,
        phase="startup",
        summary=report.one_line,
        detail=report.one_line,
        report=text,
        signature=report.one_line,
        exit_code=report.exit_code,
        restartable=False,
        detected_s=0.0,
    )


def _have_missed_store(end: AttemptEnd) -> bool:
    """True if the store was lost and a rank failed by that: it may have done without for hours."""
    tracebacks = [report.traceback for report in end.error_reports.values()]
    return bool(end.store_loss) and any(
        name in traceback for traceback in tracebacks for name in STORE_ERROR_NAMES
    )


def _blame_server_or_store_process(end: AttemptEnd, run_dir: Path) -> RankFailure | None:
    if not end.server_loss and not end.store_loss:
        return None
    detail = f"the process that holds the rendezvous store ended ({end.store_loss})"
    if end.server_loss:
        detail = f"the process that starts the ranks {end.server_loss}"
    newest = read_furthest_position(run_dir)
    step, phase = _read_step_and_phase(newest)
    summary = f"{detail} {describe_rank_position(newest, end.stepless)}"
    return RankFailure(
        rank=-1,
        cause="signal" if "killed" in (end.server_loss or end.store_loss) else "exit",
        step=step,
        phase=phase,
        summary=summary,
        detail=detail,
        report=summary + _out_of_memory_hint(detail),
        signature=detail,
        exit_code=ExitCode.INTERNAL,
        restartable=True,
        detected_s=0.0,
    )


def _blame_phalanx_error(blamed: _BlamedRank, report: ErrorReport) -> RankFailure:
    line = report.one_line
    cause = "exception"
    if report.type == OutOfMemoryError.__name__:
        cause = OUT_OF_MEMORY
    failure = blamed.build_restartable_failure(cause, line, line, [line], line)
    # Refused for a reason that is in the job, the data or the machine.
    failure = replace(failure, exit_code=report.exit_code, restartable=False)
    return _note_outage(failure, blamed, report)


def _note_outage(failure: RankFailure, blamed: _BlamedRank, report: ErrorReport) -> RankFailure:
    """`failure` as that of an outage, if the report tells of one and the run has trained."""
    if not report.outage or not blamed.is_of_trained_run:
        return failure
    return replace(failure, restartable=True, is_outage=True, signature=f"outage: {report.outage}")


def _blame_data_source(blamed: _BlamedRank, report: ErrorReport) -> RankFailure:
    """The failure of a user's dataset in a run that has trained: its files or its server may be
    there again when the ranks start again."""
    line = report.one_line
    told = line.removeprefix(f"rank {blamed.rank}: ")
    summary = f"rank {blamed.rank} failed {blamed.describe_position}: {told}"
    signature = remove_varying_text_from_failure(line)
    failure = blamed.build_restartable_failure("exception", summary, line, [summary], signature)
    failure = replace(failure, exit_code=report.exit_code, restartable=True)
    return _note_outage(failure, blamed, report)


def _explain_roll_back(blamed: _BlamedRank, roll_back: RollBack) -> RankFailure:
    """No rank has failed: all of them agreed to go back."""
    whose = f"rank {roll_back.rank}: " if roll_back.rank >= 0 else ""
    summary = f"step {roll_back.step}: {whose}{roll_back.why}"
    failure = blamed.build_restartable_failure(
        roll_back.kind, summary, roll_back.why, [summary], roll_back.kind
    )
    return replace(
        failure,
        rank=roll_back.rank,
        step=roll_back.step,
        restartable=True,
        detected_s=0.0,
        roll_back=roll_back,
    )


def _blame_exception(blamed: _BlamedRank, report: ErrorReport) -> RankFailure:
    summary = f"rank {blamed.rank} failed {blamed.describe_position}"
    lines = [f"{summary}:", report.traceback.rstrip()]
    lines += _describe_other_ranks_ends(blamed.rank, report, blamed.end)
    if report.user_place:
        lines.append(f"your code: {report.user_place}")
    lines.append(f"log: {blamed.log_path}")
    signature = remove_varying_text_from_failure(report.one_line)
    summary = f"{summary}: {report.one_line}"
    failure = blamed.build_restartable_failure(
        "exception", summary, report.one_line, lines, signature
    )
    if report.type == COLLECTIVES_DIFFER_ERROR:
        noticed = f"rank {blamed.rank} noticed"
        return _blame_rank_in_other_collective(failure, blamed, noticed)
    return _note_outage(failure, blamed, report)


def _explain_lost_connection(blamed: _BlamedRank, report: ErrorReport) -> RankFailure:
    """The failure of ranks that only lost each other: the first to notice is not to blame."""
    summary = f"ranks lost the connection to each other {blamed.describe_position}"
    noticed = f"rank {blamed.rank} noticed first: {report.one_line}"
    lines = [f"{summary}; rank {blamed.rank} noticed first:", report.traceback.rstrip()]
    lines += _describe_other_ranks_ends(blamed.rank, report, blamed.end)
    lines.append(f"log: {blamed.log_path}")
    # It is told in many words: they are one failure when it repeats.
    failure = blamed.build_restartable_failure(
        LOST_CONNECTION, f"{summary}; {noticed}", noticed, lines, "lost connection"
    )
    return replace(failure, rank=-1)


def _blame_absent_rank(absence: AbsentRank, end: AttemptEnd, run_dir: Path) -> RankFailure:
    """The failure of a rank that the others waited for: it had reported nothing, or came too
    late."""
    rank, last_seen_of = absence.rank, _read_black_boxes(end, run_dir)
    blamed = _BlamedRank(rank, end, run_dir, last_seen_of.get(rank))
    summary = f"rank {rank} kept the others waiting {blamed.describe_position}: {absence.why}"
    ranks_at: dict[str, list[int]] = {}
    for other in sorted(end.records.keys() | end.exits.keys() | end.silent.keys()):
        if other != rank:
            words = describe_rank_position(last_seen_of.get(other), end.stepless)
            ranks_at.setdefault(words, []).append(other)
    lines = [summary]
    for words, ranks in ranks_at.items():
        lines.append(f"{_format_rank_list(ranks)}: waited {words}")
    lines += describe_waits_at_end(last_seen_of, end.silent, rank)
    lines += [*read_main_thread_stack(blamed.log_path), f"log: {blamed.log_path}"]
    detail = f"kept the others waiting: {absence.why}"
    failure = blamed.build_restartable_failure(
        "hang", summary, detail, lines, "kept the others waiting"
    )
    # A hang is no death whose detection could be timed.
    return replace(failure, detected_s=0.0)


def _blame_hang(hang: HangVerdict, end: AttemptEnd, run_dir: Path) -> RankFailure:
    """The failure of ranks that kept a run from progress and were killed for that."""
    rank = hang.culprits[0]
    blamed = _BlamedRank(rank, end, run_dir, hang.positions.get(rank))
    summary = "; ".join(hang.sentences)
    lines = [f"hang ({hang.kind}): {summary}", *hang.report[len(hang.sentences) :]]
    lines.append(f"log: {blamed.log_path}")
    failure = blamed.build_restartable_failure(
        "hang", summary, summary, lines, f"hang: {hang.kind}"
    )
    # A process that is stopped was stopped from outside: it may do better before the first step,
    # too. So may one that hangs where ranks of an earlier attempt did not.
    restartable = failure.restartable or hang.kind == FROZEN or end.number > 0
    return replace(
        failure, detected_s=hang.detected_s, hang_kind=hang.kind, restartable=restartable
    )


def _blame_nonzero_exit_code(blamed: _BlamedRank, code: int) -> RankFailure:
    """The failure of a rank whose entry returned a code that is neither success nor a stop, without
    a report."""
    failure = _build_failure_of_dead_process(blamed, "exit", f"ended with code {code}")
    if code in _DETERMINISTIC_EXIT_CODES:
        return replace(failure, exit_code=code, restartable=False)
    return failure


def _blame_exit_without_record(blamed: _BlamedRank, rank_exit: RankExit) -> RankFailure:
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
        return _blame_rank_in_other_collective(failure, blamed, gloo_did)
    return failure


def _blame_rank_in_other_collective(
    failure: RankFailure, first: _BlamedRank, consequence: str
) -> RankFailure:
    """`failure` as that of the rank which called another collective than the others, if the black
    boxes single one out: any of them may be the first to end."""
    failure = replace(failure, hang_kind=ABSENT_COLLECTIVE)
    positions = _read_black_boxes(first.end, first.run_dir)
    states = {rank: RankState(rank, position) for rank, position in positions.items()}
    odd = find_unusual_callers(states, sorted(states))
    if len(odd) != 1:
        return failure
    (rank,) = odd
    position = positions[rank]
    call = position.collectives[-1]
    name = describe_collective(call, find_group(position, call))
    file, line = find_newest_call_site(position)
    text = f"rank {rank} called {name} at {os.path.basename(file)}:{line},"
    text += f" where others called another collective, and {consequence}"
    return replace(
        failure, rank=rank, summary=text, detail=text, report=f"{text}\n{failure.report}"
    )


def _build_failure_of_dead_process(blamed: _BlamedRank, cause: str, detail: str) -> RankFailure:
    rank, end = blamed.rank, blamed.end
    verb = f"was {detail}" if cause == "signal" else detail
    summary = f"rank {rank} {verb} {blamed.describe_position}"
    hint = UNREPORTED_EXIT_HINT
    if cause == "signal" or rank in end.records:
        rank_exit = end.exits.get(rank)
        is_known = rank_exit is not None and rank_exit.is_oom_known
        hint = "" if is_known else _out_of_memory_hint(detail)
    lines = [
        summary + hint,
        *describe_waits_at_end(_read_black_boxes(end, blamed.run_dir), {}, rank),
        *read_log_end_explaining_death(end.exits.get(rank), blamed.log_path),
        *_describe_other_ranks_ends(rank, None, end),
        f"log: {blamed.log_path}",
    ]
    return blamed.build_restartable_failure(cause, summary, detail, lines, detail)


def _out_of_memory_hint(how: str) -> str:
    if "SIGKILL" in how:
        return " (possibly by the kernel's out-of-memory killer)"
    return ""


def _describe_other_ranks_ends(
    root: int, root_report: ErrorReport | None, end: AttemptEnd
) -> list[str]:
    """One line for all ranks that ended with the first, and one for each that had an error of its
    own.

    A rank that we killed before it noticed ended because of that, too: on a busy machine few notice
    in time.
    """
    reports = end.error_reports
    victims = set()
    for rank, report in reports.items():
        if report.secondary:
            victims.add(rank)
    for rank, rank_exit in end.exits.items():
        if rank_exit.by_us and rank not in reports:
            victims.add(rank)
    # The first to fail may itself have noticed only another one.
    victims.discard(root)
    lines = []
    if victims:
        lines.append(f"{_format_rank_list(sorted(victims))}: ended because of that")
    by_line: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        if rank != root and not report.secondary:
            # One line for all ranks with the same error.
            by_line.setdefault(report.one_line, []).append(rank)
    for one_line, ranks in by_line.items():
        if root_report is not None and one_line == root_report.one_line:
            one_line = "the same"
        lines.append(f"{_format_rank_list(ranks)}: {one_line}")
    return lines


def _format_rank_list(ranks: Sequence[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"
