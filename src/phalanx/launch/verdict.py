"""The verdict on a failed attempt: the rank that failed first, the text for a person, and whether
starting again can help."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from phalanx.core.errors import ExitCode
from phalanx.launch.absence import AbsentRank, find_absent_rank
from phalanx.launch.attempt_end import AttemptEnd, RankExit
from phalanx.launch.blamed_rank import (
    BlamedRank,
    hint_at_out_of_memory,
    name_each_rank,
    read_black_box,
    read_black_boxes,
    read_step_and_phase,
)
from phalanx.launch.dead_process import blame_exit_without_record, blame_nonzero_exit_code
from phalanx.launch.hang_kinds import FROZEN
from phalanx.launch.hang_verdict import HangVerdict
from phalanx.launch.log_excerpts import read_abort_reason, read_main_thread_stack
from phalanx.launch.paths import rank_log_path
from phalanx.launch.positions import (
    describe_rank_position,
    describe_waits_at_end,
    read_furthest_position,
)
from phalanx.launch.rank_failure import RankFailure
from phalanx.launch.reported_failure import explain_error_report
from phalanx.launch.reports import STORE_ERROR_NAMES, ErrorReport, is_message_about_lost_peer


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
        absence = find_absent_rank(end.records, end.silent, read_black_boxes(end, run_dir))
        if absence is not None:
            return _blame_absent_rank(absence, end, run_dir)
        if process_failure is not None:
            return process_failure
    return _explain_failure_of_rank(earliest.rank, end, run_dir)


def blame_nobody(end: AttemptEnd) -> RankFailure:
    """The failure of an attempt that no rank is known to have failed in, and not all have ended."""
    ended = ", ".join(map(str, sorted(end.exits.keys() - end.records.keys())))
    text = f"no rank is known to have failed, and rank {ended} has not ended its work"
    return RankFailure(
        *(-1, "exit", 0, "", text, text, text, "nobody failed"),
        exit_code=1,
        restartable=True,
        detected_s=0.0,
    )


def _explain_failure_of_rank(rank: int, end: AttemptEnd, run_dir: Path) -> RankFailure:
    """The failure of a rank by what it reported; else by its exit."""
    report = end.error_reports.get(rank)
    if report is not None and report.of_rank >= 0:
        # All ranks raise it: the first to do so is not to blame.
        rank = report.of_rank
    blamed = BlamedRank(rank, end, run_dir, read_black_box(rank, end, run_dir))
    if report is not None:
        return explain_error_report(blamed, report)
    if rank in end.records:
        return blame_nonzero_exit_code(blamed, end.records[rank].code)
    return blame_exit_without_record(blamed, end.exits[rank])


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
    step, phase = read_step_and_phase(newest)
    summary = f"{detail} {describe_rank_position(newest, end.stepless)}"
    return RankFailure(
        rank=-1,
        cause="signal" if "killed" in (end.server_loss or end.store_loss) else "exit",
        step=step,
        phase=phase,
        summary=summary,
        detail=detail,
        report=summary + hint_at_out_of_memory(detail),
        signature=detail,
        exit_code=ExitCode.INTERNAL,
        restartable=True,
        detected_s=0.0,
    )


def _blame_absent_rank(absence: AbsentRank, end: AttemptEnd, run_dir: Path) -> RankFailure:
    """The failure of a rank that the others waited for: it had reported nothing, or came too
    late."""
    rank, last_seen_of = absence.rank, read_black_boxes(end, run_dir)
    blamed = BlamedRank(rank, end, run_dir, last_seen_of.get(rank))
    summary = f"rank {rank} kept the others waiting {blamed.described_position}: {absence.why}"
    ranks_at: dict[str, list[int]] = {}
    for other in sorted(end.records.keys() | end.exits.keys() | end.silent.keys()):
        if other != rank:
            words = describe_rank_position(last_seen_of.get(other), end.stepless)
            ranks_at.setdefault(words, []).append(other)
    lines = [summary]
    for words, ranks in ranks_at.items():
        lines.append(f"{name_each_rank(ranks)}: waited {words}")
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
    blamed = BlamedRank(rank, end, run_dir, hang.positions.get(rank))
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
