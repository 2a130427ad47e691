"""Bytes that torch's allocator of the CPU hands out, also inside of operations that Python sees
as one."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def most_allocated(compute: Callable[[], object]) -> tuple[int, int]:
    """(Bytes of the largest allocation, bytes at the worst moment) while `compute` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        compute()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    now = worst = 0
    for size in sizes:
        now += size
        worst = max(worst, now)
    return max(sizes), worst
