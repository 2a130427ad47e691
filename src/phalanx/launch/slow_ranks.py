"""Says which rank is slow, while a run goes on: from the seconds that each rank takes for its own
work in a step, beside those of the ranks with the same work.

A rank that waits is not slow; the one that it waits for is. Nor is it one that wants a processor
which other processes have: that is the kernel's to say. What counts is how much longer a rank takes
than its peers over many steps, beside how much it usually differs from them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import mean, median

from phalanx.observe.events import Event, RankSlow, RankSlowEnded, StepFinished

# The own work of a rank in a step, in which ranks of one stage do the same. Rank 0 records more
# than the others, and saves and evaluations are no steps.
OWN_PHASES = ("data", "host_to_device", "prepare", "forward", "backward", "optimizer")
_WAITING_PHASES = ("collective", "pipeline")
_PHASES_OF_NO_STEP = ("evaluate", "ckpt_prepare", "ckpt_stage", "ckpt_write", "before_commit")

# Steps that are looked at together; a slow rank is named within 20.
WINDOW = 16
# Where steps are short it must have been slow for so long: what else a machine does slows a core
# down for a second or two, and is over.
MIN_SLOW_S = 3.0
# Of these the slowest may be accidents of the rank, and the fastest accidents of its peers.
_NUM_TRIMMED = 3
# A rank is slow from this factor on, and is not any more below the second.
SLOW_FACTOR, RECOVERED_FACTOR = 1.2, 1.1
# In so many steps of the window it must have taken clearly longer: a few accidents are no slowness.
_MIN_SLOW_STEPS, _SLOW_STEP_FACTOR = 7, 1.15
# What a rank takes longer must be this much of the step, and so many seconds.
_MIN_STEP_SHARE, _MIN_EXCESS_S = 0.1, 0.001
# How far beyond the usual difference of a rank from its peers, in standard errors of the window.
_MIN_DEVIATIONS = 5.0
_HISTORY = 400
# Before there is a history, and the least that is believed of one.
_MIN_HISTORY, _UNKNOWN_SPREAD, _MIN_SPREAD = 32, 0.5, 0.05
_WARM_UP_STEPS = 3
# The kernel also counts what a rank wants a processor for when a wait is over; where waits are many
# and work is short, this share of the work is left.
_MIN_ACTIVE_SHARE = 0.1
_NORMAL_PER_MAD = 1.4826


@dataclass(frozen=True)
class OwnStep:
    """One step of one rank: seconds of its own work by phase, those in which it waited, those of
    the whole step, processor seconds, and those in which it wanted a processor and had none (0:
    nobody counted)."""

    own_s: Mapping[str, float]
    waiting_s: float
    step_s: float
    cpu_s: float
    queued_s: float = 0.0

    @property
    def self_s(self) -> float:
        return sum(self.own_s.values())

    @property
    def active_s(self) -> float:
        """Seconds of its own work without those in which it had no processor."""
        return max(self.self_s - self.queued_s, _MIN_ACTIVE_SHARE * self.self_s)


def read_own_step(event: StepFinished) -> OwnStep | None:
    """The own work of a rank in a step; None where something that is no step was in it."""
    if any(event.phases_s.get(phase, 0.0) > 0 for phase in _PHASES_OF_NO_STEP):
        return None
    own_s = {phase: event.phases_s.get(phase, 0.0) for phase in OWN_PHASES}
    waiting_s = sum(event.phases_s.get(phase, 0.0) for phase in _WAITING_PHASES)
    if not 0 < sum(own_s.values()) < math.inf:
        return None
    return OwnStep(own_s, waiting_s, event.step_s, event.cpu_s, event.queued_s)


@dataclass
class _RankHistory:
    """The newest steps of a rank beside its peers. `ratios`: logarithms of its seconds over theirs
    in the window; `clock_ratios`: by the clock, with those without a processor; `usual`: the same of steps before, in which it was not slow; `usual_means`: of
    the windows that these steps made, the trimmed means."""

    steps: deque[tuple[int, OwnStep, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    clock_ratios: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    usual_means: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    slow_since: int = 0
    waited_s: float = 0.0
    suspected_s: float = 0.0
    """Seconds of the steps whose windows, one after the other, were all slow."""

    @property
    def ratios(self) -> list[float]:
        return [math.log(step.active_s / peers_s) for _, step, peers_s in self.steps]

    @property
    def clock_factor(self) -> float:
        """By which the rank takes longer than its peers by the clock, in the window."""
        return math.exp(mean(_trim(self.clock_ratios)))

    @property
    def excess_s(self) -> float:
        """Seconds that the rank took longer than its peers in a step of the window. One accident of
        a peer may be more than all of it: accidents are left out."""
        return mean(_trim([step.active_s - peers_s for _, step, peers_s in self.steps]))

    @property
    def step_s(self) -> float:
        return mean(_trim([step.step_s for _, step, _ in self.steps]))

    @property
    def step_with_a_processor_s(self) -> float:
        """Seconds of a step without those in which the rank had no processor."""
        return mean(_trim([step.step_s - step.queued_s for _, step, _ in self.steps]))

    def add_usual_ratio(self, ratio: float) -> None:
        self.usual.append(ratio)
        if len(self.usual) >= WINDOW:
            newest = list(islice(reversed(self.usual), WINDOW))
            self.usual_means.append(mean(_trim(newest)))

    def estimate_usual(self) -> tuple[float, float]:
        """The usual logarithm by which the rank takes longer than its peers, and the standard error
        of the mean of a window."""
        if len(self.usual) < _MIN_HISTORY:
            return 0.0, _UNKNOWN_SPREAD / math.sqrt(WINDOW)
        middle = median(self.usual)
        of_step = _NORMAL_PER_MAD * median(abs(ratio - middle) for ratio in self.usual)
        # Where what disturbs a rank goes on for many steps, windows differ by more than steps that
        # do not know of each other would make them.
        of_window = _NORMAL_PER_MAD * median(abs(each - middle) for each in self.usual_means)
        return middle, max(of_window, max(of_step, _MIN_SPREAD) / math.sqrt(WINDOW))


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

    def add_step(self, number: int, steps: Mapping[int, OwnStep]) -> list[Event]:
        """The events that follow from one more step."""
        self._num_steps += 1
        # Allocations, first reads.
        if self._num_steps <= _WARM_UP_STEPS:
            return []
        events: list[Event] = []
        for group in self._groups:
            for rank in group:
                peers = [steps[other] for other in group if other != rank]
                self._add_step_of_rank(number, rank, steps[rank], peers)
            slowest = max(group, key=self._compute_factor)
            for rank in group:
                event = self._judge_rank(number, rank, group, steps, may_begin=rank == slowest)
                if event is not None:
                    events.append(event)
        return events

    def end(self, number: int) -> list[Event]:
        """The ends of what is slow when an attempt is over."""
        events: list[Event] = []
        for rank, history in self._histories.items():
            if history.slow_since:
                events.append(_build_end(rank, number, history))
        return events

    def _add_step_of_rank(
        self, number: int, rank: int, step: OwnStep, peers: Sequence[OwnStep]
    ) -> None:
        history = self._histories[rank]
        if len(history.steps) == WINDOW and not history.slow_since:
            history.add_usual_ratio(history.ratios[0])
        history.steps.append((number, step, median(peer.active_s for peer in peers)))
        history.clock_ratios.append(math.log(step.self_s / median(peer.self_s for peer in peers)))
        if history.slow_since:
            history.waited_s += _charge_waiting(step, peers)

    def _compute_factor(self, rank: int) -> float:
        """The factor by which the rank takes longer than its peers in the window: the geometric
        mean without the most and the least slow steps. 0 before the window is full."""
        ratios = self._histories[rank].ratios
        if len(ratios) < WINDOW:
            return 0.0
        return math.exp(mean(_trim(ratios)))

    def _judge_rank(
        self,
        number: int,
        rank: int,
        group: range,
        steps: Mapping[int, OwnStep],
        *,
        may_begin: bool,
    ) -> Event | None:
        history = self._histories[rank]
        if history.slow_since:
            if self._compute_factor(rank) >= RECOVERED_FACTOR:
                return None
            event = _build_end(rank, number, history)
            history.slow_since, history.waited_s, history.suspected_s = 0, 0.0, 0.0
            return event
        if not self._is_slow(rank):
            history.suspected_s = 0.0
            return None
        history.suspected_s += steps[rank].step_s
        lasts_s = history.suspected_s + WINDOW * history.step_s
        # Where its peers lack a processor for as long as it computes longer, nobody waits for it.
        is_waited_for = history.clock_factor >= RECOVERED_FACTOR
        if not may_begin or lasts_s < MIN_SLOW_S or not is_waited_for:
            return None
        history.slow_since = history.steps[0][0]
        peers = [other for other in group if other != rank]
        history.waited_s = WINDOW * _charge_waiting(steps[rank], [steps[peer] for peer in peers])
        return RankSlow(
            slow_rank=rank,
            step=number,
            first_step=history.slow_since,
            factor=self._compute_factor(rank),
            excess_s=history.excess_s,
            phase=_find_slowest_phase(self._list_steps([rank]), self._list_steps(peers)),
            waited_s=history.waited_s,
            cpu_share=_compute_cpu_share(self._list_steps([rank])),
            peers_cpu_share=_compute_cpu_share(self._list_steps(peers)),
        )

    def _list_steps(self, ranks: Iterable[int]) -> list[OwnStep]:
        """The steps of the window, of all these ranks."""
        return [step for rank in ranks for _, step, _ in self._histories[rank].steps]

    def _is_slow(self, rank: int) -> bool:
        history = self._histories[rank]
        if self._compute_factor(rank) < SLOW_FACTOR:
            return False
        if sum(ratio > math.log(_SLOW_STEP_FACTOR) for ratio in history.ratios) < _MIN_SLOW_STEPS:
            return False
        middle, standard_error = history.estimate_usual()
        # One that is always a little behind is compared with itself.
        usual = min(max(middle, 0.0), math.log(SLOW_FACTOR))
        if mean(_trim(history.ratios)) - usual < _MIN_DEVIATIONS * standard_error:
            return False
        least_s = _MIN_STEP_SHARE * history.step_with_a_processor_s
        return history.excess_s >= max(_MIN_EXCESS_S, least_s)


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
    return mean(_trim(seconds))


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
