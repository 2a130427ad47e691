"""The rank that is blamed for a failed attempt: where it was last seen, and what is told beside its
failure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.black_box_reader import LastPosition, read_last_position
from phalanx.core.errors import ExitCode
from phalanx.launch.attempt_end import AttemptEnd
from phalanx.launch.paths import black_box_path, rank_log_path
from phalanx.launch.positions import describe_rank_position
from phalanx.launch.rank_failure import RankFailure
from phalanx.launch.reports import ErrorReport
from phalanx.launch.signals import format_signal_name
from phalanx.observe.where_words import format_rank_list


@dataclass(frozen=True)
class BlamedRank:
    """The rank that failed first, as far as is known, and where it was last seen."""

    rank: int
    end: AttemptEnd
    run_dir: Path
    last_seen: LastPosition | None

    @property
    def described_position(self) -> str:
        """Where it was last seen, in words."""
        return describe_rank_position(self.last_seen, self.end.stepless)

    @property
    def log_path(self) -> Path:
        """Its log in the attempt that failed."""
        return rank_log_path(self.run_dir, self.rank, self.end.number)

    @property
    def has_done_steps(self) -> bool:
        """True if it was in a step, or had done one."""
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
        step, phase = read_step_and_phase(self.last_seen)
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


def read_step_and_phase(last_seen: LastPosition | None) -> tuple[int, str]:
    """The step and the phase of a position; 0 and "" where there is none."""
    if last_seen is None:
        return 0, ""
    return last_seen.step, last_seen.phase


def read_black_box(rank: int, end: AttemptEnd, run_dir: Path) -> LastPosition | None:
    """The place where a rank was last seen; None where nothing is known of it."""
    return read_last_position(black_box_path(run_dir, rank)) or end.last_seen.get(rank)


def read_black_boxes(end: AttemptEnd, run_dir: Path) -> dict[int, LastPosition]:
    """The place where each rank was last seen, as far as its black box says."""
    last_seen_of: dict[int, LastPosition] = {}
    for rank in sorted(end.exits.keys() | end.records.keys() | end.silent.keys()):
        last_seen = read_black_box(rank, end, run_dir)
        if last_seen is not None:
            last_seen_of[rank] = last_seen
    # As they were before their stacks were asked for, which may have woken them.
    return last_seen_of | end.silent_places


def hint_at_out_of_memory(how: str) -> str:
    """What is told after `how` a process ended, where nobody knows who sent it SIGKILL; else ""."""
    if "SIGKILL" in how:
        return " (possibly by the kernel's out-of-memory killer)"
    return ""


def describe_other_ranks_ends(
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
        lines.append(f"{name_each_rank(sorted(victims))}: ended because of that")
    by_line: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        if rank != root and not report.secondary:
            # One line for all ranks with the same error.
            by_line.setdefault(report.one_line, []).append(rank)
    for one_line, ranks in by_line.items():
        if root_report is not None and one_line == root_report.one_line:
            one_line = "the same"
        lines.append(f"{name_each_rank(ranks)}: {one_line}")
    return lines


def describe_deaths_beside(root: int, end: AttemptEnd) -> str:
    """ ", and so was rank 0", for the other ranks that a signal from outside ended: they are not
    its victims.

    Not for aborts: C++ code of torch ends a process by one because a peer is gone.
    """
    root_exit = end.exits.get(root)
    if root_exit is None or root_exit.signal is None:
        return ""
    ranks_by_signal: dict[int, list[int]] = {}
    for rank, rank_exit in sorted(end.exits.items()):
        is_own = rank != root and not rank_exit.by_us and rank not in end.records
        if is_own and rank_exit.signal not in (None, signal.SIGABRT):
            ranks_by_signal.setdefault(rank_exit.signal, []).append(rank)
    words = ""
    for number, ranks in ranks_by_signal.items():
        if number == root_exit.signal:
            words += f", and so {'was' if len(ranks) == 1 else 'were'} {format_rank_list(ranks)}"
        else:
            words += f", and {format_rank_list(ranks)} by {format_signal_name(number)}"
    return words


def name_each_rank(ranks: Sequence[int]) -> str:
    """ "rank 1" or "ranks 1, 2"."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"
