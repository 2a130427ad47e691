"""The collectives of a run by who called them: sums over its ranks and attempts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.observe.events import CollectivesCounted
from phalanx.report.formats import finite_or_zero


@dataclass
class CallerFacts:
    """The calls of one operation over one axis from one line, of `num_ranks` ranks together.

    `wait_s`: seconds inside of waits for them; `most_wait_s` of the rank that waited longest. NaN:
    no rank timed its waits, as on a GPU.
    """

    axis: str
    operation: str
    caller: str
    num_calls: int = 0
    num_bytes: float = 0.0
    wait_s: float = 0.0
    most_wait_s: float = 0.0
    num_ranks: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "operation": self.operation,
            "caller": self.caller,
            "num_calls": self.num_calls,
            "num_bytes": self.num_bytes,
            "wait_s": round(self.wait_s, 4),
            "most_wait_s": round(self.most_wait_s, 4),
            "num_ranks": self.num_ranks,
        }


@dataclass
class _RankTotals:
    num_calls: float = 0.0
    num_bytes: float = 0.0
    wait_s: float = math.nan


@dataclass
class CallerLog:
    """Hears the events of all ranks, in any order."""

    # By axis, operation and caller, by rank.
    _totals: dict[tuple[str, str, str], dict[int, _RankTotals]] = field(default_factory=dict)

    def add_event(self, rank: int, event: CollectivesCounted) -> None:
        for name, num_calls in event.num_calls.items():
            of_rank = self._totals.setdefault(_split_name(name), {}).setdefault(rank, _RankTotals())
            of_rank.num_calls += finite_or_zero(num_calls)
            of_rank.num_bytes += _get_finite(event.num_bytes, name)
            if name in event.wait_s:
                wait_s = _get_finite(event.wait_s, name)
                of_rank.wait_s = finite_or_zero(of_rank.wait_s) + wait_s

    def list_caller_facts(self) -> list[CallerFacts]:
        """Those that were waited for longest first."""
        facts = []
        for (axis, operation, caller), of_ranks in self._totals.items():
            waits = [each.wait_s for each in of_ranks.values() if math.isfinite(each.wait_s)]
            facts.append(
                CallerFacts(
                    axis,
                    operation,
                    caller,
                    int(sum(each.num_calls for each in of_ranks.values())),
                    sum(each.num_bytes for each in of_ranks.values()),
                    sum(waits) if waits else math.nan,
                    max(waits, default=math.nan),
                    len(of_ranks),
                )
            )
        return sorted(
            facts, key=lambda each: (finite_or_zero(each.wait_s), each.num_bytes), reverse=True
        )


def _split_name(name: str) -> tuple[str, str, str]:
    """Axis, operation and caller of "dp [0-3]: all_reduce at file.py:3". Groups of one axis through
    different ranks count as one: each rank is in one of them."""
    group, _, call = name.partition(": ")
    operation, _, caller = call.partition(" at ")
    return group.partition(" [")[0], operation, caller


def _get_finite(values: Mapping[str, float], name: str) -> float:
    return finite_or_zero(values.get(name, 0.0))
