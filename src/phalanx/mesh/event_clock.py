"""The clock of a GPU: marks are events on its stream, so that phases are timed where their work
is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phalanx.core.phases import HostClock, PhaseClock


def create_phase_clock_for_device(device: torch.device) -> PhaseClock:
    """The clock that times phases of work on `device`."""
    if device.type == "cuda":
        return CudaEventClock.create_for_current_stream(device)
    return HostClock()


class CudaEventClock:
    """Marks are events behind all work that the stream of a computation was given before.

    A host clock around queued work shows how long queueing took, and charges the work itself to the
    first line that waits for the device. All marks are on one stream, also those that are made
    while another one is current: so the seconds between them add up to that stream's time. It has
    not run on a GPU.
    """

    is_late = True

    def __init__(self, record: Callable[[], Any]) -> None:
        self._record = record

    @classmethod
    def create_for_current_stream(cls, device: torch.device) -> CudaEventClock:
        """The clock of the stream that is current on `device` now."""
        stream = torch.cuda.current_stream(device)

        def record() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record(stream)
            return event

        return cls(record)

    def mark(self) -> Any:
        return self._record()

    def seconds(self, start: Any, end: Any) -> float | None:
        # `elapsed_time` raises for an event that has not happened. The start has, if the end has:
        # both are on one stream.
        if not end.query():
            return None
        return start.elapsed_time(end) / 1000  # CUDA counts in milliseconds

    def wait(self, mark: Any) -> None:
        mark.synchronize()
