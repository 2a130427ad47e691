"""StepTraffic: bytes that this rank sends in a step, by axis of the layout.

Over dp these are the bytes of gradients alone: weights that FSDP and ZeRO-1 gather, buffers that
are broadcast and the few numbers of a step's facts are not counted.

A rank's bytes are those of the bandwidth-optimal algorithms (ring), per rank and step: an
all-reduce of n bytes over w ranks sends 2 (w - 1) / w n, a reduce-scatter or an all-to-all (w - 1)
/ w n, an all-gather of own n bytes (w - 1) n; a message its own bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

COUNTED_AXES = ("dp", "tp", "cp", "ep", "pp")


class SentBytesCounter(Protocol):
    """A group of ranks that counts the bytes that this rank has sent to the others, since it
    began."""

    @property
    def sent_bytes(self) -> float: ...


@dataclass
class GradientTraffic:
    """Bytes that this rank sends to reduce gradients over data parallelism.

    `plain_bytes`: what a step would send in fp32, uncompressed.
    """

    plain_bytes: int = 0
    sent_bytes: float = 0.0

    def add_all_reduce(self, num_bytes: int, num_ranks: int) -> None:
        self.sent_bytes += count_ring_all_reduce_bytes(num_bytes, num_ranks)

    def add_reduce_scatter(self, num_bytes: int, num_ranks: int) -> None:
        """Count a reduce-scatter, or an all-to-all, of a total of `num_bytes`."""
        self.sent_bytes += num_bytes * (num_ranks - 1) / num_ranks

    def add_all_gather(self, rank_bytes: int, num_ranks: int) -> None:
        """Count an all-gather of `rank_bytes` of each rank."""
        self.sent_bytes += rank_bytes * (num_ranks - 1)


def count_ring_all_reduce_bytes(num_bytes: int, num_ranks: int) -> float:
    return 2 * num_bytes * (num_ranks - 1) / num_ranks


@dataclass
class StepTraffic:
    """Counts the bytes of the step under way, by axis.

    Groups count all that they send, evaluations too. A step's bytes are how much their counters
    grew inside of `counting_step_traffic`, but for `excluding_from_step_traffic`.
    """

    gradients: GradientTraffic = field(default_factory=GradientTraffic)
    _senders: dict[str, SentBytesCounter] = field(default_factory=dict)
    _step_bytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED_AXES, 0.0))

    def __post_init__(self) -> None:
        self.count_axis_by_sender("dp", self.gradients)

    def count_axis_by_sender(self, axis: str, sender: SentBytesCounter) -> None:
        """From now on what `sender` sends is that of `axis`."""
        assert axis in COUNTED_AXES, axis
        assert axis not in self._senders, f"two groups send over {axis}"
        self._senders[axis] = sender

    @contextmanager
    def counting_step_traffic(self) -> Iterator[None]:
        """Inside, what is sent belongs to the step."""
        # Differences, because the groups count evaluations and shape inference as well: a group in
        # `mesh` needs to know of no step, and is told nothing.
        before = self._read_sent_bytes_by_axis()
        yield
        for axis, num_bytes in self._read_sent_bytes_by_axis().items():
            self._step_bytes[axis] += num_bytes - before[axis]

    @contextmanager
    def excluding_from_step_traffic(self) -> Iterator[None]:
        """Inside, within `counting_step_traffic`, what is sent is not the step's: a pipeline's
        shape inference, which steps of a known form do not repeat."""
        before = self._read_sent_bytes_by_axis()
        yield
        for axis, num_bytes in self._read_sent_bytes_by_axis().items():
            self._step_bytes[axis] -= num_bytes - before[axis]

    def _read_sent_bytes_by_axis(self) -> dict[str, float]:
        """Bytes that were sent so far, by axis."""
        return {axis: sender.sent_bytes for axis, sender in self._senders.items()}

    def take_sent_bytes_by_axis(self) -> dict[str, int]:
        """Bytes of the step by axis, 0 for an axis that the layout has not; the next one begins."""
        step_bytes, self._step_bytes = self._step_bytes, dict.fromkeys(COUNTED_AXES, 0.0)
        return {axis: round(num_bytes) for axis, num_bytes in step_bytes.items()}
