"""Times of all ranks on one clock: that of rank 0."""

from __future__ import annotations

from phalanx.observe.trace_part import TracePart
from phalanx.observe.trace_rows import ClockOffset


class ClockAlignment:
    """Moves times of a rank's part to the clock of rank 0.

    Between the offsets that were measured at the start and at the end, the clocks are taken to
    drift evenly. `error_ns` is the larger error of the two. `is_aligned`: False where the clocks
    differ and no offset is known; times stay as they are then.
    """

    def __init__(self, part: TracePart) -> None:
        self._offsets: list[ClockOffset] = sorted(part.of_kind("clock"))
        is_one_clock = part.header.clock == part.header.reference_clock
        self.is_aligned = is_one_clock or bool(self._offsets)
        self.error_ns = max((offset.error_ns for offset in self._offsets), default=0)

    def to_reference_ns(self, at_ns: int) -> int:
        """`at_ns` of the rank's clock by that of rank 0."""
        if not self._offsets:
            return at_ns
        first, last = self._offsets[0], self._offsets[-1]
        drift_ns, passed_ns = last.offset_ns - first.offset_ns, last.at_ns - first.at_ns
        if passed_ns == 0:
            return at_ns + first.offset_ns
        return at_ns + first.offset_ns + drift_ns * (at_ns - first.at_ns) // passed_ns
