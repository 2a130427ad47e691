"""The invariants of a run: what was checked how often, what failed, and what was not looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.observe.events import Envelope, InvariantChecked
from phalanx.observe.invariant_words import DESCRIPTION_OF_INVARIANT

MAX_KEPT_FAILURES = 100
# How `looked_at` of a check begins that had nothing to compare: "0 blocks of weights that ...".
_NOTHING = "0 "


@dataclass(frozen=True)
class InvariantFacts:
    """One invariant over all attempts of a run.

    `num_checks` and `num_failed` are those of attempts that summed them up, which one that was
    killed did not; `failures` are told as they happen, the first MAX_KEPT_FAILURES of them.
    """

    name: str
    num_checks: int
    num_failed: int
    last_step: int
    failures: list[InvariantChecked]
    looked_at: str
    not_looked_at: list[str]
    is_empty: bool = False
    """The newest check compared nothing, as replicas where each rank holds blocks of its own."""

    @property
    def has_held(self) -> bool | None:
        """True if every check held; None if nothing was compared."""
        if self.failures or self.num_failed:
            return False
        if self.num_checks and not self.is_empty:
            return True
        return None


@dataclass
class InvariantLog:
    """Takes events in any order."""

    # The newest of each invariant, attempt and rank.
    _summaries: dict[tuple[str, int, int], InvariantChecked] = field(default_factory=dict)
    _failures: dict[str, list[InvariantChecked]] = field(default_factory=dict)

    def add_event(self, envelope: Envelope) -> None:
        event = envelope.event
        assert isinstance(event, InvariantChecked)
        if event.is_summary:
            key = (event.name, envelope.attempt, envelope.rank)
            if key not in self._summaries or event.step >= self._summaries[key].step:
                self._summaries[key] = event
        else:
            self._failures.setdefault(event.name, []).append(event)

    def list_invariant_facts(self) -> list[InvariantFacts]:
        """The facts of each invariant in the order of DESCRIPTION_OF_INVARIANT; none of a run that
        checked nothing."""
        names = dict.fromkeys(
            (*DESCRIPTION_OF_INVARIANT, *(name for name, _, _ in self._summaries), *self._failures)
        )
        return [self._build_facts_of_invariant(name) for name in names if self._has_checks(name)]

    def _has_checks(self, name: str) -> bool:
        return name in self._failures or any(each == name for each, _, _ in self._summaries)

    def _build_facts_of_invariant(self, name: str) -> InvariantFacts:
        summaries = {key[1:]: event for key, event in self._summaries.items() if key[0] == name}
        failures = sorted(self._failures.get(name, []), key=lambda event: event.step)
        num_checks = num_failed = 0
        for attempt in {attempt for attempt, _ in summaries}:
            # Stages of a pipeline check the same steps, each its own layers.
            of_attempt = [event for (each, _), event in summaries.items() if each == attempt]
            num_checks += max(int(event.num_checks) for event in of_attempt)
            num_failed += max(int(event.num_failed) for event in of_attempt)
        newest = max(summaries, default=None)
        last_attempt = [event for key, event in summaries.items() if newest and key[0] == newest[0]]
        return InvariantFacts(
            name,
            num_checks,
            num_failed,
            int(max((event.step for event in (*last_attempt, *failures)), default=0)),
            failures[:MAX_KEPT_FAILURES],
            "; ".join(_drop_duplicates(event.looked_at for event in last_attempt)),
            _drop_duplicates(text for event in last_attempt for text in event.not_looked_at),
            is_empty=all(event.looked_at.startswith(_NOTHING) for event in last_attempt),
        )


def _drop_duplicates(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if text))
