"""The verdict on a failed attempt: the rank that failed first, the text for a person, and whether
starting again can help."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from phalanx.core.errors import ExitCode
from phalanx.core.files import open_regular
from phalanx.core.phases import LastSeen, read_black_box
from phalanx.launch.absence import Absence, find_absence
from phalanx.launch.attempt import AttemptEnd, RankExit
from phalanx.launch.paths import BLACK_BOXES, black_box, rank_log
from phalanx.launch.rank import STACK_HEAD
from phalanx.launch.reports import ErrorReport, blames_another
from phalanx.launch.signals import signal_name
from phalanx.launch.signature import signature_of

# Codes that phalanx gives to problems which a restart does not cure.
_DETERMINISTIC = {int(code) for code in ExitCode} - {
    ExitCode.OK,
    ExitCode.INTERNAL,
    ExitCode.RESTART_BUDGET,
    ExitCode.PREEMPTED,
    ExitCode.INTERRUPTED,
}
# Python raises SystemExit for sys.exit, and that is reported with its line.
UNSAID = " (by os._exit or C's exit, before the run was done)"
# Lines that say why a rank was aborted: the lines after them are often longer than the end of a log
# that is shown.
_TELLING = re.compile(
    r"watchdog|NCCL (WARN|error)|terminate called|what\(\):|Fatal Python error", re.IGNORECASE
)
NUM_LAST_LINES, NUM_TELLING_LINES, NUM_STACK_LINES = 25, 6, 10


@dataclass(frozen=True)
class Failure:
    """The root cause of a failed attempt.

    `summary` is one line with the place; `detail` the error or signal alone; `report` the whole
    text for a person; `signature` is equal for equal failures. `step` is 0 before the first step,
    `rank` -1 for the server itself.
    """

    rank: int
    cause: str  # "exception" | "signal" | "exit" | "hang"
    step: int
    phase: str
    summary: str
    detail: str
    report: str
    signature: str
    exit_code: int
    restartable: bool
    detected_s: float


def find_failure(end: AttemptEnd, run_dir: Path) -> Failure | None:
    """The failure of an attempt, or None if every rank finished or left in agreement."""
    if end.start_error is not None:
        return _blame_startup(end.start_error)
    earliest = _find_first_failed(end, run_dir)
    if earliest is None or earliest.is_consequence:
        process_failure = _blame_own_process(end, run_dir)
        if process_failure is not None or earliest is None:
            return process_failure
        absence = find_absence(end.records, end.silent, _places(end, run_dir))
        if absence is not None:
            return _blame_absence(absence, end, run_dir)
    first = earliest.rank
    place = read_black_box(black_box(run_dir, first))
    report = end.reports.get(first)
    if report is not None and report.is_phalanx_error:
        return _blame_phalanx_error(first, report, place, end)
    if report is not None:
        return _blame_exception(first, report, place, end, run_dir)
    if first in end.records:
        return _blame_code(first, end.records[first].code, place, end, run_dir)
    return _blame_exit(end.exits[first], place, end, run_dir)


class _FailedRank(NamedTuple):
    """A rank that failed; sorts in the order in which they are examined."""

    is_consequence: bool
    time_monotonic_s: float
    rank: int


def _find_first_failed(end: AttemptEnd, run_dir: Path) -> _FailedRank | None:
    """The earliest cause; the earliest consequence where no cause is known."""
    failed: list[_FailedRank] = []
    reports = end.reports
    for rank in filter(end.has_failed, end.exits.keys() | end.records.keys()):
        if rank in reports:
            failed.append(
                _FailedRank(reports[rank].secondary, reports[rank].time_monotonic_s, rank)
            )
        elif rank in end.exits:
            rank_exit = end.exits[rank]
            failed.append(
                _FailedRank(
                    _is_aborted_by_peer(rank_exit, end, run_dir), rank_exit.died_monotonic_s, rank
                )
            )
    return min(failed, default=None)


def _is_aborted_by_peer(rank_exit: RankExit, end: AttemptEnd, run_dir: Path) -> bool:
    """True if C++ code of torch, NCCL's watchdog above all, ended the process because a peer was
    gone or did not come."""
    if rank_exit.signal != signal.SIGABRT:
        return False
    return any(
        blames_another(line)
        for line in _read_telling_lines(rank_log(run_dir, rank_exit.rank, end.number))
    )


def _places(end: AttemptEnd, run_dir: Path) -> dict[int, LastSeen]:
    ranks = end.exits.keys() | end.records.keys() | end.silent.keys()
    places = {rank: read_black_box(black_box(run_dir, rank)) for rank in ranks}
    return {
        rank: place for rank, place in sorted(places.items()) if place is not None
    } | end.silent_places


def _blame_startup(report: ErrorReport) -> Failure:
    """The failure of ranks that never started: a module that does not import, no process or port
    to be had."""
    return Failure(
        rank=-1,
        cause="exception",
        step=0,
        phase="startup",
        summary=report.one_line,
        detail=report.one_line,
        report=report.one_line if report.is_phalanx_error else report.traceback.rstrip(),
        signature=report.one_line,
        exit_code=report.exit_code,
        restartable=False,
        detected_s=0.0,
    )


def _blame_own_process(end: AttemptEnd, run_dir: Path) -> Failure | None:
    if not end.server_loss and not end.store_loss:
        return None
    process_name = (
        "the process that starts the ranks"
        if end.server_loss
        else "the process that holds the rendezvous store"
    )
    how = end.server_loss or f"ended ({end.store_loss})"
    boxes = (run_dir / BLACK_BOXES).glob("rank-*")
    places = [place for box in boxes if (place := read_black_box(box)) is not None]
    place = max(places, default=None)
    return Failure(
        rank=-1,
        cause="signal" if "killed" in how else "exit",
        step=place.step if place else 0,
        phase=place.phase if place else "",
        summary=f"{process_name} {how} {place_in_words(place, end.stepless)}",
        detail=f"{process_name} {how}",
        report=f"{process_name} {how} {place_in_words(place, end.stepless)}{_hint(how)}",
        signature=f"{process_name} {how}",
        exit_code=ExitCode.INTERNAL,
        restartable=True,
        detected_s=0.0,
    )


def _blame_phalanx_error(
    rank: int, report: ErrorReport, place: LastSeen | None, end: AttemptEnd
) -> Failure:
    return Failure(
        rank=rank,
        cause="exception",
        step=place.step if place else 0,
        phase=place.phase if place else "",
        summary=report.one_line,
        detail=report.one_line,
        report=report.one_line,
        signature=report.one_line,
        exit_code=report.exit_code,
        restartable=False,
        detected_s=_detection_s(rank, end),
    )


def _blame_exception(
    rank: int, report: ErrorReport, place: LastSeen | None, end: AttemptEnd, run_dir: Path
) -> Failure:
    summary = f"rank {rank} failed {place_in_words(place, end.stepless)}"
    raised_at = [f"your code: {report.user_place}"] if report.user_place else []
    log = f"log: {rank_log(run_dir, rank, end.number)}"
    lines = [
        f"{summary}:",
        report.traceback.rstrip(),
        *_describe_others(rank, report, end),
        *raised_at,
        log,
    ]
    return Failure(
        rank=rank,
        cause="exception",
        step=place.step if place else 0,
        phase=place.phase if place else "",
        summary=f"{summary}: {report.one_line}",
        detail=report.one_line,
        report="\n".join(lines),
        signature="lost connection" if report.secondary else signature_of(report.one_line),
        exit_code=ExitCode.INTERNAL,
        restartable=place is not None and place.step >= 1,
        detected_s=_detection_s(rank, end),
    )


def _blame_absence(absence: Absence, end: AttemptEnd, run_dir: Path) -> Failure:
    """The failure of a rank that the others waited for: it had reported nothing, or came too
    late."""
    rank, places = absence.rank, _places(end, run_dir)
    place, log = places.get(rank), rank_log(run_dir, absence.rank, end.number)
    where = place_in_words(place, end.stepless)
    summary = f"rank {rank} kept the others waiting {where}: {absence.why}"
    by_place: dict[str, list[int]] = {}
    for other in sorted(end.records.keys() | end.exits.keys() | end.silent.keys()):
        if other != rank:
            by_place.setdefault(place_in_words(places.get(other), end.stepless), []).append(other)
    waited = [f"{_ranks(ranks)}: waited {where}" for where, ranks in by_place.items()]
    lines = [summary, *waited, *_read_stack(log), f"log: {log}"]
    return Failure(
        rank=rank,
        cause="hang",
        step=place.step if place else 0,
        phase=place.phase if place else "",
        summary=summary,
        detail=f"kept the others waiting: {absence.why}",
        report="\n".join(lines),
        signature="kept the others waiting",
        exit_code=ExitCode.INTERNAL,
        restartable=place is not None and place.step >= 1,
        detected_s=0.0,
    )


def _blame_code(
    rank: int, code: int, place: LastSeen | None, end: AttemptEnd, run_dir: Path
) -> Failure:
    """The failure of a rank whose entry returned a code that is neither success nor a stop, without
    a report."""
    deterministic = code in _DETERMINISTIC
    failure = _describe_death(rank, "exit", f"ended with code {code}", place, end, run_dir)
    exit_code = code if deterministic else int(ExitCode.INTERNAL)
    return replace(
        failure, exit_code=exit_code, restartable=failure.restartable and not deterministic
    )


def _blame_exit(
    rank_exit: RankExit, place: LastSeen | None, end: AttemptEnd, run_dir: Path
) -> Failure:
    """The failure of a process that ended without an end record: by a signal, or an exit behind our
    back. Whatever code that had, its work was not done."""
    if rank_exit.signal is None:
        return _describe_death(
            rank_exit.rank, "exit", f"exited with code {rank_exit.code}", place, end, run_dir
        )
    detail = f"killed by {signal_name(rank_exit.signal)}"
    return replace(
        _describe_death(rank_exit.rank, "signal", detail, place, end, run_dir), restartable=True
    )


def _describe_death(
    rank: int, cause: str, detail: str, place: LastSeen | None, end: AttemptEnd, run_dir: Path
) -> Failure:
    was = "was " if cause == "signal" else ""
    summary = f"rank {rank} {was}{detail} {place_in_words(place, end.stepless)}"
    rank_exit, log = end.exits.get(rank), rank_log(run_dir, rank, end.number)
    hint = _hint(detail) if cause == "signal" or rank in end.records else UNSAID
    lines = [
        summary + hint,
        *_read_last_words(rank_exit, log),
        *_describe_others(rank, None, end),
        f"log: {log}",
    ]
    return Failure(
        rank=rank,
        cause=cause,
        step=place.step if place else 0,
        phase=place.phase if place else "",
        summary=summary,
        detail=detail,
        report="\n".join(lines),
        signature=detail,
        exit_code=ExitCode.INTERNAL,
        restartable=place is not None and place.step >= 1,
        detected_s=_detection_s(rank, end),
    )


def _detection_s(rank: int, end: AttemptEnd) -> float:
    rank_exit = end.exits.get(rank)
    return rank_exit.detected_s if rank_exit is not None else 0.0


def place_in_words(place: LastSeen | None, stepless: str = "") -> str:
    """Step, phase and collective, as the end of a sentence; for ranks without steps their work."""
    collective = f" ({place.collective})" if place is not None and place.collective else ""
    if stepless:
        return f"while {stepless}{collective}"
    if place is None or place.step < 1:
        return "before the first step"
    return f"at step {place.step} in {place.phase}{collective}"


def _hint(how: str) -> str:
    return " (possibly by the kernel's out-of-memory killer)" if "SIGKILL" in how else ""


def _read_last_words(rank_exit: RankExit | None, log: Path) -> list[str]:
    """The end of the log where it explains a death (stacks of faulthandler, an abort's message),
    and before it those lines of NCCL and of C++ that say why."""
    if rank_exit is not None and rank_exit.signal in (
        signal.SIGKILL,
        signal.SIGTERM,
        signal.SIGINT,
    ):
        return []
    end = _read_lines(log)[-NUM_LAST_LINES:]
    return [*(line for line in _read_telling_lines(log) if line not in end), *end]


def _read_telling_lines(log: Path) -> list[str]:
    """The first lines of a log that say why a process was aborted."""
    return [line for line in _read_lines(log) if _TELLING.search(line)][:NUM_TELLING_LINES]


def _read_stack(log: Path) -> list[str]:
    """The stack of a rank's main thread when it was asked; empty if it could not answer."""
    lines = _read_lines(log)
    if STACK_HEAD not in lines:
        return []
    start = len(lines) - lines[::-1].index(STACK_HEAD)
    frames = [line for line in lines[start:] if line.startswith("  File")]
    return [STACK_HEAD, *frames[:NUM_STACK_LINES]] if frames else []


def _read_lines(log: Path) -> list[str]:
    try:
        return _read_tail(log).splitlines()
    except OSError:
        return []


def _read_tail(log: Path, num_bytes: int = 64 << 20) -> str:
    with open_regular(log) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
        return file.read(num_bytes).decode("utf-8", "replace")


def _describe_others(root: int, root_report: ErrorReport | None, end: AttemptEnd) -> list[str]:
    """One line for all ranks that ended with the first, and one for each that had an error of its
    own.

    A rank that we killed before it noticed ended because of that, too: on a busy machine few notice
    in time.
    """
    secondary = {rank for rank, report in end.reports.items() if report.secondary}
    killed = {
        rank for rank, rank_exit in end.exits.items() if rank_exit.by_us and rank not in end.reports
    }
    fallen = sorted((secondary | killed) - {root})
    lines = [f"{_ranks(fallen)}: ended because of that"] if fallen else []
    by_line: dict[str, list[int]] = {}
    for rank, report in sorted(end.reports.items()):
        if rank != root and not report.secondary:
            by_line.setdefault(report.one_line, []).append(rank)
    for one_line, ranks in by_line.items():
        same = root_report is not None and one_line == root_report.one_line
        lines.append(f"{_ranks(ranks)}: {'the same' if same else one_line}")
    return lines


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
