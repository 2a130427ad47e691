"""Records what one rank does in the steps that are traced: phases, collectives, actions, memory.

Nothing of it is called outside of those steps. Marks of a GPU become times when its work is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.core.black_box import BlackBox, PostedCollective
from phalanx.core.black_box_format import QUEUED
from phalanx.core.phases import PhaseClock, PhaseTimer
from phalanx.observe.trace_rows import (
    ActionSpan,
    CollectiveSpan,
    MemorySample,
    OperatorSpan,
    PhaseSpan,
    StepSpan,
    TracedGroup,
    TraceRow,
)

# Collectives that have not ended are kept until the end of the trace: at most so many.
_MAX_OPEN_COLLECTIVES = 10_000
NANOSECONDS = 1_000_000_000


class TraceClock:
    """Turns marks of a PhaseClock into nanoseconds of the host's monotonic clock.

    Marks of a host clock are seconds of it. Marks of a device have seconds between each other only:
    there one mark is waited for at the start, so that its moment is known by both. How long the
    host takes to learn of it is the error, some ten microseconds.
    """

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self._anchor: Any = None
        self._anchor_ns = 0
        if clock.is_late:
            self._anchor = clock.mark()
            clock.wait(self._anchor)
            self._anchor_ns = time.perf_counter_ns()

    def read_time_ns(self, mark: Any) -> int | None:
        """Nanoseconds of `mark`; None where its moment has not come yet."""
        if not self._clock.is_late:
            return _convert_to_ns(mark)
        seconds = self._clock.seconds(self._anchor, mark)
        if seconds is None:
            return None
        return self._anchor_ns + round(seconds * NANOSECONDS)

    def wait(self, mark: Any) -> None:
        self._clock.wait(mark)


@dataclass
class _OpenCollective:
    """A collective that was posted; times are -1 as long as they are not known."""

    call: PostedCollective
    step: int
    microbatch: int
    phase: str
    posted_ns: int
    wait_ns: int = -1
    end_ns: int = -1
    end_seen: str = "open"


@dataclass(frozen=True)
class _MarkedSpan:
    """A phase or an action between two marks, whose moments may not have come yet."""

    step: int
    microbatch: int
    name: str
    words: str
    axis: str
    start: Any
    end: Any
    is_action: bool = False


class ThreadSpans:
    """Records the phases of one thread beside training, by the host's clock."""

    def __init__(self, phases: PhaseTimer) -> None:
        self._phases = phases
        self._stack: list[tuple[str, str, float]] = []
        self._rows: list[TraceRow] = []

    def begin_span(self, name: str, words: str, axis: str, mark: float) -> None:
        self._stack.append((name, words, mark))

    def end_span(self, mark: float) -> None:
        if self._stack:
            self._rows.append(self._build_row(*self._stack.pop(), mark))

    def observe_thread(self, phases: PhaseTimer) -> None:
        return None

    def take_rows(self, *, is_last: bool) -> list[TraceRow]:
        """Rows of phases that have ended; with `is_last` also of those that go on, until now."""
        rows, self._rows = self._rows, []
        if is_last:
            now_s = time.perf_counter()
            # Outer ones come later, as where they end by themselves.
            for name, words, start_s in reversed(self._stack):
                rows.append(self._build_row(name, words, start_s, now_s))
        return rows

    def _build_row(self, name: str, words: str, start_s: float, end_s: float) -> PhaseSpan:
        start_ns, end_ns = _convert_to_ns(start_s), _convert_to_ns(end_s)
        return PhaseSpan(self._phases.step, -1, 0, name, words, "", start_ns, end_ns)


def _convert_to_ns(host_s: float) -> int:
    return int(host_s * NANOSECONDS + 0.5)


