"""`LivePage`: the page of a run as it is now, made anew only where something was written."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.report.event_log import EventLogReader
from phalanx.report.page import LiveState, render_page
from phalanx.report.reduce import collect_run_facts

# A page that takes long to make is made less often: at most a fifth of one core goes into it.
_REST_PER_WORK = 4.0
_MIN_REST_S = 0.5


@dataclass(frozen=True)
class RenderedPage:
    """A page as bytes, and the tag that names this version of it."""

    body: bytes
    etag: str


class LivePage:
    """The page of `run_dir`; `describe_processes` says, of a run that goes on, what its processes
    do.

    For several threads: one makes the page, the others wait for it.
    """

    def __init__(self, run_dir: Path, describe_processes: Callable[[], str]) -> None:
        self._run_dir = run_dir
        self._describe_processes = describe_processes
        self._reader = EventLogReader(run_dir)
        self._lock = threading.Lock()
        self._page: RenderedPage | None = None
        self._source: object = None
        self._due_s = 0.0

    def render(self) -> RenderedPage:
        """The newest page, or the one before where that was made a moment ago."""
        with self._lock:
            if self._page is None or time.monotonic() >= self._due_s:
                began_s = time.monotonic()
                self._update_page()
                took_s = time.monotonic() - began_s
                self._due_s = time.monotonic() + max(_REST_PER_WORK * took_s, _MIN_REST_S)
            assert self._page is not None
            return self._page

    def _update_page(self) -> None:
        source = _list_sizes(self._run_dir), self._describe_processes()
        if source == self._source and self._page is not None:
            return
        self._reader.read_new_events()
        facts = collect_run_facts(self._run_dir, self._reader.log)
        state = LiveState(facts.is_finished, source[1])
        body = render_page(facts, live=state).encode()
        self._page = RenderedPage(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
        # Last: what could not be made is not taken for made the next time.
        self._source = source


def _list_sizes(run_dir: Path) -> tuple[tuple[str, int], ...]:
    """Names and sizes of the files that the page is made from."""
    sizes = []
    for folder in (run_dir / "events", run_dir):
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    # The page itself is a file of the run, and made from these.
                    if entry.is_file() and entry.name.endswith((".jsonl", ".json")):
                        sizes.append((entry.name, entry.stat().st_size))
        except OSError:
            continue
    return tuple(sorted(sizes))
