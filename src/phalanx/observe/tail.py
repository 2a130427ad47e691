"""Read a run's event files while they grow: whole lines only, new files as they appear."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.core.files import (
    OVERLONG_LINE_MARKER,
    open_regular_file,
    read_bounded_lines,
    skip_to_next_line,
)
from phalanx.observe.events import (
    Envelope,
    Event,
    LoaderWorkerReplaced,
    MonotonicClockReading,
    StepsSummed,
    parse_event_line,
)
from phalanx.observe.order import AttemptCounter, is_after_attempt, sort_events

RANK_FILE_PATTERN = re.compile(r"rank-(\d{1,9})-attempt-(\d{1,9})\.jsonl")
SUPERVISOR_FILE_NAME = "supervisor.jsonl"
EVENT_CLASSES_SHOWN_OF_ANY_RANK: tuple[type[Event], ...] = (LoaderWorkerReplaced,)
"""What befalls one rank alone: of the others than rank 0 a terminal shows these."""

_BEGINNING_BYTES = 200  # the first event of a process: its place and its times
_MAX_PLAIN_INT = 2**63
_MAX_COUNTABLE_NUMBER = 1e300  # a longer whole number would overflow in the first division


def parse_valid_event_line(
    line: bytes, clock: MonotonicClockReading | None = None
) -> Envelope | None:
    """The envelope of one whole line, or None if it is torn, unknown, or holds values of the wrong
    type.

    Event files are input: a disk error, another program or another release may have written them,
    and whoever formats a number must be able to trust that it is one. `clock`: of the event before
    in the same file.
    """
    try:
        envelope = parse_event_line(line.decode("utf-8", errors="replace"), clock)
    # Of brackets nested by the thousand: json raises it, and parse_line does not catch it.
    except RecursionError:
        return None
    if envelope is None or not _has_valid_fields(envelope):
        return None
    return envelope


def _has_valid_fields(envelope: Envelope) -> bool:
    # type() and not isinstance(): JSON's true is an int in Python.
    if type(envelope.rank) is not int or type(envelope.attempt) is not int:
        return False
    # 1e11 seconds are the year 5138; beyond the year 9999 datetime raises.
    if type(envelope.time_unix_s) not in (int, float) or not 0 <= envelope.time_unix_s < 1e11:
        return False
    if type(envelope.seq) is not int or not -1 <= envelope.seq < 2**63:
        return False
    # NaN only beside a seq of -1: a file of an earlier release, which has neither.
    steady_s = envelope.monotonic_s
    if type(steady_s) not in (int, float) or not (
        0 <= steady_s < 1e11 or (envelope.seq < 0 and steady_s != steady_s)
    ):
        return False
    event = envelope.event
    values = vars(event)
    for name, plain_type, is_valid in _list_field_checks(type(event)):
        value = values[name]
        # Most of what there is: any float, and whole numbers that can be counted with.
        kind = type(value)
        if kind is plain_type and (kind is not int or -_MAX_PLAIN_INT < value < _MAX_PLAIN_INT):
            continue
        if not is_valid(value):
            return False
    # Whoever divides by the steps of a window trusts that it has them.
    return type(event) is not StepsSummed or _has_its_steps(event)


def _has_its_steps(window: StepsSummed) -> bool:
    return 1 <= window.num_steps <= window.last_step - window.first_step + 1


def _list_field_checks(
    kind: type[Event],
) -> list[tuple[str, type | None, Callable[[Any], bool]]]:
    """(name, type of a value that needs no check, check) of each field of a kind of event, made
    once: a large run has hundreds of thousands of events."""
    checks = _CHECKS_OF_KIND.get(kind)
    if checks is None:
        checks = []
        for name, field in kind.__dataclass_fields__.items():
            annotation = str(field.type)
            plain_type = {"float": float, "int": int, "str": str}.get(annotation)
            checks.append((name, plain_type, _VALIDATOR_OF_ANNOTATION[annotation]))
        _CHECKS_OF_KIND[kind] = checks
    return checks


_CHECKS_OF_KIND: dict[type[Event], list[tuple[str, type | None, Callable[[Any], bool]]]] = {}


def _is_finite_bounded_number(value: Any) -> bool:
    """A number to count with: finite, and small enough to divide."""
    return type(value) in (int, float) and -_MAX_COUNTABLE_NUMBER < value < _MAX_COUNTABLE_NUMBER


def _is_count(value: Any) -> bool:
    """A number that fits into eight bytes, as every count of a run does; a float that is finite may
    stand for it."""
    return type(value) in (int, float) and -_MAX_PLAIN_INT < value < _MAX_PLAIN_INT


def _is_dict_of_numbers(value: Any) -> bool:
    if type(value) is not dict:
        return False
    for each in value.values():
        # Inline what `_is_finite_bounded_number` asks: phases of each step come here.
        if type(each) is float and -_MAX_COUNTABLE_NUMBER < each < _MAX_COUNTABLE_NUMBER:
            continue
        if not _is_finite_bounded_number(each):
            return False
    return True


def _is_list_of_numbers(value: Any) -> bool:
    return type(value) is list and all(map(_is_finite_bounded_number, value))


def _is_list_of_texts(value: Any) -> bool:
    return type(value) is list and all(type(item) is str for item in value)


def _is_list_of_lists(value: Any) -> bool:
    return type(value) is list and all(type(row) is list for row in value)


# By the annotation of an event's field: what its value must be. A float may also be NaN or
# infinite.
_VALIDATOR_OF_ANNOTATION: dict[str, Callable[[Any], bool]] = {
    "float": lambda value: type(value) is float or _is_finite_bounded_number(value),
    "int": _is_count,
    "str": lambda value: type(value) is str,
    "dict[str, int]": _is_dict_of_numbers,
    "dict[str, float]": _is_dict_of_numbers,
    "dict[str, Any]": lambda value: type(value) is dict,
    "dict[str, list[int]]": lambda value: (
        type(value) is dict and all(map(_is_list_of_numbers, value.values()))
    ),
    "list[int]": _is_list_of_numbers,
    "list[str]": _is_list_of_texts,
    "bool": lambda value: type(value) is bool,
    "list[list[float]]": lambda value: type(value) is list and all(map(_is_list_of_numbers, value)),
    "list[list[list[Any]]]": lambda value: (
        type(value) is list and all(map(_is_list_of_lists, value))
    ),
}


def read_recorded_events(run_dir: Path, *kinds: type[Event], rank: int = 0) -> Iterator[Envelope]:
    """The events of some kinds that a rank (-1: the supervisor) has written in any attempt, oldest
    attempt first, each file in its order.

    Lines of other kinds are not parsed: a run of a million steps has a few hundred megabytes of
    them.
    """
    marks = _list_marks_of_kinds(kinds)
    for name in _list_files_of(run_dir, rank):
        try:
            with open_regular_file(run_dir / "events" / name) as file:
                envelopes = [
                    parse_valid_event_line(line)
                    for line in read_bounded_lines(file)
                    if any(mark in line for mark in marks)
                ]
        except OSError:
            continue
        yield from (
            envelope
            for envelope in envelopes
            if envelope is not None and isinstance(envelope.event, kinds)
        )


def _list_marks_of_kinds(kinds: Sequence[type[Event]]) -> list[bytes]:
    """Bytes that lines of other kinds do not have: as Envelope.to_line writes it, without
    spaces."""
    return [f'"event":"{kind.kind()}"'.encode() for kind in kinds]


def _list_files_of(run_dir: Path, rank: int) -> list[str]:
    """Names of the event files of a rank, by number of the attempt; one for the supervisor."""
    if rank < 0:
        return [SUPERVISOR_FILE_NAME]
    try:
        matches = [
            RANK_FILE_PATTERN.fullmatch(entry.name) for entry in (run_dir / "events").iterdir()
        ]
    except OSError:
        return []
    of_rank = [match for match in matches if match is not None and int(match[1]) == rank]
    # By number: file names have two digits, and attempt 100 would come before attempt 11.
    return [match[0] for match in sorted(of_rank, key=lambda match: int(match[2]))]


class EventTail:
    """Follows `RUN/events`: the supervisor's file and those of rank 0, or of all ranks.

    Attempts before `attempt_from` are left out, so that a resumed run does not show its past again;
    the supervisor's lines are judged by the attempt they carry. With `kinds` events of these kinds
    alone are given, and lines of others are not parsed; `kinds_of_others`: of these kinds those of
    the other ranks, too. `num_unreadable` counts the lines that were no event.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt_from: int = 0,
        *,
        all_ranks: bool = False,
        kinds: Sequence[type[Event]] = (),
        kinds_of_others: Sequence[type[Event]] = (),
    ) -> None:
        self.num_unreadable = 0
        self._directory = run_dir / "events"
        self._attempt_from = attempt_from
        self._all_ranks = all_ranks or bool(kinds_of_others)
        self._marks = _list_marks_of_kinds(kinds)
        self._marks_of_others = _list_marks_of_kinds(kinds_of_others or kinds)
        self._offsets: dict[str, int] = {}
        # Of the files that are read: the number of each, and how it begins.
        self._inodes: dict[str, int] = {}
        self._beginnings: dict[str, bytes] = {}
        self._clocks: dict[str, MonotonicClockReading | None] = {}
        # Files that are read up to the middle of an overlong line.
        self._is_inside: set[str] = set()
        # (rank, attempt, seq) of events that came through a pipe while the disk refused them.
        self._seen: set[tuple[int, int, int]] = set()

    def ignore_event(self, envelope: Envelope) -> None:
        """Leave out an event that came another way, should it still be written."""
        self._seen.add((envelope.rank, envelope.attempt, envelope.seq))

    def read_new_events(self) -> list[Envelope]:
        """The events that were written since the last call, oldest first; a torn last line waits
        for its end."""
        envelopes: list[Envelope] = []
        for name, size in self._list_followed_files():
            if size > self._offsets.get(name, 0):
                envelopes += self._iterate_new_envelopes(name)
        if self._seen:
            envelopes = [e for e in envelopes if (e.rank, e.attempt, e.seq) not in self._seen]
        return sort_events(envelopes)

    def iterate_past_events(self) -> Iterator[Envelope]:
        """The events that are there when it begins, one attempt after the other, without holding
        more of them than the supervisor's: a long run has millions.

        Within an attempt come the supervisor's until its ranks have ended, then rank by rank all
        of theirs, then what the supervisor said of the end. `read_new_events` goes on behind them.
        """
        names = [name for name, _ in self._list_followed_files()]
        of_supervisor = _group_supervisor_events_by_attempt(
            self._iterate_new_envelopes(SUPERVISOR_FILE_NAME)
        )
        names_of_attempt: dict[int, list[str]] = {}
        for name in names:
            if match := RANK_FILE_PATTERN.fullmatch(name):
                names_of_attempt.setdefault(int(match[2]), []).append(name)
        for attempt in sorted(names_of_attempt.keys() | of_supervisor.keys()):
            supervised = of_supervisor.get(attempt, [])
            num_before_end = 0
            while num_before_end < len(supervised) and not is_after_attempt(
                supervised[num_before_end].event
            ):
                num_before_end += 1
            yield from supervised[:num_before_end]
            for name in names_of_attempt.get(attempt, []):
                yield from self._iterate_new_envelopes(name)
            yield from supervised[num_before_end:]

    def _list_followed_files(self) -> list[tuple[str, int]]:
        """Names and sizes of the files to follow; none before the run has made its directory."""
        files = []
        with suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                if self._is_followed(entry.name):
                    # One that cannot be looked at (a link that leads nowhere) hides no other.
                    with suppress(OSError):
                        status = entry.stat()
                        self._begin_anew_if_replaced(entry.name, status.st_ino)
                        files.append((entry.name, status.st_size))
        return sorted(files)

    def _begin_anew_if_replaced(self, name: str, inode: int) -> None:
        """Read a file from its beginning that has taken the place of one that was removed."""
        beginning = self._beginnings.get(name, b"")
        if beginning and self._inodes.get(name, inode) != inode:
            # Some file systems change the number of a file that stays. A file that cannot be
            # opened now is looked at again by the next call: its number is not taken over.
            with open_regular_file(self._directory / name) as file:
                is_same = file.read(len(beginning)) == beginning
            if not is_same:
                self._forget(name)
        self._inodes[name] = inode

    def _forget(self, name: str) -> None:
        """Read a file from its beginning in the next call."""
        del self._beginnings[name]
        self._offsets.pop(name, None)
        self._clocks.pop(name, None)
        self._is_inside.discard(name)

    def _is_followed(self, name: str) -> bool:
        if name == SUPERVISOR_FILE_NAME:
            return True
        match = RANK_FILE_PATTERN.fullmatch(name)
        if match is None or int(match[2]) < self._attempt_from:
            return False
        return self._all_ranks or int(match[1]) == 0

    def _choose_marks(self, name: str) -> list[bytes]:
        match = RANK_FILE_PATTERN.fullmatch(name)
        is_of_other_rank = match is not None and int(match[1]) > 0
        return self._marks_of_others if is_of_other_rank else self._marks

    def _iterate_new_envelopes(self, name: str) -> Iterator[Envelope]:
        marks = self._choose_marks(name)
        for line in self._iterate_whole_lines(name):
            is_first = name not in self._clocks
            is_wanted = not marks or any(mark in line for mark in marks)
            if not is_wanted and not is_first:
                continue
            envelope = parse_valid_event_line(line, self._clocks.get(name))
            if envelope is None:
                self.num_unreadable += bool(line.strip())
                continue
            # Only a file's first line names its clock: kept also where the event is left out.
            self._clocks[name] = envelope.clock
            if is_wanted and envelope.attempt >= self._attempt_from:
                yield envelope

    def _iterate_whole_lines(self, name: str) -> Iterator[bytes]:
        """Whole ones, and the beginning of an overlong one, which does not wait for its end."""
        try:
            with open_regular_file(self._directory / name) as file:
                file.seek(self._offsets.get(name, 0))
                # The rest of an overlong line is passed over first, and may still have no end.
                if name in self._is_inside:
                    is_over = skip_to_next_line(file)
                    self._offsets[name] = file.tell()
                    if not is_over:
                        return
                    self._is_inside.discard(name)
                for line in read_bounded_lines(file):
                    if line == OVERLONG_LINE_MARKER:
                        self._is_inside.add(name)
                    elif not line.endswith(b"\n"):
                        # The line is torn: the next call begins with its first byte again.
                        return
                    self._offsets[name] = file.tell()
                    self._beginnings.setdefault(name, line[:_BEGINNING_BYTES])
                    yield line
        except OSError:
            return


def follow_shown_events(run_dir: Path, attempt_from: int = 0) -> EventTail:
    """Follow the events that a terminal shows."""
    return EventTail(run_dir, attempt_from, kinds_of_others=EVENT_CLASSES_SHOWN_OF_ANY_RANK)


def _group_supervisor_events_by_attempt(
    of_supervisor: Iterable[Envelope],
) -> dict[int, list[Envelope]]:
    attempts = AttemptCounter()
    by_attempt: dict[int, list[Envelope]] = {}
    for envelope in of_supervisor:
        by_attempt.setdefault(attempts.attempt_of_event(envelope), []).append(envelope)
    return by_attempt
