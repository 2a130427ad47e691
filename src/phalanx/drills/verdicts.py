"""What a run itself says of what happened to it: the verdicts of its own detectors, read from its
events.

Nothing here knows what was injected: the reader of a run's events is a process of its own, and the
marks of faults are not among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.stop_signals import MORE_RANKS_REASON
from phalanx.core.typed_json import JsonRecord
from phalanx.launch.processor_watch import STARVED
from phalanx.observe.events import (
    CheckpointFailed,
    CheckpointUnusable,
    Envelope,
    Event,
    HangFound,
    InvariantChecked,
    NonFiniteFound,
    RankFailed,
    RankSlow,
    RolledBack,
    StepSkipped,
    StopRequested,
    StoreLost,
)
from phalanx.report.failures import classify_failure

SLOW = "slow"
_CLASS_OF_ROLL_BACK = {
    "corruption": "corrupt",
    "loss_spike": "loss spike",
    "nonfinite_weights": "corrupt",
}


@dataclass(frozen=True)
class Verdict(JsonRecord):
    """A verdict: its class, the ranks that it names, the step, and when it fell. `text` is what it
    says itself."""

    kind: str
    ranks: tuple[int, ...]
    step: int
    monotonic_s: float
    text: str


def find_verdicts(envelopes: Sequence[Envelope], expected: str = "") -> list[Verdict]:
    """The verdicts among the events of a run, oldest first.

    That a step was skipped says no more than what was found in it, where something was. That other
    processes starve a rank, by the kernel's own count, is true of the machine whatever was injected
    (`count_starved_ranks`), and is left out unless "slow" is `expected`.
    """
    explained = {each.event.step for each in envelopes if isinstance(each.event, NonFiniteFound)}
    verdicts = []
    for envelope in envelopes:
        event, verdict = envelope.event, _read_verdict(envelope)
        is_explained = isinstance(event, StepSkipped) and event.step in explained
        if expected != SLOW:
            is_explained |= _is_starvation(event)
        if verdict is not None and not is_explained:
            verdicts.append(verdict)
    return sorted(verdicts, key=lambda verdict: verdict.monotonic_s)


def count_starved_ranks(envelopes: Sequence[Envelope]) -> int:
    """How often a rank was called slow because other processes had the processors."""
    return sum(_is_starvation(each.event) for each in envelopes)


def _is_starvation(event: Event) -> bool:
    return isinstance(event, RankSlow) and event.why == STARVED


def find_named_ranks(verdicts: Sequence[Verdict]) -> tuple[int, ...]:
    """The ranks of the first verdict; where it names none, those that a later one of its class
    does."""
    if not verdicts:
        return ()
    named = (verdict.ranks for verdict in verdicts if verdict.kind == verdicts[0].kind)
    return next((ranks for ranks in named if ranks), ())


def _read_verdict(envelope: Envelope) -> Verdict | None:
    """The verdict that an event is; None for an event that is none."""
    event, at_s = envelope.event, envelope.monotonic_s
    match event:
        case RankFailed():
            ranks = _list_known_rank(event.failed_rank)
            return Verdict(classify_failure(event), ranks, event.step, at_s, event.detail)
        case HangFound():
            kind = event.hang_kind.replace("_", " ")
            return Verdict(kind, tuple(event.culprits), event.step, at_s, event.collective)
        case StoreLost():
            return Verdict("store killed", (), event.step, at_s, event.detail)
        case RolledBack():
            kind = _CLASS_OF_ROLL_BACK.get(event.cause, event.cause)
            ranks = _list_known_rank(event.failed_rank)
            return Verdict(kind, ranks, event.step, at_s, event.why)
        # Of the code that is trained, in each evaluation, where a forward writes its own weights.
        case InvariantChecked(name="unchanged_by_evaluation"):
            return None
        case InvariantChecked(ok=False, is_summary=False):
            return Verdict("corrupt", tuple(event.ranks), event.step, at_s, event.name)
        case NonFiniteFound():
            # Computed once more it is finite: not the batch, but whoever computed it.
            kind = "not finite"
            if event.origin == "unknown" or event.was_repeated:
                kind = "corrupt"
            ranks = _list_known_rank(event.failed_rank)
            text = f"{event.origin} {event.found_in}".strip()
            return Verdict(kind, ranks, event.step, at_s, text)
        case StepSkipped(reason="nonfinite_gradients"):
            return Verdict("not finite", (), event.step, at_s, event.reason)
        case StepSkipped(reason="loss_spike"):
            return Verdict("loss spike", (), event.step, at_s, event.reason)
        # With more ranks the run goes on.
        case StopRequested(reason=reason) if reason == MORE_RANKS_REASON:
            return None
        case StopRequested():
            return Verdict("preempted", (), event.step, at_s, event.reason)
        case CheckpointFailed():
            return Verdict("save failed", (), event.step, at_s, "")
        case CheckpointUnusable():
            return Verdict("checkpoint damaged", (), event.step, at_s, event.reason)
        case RankSlow():
            return Verdict(SLOW, (event.slow_rank,), event.step, at_s, event.phase)
    return None


def _list_known_rank(rank: int) -> tuple[int, ...]:
    """`rank` alone; none where events say -1, which is a rank that is not known."""
    return (rank,) if rank >= 0 else ()
