"""The load of a run's experts: reduced from events as they are read, with few numbers for
each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx.observe.events import Envelope, ExpertsLoaded


@dataclass
class _ExpertStep:
    """The load of one step, summed over the layers of all ranks that reported theirs."""

    worst: float = 0.0
    num_chosen: float = 0.0
    num_dropped: float = 0.0

    def add_layer(self, event: ExpertsLoaded) -> None:
        self.worst = max(self.worst, event.worst[1])
        self.num_chosen += sum(map(sum, event.tokens_by_expert.values()))
        self.num_dropped += sum(event.dropped.values())

    @property
    def dropped_share(self) -> float:
        """Fraction (0 to 1) of the choices that were dropped; NaN without choices."""
        if not self.num_chosen > 0:
            return math.nan
        return self.num_dropped / self.num_chosen


def compute_max_over_mean_load(tokens: Sequence[int]) -> float:
    """Tokens of the busiest expert of a layer over the mean of its experts; 0 without tokens."""
    if not sum(tokens) > 0:
        return 0.0
    return max(tokens) * len(tokens) / sum(tokens)


@dataclass(frozen=True)
class ExpertFacts:
    """`worst`: tokens of the busiest expert of any layer over the mean of its layer, by step;
    `dropped_share`: of all choices, 0 to 1.

    `tokens` and `dropped`: of each layer in the newest step, `step`, in the order of the model.
    """

    steps: list[int] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)
    dropped_share: list[float] = field(default_factory=list)
    step: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def has_expert_steps(self) -> bool:
        return any(sum(tokens) > 0 for tokens in self.tokens.values())

    @property
    def newest_dropped_share(self) -> float:
        """Fraction (0 to 1) of the token-to-expert choices of `step` that were dropped."""
        chosen = sum(map(sum, self.tokens.values()))
        if not chosen > 0:
            return 0.0
        return sum(self.dropped.values()) / chosen


@dataclass
class ExpertLog:
    """Takes events in any order. Of layers it keeps those of the newest step alone."""

    _steps: dict[tuple[int, int], _ExpertStep] = field(default_factory=dict)  # by attempt and step
    _newest: tuple[int, int] = (-1, -1)
    _tokens: dict[str, list[int]] = field(default_factory=dict)
    _dropped: dict[str, int] = field(default_factory=dict)

    def add_event(self, envelope: Envelope) -> None:
        event = envelope.event
        assert isinstance(event, ExpertsLoaded)
        at = (envelope.attempt, int(event.step))
        self._steps.setdefault(at, _ExpertStep()).add_layer(event)
        if at > self._newest:
            self._newest, self._tokens, self._dropped = at, {}, {}
        # Stages of a pipeline report the same step, each its own layers.
        if at == self._newest:
            self._tokens |= event.tokens_by_expert
            self._dropped |= event.dropped

    def build_expert_facts(self, attempt_of: Callable[[int, int], int]) -> ExpertFacts:
        """`attempt_of(step, default)`: the attempt whose result of a step stands."""
        standing: dict[int, _ExpertStep] = {}
        for (attempt, step), result in self._steps.items():
            if attempt_of(step, attempt) == attempt:
                standing[step] = result
        steps = sorted(standing)
        return ExpertFacts(
            steps=steps,
            # 0: nothing was counted.
            worst=[standing[step].worst or math.nan for step in steps],
            dropped_share=[standing[step].dropped_share for step in steps],
            step=self._newest[1],
            tokens=dict(sorted(self._tokens.items(), key=lambda item: _layer_sort_key(item[0]))),
            dropped=self._dropped,
        )


def _layer_sort_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """ "blocks.10.moe" comes after "blocks.2.moe"."""
    return tuple(map(_name_sort_key, name.split(".")))


def _name_sort_key(part: str) -> tuple[int, int, str]:
    # Names come from files, and int() refuses numbers of thousands of digits.
    if part.isdecimal() and len(part) < 10:
        return (1, int(part), "")
    return (0, 0, part)
