"""What a rank records while its steps are traced: spans whose own times are the seconds of the
phases, collectives with their waits, whatever clock they are timed by."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import DeviceType

from phalanx.core import phases as phases_module
from phalanx.core.black_box import BlackBox, PostedCollective
from phalanx.core.black_box_format import POSTED, QUEUED
from phalanx.core.call_site import CallSite
from phalanx.core.phases import PHASES, PhaseTimer
from phalanx.core.step_ranges import StepRange
from phalanx.job.schema import Job
from phalanx.mesh.nvtx import NvtxRanges
from phalanx.observe import trace_recorder
from phalanx.observe.trace_recorder import TraceRecorder
from phalanx.observe.trace_request import TraceRequest, read_trace_answer, write_trace_request
from phalanx.observe.trace_rows import OperatorSpan, TraceRow
from phalanx.report.trace.packets import SLICE_BEGIN
from phalanx.report.trace.spans import TrackSpan, nest_spans
from phalanx.train.operator_profile import _iterate_operator_spans
from phalanx.train.step_tracer import StepTracer, list_trace_windows


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def perf_counter_ns(self) -> int:
        return round(self.now_s * 1e9)

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(phases_module, "time", clock)
    monkeypatch.setattr(trace_recorder, "time", clock)
    return clock


@dataclass
class DeviceClock:
    """Marks of work that is done later than it is given: a second late."""

    host: Clock
    is_late: bool = True
    num_waits: int = 0

    def mark(self) -> float:
        return self.host.now_s + 1

    def seconds(self, start: float, end: float) -> float | None:
        return end - start if end <= self.host.now_s else None

    def wait(self, mark: float) -> None:
        self.num_waits += 1
        self.host.now_s = max(self.host.now_s, mark)


def no_memory() -> tuple[int, int]:
    return -1, -1


def of_kind(rows: list[list[TraceRow]], name: str) -> list[Any]:
    return [row for each in rows for row in each if type(row).__name__ == name]


Tree = list[tuple[str, int, bool, "Tree"]]
trees = st.recursive(
    st.just([]),
    lambda inner: st.lists(
        st.tuples(st.sampled_from(PHASES), st.integers(0, 9), st.booleans(), inner), max_size=3
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(trees)
def test_own_times_of_spans_are_the_seconds_of_the_phases(tree: Tree) -> None:
    """Whatever the nesting, and where an exception leaves phases open."""
    clock, phases = Clock(), PhaseTimer()

    def run(nodes: Tree) -> None:
        for name, seconds, raises, inner in nodes:
            with contextlib.suppress(KeyError), phases(name):
                clock.now_s += seconds
                run(inner)
                if raises:
                    phases.enter("pipeline" if name != "pipeline" else "data")
                    clock.now_s += 1
                    raise KeyError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases_module, "time", clock)
        patch.setattr(trace_recorder, "time", clock)
        recorder = TraceRecorder(phases, None, no_memory)
        recorder.attach()
        run(tree)
        recorder.detach()
        with phases("startup"):
            clock.now_s += 5
        rows = recorder.take_rows(is_last=True)
    seconds = phases.take()
    seconds["startup"] -= 5
    found = reversed(of_kind(rows, "PhaseSpan"))
    spans = [TrackSpan(row.start_ns, row.end_ns, row.name) for row in found]
    own_ns: dict[str, int] = defaultdict(int)
    stack: list[str] = []
    last_ns = 0
    # As a viewer draws them: time belongs to the innermost span.
    for event in nest_spans(1, spans):
        if stack:
            own_ns[stack[-1]] += event.at_ns - last_ns
        last_ns = event.at_ns
        if event.type == SLICE_BEGIN:
            stack.append(event.name)
        else:
            stack.pop()
    assert not stack
    assert {name: ns for name, ns in own_ns.items() if ns} == {
        name: s * 1e9 for name, s in seconds.items() if s
    }


def test_a_phase_that_was_open_before_has_no_span(clock: Clock) -> None:
    phases = PhaseTimer()
    phases.enter("startup")
    recorder = TraceRecorder(phases, None, no_memory)
    recorder.attach()
    with phases("forward"):
        clock.now_s += 1
    phases.leave("startup")
    assert [row.name for row in of_kind(recorder.take_rows(is_last=True), "PhaseSpan")] == [
        "forward"
    ]


def test_phases_of_a_thread_beside_training_are_told_apart(clock: Clock) -> None:
    phases = PhaseTimer(clock=DeviceClock(clock))
    recorder = TraceRecorder(phases, None, no_memory)
    assert not phases.for_thread(3).observers, "nothing is recorded yet"
    recorder.attach()
    beside = phases.for_thread(4)
    beside.enter("ckpt_write")
    with beside("before_commit", "the manifest"):
        clock.now_s += 1
    recorder.detach()
    clock.now_s += 1
    rows = of_kind(recorder.take_rows(is_last=True), "PhaseSpan")
    assert [(row.step, row.is_foreground, row.name, row.words) for row in rows] == [
        (4, 0, "before_commit", "the manifest"),
        (4, 0, "ckpt_write", ""),
    ]
    assert [row.end_ns - row.start_ns for row in rows] == [10**9, 2 * 10**9]
    beside.leave("ckpt_write")


def test_marks_of_a_device_are_read_late_and_waited_for_at_the_end(clock: Clock) -> None:
    device = DeviceClock(clock)
    phases = PhaseTimer(clock=device)
    phases.step = 7
    recorder = TraceRecorder(phases, None, no_memory)
    assert device.num_waits == 1, "so that one moment is known by both clocks"
    recorder.attach()
    recorder.begin_step()
    with phases("forward"):
        clock.now_s += 2
    begin = device.mark()
    clock.now_s += 0.5
    recorder.end_step(7, [("0F0", begin, device.mark())])
    rows = recorder.take_rows(is_last=False)
    assert device.num_waits == 1
    assert not of_kind(rows, "ActionSpan"), "it is not done yet"
    recorder.detach()
    rows = recorder.take_rows(is_last=True)
    # The mark of second 101 was seen at 101: by the host's clock the device is a second late.
    (action,) = of_kind(rows, "ActionSpan")
    assert (action.start_ns, action.end_ns) == (round(104e9), round(104.5e9))
    (forward,) = of_kind(rows, "PhaseSpan")
    assert (forward.start_ns, forward.end_ns) == (round(102e9), round(104e9))
    assert device.num_waits == 2


CALL = PostedCollective(
    "all_reduce", 0, 5, "float32", (4,), 1, 16, -1, -1, CallSite("a.py", 3), POSTED, True
)


def test_a_collective_has_its_posting_its_wait_and_its_first_end(
    clock: Clock, tmp_path: Path
) -> None:
    box = BlackBox(tmp_path / "box")
    box.add_group("key", "world", 2, "0-1")
    phases = PhaseTimer(box)
    phases.step, phases.microbatch = 7, 3
    before = box.post_collective(CALL)
    recorder = TraceRecorder(phases, box, no_memory)
    recorder.attach()
    with phases("backward"):
        waited = box.post_collective(CALL)
        clock.now_s += 1
        box.begin_wait(waited)
        clock.now_s += 1
        box.end_collective(waited, end_seen="waited")
        completed = box.post_collective(replace_call(sequence=6))
        clock.now_s += 1
        recorder.end_collective(completed, "completed")
        clock.now_s += 1
        box.end_collective(completed)
        still_open = box.post_collective(replace_call(sequence=7, is_foreground=False))
        box.post_collective(replace_call(sequence=8, state=QUEUED))
        failed = box.post_collective(replace_call(sequence=9))
        box.end_collective(failed, has_failed=True)
    box.end_collective(before)
    rows = recorder.take_rows(is_last=False)
    found = {row.sequence: row for row in of_kind(rows, "CollectiveSpan")}
    assert sorted(found) == [5, 6, 8, 9]
    second = 1_000_000_000
    assert found[5].wait_ns - found[5].posted_ns == second
    assert found[5].end_ns - found[5].posted_ns == 2 * second
    assert (found[5].end_seen, found[5].site, found[5].phase) == ("waited", "a.py:3", "backward")
    assert (found[5].step, found[5].microbatch) == (7, 3)
    assert (found[6].end_ns - found[6].posted_ns, found[6].end_seen) == (second, "completed")
    assert (found[8].end_seen, found[9].end_seen) == ("queued", "failed")
    assert [row.label for row in of_kind(rows, "TracedGroup")] == ["world"]
    recorder.detach()
    box.end_collective(still_open)
    box.post_collective(CALL)
    (row,) = of_kind(recorder.take_rows(is_last=True), "CollectiveSpan")
    assert (row.sequence, row.end_ns, row.end_seen) == (7, -1, "open")
    assert (row.microbatch, row.phase, row.is_foreground) == (-1, "", 0)
    box.close()


def replace_call(**changes: Any) -> PostedCollective:
    return CALL._replace(**changes)


def job_of(**observe: Any) -> Job:
    observe = {key: tuple(steps) for key, steps in observe.items()}
    return Job.model_validate({"observe": observe, "train": {"steps": 50}})


def test_windows_of_a_job() -> None:
    windows = list_trace_windows(job_of(trace_steps=[10, "11:12", 30], profile_steps=["12:13", 40]))
    found = [(str(each.steps), [str(steps) for steps in each.operator_steps]) for each in windows]
    assert found == [("10:13", ["12:13"]), ("30", []), ("40", ["40"])]
    assert [windows[0].has_operators_in(step) for step in (11, 12, 13, 14)] == [
        False, True, True, False,
    ]  # fmt: skip


def tracer_of(run_dir: Path, rank: int, **observe: Any) -> StepTracer:
    model: Any = SimpleNamespace(mesh=SimpleNamespace(rank=rank), phases=PhaseTimer())
    bus: Any = SimpleNamespace(attempt=1)
    return StepTracer(job_of(**observe), model, bus, run_dir, lambda seconds: None)


@pytest.mark.parametrize(
    ("request_", "status", "steps", "why"),
    [
        (TraceRequest("x", 0, 2), "accepted", StepRange(8, 9), ""),
        (TraceRequest("x", 8, 2), "accepted", StepRange(8, 9), ""),
        (TraceRequest("x", 21, 1), "accepted", StepRange(20, 22), ""),
        (TraceRequest("x", 7, 2), "refused", StepRange(7, 8), "step 7 is over"),
        (TraceRequest("x", 19, 2), "refused", StepRange(19, 20), "traced already"),
        (TraceRequest("x", 50, 2), "refused", StepRange(50, 51), "ends with step 50"),
    ],
)
def test_all_ranks_take_a_request_alike_and_one_answers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request_: TraceRequest,
    status: str,
    steps: StepRange,
    why: str,
) -> None:
    monkeypatch.setattr("phalanx.observe.trace_request.LOOK_INTERVAL_S", 0.0)
    tracers = [tracer_of(tmp_path, rank, trace_steps=["20:22"]) for rank in (0, 1)]
    write_trace_request(tmp_path, request_)
    packed = sum(tracer.look_for_request() for tracer in tracers)
    for tracer in tracers:
        tracer.accept_request(packed, 7)
    assert tracers[0]._windows == tracers[1]._windows
    assert tracers[0]._first_step == tracers[1]._first_step == (8 if steps.first == 8 else 20)
    answer = read_trace_answer(tmp_path, "x")
    assert answer is not None
    assert (answer.status, StepRange(answer.first_step, answer.last_step)) == (status, steps)
    assert why in answer.why
    assert (answer.step, answer.attempt) == (7, 1)


def test_operators_are_added_to_steps_that_the_job_traces_until_these_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.observe.trace_request.LOOK_INTERVAL_S", 0.0)
    tracers = [tracer_of(tmp_path, rank, trace_steps=["20:24"]) for rank in (0, 1)]

    def ask(step: int, request: TraceRequest) -> tuple[str, str]:
        write_trace_request(tmp_path, request)
        packed = sum(tracer.look_for_request() for tracer in tracers)
        for tracer in tracers:
            tracer.accept_request(packed, step)
        answer = read_trace_answer(tmp_path, request.id)
        assert answer is not None
        return answer.status, answer.why

    assert ask(7, TraceRequest("x", 21, 1, has_operators=True)) == ("accepted", "")
    for tracer in tracers:
        (window,) = tracer._windows
        assert (str(window.steps), window.operator_steps) == ("20:24", (StepRange(21, 21),))
    assert ask(20, TraceRequest("y", 21, 1, has_operators=True)) == ("accepted", "")
    assert ask(20, TraceRequest("z", 22, 2)) == ("accepted", "")
    assert ask(20, TraceRequest("w", 22, 2, has_operators=True)) == (
        "refused",
        "steps 20:24 are being traced already, without operators",
    )


def test_nothing_is_looked_for_without_a_directory() -> None:
    tracer: StepTracer = replace(tracer_of(Path(), 0), run_dir=None, _inbox=None)
    assert tracer.look_for_request() == 0.0
    tracer.begin_step(1)
    tracer.end_step(1)
    tracer.close()


def test_phases_are_ranges_of_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str | int] = []

    def start(text: str) -> int:
        heard.append(text)
        return len(heard)

    monkeypatch.setattr(torch.cuda.nvtx, "range_start", start)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", heard.append)
    phases = PhaseTimer()
    phases.enter("startup")
    phases.observers += (NvtxRanges(),)
    with phases("backward"), phases("collective", "all_reduce gradients"):
        pass
    phases.leave("startup")
    assert heard == ["backward", "collective: all_reduce gradients", 2, 1]
    with phases.for_thread(1)("ckpt_write"):
        assert heard[4:] == ["ckpt_write"]


@dataclass
class ProfilerEvent:
    """As torch.profiler's kineto events, of which there are none of a GPU here."""

    text: str
    device: DeviceType = DeviceType.CPU
    asynchronous: bool = False

    def name(self) -> str:
        return self.text

    def is_async(self) -> bool:
        return self.asynchronous

    def start_ns(self) -> int:
        return 1000

    def duration_ns(self) -> int:
        return 50

    def device_type(self) -> DeviceType:
        return self.device

    def start_thread_id(self) -> int:
        return 3

    def device_resource_id(self) -> int:
        return 7


def test_operators_lie_on_their_thread_and_kernels_on_their_stream() -> None:
    events = [
        ProfilerEvent("aten::mm"),
        ProfilerEvent("gemm_kernel", DeviceType.CUDA),
        ProfilerEvent("phalanx clock"),
        ProfilerEvent("from one thread to another", asynchronous=True),
    ]
    assert list(_iterate_operator_spans(events, 5)) == [
        OperatorSpan("operators of thread 3", "aten::mm", 1005, 1055),
        OperatorSpan("kernels of stream 7", "gemm_kernel", 1005, 1055),
    ]
