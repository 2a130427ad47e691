"""Lines of logs as `phalanx logs` prints them: for people, or as objects for programs."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from phalanx.cli._json import print_json
from phalanx.launch.rank_logs import LogLine


class LogLinePrinter:
    """Prints lines, and before them the attempt and the day where these change."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._heading = ""
        # Logs of which a line with a time of its own was printed.
        self._timed: set[tuple[int, int]] = set()

    def print_line(self, line: LogLine) -> None:
        """Print one line; what terminals would obey is taken out by the stream itself."""
        log = line.attempt, line.rank
        if line.is_exact:
            self._timed.add(log)
        # Where nothing with a time lies before it, it may be older by any time.
        is_latest = log not in self._timed and line.time_unix_s == line.before_unix_s
        if self._as_json:
            facts = {
                "attempt": line.attempt,
                "rank": line.rank,
                "time_unix_s": math.nan if is_latest else line.time_unix_s,
                "is_exact": line.is_exact,
                "before_unix_s": line.before_unix_s,
                "text": line.text,
            }
            print_json("log-line", facts, raises_without_reader=True)
            return
        heading = _build_heading(line)
        if heading != self._heading:
            print(heading)
            self._heading = heading
        # A bar that redraws itself: its last state, as a terminal would show it.
        text = line.text.rstrip("\r").rpartition("\r")[2]
        print(f"{_format_time_of_day(line, is_latest)}  rank {line.rank}  {text}")


def _build_heading(line: LogLine) -> str:
    heading = f"-- attempt {line.attempt}"
    if math.isfinite(line.time_unix_s):
        heading += f", {_parse_time(line):%Y-%m-%d} UTC"
    return f"{heading} --"


def _format_time_of_day(line: LogLine, is_latest: bool) -> str:
    if not math.isfinite(line.time_unix_s):
        return f"{'no time':>13}"
    text = f"{_parse_time(line):%H:%M:%S.%f}"[:-3]
    if line.is_exact:
        return f" {text}"
    return f"{'<' if is_latest else '~'}{text}"


def _parse_time(line: LogLine) -> datetime:
    return datetime.fromtimestamp(line.time_unix_s, UTC)
