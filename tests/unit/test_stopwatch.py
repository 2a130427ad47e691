"""The order in which a GPU is given what is timed: no GPU is here, its queue is a list."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from phalanx.bench.stopwatch import keep_device_busy, time_repeatedly


class QueuedEvent:
    def __init__(self, queue: list[str]) -> None:
        self._queue = queue

    def record(self) -> None:
        self._queue.append("event")

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: QueuedEvent) -> float:
        return 1.0


def test_a_gpu_is_busy_while_it_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: QueuedEvent(queue))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: queue.append("busy"), raising=False)
    device = torch.device("cuda")
    time_repeatedly(lambda: queue.append("call"), 0.0, device, partial(keep_device_busy, device))
    batch = ["event", "call", "event"]
    assert queue == batch + ["busy", *batch] * 4
    keep_device_busy(torch.device("cpu"))
    assert len(queue) == 19
