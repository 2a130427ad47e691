"""What is known of each block of memory that a program asked for, and what that adds up to.

Memory is followed by storage: views share one, and it is freed when the last of them goes. Who a
storage belongs to is often known only later (a gradient is one once it lies in `.grad`), so the log
notes births, deaths and changes of size, and is read when the program is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.verify.dry_run.callers import OperationCaller
from phalanx.verify.dry_run.moments import BACKWARD, FORWARD, LOSS, MomentLog, StepMoment

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, COMMUNICATION = "activations", "communication"
LOSS_CATEGORY, OTHER = "loss", "other"
HOST = "host"
"""What waits in host memory: no category of a device's."""
CATEGORIES = (
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER,
    ACTIVATIONS,
    COMMUNICATION,
    LOSS_CATEGORY,
    OTHER,
)

# What these files make travels between ranks, or is made of weights that do.
_COMMUNICATING = (
    "phalanx/mesh/gloo_collectives.py",
    "phalanx/parallel/context/group.py",
    "phalanx/parallel/context/attention.py",
    "phalanx/parallel/data_parallel/",
    "phalanx/parallel/expert/transform.py",
    "phalanx/parallel/hooks/",
    "phalanx/parallel/pipeline/p2p.py",
    "phalanx/parallel/pipeline/tied_params.py",
    "phalanx/parallel/tensor/grad_sync.py",
    "phalanx/parallel/wire.py",
)
# What these files make is in host memory, where a plan is for GPUs.
_ON_HOST = ("phalanx/parallel/offload/",)
# What tensor parallelism gathers is an activation where it outlives the forward.
_GATHERING = ("phalanx/mesh/tensor_group.py", "phalanx/parallel/tensor/overlap.py")


@dataclass(slots=True, eq=False)
class StorageRecord:
    """One storage. `born` and `died` are indices of moments; `category` is set where somebody knows
    it, and `is_cast` for a copy of a weight in another type."""

    num_bytes: int
    born: int
    caller: OperationCaller
    died: int | None = None
    category: str = ""
    is_cast: bool = False


@dataclass(frozen=True)
class Change:
    """`record` grew by so many bytes during a moment."""

    record: StorageRecord
    num_bytes: int
    moment: int


@dataclass
class StorageLog:
    """All changes of memory of one program, in their order."""

    moments: MomentLog = field(default_factory=MomentLog)
    changes: list[Change] = field(default_factory=list)
    live_bytes: int = 0

    def add(self, record: StorageRecord, num_bytes: int) -> None:
        if num_bytes:
            self.live_bytes += num_bytes
            self.changes.append(Change(record, num_bytes, self.moments.index))

    def categorize_storage(self, record: StorageRecord) -> str:
        """The category of a storage, once the program is over."""
        if record.category:
            return record.category
        born = self.moments.moments[record.born]
        file, through = record.caller.file, record.caller.through
        if through == "fsdp" or record.is_cast or file.startswith(_COMMUNICATING):
            return COMMUNICATION
        if born.part == LOSS:
            return LOSS_CATEGORY
        if born.phase not in (FORWARD, BACKWARD):
            return OTHER
        if self._outlives_moment_of_birth(record):
            return ACTIVATIONS
        return COMMUNICATION if file.startswith(_GATHERING) else OTHER

    def _outlives_moment_of_birth(self, record: StorageRecord) -> bool:
        """True for what is there when the part that made it has ended: autograd, or the next part,
        has it."""
        return record.died is None or record.died > record.born


@dataclass(frozen=True)
class MemoryPeak:
    """The most memory at one time: bytes by category, and when that was."""

    total_bytes: int
    by_category: Mapping[str, int]
    moment: StepMoment

    def to_json(self) -> dict[str, Any]:
        return {
            "total_bytes": self.total_bytes,
            "by_category": dict(self.by_category),
            "moment": self.moment.to_json(),
            "when": self.moment.describe(),
        }


@dataclass(frozen=True)
class MemoryTimelinePoint:
    """The most memory during one moment, by category."""

    moment: StepMoment
    by_category: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.by_category.values())


def build_memory_timeline(
    log: StorageLog,
    first: int,
    stop: int | None = None,
    on_host: Collection[str] = (),
) -> list[MemoryTimelinePoint]:
    """The most memory of each moment from the one numbered `first` on, before `stop`.

    Categories `on_host` wait in host memory and do not count, and neither does what offload made:
    of a plan for GPUs, whose dry run has them beside the rest.
    """
    if stop is None:
        stop = len(log.moments.moments)
    points = []
    for moment, by_category in _iterate_moment_peaks(log, on_host):
        if first <= moment < stop:
            points.append(MemoryTimelinePoint(log.moments.moments[moment], by_category))
    return points


def find_highest_point(timeline: Sequence[MemoryTimelinePoint]) -> MemoryPeak:
    """The highest point; the first of several."""
    highest = max(timeline, key=lambda point: point.total_bytes)
    return MemoryPeak(highest.total_bytes, highest.by_category, highest.moment)


def _iterate_moment_peaks(
    log: StorageLog, on_host: Collection[str]
) -> Iterator[tuple[int, dict[str, int]]]:
    """(moment, bytes by category at the highest point in it), for each moment in which memory
    changed."""
    now = dict.fromkeys(CATEGORIES, 0)
    total, highest, best, moment = 0, -1, dict(now), 0
    for change in log.changes:
        if change.moment != moment:
            yield moment, best
            # What is there when a moment begins counts in it as well.
            moment, highest, best = change.moment, total, dict(now)
        category = log.categorize_storage(change.record)
        is_away = category in on_host or change.record.caller.file.startswith(_ON_HOST)
        if on_host and is_away:
            continue
        now[category] += change.num_bytes
        total += change.num_bytes
        if total > highest:
            highest, best = total, dict(now)
    yield moment, best
