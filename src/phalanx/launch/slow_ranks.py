"""Says which rank is slow, while a run goes on: from the seconds that each rank takes for its own
work in a step, beside those of the ranks with the same work.

A rank that waits is not slow; the one that it waits for is. Nor is it one that wants a processor
which other processes have: that is the kernel's to say. What counts is how much longer a rank takes
than its peers over many steps, beside how much it usually differs from them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean, median

from phalanx.launch.own_step import OWN_PHASES, OwnStep, average_steps, read_own_step
from phalanx.observe.events import Event, RankSlow, RankSlowEnded, StepFinished

# Samples that are looked at together; a slow rank is named within 20. A sample is a step, or as
# many as take so long: what else a machine does slows a core down for seconds, and is over.
WINDOW, WINDOW_S = 16, 6.0
_SAMPLE_S = WINDOW_S / WINDOW
# Of these the slowest may be accidents of the rank, and the fastest accidents of its peers.
_NUM_TRIMMED = 3
# A rank is slow from this factor on, and is not any more below the second.
SLOW_FACTOR, RECOVERED_FACTOR = 1.2, 1.1
# And from this one on where ranks had no processor for such a share of their own work: beside the
# work of others a core does less for some seconds.
SLOW_FACTOR_BESIDE_OTHERS, _BUSY_SHARE = 1.25, 0.05
# In so many samples of the window, and for so long, it must have taken clearly longer: a few
# accidents are no slowness.
_MIN_SLOW_SAMPLES, MIN_SLOW_S, _SLOW_SAMPLE_FACTOR = 7, 4.5, 1.15
# What a rank takes longer must be this much of the step, and so many seconds.
_MIN_STEP_SHARE, _MIN_EXCESS_S = 0.1, 0.001
# How far beyond the usual difference of a rank from its peers, in standard errors of the window.
_MIN_DEVIATIONS = 5.0
_HISTORY = 400
# Before there is a history, and the least that is believed of one.
_MIN_HISTORY, _UNKNOWN_SPREAD, _MIN_SPREAD = 32, 0.5, 0.05
_WARM_UP_STEPS = 3
_NORMAL_PER_MAD = 1.4826


@dataclass(frozen=True)
class _Sample:
    """What each rank took for one of so many steps, in their mean. By rank, the medians of its
    peers: seconds of their own work with a processor, and by the clock."""

    first_step: int
    num_steps: int
    steps: Mapping[int, OwnStep]
    peers_active_s: Mapping[int, float]
    peers_self_s: Mapping[int, float]
    ratios: Mapping[int, float]
    """Logarithms of the seconds of each rank over those of its peers, with a processor."""


@dataclass(frozen=True)
class _RankWindow:
    """Samples of one rank of a group, each beside those of its peers."""

    samples: Sequence[_Sample]
    rank: int
    group: range

    @property
    def steps(self) -> list[OwnStep]:
        return [sample.steps[self.rank] for sample in self.samples]

    @property
    def ratios(self) -> list[float]:
        return [sample.ratios[self.rank] for sample in self.samples]

    @property
    def factor(self) -> float:
        """The factor by which the rank takes longer than its peers: the geometric mean without the
        most and the least slow samples."""
        return math.exp(fmean(_trim(self.ratios)))

    @property
    def clock_factor(self) -> float:
        """The same by the clock, with the seconds in which ranks had no processor."""
        ratios = []
        for sample in self.samples:
            ratios.append(math.log(sample.steps[self.rank].self_s / sample.peers_self_s[self.rank]))
        return math.exp(fmean(_trim(ratios)))

    @property
    def least_slow_factor(self) -> float:
        """The factor from which on the rank is slow."""
        steps = [*self.steps, *self.all_peer_steps]
        queued_s = sum(step.queued_s for step in steps)
        self_s = sum(step.self_s for step in steps)
        return SLOW_FACTOR_BESIDE_OTHERS if queued_s > _BUSY_SHARE * self_s else SLOW_FACTOR

    @property
    def excess_s(self) -> float:
        """Seconds that the rank takes longer than its peers in a step. One accident of a peer may
        be more than all of it: accidents are left out."""
        excess_s = []
        for sample in self.samples:
            active_s = sample.steps[self.rank].active_s
            excess_s.append(active_s - sample.peers_active_s[self.rank])
        return fmean(_trim(excess_s))

    @property
    def step_with_a_processor_s(self) -> float:
        """Seconds of a step without those in which the rank had no processor."""
        return fmean(_trim([step.step_s - step.queued_s for step in self.steps]))

    @property
    def all_peer_steps(self) -> list[OwnStep]:
        return [step for sample in self.samples for step in self._list_peer_steps(sample)]

    def list_slow_samples(self) -> list[int]:
        """The samples, from 0, in which the rank took clearly longer."""
        least = math.log(_SLOW_SAMPLE_FACTOR)
        return [index for index, ratio in enumerate(self.ratios) if ratio > least]

    def is_slow_for_long(self) -> bool:
        """Whether the rank took clearly longer in enough samples, and for long enough."""
        found = self.list_slow_samples()
        slow = [self.samples[index] for index in found]
        slow_s = sum(sample.num_steps * sample.steps[self.rank].step_s for sample in slow)
        return len(found) >= _MIN_SLOW_SAMPLES and slow_s >= MIN_SLOW_S

    def sum_waiting_s(self) -> float:
        """Seconds in which peers waited for the rank."""
        return sum(map(self.charge_waiting, self.samples))

    def charge_waiting(self, sample: _Sample) -> float:
        """Seconds in which peers waited for the rank in a sample."""
        peer_steps = self._list_peer_steps(sample)
        return sample.num_steps * _charge_waiting(sample.steps[self.rank], peer_steps)

    def _list_peer_steps(self, sample: _Sample) -> list[OwnStep]:
        return [sample.steps[other] for other in self.group if other != self.rank]


@dataclass
class _RankHistory:
    """How a rank differs from its peers. `usual`: logarithms of its seconds over theirs in samples
    in which it was not slow; `usual_means`: of the windows that these made, the trimmed means."""

    usual: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    usual_means: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    slow_since: int = 0
    waited_s: float = 0.0

    def add_usual_ratio(self, ratio: float) -> None:
        self.usual.append(ratio)
        if len(self.usual) >= WINDOW:
            newest = list(islice(reversed(self.usual), WINDOW))
            self.usual_means.append(fmean(_trim(newest)))

    def estimate_usual(self) -> tuple[float, float]:
        """The usual logarithm by which the rank takes longer than its peers, and the standard error
        of the mean of a window."""
        if len(self.usual) < _MIN_HISTORY:
            return 0.0, _UNKNOWN_SPREAD / math.sqrt(WINDOW)
        middle = median(self.usual)
        of_sample = _NORMAL_PER_MAD * median(abs(ratio - middle) for ratio in self.usual)
        # Where what disturbs a rank goes on for many samples, windows differ by more than samples
        # that do not know of each other would make them.
        of_window = _NORMAL_PER_MAD * median(abs(each - middle) for each in self.usual_means)
        return middle, max(of_window, max(of_sample, _MIN_SPREAD) / math.sqrt(WINDOW))


class SlowRankJudge:
    """Told of each step of all ranks, in order. `num_stages`: ranks of one pipeline stage, which
    are numbered one after the other, have the same work; a stage of one rank has no peers, and is
    not judged."""

    def __init__(self, num_ranks: int, num_stages: int = 1) -> None:
        size = num_ranks // max(num_stages, 1)
        self._groups: list[range] = []
        if size > 1:
            self._groups = [range(first, first + size) for first in range(0, num_ranks, size)]
        self._histories = {rank: _RankHistory() for group in self._groups for rank in group}
        self._num_steps = 0
        self._window: deque[_Sample] = deque(maxlen=WINDOW)
        # Steps that make no sample yet, and the number of the first.
        self._newest: list[Mapping[int, OwnStep]] = []
        self._first_step = 0

    def add_step(self, number: int, steps: Mapping[int, OwnStep]) -> list[Event]:
        """The events that follow from one more step."""
        self._num_steps += 1
        # Allocations, first reads.
        if self._num_steps <= _WARM_UP_STEPS or not self._groups:
            return []
        if not self._newest:
            self._first_step = number
        self._newest.append(steps)
        if sum(max(step.step_s for step in each.values()) for each in self._newest) < _SAMPLE_S:
            return []
        self._add_sample()
        if len(self._window) < WINDOW:
            return []
        events: list[Event] = []
        for group in self._groups:
            windows = {rank: _RankWindow(self._window, rank, group) for rank in group}
            slowest = max(group, key=lambda rank: windows[rank].factor)
            for rank in group:
                event = self._judge_rank(number, rank, windows[rank], may_begin=rank == slowest)
                if event is not None:
                    events.append(event)
        return events

    def end(self, number: int) -> list[Event]:
        """The ends of what is slow when an attempt is over."""
        events: list[Event] = []
        for rank, history in self._histories.items():
            if history.slow_since:
                events.append(replace(_build_end(rank, number, history), with_attempt=True))
        return events

    def _add_sample(self) -> None:
        """Make a sample of the newest steps. The oldest of a full window becomes history."""
        if len(self._window) == WINDOW:
            for rank, history in self._histories.items():
                if not history.slow_since:
                    history.add_usual_ratio(self._window[0].ratios[rank])
        ranks = self._histories
        means = {rank: average_steps([steps[rank] for steps in self._newest]) for rank in ranks}
        peers_active_s: dict[int, float] = {}
        peers_self_s: dict[int, float] = {}
        for group in self._groups:
            peers_active_s |= _find_medians_of_others(
                {rank: means[rank].active_s for rank in group}
            )
            peers_self_s |= _find_medians_of_others({rank: means[rank].self_s for rank in group})
        ratios = {rank: math.log(means[rank].active_s / peers_active_s[rank]) for rank in ranks}
        num_steps = len(self._newest)
        self._window.append(
            _Sample(self._first_step, num_steps, means, peers_active_s, peers_self_s, ratios)
        )
        self._newest = []

    def _judge_rank(
        self, number: int, rank: int, window: _RankWindow, *, may_begin: bool
    ) -> Event | None:
        history = self._histories[rank]
        if history.slow_since:
            history.waited_s += window.charge_waiting(window.samples[-1])
            if window.factor >= RECOVERED_FACTOR:
                return None
            event = _build_end(rank, number, history)
            history.slow_since, history.waited_s = 0, 0.0
            return event
        if not may_begin or not self._is_slow(history, window):
            return None
        history.slow_since = self._window[window.list_slow_samples()[0]].first_step
        history.waited_s = window.sum_waiting_s()
        return RankSlow(
            slow_rank=rank,
            step=number,
            first_step=history.slow_since,
            factor=window.factor,
            excess_s=window.excess_s,
            phase=_find_slowest_phase(window.steps, window.all_peer_steps),
            waited_s=history.waited_s,
            cpu_share=_compute_cpu_share(window.steps),
            peers_cpu_share=_compute_cpu_share(window.all_peer_steps),
        )

    def _is_slow(self, history: _RankHistory, window: _RankWindow) -> bool:
        # What goes through the steps of all peers comes last: of most windows the first says no.
        if window.factor < SLOW_FACTOR or not window.is_slow_for_long():
            return False
        if window.factor < window.least_slow_factor:
            return False
        # Where its peers lack a processor for as long as it computes longer, nobody waits for it.
        if window.clock_factor < RECOVERED_FACTOR:
            return False
        middle, standard_error = history.estimate_usual()
        # One that is always a little behind is compared with itself.
        usual = min(max(middle, 0.0), math.log(SLOW_FACTOR))
        if math.log(window.factor) - usual < _MIN_DEVIATIONS * standard_error:
            return False
        least_s = _MIN_STEP_SHARE * window.step_with_a_processor_s
        return window.excess_s >= max(_MIN_EXCESS_S, least_s)


class SlowRankWatch:
    """Puts the steps of all ranks of an attempt together for the judge, as their events come."""

    def __init__(self, num_ranks: int = 0, num_stages: int = 1) -> None:
        self._num_ranks, self._num_stages = num_ranks, num_stages
        self._attempt = -1
        self._begin_attempt(-1)

    def _begin_attempt(self, attempt: int) -> None:
        self._attempt, self._newest = attempt, 0
        self._judge = SlowRankJudge(self._num_ranks, self._num_stages)
        self._partial: dict[int, dict[int, OwnStep | None]] = {}

    def change_ranks(self, num_ranks: int, num_stages: int) -> None:
        """The next attempt has another layout."""
        self._num_ranks, self._num_stages = num_ranks, num_stages

    def add(self, rank: int, attempt: int, event: StepFinished) -> list[Event]:
        """The events that follow from a rank's step."""
        events: list[Event] = []
        if attempt < self._attempt or rank < 0:
            return events
        if attempt > self._attempt:
            events += self._judge.end(self._newest)
            self._begin_attempt(attempt)
        of_step = self._partial.setdefault(event.step, {})
        of_step[rank] = read_own_step(event)
        if len(of_step) < self._num_ranks:
            # Ranks that record sums leave steps that are never whole.
            if len(self._partial) > 4 * WINDOW:
                del self._partial[min(self._partial)]
            return events
        del self._partial[event.step]
        self._newest = event.step
        own_steps = {rank: step for rank, step in of_step.items() if step is not None}
        if len(own_steps) == self._num_ranks:
            events += self._judge.add_step(event.step, own_steps)
        return events


