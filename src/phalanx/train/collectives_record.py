"""The collectives of a rank by who called them, as an event."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from phalanx.mesh.collective_recorder import CallerTotals
from phalanx.observe.events import CollectivesCounted

MAX_CALLERS_IN_EVENT = 24


def build_collectives_event(step: int, totals: Sequence[CallerTotals]) -> CollectivesCounted:
    """The event of an attempt that ends at `step`; of `totals`, those that come first."""
    num_calls: dict[str, int] = {}
    num_bytes: dict[str, int] = {}
    wait_s: dict[str, float] = {}
    num_left_out = 0
    for each in totals:
        name = name_caller(each)
        if name not in num_calls and len(num_calls) >= MAX_CALLERS_IN_EVENT:
            num_left_out += 1
            continue
        num_calls[name] = num_calls.get(name, 0) + each.num_calls
        num_bytes[name] = num_bytes.get(name, 0) + each.num_bytes
        # One line may call with tensors of a CPU and of a GPU.
        if each.is_timed or each.wait_s:
            wait_s[name] = round(wait_s.get(name, 0.0) + each.wait_s, 6)
    return CollectivesCounted(step, num_calls, num_bytes, wait_s, num_left_out)


def name_caller(totals: CallerTotals) -> str:
    """ "dp_shard [0-3]: all_gather at data_parallel/zero1.py:199"."""
    caller = "nobody knows where"
    if totals.site.file:
        caller = f"{'/'.join(PurePath(totals.site.file).parts[-2:])}:{totals.site.line}"
    return f"{totals.axis} [{totals.ranks}]: {totals.op} at {caller}"
