"""What a rank records of the steps that are traced, row by row: whole numbers and texts alone.

All times are nanoseconds of the rank's monotonic clock.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class StepSpan(NamedTuple):
    """A traced step, from where its rank began with it to where its facts were recorded."""

    step: int
    start_ns: int
    end_ns: int


class PhaseSpan(NamedTuple):
    """A phase of the thread that trains, or of one beside it (`is_foreground` 0: a save).

    `words`: what it stands for; `axis`: of a collective, "" otherwise; microbatch -1: of none.
    """

    step: int
    microbatch: int
    is_foreground: int
    name: str
    words: str
    axis: str
    start_ns: int
    end_ns: int


class ActionSpan(NamedTuple):
    """An action of a pipeline's schedule, without waiting for messages."""

    step: int
    action: str
    start_ns: int
    end_ns: int


class CollectiveSpan(NamedTuple):
    """A collective, a send or a receive (`peer`, `tag` as in the black box).

    `group` is the number of a TracedGroup of the same part. `wait_ns` is when this rank began to
    wait (-1: it did not, or in C++), `end_ns` when it ended (-1: not seen). `end_seen`: "completed"
    (the transfer said so), "waited" (when the wait for it was over), "noticed" (found to have ended
    before this time), "failed", "queued" (on a device, which is not asked), "open".
    """

    step: int
    microbatch: int
    op: str
    group: int
    sequence: int
    dtype: str
    num_bytes: int
    num_tensors: int
    peer: int
    tag: int
    is_foreground: int
    phase: str
    site: str
    posted_ns: int
    wait_ns: int
    end_ns: int
    end_seen: str


class MemorySample(NamedTuple):
    """Bytes that are resident, and that a GPU's allocator gave out (-1: there is none)."""

    at_ns: int
    resident_bytes: int
    allocated_bytes: int


class OperatorSpan(NamedTuple):
    """An event of torch.profiler: an operator of a thread, or a kernel of a stream."""

    lane: str
    name: str
    start_ns: int
    end_ns: int


class ClockOffset(NamedTuple):
    """`offset_ns` on this rank's clock at `at_ns` gives rank 0's, wrong by at most `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


class TracedGroup(NamedTuple):
    """A process group: `key` is the same on all its ranks."""

    key: str
    label: str
    ranks: str


TraceRow = (
    StepSpan
    | PhaseSpan
    | ActionSpan
    | CollectiveSpan
    | MemorySample
    | OperatorSpan
    | ClockOffset
    | TracedGroup
)
ROW_CLASS_OF_KIND: dict[str, type[Any]] = {
    "step": StepSpan,
    "phase": PhaseSpan,
    "action": ActionSpan,
    "collective": CollectiveSpan,
    "memory": MemorySample,
    "operator": OperatorSpan,
    "clock": ClockOffset,
    "group": TracedGroup,
}
