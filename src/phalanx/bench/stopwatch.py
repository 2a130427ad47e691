"""Times one operation: repeats it for a while, on the CPU's clock or by events of the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# A batch of calls lasts at least as long, so that reading the clock costs nothing of it.
MIN_BATCH_S = 100e-6
# About 1 ms: longer than it takes to call what a batch calls.
_BUSY_CYCLES = 2_000_000
LEAST_REPEATS, MOST_REPEATS = 3, 400
WallAndCpu = tuple[float, float]


@dataclass(frozen=True)
class RepeatedTime:
    """Seconds of one call: the median over repeats, and the tenths at both ends; and the median
    of this process's processor seconds."""

    seconds: float
    low_s: float
    high_s: float
    cpu_s: float
    num_repeats: int


def time_repeatedly(
    call: Callable[[], object],
    budget_s: float,
    device: torch.device,
    before: Callable[[], None] = lambda: None,
) -> RepeatedTime:
    """Time `call` until `budget_s` seconds are over, at least LEAST_REPEATS times; `before` each
    batch something may be queued."""
    batch = _choose_calls_per_batch(call, device, before)
    times: list[WallAndCpu] = []
    deadline = time.perf_counter() + budget_s
    while len(times) < MOST_REPEATS:
        before()
        times.append(_time_batch(call, batch, device))
        if time.perf_counter() > deadline and len(times) >= LEAST_REPEATS:
            break
    return _summarize_times(times)


def keep_device_busy(device: torch.device) -> None:
    """Queue nothing of use: what is called meanwhile stands in the queue when the device comes to
    it, and its seconds are those of the device, not those of calling. It has not run on a GPU."""
    if device.type == "cuda":
        torch.cuda._sleep(_BUSY_CYCLES)


def time_exact_repeats(
    call: Callable[[], object], repeats: int, device: torch.device, before: Callable[[], None]
) -> RepeatedTime:
    """Time `call` exactly `repeats` times, as ranks must that call each other; `before` each,
    they meet."""
    times = []
    for _ in range(repeats):
        before()
        times.append(_time_batch(call, 1, device))
    return _summarize_times(times)


def _summarize_times(times: list[WallAndCpu]) -> RepeatedTime:
    walls = sorted(wall_s for wall_s, _ in times)
    cpu_s = statistics.median(cpu_s for _, cpu_s in times)
    tenth = len(walls) // 10
    return RepeatedTime(
        statistics.median(walls), walls[tenth], walls[-1 - tenth], cpu_s, len(walls)
    )


def _choose_calls_per_batch(
    call: Callable[[], object], device: torch.device, before: Callable[[], None]
) -> int:
    # The first call chooses kernels and takes memory, the second shows how long one takes.
    _time_batch(call, 1, device)
    before()
    once_s = _time_batch(call, 1, device)[0]
    return max(1, min(1000, round(MIN_BATCH_S / max(once_s, 1e-7))))


def _time_batch(call: Callable[[], object], batch: int, device: torch.device) -> WallAndCpu:
    """Seconds of one call, of `batch` in a row."""
    if device.type == "cuda":
        return _time_batch_on_gpu(call, batch)
    began, began_cpu = time.perf_counter(), time.process_time()
    for _ in range(batch):
        call()
    cpu_s = time.process_time() - began_cpu
    return (time.perf_counter() - began) / batch, cpu_s / batch


def _time_batch_on_gpu(call: Callable[[], object], batch: int) -> WallAndCpu:
    start_event = torch.cuda.Event(enable_timing=True)
    end_event = torch.cuda.Event(enable_timing=True)
    began_cpu = time.process_time()
    start_event.record()
    for _ in range(batch):
        call()
    cpu_s = time.process_time() - began_cpu
    end_event.record()
    end_event.synchronize()
    return float(start_event.elapsed_time(end_event)) / 1000 / batch, cpu_s / batch
