"""Drift over a run: steps that take longer and longer, and memory that grows and grows.

The slope is that of Theil (1950) and Sen (1968): the median of the slopes between all pairs of
windows' medians, which a tenth of odd windows does not move. It counts as drift where even the end
of its 99.9 % interval that is nearer to nothing (Sen 1968, by the variance of Kendall's tau) is
beyond a threshold, and the second half of the run goes on as the first.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from phalanx.core.units import MIB
from phalanx.observe.events import Envelope, StepFinished, StepsSummed

NUM_WINDOWS = 24
MIN_STEPS = 240
"""Of an attempt, after its first ones are left out: with fewer nothing is said."""
WARM_UP_SHARE = 0.1
"""Of the steps of an attempt: caches fill, allocators settle."""
MIN_SLOWDOWN_SHARE = 0.05
"""Steps that take so much more at the end than at the beginning are said."""
MIN_GROWTH_BYTES = 32 * MIB
MIN_GROWTH_SHARE = 0.02
"""Memory that has grown by both, the second of what there was, is said."""
# Two-sided 99.9 % of a normal distribution.
_Z = 3.29
# The second half must have this share of the whole slope: what settles is no drift.
_MIN_SHARE_OF_LATE_SLOPE = 1 / 3


@dataclass(frozen=True)
class Slope:
    """A trend per step. `least`: the end of its interval that is nearer to 0, 0 if 0 is inside.
    `start`: the median of the first windows; `num_steps`: how far the windows reach."""

    per_step: float
    least: float
    start: float
    num_steps: float


@dataclass(frozen=True)
class Drift:
    """What drifts: `kind` is "step time" (seconds) or "memory" (bytes, of `rank`).

    `total`: at least so much more over `num_steps` steps, from `start`.
    """

    kind: str
    rank: int
    slope: Slope

    @property
    def total(self) -> float:
        return self.slope.least * self.slope.num_steps

    def describe(self) -> str:
        """One sentence."""
        slope = self.slope
        if self.kind == "step time":
            share = 100 * slope.per_step * slope.num_steps / slope.start
            return (
                f"steps take longer and longer: {share:.0f} % more over {slope.num_steps:,.0f}"
                f" steps, from {1000 * slope.start:.3g} ms"
            )
        grown = slope.per_step * slope.num_steps
        return (
            f"memory of rank {self.rank} grows and grows: {slope.per_step / MIB:.3g} MiB a step,"
            f" {grown / MIB:,.0f} MiB over {slope.num_steps:,.0f} steps, from"
            f" {slope.start / MIB:,.0f} MiB"
        )


@dataclass
class _Stream:
    """The steps of one rank in one attempt, in order: number, seconds, bytes (0: not known)."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    step_s: array[float] = field(default_factory=lambda: array("d"))
    own_bytes: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: float, step_s: float, own_bytes: float) -> None:
        if math.isfinite(step_s) and (not self.steps or step > self.steps[-1]):
            self.steps.append(step)
            self.step_s.append(step_s)
            self.own_bytes.append(own_bytes)


