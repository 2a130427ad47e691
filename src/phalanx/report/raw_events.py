"""The lines of the event files behind the numbers of a page, as they stand there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.core.files import open_regular_file, read_bounded_lines
from phalanx.observe.bus import build_event_file_path
from phalanx.observe.events import Envelope

MAX_LINES_OF_NUMBER = 20
_MAX_LINE_CHARS = 4_000
# Of a file's end: where a step of a run that was just made is looked for first.
_TAIL_BYTES = 4 * 2**20
_STEP_MARK = b'"event":"step_finished"'
_SUM_MARK = b'"event":"steps_summed"'
_SEQ_PATTERN = re.compile(rb'"seq":(\d{1,18})[,}]')


@dataclass(frozen=True)
class RawEvent:
    """A line of `file` (its name in RUN/events); `number` counts from 1, 0 where not known."""

    file: str
    number: int
    text: str

    @property
    def origin(self) -> str:
        if self.number:
            return f"events/{self.file}, line {self.number:,}"
        return f"events/{self.file}"


@dataclass
class RawEvents:
    """Lines by the key of the number that they explain, and by the story's envelopes (by
    identity)."""

    by_key: dict[str, list[RawEvent]] = field(default_factory=dict)
    by_envelope: dict[int, RawEvent] = field(default_factory=dict)

    def add_step(self, key: str, run_dir: Path, rank: int, attempt: int, step: int) -> None:
        """Put the line of a rank's step under `key`, if it is found."""
        event = find_step_line(run_dir, rank, attempt, step)
        if event is not None:
            self.by_key.setdefault(key, []).append(event)

    def add_envelopes(self, key: str, envelopes: Iterable[Envelope]) -> None:
        """Put the lines of envelopes under `key`: those that were found, the newest of many."""
        lines = [self.by_envelope[id(each)] for each in envelopes if id(each) in self.by_envelope]
        if lines:
            self.by_key.setdefault(key, []).extend(lines[-MAX_LINES_OF_NUMBER:])


def find_event_lines(run_dir: Path, envelopes: Iterable[Envelope]) -> dict[int, RawEvent]:
    """The line of each envelope, by the identity of the envelope; steps are not looked for.

    Files of earlier releases number no events: their lines are not found.
    """
    envelopes_of_path: dict[Path, dict[tuple[int, str], Envelope]] = {}
    for envelope in envelopes:
        if envelope.seq >= 0:
            path = build_event_file_path(run_dir, envelope.rank, envelope.attempt)
            envelopes_of_path.setdefault(path, {})[envelope.seq, envelope.event.kind()] = envelope
    lines: dict[int, RawEvent] = {}
    for path, of_path in envelopes_of_path.items():
        for number, line in _iterate_other_lines(path):
            match = _SEQ_PATTERN.search(line)
            kind = _read_kind(line)
            if match is None or kind is None:
                continue
            event = of_path.get((int(match[1]), kind))
            # The supervisors of one run after the other write to one file, each from 0.
            if event is not None and _format_time(event) in line:
                lines[id(event)] = RawEvent(path.name, number, _format_line(line))
    return lines


def find_step_line(run_dir: Path, rank: int, attempt: int, step: int) -> RawEvent | None:
    """The line with which a rank recorded a step, or the sum of steps that ends with it; None
    where it is not found near the end."""
    path = build_event_file_path(run_dir, rank, attempt)
    marks = (_STEP_MARK, b'"step":%d,' % step), (_SUM_MARK, b'"last_step":%d,' % step)
    try:
        with open_regular_file(path) as file:
            start = max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0)
            file.seek(start)
            lines = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return None
    for index, line in enumerate(lines):
        if any(kind in line and number in line for kind, number in marks):
            line_number = 0
            if start == 0:
                line_number = index + 1
            return RawEvent(path.name, line_number, _format_line(line))
    return None


def _iterate_other_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are no steps, with their numbers."""
    try:
        with open_regular_file(path) as file:
            for number, line in enumerate(read_bounded_lines(file), 1):
                if _STEP_MARK not in line:
                    yield number, line
    except OSError:
        return


def _read_kind(line: bytes) -> str | None:
    # As Envelope.to_line begins each.
    head, _, rest = line.partition(b'"event":"')
    if not rest or len(head) > 16:
        return None
    return rest.partition(b'"')[0].decode("utf-8", "replace")


def _format_time(envelope: Envelope) -> bytes:
    return f'"time_unix_s":{envelope.time_unix_s}'.encode()


def _format_line(line: bytes) -> str:
    text = line.decode("utf-8", "replace").rstrip("\n")
    if len(text) > _MAX_LINE_CHARS:
        return f"{text[:_MAX_LINE_CHARS]} … {len(text) - _MAX_LINE_CHARS:,} more characters"
    return text
