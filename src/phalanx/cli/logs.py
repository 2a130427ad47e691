"""Print the logs of a run's ranks, merged in order of time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli._options import RunArgument

if TYPE_CHECKING:
    from phalanx.launch.merge_logs import LogFollower
    from phalanx.launch.rank_logs import LogLine

EXAMPLE = "Example: phalanx logs runs/train-20260101-120000 --follow"
_POLL_INTERVAL_S = 0.2
_CUT_OFF_INTERVAL_S = 2.0


def command(
    run: RunArgument,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", help="Only this rank's log.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="WHEN",
            help="Only lines from then on: 10m or 2h before now, a time (UTC), or step:120.",
        ),
    ] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="TEXT", help="Only lines that contain TEXT.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines until the run ends.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each line.")
    ] = False,
) -> int:
    """Print the logs of all ranks of a run in order of time, of all attempts.

    A time with ~ is that of the line's neighbour: a C library or a child process wrote the line.
    Where another launcher has the ranks' output, it says where that is.
    """
    import sys

    from phalanx.cli._json import print_errors_as_json
    from phalanx.cli._log_start import find_log_start
    from phalanx.launch.merge_logs import LogFollower

    with print_errors_as_json(as_json):
        run_dir = _require_run_with_ranks(run, rank)
        start_s = find_log_start(run_dir, since)
        for notice in _list_notices(run_dir, rank, start_s):
            print(notice, file=sys.stderr)
        follower = LogFollower(run_dir, rank)
        lines = follower.read_new_lines(is_last=not follow)
        if follow:
            lines = _follow_lines(run_dir, follower)
        try:
            num_lines = _print_lines(_select_lines(lines, start_s, grep), as_json=as_json)
            if not num_lines:
                print("no such line was printed", file=sys.stderr)
        except KeyboardInterrupt:
            # The usual end of following.
            if not follow:
                raise
    return 0


def _require_run_with_ranks(run: str, rank: int | None) -> Path:
    """The directory of a run whose ranks left logs, or said where theirs are.

    Raises UsageError if none is there, or none of `rank`.
    """
    from phalanx.core.errors import UsageError
    from phalanx.launch.output_destination import list_output_destinations
    from phalanx.launch.rank_logs import list_rank_logs
    from phalanx.observe.where_words import format_rank_list

    run_dir = Path(run)
    ranks = {reader.rank for reader in list_rank_logs(run_dir)}
    ranks |= {destination.rank for destination in list_output_destinations(run_dir)}
    if not ranks:
        fix = "give a directory that phalanx train wrote"
        if (run_dir / "events").is_dir():
            fix = "ranks of another launcher print where that one sends it: ask it"
        raise UsageError("no rank has left a log there", where=run, fix=fix)
    if rank is not None and rank not in ranks:
        raise UsageError(
            f"rank {rank} has left no log there",
            where=run,
            fix=f"logs are there of {format_rank_list(sorted(ranks))}",
        )
    return run_dir


def _list_notices(run_dir: Path, rank: int | None, start_s: float | None) -> list[str]:
    """The lines that are not shown, or not in order of time, and why."""
    from phalanx.launch.rank_logs import list_rank_logs
    from phalanx.observe.where_words import format_rank_list

    notices = _list_elsewhere_notices(run_dir, rank)
    timeless = [reader for reader in list_rank_logs(run_dir, rank) if not reader.has_times]
    if timeless:
        ranks = format_rank_list(sorted({reader.rank for reader in timeless}))
        order = "they come first in their attempt, rank after rank"
        if start_s is not None:
            order = "they are left out: nobody knows when their lines were written"
        notices.append(f"the logs of {ranks} have no times; {order}")
    return notices


def _list_elsewhere_notices(run_dir: Path, rank: int | None) -> list[str]:
    from phalanx.launch.output_destination import list_output_destinations
    from phalanx.observe.where_words import format_rank_list

    ranks_of: dict[tuple[int, str], list[int]] = {}
    for each in list_output_destinations(run_dir):
        if rank not in (None, each.rank) or each.readable_log is not None:
            continue
        destination = f"a {each.kind}"
        if each.kind == "file":
            destination = f"{each.path} on {each.host}"
        elif each.kind == "pipe":
            destination = "a pipe that it reads"
        text = f"{each.launcher} has its output, {destination}"
        ranks_of.setdefault((each.attempt, text), []).append(each.rank)
    return [
        f"no log here of {format_rank_list(ranks)}, attempt {attempt}: {text}"
        for (attempt, text), ranks in ranks_of.items()
    ]


def _follow_lines(run_dir: Path, follower: LogFollower) -> Iterator[LogLine]:
    """Lines as they come, until the run has recorded its end, or its processes are gone."""
    import sys

    from phalanx.core.units import format_seconds
    from phalanx.observe.run_end import read_recorded_end
    from phalanx.run.run_in_use import find_silence_s, is_run_cut_off

    looked_s = 0.0
    while True:
        # Before the lines are read: what was written until the end is read then.
        is_over, is_cut_off = read_recorded_end(run_dir) is not None, False
        now = time.monotonic()
        if not is_over and now - looked_s >= _CUT_OFF_INTERVAL_S:
            looked_s, is_cut_off = now, is_run_cut_off(run_dir)
        yield from follower.read_new_lines(is_last=is_over or is_cut_off)
        if is_cut_off:
            print(
                "the run was cut off, it seems: its processes are gone, no end was recorded, and"
                f" nothing has written for {format_seconds(find_silence_s(run_dir))}; a launcher"
                " that starts its ranks again is followed by the same command",
                file=sys.stderr,
            )
        if is_over or is_cut_off:
            return
        time.sleep(_POLL_INTERVAL_S)


def _select_lines(
    lines: Iterable[LogLine], start_s: float | None, text: str | None
) -> Iterator[LogLine]:
    for line in lines:
        # Of a line between two times the later one counts; it may be NaN, which is not less.
        if start_s is not None and (
            line.time_unix_s != line.time_unix_s or line.latest_unix_s < start_s
        ):
            continue
        if text is None or text in line.text:
            yield line


def _print_lines(lines: Iterable[LogLine], *, as_json: bool) -> int:
    """Print each line at once; returns how many there were."""
    import sys

    from phalanx.cli._log_lines import LogLinePrinter

    printer, num_lines = LogLinePrinter(as_json=as_json), 0
    for line in lines:
        printer.print_line(line)
        sys.stdout.flush()
        num_lines += 1
    return num_lines
