"""`phase(name)`: the one seam through which spans, faults, guards and progress reach the step loop.

A `PhaseTimer` belongs to one rank and is handed to whoever needs it: it is no global function,
as there is no ambient rank to ask. `with phases("forward"): ...` charges the seconds inside to
"forward", minus those of phases nested in it, so that the phases of a step never count a second
twice. Seconds are those of a `PhaseClock`: the host's where work is done when its call returns,
that of the device's queue where it is only queued then. Listeners (fault injection, a watchdog) are
called on entry. Step, phase and collective are also written to a small memory-mapped black box that
another process can read after this one was stopped or killed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from phalanx.core.black_box import BlackBox
from phalanx.core.call_site import UNKNOWN_CALL_SITE, CallSite

# What a step's seconds are charged to; "host_to_device" is a batch's copy to a GPU, "optimizer"
# includes the gradients' norm and clipping, "pipeline" is waiting for another stage: the bubble as
# this rank sees it. "prepare" is what a step does before its first forward and after its last
# backward for batches and modules, "record" what it checks and writes down. Another name is a bug.
PHASES = (
    "startup",
    "data",
    "host_to_device",
    "prepare",
    "record",
    "forward",
    "backward",
    "collective",
    "pipeline",
    "optimizer",
    "evaluate",
    "ckpt_prepare",
    "ckpt_stage",
    "ckpt_write",
    "before_commit",
    "after_commit",
    "ckpt_load",
)

WORLD_AXIS = "world"
"""In place of an axis where all ranks of the run take part."""
UNKNOWN_AXIS = "?"

PhaseListener = Callable[[int, str], None]

# In a loop that is not the trainer's nobody takes the seconds of marks: they must not pile up.
_MAX_UNRESOLVED_MARKS = 4096
_MAX_KNOWN_PHASES = 1024


class PhaseClock(Protocol):
    """The clock that times phases.

    A mark is a moment as the clock knows it: with `is_late` one that may still lie ahead, behind
    work that is queued and not done.
    """

    is_late: bool

    def mark(self) -> Any:
        """Mark the moment between all work that was given before and all that comes after, in
        seconds where no mark lies ahead.

        Waits for nothing.
        """
        ...

    def seconds(self, start: Any, end: Any) -> float | None:
        """From one mark to a later one; None where that moment has not come yet."""
        ...

    def wait(self, mark: Any) -> None:
        """Until the moment of a mark has come."""
        ...


class SpanObserver(Protocol):
    """Told of each phase that begins, and of the end of the innermost one, with the marks that its
    seconds are counted by."""

    def begin_span(self, name: str, words: str, axis: str, mark: Any) -> None: ...

    def end_span(self, mark: Any) -> None: ...

    def observe_thread(self, phases: PhaseTimer) -> SpanObserver | None:
        """The observer that is told of the phases of another thread, which `phases` times; None:
        nobody."""
        ...


class HostClock:
    """The host's own time: right where work is done when the call that asks for it returns."""

    is_late = False

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def wait(self, mark: float) -> None:
        pass


class _Phase(NamedTuple):
    """A phase: its name, what it does in words for people, and the key of `take_communication` that
    its seconds are charged to ("": none)."""

    name: str
    words: str
    communication: str


class _OpenPhase(NamedTuple):
    """A phase that goes on, and the line that began it, where the black box asked for it."""

    phase: _Phase
    site: CallSite


# Without the function that NamedTuple makes: a step begins many.
_make_open_phase = tuple.__new__


