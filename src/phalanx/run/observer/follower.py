"""`RunFollower`: reads a run directory while it grows, and adds up its metrics.

Why a reader, and no sink: sinks see rank 0 alone and end with its attempt. The files have all ranks
and attempts, under every launcher, and reading them costs training nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.core.black_box import read_boot_id
from phalanx.core.black_box_reader import BlackBoxVersionError, LastPosition, read_last_position
from phalanx.core.errors import PhalanxError, ResourceError
from phalanx.core.files import read_json
from phalanx.launch.paths import BLACK_BOXES
from phalanx.observe.events import Envelope
from phalanx.observe.tail import EventTail
from phalanx.report.prometheus.http_server import MetricsServer
from phalanx.report.prometheus.run_metrics import RunMetrics
from phalanx.report.prometheus.values import MetricSnapshot
from phalanx.run.observer.event_files import EventFilesCheck

# Without an event for so long, the black boxes are asked, as often: a step may take minutes.
SILENCE_S = 10.0
# And this often in any case: of a large run, ranks other than 0 do not write every step.
BLACK_BOX_INTERVAL_S = 30.0


class RunFollower:
    """Follows one run. `silence_s`: as `SILENCE_S`."""

    def __init__(self, run_dir: Path, silence_s: float = SILENCE_S) -> None:
        self._run_dir, self._silence_s = run_dir, silence_s
        self._tail = EventTail(run_dir, all_ranks=True)
        self.run_name = run_dir.resolve().name
        self.metrics = RunMetrics(self.run_name, _read_job(run_dir))
        self._progress_s = self._boxes_read_s = time.monotonic()
        self._box_progress_s: dict[int, float] = {}
        self._files = EventFilesCheck(run_dir)

    @property
    def stalled_s(self) -> float:
        """Seconds since this reader last saw progress of any rank: by its own steady clock."""
        return time.monotonic() - self._progress_s

    def iterate_past(self) -> Iterator[Envelope]:
        """Add what the run has written so far, event by event, and give each; first of all."""
        for envelope in self._tail.iterate_past_events():
            self.metrics.add_event(envelope)
            yield envelope
        self._progress_s = time.monotonic()
        self._files.check(self._progress_s)

    def read_news(self) -> list[Envelope]:
        """Add what the run has written since the last call, and return its events, oldest
        first."""
        envelopes = self._tail.read_new_events()
        now_s = time.monotonic()
        self._files.check(now_s)
        for envelope in envelopes:
            self.metrics.add_event(envelope)
        # What the supervisor says, of an alert that was not sent perhaps, is no progress.
        if any(envelope.rank >= 0 for envelope in envelopes):
            self._progress_s = now_s
        is_silent = now_s - max(self._progress_s, self._boxes_read_s) >= self._silence_s
        if is_silent or now_s - self._boxes_read_s >= BLACK_BOX_INTERVAL_S:
            self._boxes_read_s = now_s
            self._read_black_boxes(now_s)
        return envelopes

    def read_all(self) -> None:
        """Add all that the run has written so far, and where its ranks are now."""
        for _ in self.iterate_past():
            pass
        self._read_black_boxes(time.monotonic())

    def build_snapshot(self) -> MetricSnapshot:
        """The metrics of what was read. Raises ResourceError where event files cannot be read:
        without them a run looks like one in which nothing happened."""
        if self._files.unreadable:
            name, why = min(self._files.unreadable.items())
            raise ResourceError(
                f"{name} cannot be read",
                where=str(self._run_dir),
                why=f"{why}, and without it the metrics would be wrong",
            )
        return self.metrics.build_snapshot(self._tail.num_unreadable)

    def _read_black_boxes(self, now_s: float) -> None:
        for path in (self._run_dir / BLACK_BOXES).glob("rank-*"):
            number = path.name.removeprefix("rank-")
            position = _read_position(path)
            if position is None or not number.isdecimal():
                continue
            rank = int(number)
            if position.last_progress_s != self._box_progress_s.get(rank):
                if rank in self._box_progress_s:
                    self._progress_s = now_s
                self._box_progress_s[rank] = position.last_progress_s
                unix_s = _find_unix_time(position)
                if unix_s is not None:
                    self.metrics.note_progress(rank, unix_s)


class MetricsPublisher:
    """Publishes what a follower has read; `say` is told once why it cannot."""

    def __init__(
        self, server: MetricsServer, follower: RunFollower, say: Callable[[str], None]
    ) -> None:
        self._server, self._follower, self._say = server, follower, say
        self._failure = ""

    def publish(self) -> None:
        """Let the server answer with the metrics of now, or, where there are none, with the
        reason."""
        try:
            snapshot, failure = self._follower.build_snapshot(), ""
        except PhalanxError as error:
            snapshot, failure = None, str(error)
        # A mistake of ours: training and alerts go on.
        except Exception as error:
            snapshot, failure = None, f"the metrics have an error: {type(error).__name__}: {error}"
        if snapshot is None:
            self._server.publish_failure(failure)
        else:
            self._server.publish(snapshot)
        if failure and failure != self._failure:
            self._say(failure)
        self._failure = failure


def _read_position(path: Path) -> LastPosition | None:
    try:
        return read_last_position(path)
    except BlackBoxVersionError:
        # Of a newer phalanx: its events tell enough.
        return None


def _find_unix_time(position: LastPosition) -> float | None:
    """When a rank last wrote to its box; None where its clock says nothing here."""
    header = position.header
    if header is None:
        return None
    if header.boot_id and header.boot_id == read_boot_id():
        return time.time() - (time.monotonic() - position.last_progress_s)
    # Of another machine: by what its clocks showed when the box was opened.
    return header.opened_wall_s + position.last_progress_s - header.opened_monotonic_s


def _read_job(run_dir: Path) -> dict[str, Any]:
    try:
        job = read_json(run_dir / "job.json")
    except (OSError, ValueError):
        return {}
    return job if isinstance(job, dict) else {}
