"""Traces chosen steps: those of the job, and those that `phalanx trace` asks for while it runs.

All ranks begin and end with the same steps. Outside of them a step costs a comparison, and rank 0
twice a second a look for a request.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.core.clocks import build_monotonic_clock_id
from phalanx.core.step_ranges import StepRange, merge_step_ranges, parse_step_range
from phalanx.job.schema import Job
from phalanx.mesh.clock_exchange import exchange_clock_offsets
from phalanx.mesh.mesh import Mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import Note
from phalanx.observe.trace_request import (
    ACCEPTED,
    REFUSED,
    TraceAnswer,
    TraceRequest,
    TraceRequestInbox,
    write_trace_answer,
)
from phalanx.observe.trace_rows import ClockOffset
from phalanx.parallel.model import ParallelModel
from phalanx.train.trace_session import TraceSession, open_trace_session

_NEVER = sys.maxsize


@dataclass(frozen=True)
class TraceWindow:
    """Steps that are traced without a gap, and those of them with operators."""

    steps: StepRange
    operator_steps: tuple[StepRange, ...] = ()

    def has_operators_in(self, step: int) -> bool:
        return any(each.first <= step <= each.last for each in self.operator_steps)


def list_trace_windows(job: Job) -> list[TraceWindow]:
    """The windows that a job asks for, in order."""
    profiled = merge_step_ranges(map(parse_step_range, job.observe.profile_steps))
    traced = [*map(parse_step_range, job.observe.trace_steps), *profiled]
    windows = []
    for steps in merge_step_ranges(traced):
        inside = [each for each in profiled if steps.first <= each.first <= steps.last]
        windows.append(TraceWindow(steps, tuple(inside)))
    return windows


@dataclass
class StepTracer:
    """Traces steps of one rank into `run_dir`; nothing where that is None.

    `exclude_seconds` takes seconds that belong to no step. `may_write` is False once the run is
    another job's.
    """

    job: Job
    model: ParallelModel
    bus: Bus
    run_dir: Path | None
    exclude_seconds: Callable[[float], None]
    may_write: Callable[[], bool] = lambda: True
    _windows: list[TraceWindow] = field(default_factory=list)
    _session: TraceSession | None = None
    _session_window: TraceWindow | None = None
    _inbox: TraceRequestInbox | None = None
    _request: TraceRequest | None = None
    _clocks: list[str] = field(default_factory=list)
    _exchange_mesh: Mesh | None = None
    _first_step: int = _NEVER

    def __post_init__(self) -> None:
        if self.run_dir is None:
            return
        self._windows = list_trace_windows(self.job)
        if self.model.mesh.rank == 0:
            self._inbox = TraceRequestInbox(self.run_dir)
        self._find_next_window(0)

    # Requests

    def look_for_request(self) -> float:
        """This rank's flag in the reduction of a step: a packed request, or 0."""
        if self._inbox is None:
            return 0.0
        self._request = self._inbox.take_request()
        if self._request is None:
            return 0.0
        return self._request.pack()

    def accept_request(self, packed: float, step: int) -> None:
        """Take what all ranks have learned in the reduction of `step`; rank 0 answers."""
        if not packed:
            return
        request = TraceRequest.unpack(packed)
        steps = request.choose_steps(step + 1)
        window, problem = self._find_window_for(steps, step, has_operators=request.has_operators)
        if self._request is None or self.run_dir is None:
            return
        if window is None:
            status, answered = REFUSED, steps
        else:
            status, answered = ACCEPTED, window.steps
        write_trace_answer(
            self.run_dir,
            TraceAnswer(
                self._request.id,
                status,
                step,
                self.bus.attempt,
                answered.first,
                answered.last,
                problem,
            ),
        )
        self._request = None

    def _find_window_for(
        self, steps: StepRange, step: int, *, has_operators: bool
    ) -> tuple[TraceWindow | None, str]:
        """The window in which `steps` will be traced, a new one if need be; or None, and why."""
        if steps.first <= step:
            return None, f"step {steps.first} is over: the run has done step {step}"
        if steps.last > self.job.train.steps:
            return None, f"the run ends with step {self.job.train.steps}"
        for index, window in enumerate(self._windows):
            if window.steps.first <= steps.first and steps.last <= window.steps.last:
                wanted = merge_step_ranges([*window.operator_steps, *[steps] * has_operators])
                widened = replace(window, operator_steps=tuple(wanted))
                if widened != window and window.steps.first <= step:
                    return None, f"steps {window.steps} are being traced already, without operators"
                self._windows[index] = widened
                return widened, ""
            if steps.first <= window.steps.last and window.steps.first <= steps.last:
                return None, f"steps {window.steps} are being traced already"
        new = TraceWindow(steps, (steps,) if has_operators else ())
        self._windows = sorted([*self._windows, new], key=lambda window: window.steps)
        self._find_next_window(step)
        return new, ""

    def _find_next_window(self, done_step: int) -> None:
        """Forget windows that are over, and note where the next one begins."""
        self._windows = [each for each in self._windows if each.steps.last > done_step]
        self._first_step = self._windows[0].steps.first if self._windows else _NEVER

    # Steps

    def begin_step(self, step: int) -> None:
        """Before `step`. Collective where a window begins."""
        if step < self._first_step:
            return
        if self._session is None:
            # A resumed run begins behind windows of before.
            self._find_next_window(step - 1)
            if step < self._first_step:
                return
        window = self._session_window or self._windows[0]
        with self._excluding_from_step():
            if self._session is None:
                self._session, self._session_window = self._open_session(window), window
            if window.has_operators_in(step):
                self._session.start_profiler()
        self._session.recorder.begin_step()

    def end_step(self, step: int) -> None:
        """After the facts of `step` were recorded. Collective where a window ends."""
        session, window = self._session, self._session_window
        if session is None or window is None:
            return
        pipeline = self.model.pipeline
        session.recorder.end_step(step, pipeline.spans if pipeline is not None else ())
        with self._excluding_from_step():
            if not window.has_operators_in(step + 1):
                session.stop_profiler()
            if step < window.steps.last:
                session.write_rows()
                return
            session.recorder.detach()
            session.write_rows(is_last=True)
            offset = self._exchange_offset()
            if offset is not None:
                session.writer.write_rows([offset])
            self._end_session(is_complete=True)
            self._find_next_window(step)

    def close(self) -> None:
        """End a window that an error or a stop has cut short; what was recorded is written."""
        if self._session is None:
            return
        self._session.recorder.detach()
        with contextlib.suppress(Exception):
            # The error that is on its way says more than one in its wake.
            self._session.stop_profiler()
            # A device may never do what it was given.
            is_late = self.model.phases.clock.is_late
            if self.may_write():
                self._session.write_rows(is_last=not is_late)
        self._end_session(is_complete=False)

    def _end_session(self, *, is_complete: bool) -> None:
        assert self._session is not None
        self._session.close(is_complete=is_complete)
        refusal = self._session.writer.refusal
        self._session = self._session_window = None
        if refusal is not None:
            why = f"the trace of this rank is not written: {refusal.strerror or refusal}"
            self.bus.emit(Note("trace_unwritten", {"why": why}))

    @contextlib.contextmanager
    def _excluding_from_step(self) -> Iterator[None]:
        with self.model.phases.exclude_from_step():
            began = time.perf_counter()
            yield
        self.exclude_seconds(time.perf_counter() - began)

    def _open_session(self, window: TraceWindow) -> TraceSession:
        assert self.run_dir is not None
        if not self._clocks:
            own_clock = build_monotonic_clock_id() or platform.node()
            with self.model.phases("collective", "gather the names of clocks"):
                self._clocks = self.model.mesh.gather_json(own_clock)
        offset = self._exchange_offset()
        session = open_trace_session(
            self.run_dir,
            self.model,
            window.steps,
            attempt=self.bus.attempt,
            clocks=self._clocks,
            has_operators=bool(window.operator_steps),
            may_write=self.may_write(),
        )
        if offset is not None:
            session.writer.write_rows([offset])
        session.recorder.attach()
        return session

    def _exchange_offset(self) -> ClockOffset | None:
        """This rank's clock beside that of rank 0; None where all ranks have one. Collective."""
        if len(set(self._clocks)) == 1:
            return None
        if self._exchange_mesh is None:
            self._exchange_mesh = self.model.mesh
            if self.model.mesh.device.type != "cpu":
                # Messages of the host's memory need a group of their own.
                timeout_s = self.job.resilience.collective_timeout_s
                self._exchange_mesh = self.model.mesh.open_cpu_mesh(
                    timeout_s=timeout_s, name="tracing"
                )
        with self.model.phases("collective", "exchange the time of clocks"):
            measured = exchange_clock_offsets(self._exchange_mesh, self._clocks)
        if measured is None:
            return ClockOffset(time.perf_counter_ns(), 0, 0)
        return ClockOffset(*measured)
