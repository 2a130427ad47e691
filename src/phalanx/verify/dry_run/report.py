"""What a dry run says, as data: JSON in and out. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

SCHEMA_VERSION = 1
# What a plan counts on top of tensors: memory that an allocator keeps, and copies for saves.
NOT_TENSORS = ("allocator", "staging")


@dataclass(frozen=True)
class CollectiveRow:
    """One collective as it was called: `count` times in a step, `num_bytes` each.

    `axis` names the axes of the layout along which the ranks of its group differ. `num_bytes` is
    the whole message: what is reduced, all that is gathered, scattered, exchanged or sent;
    `sent_bytes` what this rank sends of it by ring algorithms. `purpose` and `caller` say what it
    is for, and the line of phalanx or of the user's code that asked for it.
    """

    kind: str
    axis: str
    group_size: int
    first_rank: int
    num_bytes: int
    sent_bytes: float
    phase: str
    purpose: str
    caller: str
    count: int


@dataclass(frozen=True)
class TimelineRow:
    """The most memory at one time during one stretch of the step."""

    when: str
    total_bytes: int
    by_category: Mapping[str, int]


@dataclass(frozen=True)
class RankKindReport:
    """A dry run of one kind of rank.

    `peak_bytes` and `peak_by_category` are of the moment `peak_when`. `planned_bytes` is what the
    plan says of tensors by category. `num_traced` of `num_microbatches` microbatches were run: the
    others repeat the second one. `boundary`: the form of what stages of a pipeline hand on.
    """

    name: str
    rank: int
    stages: tuple[int, ...]
    peak_bytes: int
    peak_when: str
    peak_by_category: Mapping[str, int]
    planned_bytes: Mapping[str, int]
    collectives: tuple[CollectiveRow, ...]
    timeline: tuple[TimelineRow, ...]
    num_traced: int
    num_microbatches: int
    num_operations: int
    wall_s: float
    boundary: Mapping[str, Any] | None = None
    is_cached: bool = False

    @property
    def planned_total_bytes(self) -> int:
        """Bytes of tensors that the plan predicts."""
        return sum(self.planned_bytes.values())

    @property
    def plan_error(self) -> float:
        """Planned over measured bytes, less 1: positive where the plan predicts more."""
        return self.planned_total_bytes / self.peak_bytes - 1

    def sent_bytes_by_axis(self) -> dict[str, float]:
        """Bytes that the rank sends in a step, by axis."""
        total: dict[str, float] = {}
        for row in self.collectives:
            total[row.axis] = total.get(row.axis, 0.0) + row.count * row.sent_bytes
        return total

    def to_json(self) -> dict[str, Any]:
        derived = {
            "planned_total_bytes": self.planned_total_bytes,
            "plan_error": self.plan_error,
            "sent_bytes_by_axis": self.sent_bytes_by_axis(),
        }
        return asdict(self) | derived

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> RankKindReport:
        values = {name: body[name] for name in cls.__dataclass_fields__}
        values["stages"] = tuple(body["stages"])
        values["collectives"] = tuple(CollectiveRow(**row) for row in body["collectives"])
        values["timeline"] = tuple(TimelineRow(**row) for row in body["timeline"])
        return cls(**values)

    def copy_as_cached(self) -> RankKindReport:
        return replace(self, is_cached=True)


@dataclass(frozen=True)
class DryRunReport:
    """The dry run of a plan: its kinds of rank, the first stage's first. `device`: the plan's."""

    layout: str
    world_size: int
    device: str
    capacity_bytes: int
    has_experts: bool
    kinds: tuple[RankKindReport, ...]

    @property
    def highest(self) -> RankKindReport:
        """The kind whose memory peaks highest."""
        return max(self.kinds, key=lambda kind: kind.peak_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": SCHEMA_VERSION,
            "layout": self.layout,
            "world_size": self.world_size,
            "device": self.device,
            "capacity_bytes": self.capacity_bytes,
            "assumes_even_routing": self.has_experts,
            "peak_bytes": self.highest.peak_bytes,
            "peak_kind": self.highest.name,
            "kinds": [kind.to_json() for kind in self.kinds],
        }


def sum_planned_tensor_bytes(predicted_bytes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of tensors that a plan predicts, by category of the dry run."""
    planned = {}
    for category, num_bytes in predicted_bytes.items():
        if category not in NOT_TENSORS:
            planned[category] = num_bytes
    return planned
