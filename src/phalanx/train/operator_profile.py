"""Operators and kernels of the steps that are traced with them, as torch.profiler sees them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import DeviceType

from phalanx.observe.trace_rows import OperatorSpan

# Of one session; what comes beyond is counted.
MAX_OPERATORS = 200_000
_CLOCK_MARK = "phalanx clock"


class OperatorProfiler:
    """One session of torch.profiler. `num_dropped` events went beyond MAX_OPERATORS.

    Events of the profiler have a clock of their own: a marked range, of which the host's clock is
    read before and after, tells how far apart the two are.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_dropped = 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._marked_ns = 0

    def start(self) -> None:
        self._profile.start()
        # The first range of a session makes what later ones find.
        for _ in range(2):
            before_ns = time.perf_counter_ns()
            with torch.profiler.record_function(_CLOCK_MARK):
                self._marked_ns = (before_ns + time.perf_counter_ns()) // 2

    def stop(self) -> list[OperatorSpan]:
        """End the session; returns its events by the host's monotonic clock."""
        self._profile.stop()
        results = getattr(self._profile.profiler, "kineto_results", None)
        if results is None:
            return []
        events = results.events()
        marks = [event.start_ns() for event in events if event.name() == _CLOCK_MARK]
        if not marks:
            return []
        spans = list(_iterate_operator_spans(events, self._marked_ns - max(marks)))
        self.num_dropped = max(0, len(spans) - MAX_OPERATORS)
        return spans[:MAX_OPERATORS]


def _iterate_operator_spans(events: Any, offset_ns: int) -> Iterator[OperatorSpan]:
    for event in events:
        name = event.name()
        # One that is asynchronous begins in one thread and ends in another.
        if name == _CLOCK_MARK or event.is_async():
            continue
        start_ns = event.start_ns() + offset_ns
        end_ns = start_ns + event.duration_ns()
        if event.device_type() == DeviceType.CPU:
            lane = f"operators of thread {event.start_thread_id()}"
        else:
            lane = f"kernels of stream {event.device_resource_id()}"
        yield OperatorSpan(lane, name, start_ns, end_ns)
