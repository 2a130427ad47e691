"""Norms by block of the model over a run: of steps that stand, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.observe.events import BlockNormsMeasured


@dataclass(frozen=True)
class BlockNormFacts:
    """What was measured of steps that stand, ascending."""

    steps: list[BlockNormsMeasured] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Blocks in the order of the model."""
        names: dict[str, None] = {}
        for event in self.steps:
            names |= dict.fromkeys(event.weight_norms or event.gradient_norms)
        return list(names | {name: None for event in self.steps for name in event.nonfinite})


@dataclass
class BlockNormLog:
    """Takes events in any order."""

    _by_attempt_and_step: dict[tuple[int, int], BlockNormsMeasured] = field(default_factory=dict)

    def add_event(self, attempt: int, event: BlockNormsMeasured) -> None:
        self._by_attempt_and_step[attempt, int(event.step)] = event

    def build_block_norm_facts(self, attempt_of: Callable[[int, int], int]) -> BlockNormFacts:
        """`attempt_of(step, default)`: the attempt whose result of a step stands."""
        standing = {
            step: event
            for (attempt, step), event in self._by_attempt_and_step.items()
            if attempt_of(step, attempt) == attempt
        }
        return BlockNormFacts([standing[step] for step in sorted(standing)])
