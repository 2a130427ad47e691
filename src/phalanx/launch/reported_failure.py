"""The failure of a rank by what it reported of it."""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.errors import DataSourceError, OutOfMemoryError
from phalanx.core.roll_back import RollBack
from phalanx.launch.attempt_end import AttemptEnd
from phalanx.launch.blamed_rank import BlamedRank, describe_other_ranks_ends
from phalanx.launch.other_collective import blame_rank_in_other_collective
from phalanx.launch.rank_failure import LOST_CONNECTION, OUT_OF_MEMORY, RankFailure
from phalanx.launch.reports import ErrorReport
from phalanx.launch.signature import remove_varying_text_from_failure

# What a rank raises that finds another one in another collective of their shared memory.
COLLECTIVES_DIFFER_ERROR = "CollectivesDifferError"


def explain_error_report(blamed: BlamedRank, report: ErrorReport) -> RankFailure:
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


def _blame_phalanx_error(blamed: BlamedRank, report: ErrorReport) -> RankFailure:
    line = report.one_line
    cause = "exception"
    if report.type == OutOfMemoryError.__name__:
        cause = OUT_OF_MEMORY
    failure = blamed.build_restartable_failure(cause, line, line, [line], line)
    # Refused for a reason that is in the job, the data or the machine.
    failure = replace(
        failure,
        exit_code=report.exit_code,
        restartable=False,
        is_of_all_ranks=_have_all_ranks_raised(report, blamed.end),
    )
    return _note_outage(failure, blamed, report)


def _have_all_ranks_raised(report: ErrorReport, end: AttemptEnd) -> bool:
    """True if each of several ranks raised what `report` tells, and no rank is known to have met
    it: the first to raise it is as good as any other."""
    ranks = end.exits.keys() | end.records.keys() | end.waiting.keys()
    raised = {(each.type, each.one_line) for each in end.error_reports.values()}
    is_one = raised == {(report.type, report.one_line)} and end.error_reports.keys() == ranks
    return is_one and len(ranks) > 1 and report.of_rank < 0


def _note_outage(failure: RankFailure, blamed: BlamedRank, report: ErrorReport) -> RankFailure:
    """`failure` as that of an outage, if the report tells of one and the run has trained."""
    if not report.outage or not blamed.is_of_trained_run:
        return failure
    return replace(failure, restartable=True, is_outage=True, signature=f"outage: {report.outage}")


def _blame_data_source(blamed: BlamedRank, report: ErrorReport) -> RankFailure:
    """The failure of a user's dataset in a run that has trained: its files or its server may be
    there again when the ranks start again."""
    line = report.one_line
    told = line.removeprefix(f"rank {blamed.rank}: ")
    summary = f"rank {blamed.rank} failed {blamed.described_position}: {told}"
    signature = remove_varying_text_from_failure(line)
    failure = blamed.build_restartable_failure("exception", summary, line, [summary], signature)
    failure = replace(failure, exit_code=report.exit_code, restartable=True)
    return _note_outage(failure, blamed, report)


def _explain_roll_back(blamed: BlamedRank, roll_back: RollBack) -> RankFailure:
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


def _blame_exception(blamed: BlamedRank, report: ErrorReport) -> RankFailure:
    summary = f"rank {blamed.rank} failed {blamed.described_position}"
    lines = [f"{summary}:", report.traceback.rstrip()]
    lines += describe_other_ranks_ends(blamed.rank, report, blamed.end)
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
        return blame_rank_in_other_collective(failure, blamed, noticed)
    failure = replace(failure, is_of_all_ranks=_have_all_ranks_raised(report, blamed.end))
    return _note_outage(failure, blamed, report)


def _explain_lost_connection(blamed: BlamedRank, report: ErrorReport) -> RankFailure:
    """The failure of ranks that only lost each other: the first to notice is not to blame."""
    summary = f"ranks lost the connection to each other {blamed.described_position}"
    noticed = f"rank {blamed.rank} noticed first: {report.one_line}"
    lines = [f"{summary}; rank {blamed.rank} noticed first:", report.traceback.rstrip()]
    lines += describe_other_ranks_ends(blamed.rank, report, blamed.end)
    lines.append(f"log: {blamed.log_path}")
    # It is told in many words: they are one failure when it repeats.
    failure = blamed.build_restartable_failure(
        LOST_CONNECTION, f"{summary}; {noticed}", noticed, lines, "lost connection"
    )
    return replace(failure, rank=-1)