class TraceRecorder:
    """Records one rank. Observes `phases` and `box` between `attach` and `detach`.

    `read_memory()` returns (resident bytes, bytes of the device's allocator), -1 where not known.
    """

    def __init__(
        self,
        phases: PhaseTimer,
        box: BlackBox | None,
        read_memory: Callable[[], tuple[int, int]],
    ) -> None:
        self._phases, self._box, self._read_memory = phases, box, read_memory
        self._clock = TraceClock(phases.clock)
        self._stack: list[tuple[int, int, str, str, str, Any]] = []
        self._spans: list[_MarkedSpan] = []
        self._collectives: dict[int, _OpenCollective] = {}
        self._rows: list[TraceRow] = []
        self._threads: list[ThreadSpans] = []
        self._num_groups_taken = 0
        self._step_began_ns = 0

    def attach(self) -> None:
        self._phases.observers += (self,)
        if self._box is not None:
            self._box.observer = self

    def detach(self) -> None:
        self._phases.observers = tuple(each for each in self._phases.observers if each is not self)
        if self._box is not None:
            self._box.observer = None

    # Told by the step loop

    def begin_step(self) -> None:
        self._step_began_ns = time.perf_counter_ns()
        self._sample_memory()

    def end_step(self, step: int, actions: Sequence[tuple[str, Any, Any]]) -> None:
        """`actions` of a pipeline: name and two marks each."""
        self._rows.append(StepSpan(step, self._step_began_ns, time.perf_counter_ns()))
        for action, start, end in actions:
            self._spans.append(_MarkedSpan(step, -1, action, "", "", start, end, is_action=True))
        self._sample_memory()

    def add_operators(self, operators: Sequence[OperatorSpan]) -> None:
        self._rows.extend(operators)

    # Told by the phases

    def begin_span(self, name: str, words: str, axis: str, mark: Any) -> None:
        step, microbatch = self._phases.step, self._phases.microbatch
        self._stack.append((step, microbatch, name, words, axis, mark))

    def end_span(self, mark: Any) -> None:
        # One that was open when tracing began has no beginning here.
        if self._stack:
            self._spans.append(_MarkedSpan(*self._stack.pop(), mark))
            self._sample_memory()

    def observe_thread(self, phases: PhaseTimer) -> ThreadSpans:
        spans = ThreadSpans(phases)
        self._threads.append(spans)
        return spans

    def _sample_memory(self) -> None:
        resident_bytes, allocated_bytes = self._read_memory()
        self._rows.append(MemorySample(time.perf_counter_ns(), resident_bytes, allocated_bytes))

    # Told by the black box, from whatever thread

    def post_collective(self, number: int, call: PostedCollective) -> None:
        posted_ns = time.perf_counter_ns()
        step, microbatch, phase = self._phases.step, self._phases.microbatch, self._phases.current
        if not call.is_foreground:
            # Of a thread beside training: it belongs to no microbatch and no phase of the step.
            microbatch, phase = -1, ""
        each = _OpenCollective(call, step, microbatch, phase, posted_ns)
        if call.state == QUEUED:
            each.end_seen = "queued"
        if len(self._collectives) < _MAX_OPEN_COLLECTIVES:
            self._collectives[number] = each

    def begin_wait(self, number: int) -> None:
        each = self._collectives.get(number)
        if each is not None:
            each.wait_ns = time.perf_counter_ns()

    def end_collective(self, number: int, end_seen: str) -> None:
        each = self._collectives.get(number)
        # The first end counts: one is noticed again where the rank waits for it.
        if each is not None and each.end_ns < 0:
            each.end_ns, each.end_seen = time.perf_counter_ns(), end_seen

    # Read by the step loop

    def take_rows(self, *, is_last: bool) -> list[list[TraceRow]]:
        """Rows that are done, in lists of one kind each; with `is_last` all of them: a device is
        waited for, open phases end now and collectives without an end are among them."""
        if is_last:
            self._end_open_spans()
            if self._spans:
                self._clock.wait(self._spans[-1].end)
        self._rows += self._take_new_groups()
        self._rows += self._take_spans()
        for thread in self._threads:
            self._rows += thread.take_rows(is_last=is_last)
        self._rows += self._take_collectives(is_last)
        by_class: dict[type[Any], list[TraceRow]] = {}
        for row in self._rows:
            by_class.setdefault(type(row), []).append(row)
        self._rows = []
        return list(by_class.values())

    def _end_open_spans(self) -> None:
        """An error left them open."""
        while self._stack:
            self.end_span(self._phases.clock.mark())

    def _take_new_groups(self) -> list[TraceRow]:
        if self._box is None:
            return []
        groups = self._box.groups[self._num_groups_taken :]
        self._num_groups_taken += len(groups)
        return [TracedGroup(*group) for group in groups]

    def _take_spans(self) -> list[TraceRow]:
        rows: list[TraceRow] = []
        later = []
        for span in self._spans:
            start_ns = self._clock.read_time_ns(span.start)
            end_ns = self._clock.read_time_ns(span.end)
            if start_ns is None or end_ns is None:
                later.append(span)
            elif span.is_action:
                rows.append(ActionSpan(span.step, span.name, start_ns, end_ns))
            else:
                position = span.step, span.microbatch, 1
                words = span.name, span.words, span.axis
                rows.append(PhaseSpan(*position, *words, start_ns, end_ns))
        self._spans = later
        return rows

    def _take_collectives(self, is_last: bool) -> list[TraceRow]:
        rows: list[TraceRow] = []
        # A copy: another thread may post one meanwhile.
        for number, each in list(self._collectives.items()):
            if each.end_ns < 0 and each.end_seen == "open" and not is_last:
                continue
            del self._collectives[number]
            call = each.call
            rows.append(
                CollectiveSpan(
                    each.step,
                    each.microbatch,
                    call.op,
                    call.group,
                    call.sequence,
                    call.dtype,
                    call.num_bytes,
                    call.num_tensors,
                    call.peer,
                    call.tag,
                    int(call.is_foreground),
                    each.phase,
                    f"{call.site.file}:{call.site.line}" if call.site.file else "",
                    each.posted_ns,
                    each.wait_ns,
                    each.end_ns,
                    each.end_seen,
                )
            )
        return rows
