"""The same job on more and more devices: the trade of time, cost and efficiency."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.job.copies import apply_job_keys
from phalanx.plan.described_cluster import resize_cluster
from phalanx.plan.search.contradiction import explain_contradiction
from phalanx.plan.search.result import RankedLayout
from phalanx.plan.search.search import search_layouts
from phalanx.plan.search.task import SearchTask


@dataclass(frozen=True)
class DeviceCountResult:
    """The best layout on so many devices. `efficiency`: tokens a second of one device, in parts of
    the same on the fewest devices that fit. `winner` is None where nothing fits."""

    num_devices: int
    winner: RankedLayout | None
    why: str = ""
    fix: str = ""
    """Changes with which there is a layout, where none divides ranks and batch."""
    tokens_per_s: float = 0.0
    efficiency: float = 0.0
    job_hours: float = 0.0
    job_dollars: float | None = None

    def to_json(self) -> dict[str, Any]:
        winner = None if self.winner is None else self.winner.to_json()
        return dict(vars(self)) | {"winner": winner}


def parse_device_counts(text: str) -> list[int]:
    """The numbers of devices that "64..1024" means: doubled from the first to the last; or one
    number. Raises LayoutError for another text."""
    ends = [_parse_count(word) for word in text.split("..")]
    if len(ends) > 2 or None in ends:
        raise LayoutError(f"--gpus {text!r}: wanted a number from 1 on, or a range as 64..1024")
    first, last = ends[0] or 1, ends[-1] or 1
    if first > last:
        raise LayoutError(
            f"--gpus {text!r}: the first number is larger than the last",
            fix=f"--gpus {last}..{first}",
        )
    counts = [first]
    while counts[-1] * 2 <= last:
        counts.append(counts[-1] * 2)
    if counts[-1] != last:
        counts.append(last)
    return counts


def _parse_count(word: str) -> int | None:
    """The whole number from 1 on that `word` is, with commas between thousands ("1,024") or
    without; None for anything else."""
    # No other comma: 8,16,32 is a list, and not the number 81,632.
    if not re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+|[0-9]{1,18}", word):
        return None
    return int(word.replace(",", "")) or None


def search_per_device_count(task: SearchTask, counts: Sequence[int]) -> Iterator[DeviceCountResult]:
    """The best layout of the job on each number of devices, one after the other."""
    basis: float | None = None
    for num_devices in counts:
        count = _search_best_layout_on(task, num_devices)
        if count.winner is not None and count.winner.tokens_per_s_per_device is not None:
            rate = count.winner.tokens_per_s_per_device
            basis = basis or rate
            count = replace(count, efficiency=rate / basis)
        yield count


def _search_best_layout_on(task: SearchTask, num_devices: int) -> DeviceCountResult:
    resized = replace(
        task,
        job=apply_job_keys(task.job, {"parallel.ranks": num_devices}),
        cluster=resize_cluster(task.cluster, num_devices),
        num_ranks=num_devices,
    )
    try:
        result = search_layouts(resized)
    except LayoutError as error:
        error = explain_contradiction(resized, error)
        return DeviceCountResult(num_devices, None, error.what, error.fix or "")
    winner = result.winner
    if winner is None:
        return DeviceCountResult(num_devices, None, result.failure)
    cost = result.economics.get("cost", {})
    return DeviceCountResult(
        num_devices,
        winner,
        tokens_per_s=(winner.tokens_per_s_per_device or 0.0) * num_devices,
        job_hours=cost.get("job_hours", 0.0),
        job_dollars=cost.get("job_dollars"),
    )