def _trim(values: Sequence[float]) -> list[float]:
    """The values of a window without those that may be accidents."""
    return sorted(values)[_NUM_TRIMMED:-_NUM_TRIMMED]


def _find_medians_of_others(values: Mapping[int, float]) -> dict[int, float]:
    """For each rank the median of the values of the others: sorted once, for runs of many ranks."""
    ordered = sorted(values, key=values.__getitem__)
    middle = (len(ordered) - 1) // 2
    medians = {}
    for place, rank in enumerate(ordered):
        upper = values[ordered[middle + (middle >= place)]]
        if len(ordered) % 2 == 0:
            medians[rank] = upper
        else:
            medians[rank] = (values[ordered[middle - 1 + (middle - 1 >= place)]] + upper) / 2.0
    return medians


def _charge_waiting(step: OwnStep, peers: Sequence[OwnStep]) -> float:
    """Seconds in which peers waited for this rank in one step: no more than it took longer."""
    return sum(min(peer.waiting_s, max(0.0, step.active_s - peer.active_s)) for peer in peers)


def _find_slowest_phase(steps: Sequence[OwnStep], peer_steps: Sequence[OwnStep]) -> str:
    """The phase in which these steps take longest beside those of peers."""
    excess_s = {}
    for phase in OWN_PHASES:
        excess_s[phase] = _compute_phase_s(steps, phase) - _compute_phase_s(peer_steps, phase)
    return max(excess_s, key=excess_s.__getitem__)


def _compute_phase_s(steps: Sequence[OwnStep], phase: str) -> float:
    """Seconds of the phase in a step, accidents left out: as if the rank had no processor for the
    same share of each of its phases, which nobody counts."""
    seconds = [step.own_s.get(phase, 0.0) * step.active_s / step.self_s for step in steps]
    return fmean(_trim(seconds))


def _compute_cpu_share(steps: Sequence[OwnStep]) -> float:
    """Cores that ranks used in the seconds of their own work; 0 where nobody counted."""
    return sum(step.cpu_s for step in steps) / sum(step.self_s for step in steps)


def _build_end(rank: int, number: int, history: _RankHistory) -> RankSlowEnded:
    return RankSlowEnded(
        slow_rank=rank,
        step=number,
        first_step=history.slow_since,
        waited_s=history.waited_s,
    )
