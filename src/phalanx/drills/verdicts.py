"""What a run itself says of what happened to it: the verdicts of its own detectors, read from its
events.

Nothing here knows what was injected: the reader of a run's events is a process of its own, and the
marks of faults are not among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.typed_json import JsonRecord
from phalanx.observe.events import (
    CheckpointFailed,
    Envelope,
    Event,
    HangFound,
    InvariantChecked,
    RankFailed,
    RolledBack,
    StepSkipped,
    StopRequested,
)

_CLASS_OF_SIGNAL = {
    "SIGKILL": "killed",
    "SIGSEGV": "segmentation fault",
    "SIGABRT": "aborted",
}
_CLASS_OF_ROLL_BACK = {"corruption": "corrupt", "loss_spike": "loss spike"}
# By the kind that an event of a slow rank has, whoever emits it.
_SLOW_KINDS = ("rank_slow", "rank_slowed")


@dataclass(frozen=True)
class Verdict(JsonRecord):
    """A verdict: its class, the ranks that it names, the step, and when it fell. `text` is what it
    says itself."""

    kind: str
    ranks: tuple[int, ...]
    step: int
    monotonic_s: float
    text: str


def find_verdicts(envelopes: Sequence[Envelope]) -> list[Verdict]:
    """The verdicts among the events of a run, oldest first."""
    verdicts = [_read_verdict(envelope) for envelope in envelopes]
    found = [verdict for verdict in verdicts if verdict is not None]
    return sorted(found, key=lambda verdict: verdict.monotonic_s)


def _read_verdict(envelope: Envelope) -> Verdict | None:
    event, at_s = envelope.event, envelope.monotonic_s
    if isinstance(event, RankFailed):
        ranks = (event.failed_rank,) if event.failed_rank >= 0 else ()
        return Verdict(_classify_failure(event), ranks, event.step, at_s, event.detail)
    if isinstance(event, HangFound):
        kind = event.hang_kind.replace("_", " ")
        return Verdict(kind, tuple(event.culprits), event.step, at_s, event.collective)
    if isinstance(event, RolledBack):
        ranks = (event.failed_rank,) if event.failed_rank >= 0 else ()
        kind = _CLASS_OF_ROLL_BACK.get(event.cause, event.cause)
        return Verdict(kind, ranks, event.step, at_s, event.why)
    if isinstance(event, InvariantChecked):
        if event.ok or event.is_summary:
            return None
        return Verdict("corrupt", tuple(event.ranks), event.step, at_s, event.name)
    if isinstance(event, StepSkipped):
        if event.reason != "nonfinite_gradients":
            return None
        return Verdict("not finite", (), event.step, at_s, event.reason)
    if isinstance(event, StopRequested):
        return Verdict("preempted", (), event.step, at_s, event.reason)
    if isinstance(event, CheckpointFailed):
        return Verdict("save failed", (), event.step, at_s, "")
    if event.kind() in _SLOW_KINDS:
        return Verdict("slow", _read_ranks(event), getattr(event, "step", 0), at_s, "")
    return None


def _classify_failure(event: RankFailed) -> str:
    """The class of a failure, from the supervisor's own words."""
    if event.failed_rank < 0 and event.cause != "exception":
        return "store killed" if "store" in event.detail else "server killed"
    if event.cause == "signal":
        for name, kind in _CLASS_OF_SIGNAL.items():
            if name in event.detail:
                return kind
        return "signal"
    if event.cause == "hang":
        return (event.hang_kind or "hang").replace("_", " ")
    if event.cause == "exit":
        return "left early"
    words = event.detail.lower()
    if words.startswith("the ranks differ"):
        return "ranks disagree"
    if "memory" in words:
        return "out of memory"
    return "exception"


def _read_ranks(event: Event) -> tuple[int, ...]:
    ranks = [getattr(event, name, None) for name in ("slow_rank", "failed_rank", "rank")]
    return tuple(rank for rank in ranks if isinstance(rank, int))