class PhaseTimer:
    """Times the phases of one rank and tells listeners where it is.

    `take()` returns and clears the seconds, `take_communication()` those of collectives by axis and
    operation.

    Listeners are told of each phase that begins. Those `of_training` are told of the thread that
    trains alone, and of the enclosing phase that goes on where one ends, too.
    """

    def __init__(
        self,
        black_box: BlackBox | None = None,
        listeners: tuple[PhaseListener, ...] = (),
        clock: PhaseClock | None = None,
        *,
        of_training: tuple[PhaseListener, ...] = (),
    ) -> None:
        self.step = 0
        # Of the step's microbatches; -1 outside of them.
        self.microbatch = -1
        self.clock: PhaseClock = clock or HostClock()
        self._black_box = black_box
        self._listeners, self._of_training = (*of_training, *listeners), of_training
        # Empty unless a trace is recorded.
        self.observers: tuple[SpanObserver, ...] = ()
        self._seconds: dict[str, float] = {}
        self._communication_s: dict[str, float] = {}
        self._stack: list[_OpenPhase] = []
        # By name, words and axis: a step has the same phases again and again.
        self._known_phases: dict[tuple[str, str, str], _Phase] = {}
        self._since: Any = 0.0
        # Phases whose end may still lie ahead.
        self._queued: deque[tuple[_Phase, Any, Any]] = deque()

    def add_listener(self, listener: PhaseListener) -> None:
        """Tell `listener`, too, of each phase that begins from now on."""
        self._listeners += (listener,)

    def for_thread(self, step: int) -> PhaseTimer:
        """Phases for another thread of this rank, at work on `step`: seconds of its own by the
        host's clock, and the listeners but those `of_training`.

        The black box goes on telling where training is.
        """
        # No black box: the thread's phases must not hide where training stands.
        listeners = tuple(each for each in self._listeners if each not in self._of_training)
        phases = PhaseTimer(None, listeners)
        phases.step = step
        for observer in self.observers:
            observer_of_thread = observer.observe_thread(phases)
            if observer_of_thread is not None:
                phases.observers += (observer_of_thread,)
        return phases

    def replace_clock(self, clock: PhaseClock) -> None:
        """Use another clock from now on; open phases go on."""
        if self._stack:
            self._charge_to_innermost_phase(self.clock.mark())
        # Marks of the old clock mean nothing to the new one: they become seconds first.
        self._add_seconds_between_marks(wait=True)
        self.clock = clock
        self._since = clock.mark()

    def __call__(self, name: str, words: str = "", *, axis: str = "") -> _PhaseSpan:
        """A context manager: the body is phase `name`, as `enter` begins and `leave` ends it."""
        return _PhaseSpan(self, name, words, axis)

    @contextmanager
    def collective(self, words: str, *, axis: str = "") -> Iterator[None]:
        """A collective over `axis` that the library below starts and waits for where it likes.

        Where the call does the work it is a phase like any other. Where it is only queued, on a
        stream that the clock does not see, its seconds cannot be told: listeners and the black box
        learn of it, and what the computation waits for it is charged to the phase around, which
        goes on.
        """
        if not self.clock.is_late:
            with self("collective", words, axis=axis):
                yield
            return
        self.enter_collective(words, axis=axis)
        yield
        self.leave_collective()

    def enter_collective(self, words: str, *, axis: str = "") -> None:
        """Begin what `collective` is the body of. For places where a `with` cannot stand."""
        if not self.clock.is_late:
            self.enter("collective", words, axis=axis)
            return
        self._write_position("collective", words)
        for listener in self._listeners:
            listener(self.step, "collective")

    def leave_collective(self) -> None:
        """End what `enter_collective` has begun."""
        if not self.clock.is_late:
            self.leave("collective")
        elif self._stack:
            enclosing = self._stack[-1].phase
            self._write_position(enclosing.name, enclosing.words)
            for listener in self._of_training:
                listener(self.step, enclosing.name)
        else:
            self._write_position("collective")

    def enter(self, name: str, words: str = "", *, axis: str = "") -> None:
        """Begin a phase; the enclosing one stops counting. `words` say what it does; `axis` says
        over which ranks a collective goes.

        For places where a `with` cannot stand (hooks).
        """
        now = self.clock.mark()
        if self._stack:
            self._charge_to_innermost_phase(now)
        key = name, words, axis
        phase = self._known_phases.get(key) or self._add_known_phase(*key)
        self._since = now
        site = UNKNOWN_CALL_SITE
        if self._black_box is not None:
            site = self._black_box.write(self.step, name, words, self.microbatch)
        self._stack.append(_make_open_phase(_OpenPhase, (phase, site)))
        for observer in self.observers:
            observer.begin_span(name, words, axis, now)
        for listener in self._listeners:
            listener(self.step, name)

    def _add_known_phase(self, name: str, words: str, axis: str) -> _Phase:
        assert name in PHASES, name
        if len(self._known_phases) >= _MAX_KNOWN_PHASES:
            self._known_phases.clear()
        communication = ""
        if name == "collective":
            communication = f"{axis or UNKNOWN_AXIS}: {words}"
        phase = self._known_phases[name, words, axis] = _Phase(name, words, communication)
        return phase

    def leave(self, name: str) -> None:
        """End phase `name` and any that an exception left open inside it."""
        site = self._end_phase(name)
        if self._black_box is None:
            return
        # The phase stays, as the last one; its collective lies behind this rank.
        words = ""
        if self._stack:
            name, words, _ = self._stack[-1].phase
        # Of the line that began the phase, and not looked for again: nothing is nearer.
        self._black_box.write(self.step, name, words, self.microbatch, site)

    def _write_position(self, phase: str, words: str = "") -> None:
        if self._black_box is not None:
            self._black_box.write(self.step, phase, words, self.microbatch)

    def _end_phase(self, name: str) -> CallSite:
        """End phase `name`, with phases inside that an exception left open; returns the line that
        began it."""
        now = self.clock.mark()
        self._charge_to_innermost_phase(now)
        is_open = True
        while is_open:
            assert self._stack, f"phase {name} was never begun"
            phase, site = self._stack.pop()
            is_open = phase.name != name
            for observer in self.observers:
                observer.end_span(now)
        self._since = now
        if self._stack:
            # The enclosing phase goes on.
            for listener in self._of_training:
                listener(self.step, self._stack[-1].phase.name)
        return site

    def _charge_to_innermost_phase(self, now: Any) -> None:
        """To the innermost phase, what has passed since the last mark."""
        if not self.clock.is_late and not self._queued:
            # The usual case on CPUs: no mark lies ahead.
            self._add_phase_seconds(self._stack[-1].phase, now - self._since)
            return
        self._queued.append((self._stack[-1].phase, self._since, now))
        if not self.clock.is_late or len(self._queued) >= _MAX_UNRESOLVED_MARKS:
            self._add_seconds_between_marks()

    def _add_seconds_between_marks(self, *, wait: bool = False) -> None:
        """Turn marks into seconds, as far as their moments have come; `wait`: all of them."""
        if wait and self._queued:
            self.clock.wait(self._queued[-1][2])
        while self._queued:
            phase, start, stop = self._queued[0]
            seconds = self.clock.seconds(start, stop)
            # In order: what was queued after it is not done either.
            if seconds is None:
                break
            self._add_phase_seconds(phase, seconds)
            self._queued.popleft()

    def _add_phase_seconds(self, phase: _Phase, seconds: float) -> None:
        name, _, communication = phase
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if communication:
            _add_seconds(self._communication_s, communication, seconds)

    @property
    def black_box(self) -> BlackBox | None:
        """The box that positions are written to, where there is one."""
        return self._black_box

    @property
    def current(self) -> str:
        if not self._stack:
            return ""
        return self._stack[-1].phase.name

    @contextmanager
    def exclude_from_step(self) -> Iterator[dict[str, float]]:
        """Time the body apart from the step, as an evaluation between two steps: its seconds go to
        the dict that is yielded, when it ends, and what was charged before stays as it was."""
        # Waited for: seconds of the step that lie in the device's queue are not the body's.
        before = self._take_seconds_per_phase(wait=True)
        communicated_before = self.take_communication()
        inside: dict[str, float] = {}
        try:
            yield inside
        finally:
            inside.update(self._take_seconds_per_phase(wait=True))
            for name, seconds in before.items():
                _add_seconds(self._seconds, name, seconds)
            self._communication_s = communicated_before

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last `take`; open phases are charged up to now.

        Of a clock that is late, those of work that is done by now: the rest comes with the next
        `take`. So nothing is waited for, and over steps that each wait for their device once, each
        has the seconds from wait to wait.
        """
        return self._take_seconds_per_phase(wait=False)

    def take_communication(self) -> dict[str, float]:
        """Return the seconds of collectives by "axis: operation" ("tp: all_gather sequence") in
        what was taken so far, and clear them: after `take`, they are those of the same step."""
        communication_s, self._communication_s = self._communication_s, {}
        return communication_s

    def discard(self) -> None:
        """Forget all seconds so far, those that lie in the device's queue, too: it is waited
        for."""
        self._take_seconds_per_phase(wait=True)
        self.take_communication()

    def _take_seconds_per_phase(self, *, wait: bool) -> dict[str, float]:
        if self._stack:
            now = self.clock.mark()
            self._charge_to_innermost_phase(now)
            self._since = now
        self._add_seconds_between_marks(wait=wait)
        seconds, self._seconds = self._seconds, {}
        return seconds


class _PhaseSpan:
    """The body of a `with` as a phase. A class: a generator costs more than the phase itself."""

    __slots__ = ("_axis", "_depth", "_name", "_phases", "_words")

    def __init__(self, phases: PhaseTimer, name: str, words: str, axis: str) -> None:
        self._phases, self._name, self._words, self._axis = phases, name, words, axis
        self._depth = 0

    def __enter__(self) -> None:
        phases = self._phases
        self._depth = len(phases._stack)
        try:
            phases.enter(self._name, self._words, axis=self._axis)
        except BaseException:
            # A listener may raise after the phase has begun.
            self._end_after_error()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._end_after_error()
        elif len(self._phases._stack) > self._depth:
            self._phases.leave(self._name)

    def _end_after_error(self) -> None:
        if len(self._phases._stack) > self._depth:
            # The black box goes on telling where it was raised.
            self._phases._end_phase(self._name)


def _add_seconds(seconds_of: dict[str, float], key: str, seconds: float) -> None:
    seconds_of[key] = seconds_of.get(key, 0.0) + seconds