@dataclass
class DriftLog:
    """Hears the steps of all ranks, each rank's in order, and keeps those of its newest attempt: 24
    bytes for each line."""

    _streams: dict[int, tuple[int, _Stream]] = field(default_factory=dict)

    def add_event(self, envelope: Envelope) -> None:
        event = envelope.event
        if not isinstance(event, StepFinished | StepsSummed):
            return
        attempt, stream = self._streams.get(envelope.rank, (-1, None))
        if stream is None or envelope.attempt > attempt:
            attempt, stream = envelope.attempt, _Stream()
            self._streams[envelope.rank] = attempt, stream
        if attempt != envelope.attempt:
            return
        if isinstance(event, StepFinished):
            stream.add(event.step, event.step_s, event.own_bytes)
        else:
            stream.add(event.last_step, event.step_s / max(event.num_steps, 1), event.own_bytes)

    def measure_step_slope(self) -> Slope | None:
        """Of the first rank's seconds: all ranks go in step. None where there are too few."""
        if not self._streams:
            return None
        _, stream = self._streams[min(self._streams)]
        return measure_slope(stream.steps, stream.step_s)

    def measure_memory_slopes(self) -> dict[int, Slope]:
        """By rank, of its own bytes, where they were recorded for long enough."""
        slopes = {}
        for rank, (_, stream) in sorted(self._streams.items()):
            if stream.own_bytes and min(stream.own_bytes) > 0:
                slope = measure_slope(stream.steps, stream.own_bytes)
                if slope is not None:
                    slopes[rank] = slope
        return slopes

    def find_drifts(self) -> list[Drift]:
        """What drifts: step time, and the memory of the rank that grows most."""
        drifts = []
        step_slope = self.measure_step_slope()
        if step_slope is not None and is_slowdown(step_slope):
            drifts.append(Drift("step time", min(self._streams), step_slope))
        growing = [
            Drift("memory", rank, slope)
            for rank, slope in self.measure_memory_slopes().items()
            if is_leak(slope)
        ]
        if growing:
            drifts.append(max(growing, key=lambda drift: drift.total))
        return drifts


def is_slowdown(slope: Slope) -> bool:
    """True if steps got slower by MIN_SLOWDOWN_SHARE at least."""
    return slope.least * slope.num_steps >= MIN_SLOWDOWN_SHARE * slope.start > 0


def is_leak(slope: Slope) -> bool:
    """True if memory grew by MIN_GROWTH_BYTES and MIN_GROWTH_SHARE at least."""
    return slope.least * slope.num_steps >= max(MIN_GROWTH_BYTES, MIN_GROWTH_SHARE * slope.start)


def measure_slope(steps: Sequence[float], values: Sequence[float]) -> Slope | None:
    """The trend of `values` over `steps`, without the first ones; None of fewer than MIN_STEPS
    steps, or of fewer lines than windows. What does not go on in the second half has a `least` of
    0."""
    if len(steps) < NUM_WINDOWS:
        return None
    first = steps[0] + WARM_UP_SHARE * (steps[-1] - steps[0])
    start = next(index for index, step in enumerate(steps) if step >= first)
    if steps[-1] - steps[start] < MIN_STEPS or len(steps) - start < NUM_WINDOWS:
        return None
    xs, ys = [], []
    count = len(steps) - start
    for window in range(NUM_WINDOWS):
        window_start = start + window * count // NUM_WINDOWS
        end = start + (window + 1) * count // NUM_WINDOWS
        xs.append((steps[window_start] + steps[end - 1]) / 2)
        ys.append(median(values[window_start:end]))
    slopes = _list_pair_slopes(xs, ys)
    per_step = median(slopes)
    # Of tau's numerator without ties: n(n-1)(2n+5)/18.
    deviation = math.sqrt(NUM_WINDOWS * (NUM_WINDOWS - 1) * (2 * NUM_WINDOWS + 5) / 18)
    margin = _Z * deviation
    low = slopes[math.floor((len(slopes) - margin) / 2)]
    high = slopes[min(math.ceil((len(slopes) + margin) / 2), len(slopes) - 1)]
    late = median(_list_pair_slopes(xs[NUM_WINDOWS // 2 :], ys[NUM_WINDOWS // 2 :]))
    least = 0.0
    if (low > 0 or high < 0) and late / per_step >= _MIN_SHARE_OF_LATE_SLOPE:
        least = low if low > 0 else high
    return Slope(per_step, least, median(ys[:3]), xs[-1] - xs[0])


def _list_pair_slopes(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """Slopes between all pairs of points, ascending."""
    return sorted(
        (ys[later] - ys[earlier]) / (xs[later] - xs[earlier])
        for earlier in range(len(xs))
        for later in range(earlier + 1, len(xs))
    )
