"""How an attempt ended: facts only; the verdict is elsewhere."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.core.black_box_reader import LastPosition
from phalanx.launch.end_record import STOPPED_EXIT_CODES, EndRecord
from phalanx.launch.hang_verdict import HangVerdict
from phalanx.launch.oom_kills import OomKill
from phalanx.launch.reports import ErrorReport


@dataclass(frozen=True)
class RankExit:
    """The end of a rank's process: a code or a signal.

    `by_us`: it was still alive when we killed the rest. `oom_kill`: the kernel killed it for
    memory; `is_oom_known`: it would be known if it had.
    """

    rank: int
    code: int | None
    signal: int | None
    by_us: bool
    died_monotonic_s: float
    detected_s: float
    oom_kill: OomKill | None = None
    is_oom_known: bool = False


@dataclass
class AttemptEnd:
    """The facts when no rank is at work any more: how each process ended, and the end record that
    each rank had written before."""

    number: int
    exits: dict[int, RankExit] = field(default_factory=dict)
    records: dict[int, EndRecord] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    """Process state (`read_state_letter`) of each rank that had said nothing when others failed by
    its absence alone."""
    silent_places: dict[int, LastPosition] = field(default_factory=dict)
    """The places of these ranks then: the question for their stacks may wake them."""
    last_seen: Mapping[int, LastPosition] = field(default_factory=dict)
    """The places of ranks at the last look while they ran, for those whose box is not there any
    more."""
    start_error: ErrorReport | None = None
    server_loss: str = ""
    store_loss: str = ""
    num_kept: int = 0
    """How many of its ranks had the process of a rank of the attempt before."""
    grace_over: bool = False
    stepless: str = ""
    """The work of ranks without steps, say "evaluating"."""
    was_told_to_leave: bool = False
    """The ranks were asked to save and leave, for an attempt with another number of them."""
    hang: HangVerdict | None = None
    """Why the ranks made no progress, where that ended the attempt."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Ranks that lost another one and wait for the next attempt, and the step whose state each of
    them holds; -1: none."""

    @property
    def error_reports(self) -> dict[int, ErrorReport]:
        """The error reports of the ranks that wrote one."""
        reports = {}
        for rank, record in self.records.items():
            if record.report is not None:
                reports[rank] = record.report
        return reports

    @property
    def exit_codes(self) -> set[int | None]:
        """The codes in the ranks' end records; None for ranks that ended without a record, or
        failed."""
        codes: set[int | None] = set()
        for rank in self.exits.keys() | self.waiting.keys():
            record = self.records.get(rank)
            if record is None or record.report is not None:
                codes.add(None)
            else:
                codes.add(record.code)
        return codes

    @property
    def is_cut_off(self) -> bool:
        """True if a rank has neither ended its work nor failed, and nobody had been asked to
        stop."""
        is_stop = self.grace_over or bool(self.exit_codes & {*STOPPED_EXIT_CODES})
        return None in self.exit_codes and bool(self.exits) and not is_stop

    def has_rank_failed_or_died(self, rank: int) -> bool:
        """True for a rank that reports so, and for a process that ended before its rank had
        reported that its work is done.

        Its exit code does not matter: any line of code can make it.
        """
        if rank in self.records:
            return self.records[rank].has_failed
        # One that we killed might have reported its end a moment later.
        return rank in self.exits and not self.exits[rank].by_us

    @property
    def is_primary_failure_known(self) -> bool:
        """True if an error or a death of this attempt is no mere consequence of another one.

        False, too, after an abort alone: NCCL's watchdog ends a process because of another one.
        """
        if self.hang is not None or self.store_loss:
            return True
        reports = self.error_reports
        for rank, rank_exit in self.exits.items():
            died_silently = self.has_rank_failed_or_died(rank) and rank not in reports
            if died_silently and rank_exit.signal != signal.SIGABRT:
                return True
        return any(not report.secondary for report in reports.values())

    def is_complete(self, num_ranks: int) -> bool:
        """True if each of the `num_ranks` ranks has reported an end, and none a failure."""
        if len(self.records) < num_ranks:
            return False
        return not any(record.has_failed for record in self.records.values())

    def is_work_done(self, num_ranks: int) -> bool:
        """True if each of the `num_ranks` ranks has reported that it has nothing left to do."""
        is_complete = self.is_complete(num_ranks)
        return is_complete and not any(record.is_agreed_stop for record in self.records.values())
