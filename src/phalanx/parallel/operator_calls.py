"""How many operators a microbatch calls, and what one call costs the host by itself.

Where tensors are small, a step on CPUs is mostly the work of calling operators: Python, autograd,
dispatch. It is the same for a microbatch of any size, so larger ones have less of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import ProfilerConfig, ProfilerState, _profiler_enabled

_NUM_LAYERS, _NUM_REPEATS = 8, 5


@dataclass(frozen=True)
class OperatorCost:
    """Operators that one microbatch calls, and the seconds that one call costs by itself."""

    num_calls: int
    call_s: float


@dataclass
class OperatorCalls:
    """What a profiler recorded of a body; nothing where another one was at work."""

    records: Sequence[Sequence[Any]] = ()

    def count(self) -> int:
        """Operators that were called, those inside of others, too; 0 where nothing was
        recorded."""
        num_calls = 0
        for of_thread in self.records:
            for record in of_thread:
                num_calls += record.kind() == "push" and record.name().startswith("aten::")
        return num_calls


@contextmanager
def counting_operator_calls() -> Iterator[OperatorCalls]:
    """Count the operators that the body calls on this thread and in its backwards.

    Nothing is counted where a profiler is at work already. Each call takes about twice as long
    meanwhile.
    """
    calls = OperatorCalls()
    if _profiler_enabled():
        yield calls
        return
    # The legacy profiler is the one that records calls and nothing else, and prints nothing.
    config = ProfilerConfig(
        ProfilerState.CPU,
        report_input_shapes=False,
        profile_memory=False,
        with_stack=False,
        with_flops=False,
        with_modules=False,
        experimental_config=torch._C._profiler._ExperimentalConfig(),
    )
    torch.autograd._enable_profiler_legacy(config)
    try:
        yield calls
    finally:
        calls.records = torch.autograd._disable_profiler_legacy()


def measure_call_seconds() -> float | None:
    """Seconds that the call of one operator costs in a forward and backward whose tensors are so
    small that nothing else counts; None where calls could not be counted. Draws nothing."""
    with counting_operator_calls() as calls:
        _run_small_layers()
    num_calls = calls.count()
    if not num_calls:
        return None
    seconds = []
    for _ in range(_NUM_REPEATS):
        began = time.perf_counter()
        _run_small_layers()
        seconds.append(time.perf_counter() - began)
    return median(seconds) / num_calls


def _run_small_layers() -> None:
    with torch.enable_grad():
        weight = torch.ones(8, 8, requires_grad=True)
        scale = torch.ones(8, requires_grad=True)
        x = torch.ones(4, 8)
        for _ in range(_NUM_LAYERS):
            x = x + F.gelu(F.linear(F.layer_norm(x, (8,), scale), weight))
        x.sum().backward()
