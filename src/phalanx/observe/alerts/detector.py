"""Finds what a person should hear of in the events of a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from phalanx.observe import events
from phalanx.observe.alerts.alert import Alert, AlertKind
from phalanx.observe.attempt_starts import AttemptStarts
from phalanx.observe.events import Envelope
from phalanx.observe.loss_spikes import LossSpikeDetector
from phalanx.observe.words import describe_event

MIN_INTERVAL_S = 60.0  # between two alerts of one series that may come with every step
_REPEATED_KINDS: frozenset[AlertKind] = frozenset(
    ("rank_slow", "step_skipped", "loss_spike", "invariant_failed", "checkpoint_failed")
)
_ORDINARY_ENDS = ("finished", "preempted", "interrupted")
# What repetitions are counted by: the kind, and what two alerts of it may be about.
_Series = tuple[AlertKind, str, int | None]


class AlertDetector:
    """Turns events into alerts. Events of attempts before `attempt_from` are history: they tell
    what is ordinary, and alert nobody."""

    def __init__(self, attempt_from: int = 0) -> None:
        self._attempt_from = attempt_from
        self._spikes = LossSpikeDetector()
        self._failure = ""
        self._newest_attempt = -1
        self._starts = AttemptStarts()
        self._sent_s: dict[_Series, float] = {}
        # The last one that was held back, and how many were.
        self._held: dict[_Series, tuple[Alert, int]] = {}

    def find_alert(self, envelope: Envelope, now_s: float) -> Alert | None:
        """The alert that an event gives, if any. `now_s` (monotonic) is when it is read."""
        alert = self._make_alert(envelope)
        if alert is None or envelope.attempt < self._attempt_from:
            return None
        if alert.kind in _REPEATED_KINDS:
            return self._hold_repetition(alert, now_s)
        return alert

    def take_held_alerts(self, now_s: float = math.inf) -> list[Alert]:
        """The alerts that were held back for as long as they are to be: of each series the last
        one, which counts the others. Without `now_s` all of them, at the end of the run."""
        due = [each for each in self._held if now_s - self._sent_s[each] >= MIN_INTERVAL_S]
        alerts = []
        for series in due:
            alert, num_held = self._held.pop(series)
            self._sent_s[series] = now_s
            alerts.append(replace(alert, num_repeated=num_held - 1))
        return alerts

    def _make_alert(self, envelope: Envelope) -> Alert | None:
        event = envelope.event
        self._starts.add_event(envelope)
        match event:
            case events.RankFailed():
                # What comes of it is told by the next event: a restart, or the end.
                self._failure = describe_event(envelope) or ""
            case events.RunStarted() if envelope.rank == 0:
                return self._find_start_by_launcher(envelope, event)
            case events.HangFound():
                alert = self._build_alert("hang", envelope, "", event.step)
                facts = {name: each for name, each in alert.facts.items() if name != "report"}
                return replace(alert, rank=min(event.culprits, default=None), facts=facts)
            case events.RankSlow():
                alert = self._build_alert("rank_slow", envelope, "", event.step)
                return replace(alert, rank=event.slow_rank)
            case events.RolledBack():
                alert = self._build_alert("rolled_back", envelope, "", event.step)
                return replace(alert, rank=event.failed_rank if event.failed_rank >= 0 else None)
            case events.RestartScheduled():
                return self._build_alert("restart", envelope, self._failure, event.from_step)
            case events.RunFinished() if event.status not in _ORDINARY_ENDS:
                return self._build_alert("run_failed", envelope, self._failure, event.step)
            case events.StepSkipped() if event.reason != "overflow":
                # An overflow of fp16 is how its loss scale finds its height.
                return self._build_alert("step_skipped", envelope, "", event.step)
            case events.CheckpointFailed():
                return self._build_alert("checkpoint_failed", envelope, "", event.step)
            case events.InvariantChecked() if not event.ok and not event.is_summary:
                return self._build_alert("invariant_failed", envelope, "", event.step)
            case events.StepFinished() if envelope.rank == 0:
                return self._find_spike(envelope, event)
        return None

    def _find_start_by_launcher(self, envelope: Envelope, event: events.RunStarted) -> Alert | None:
        self._spikes.forget()
        is_later = envelope.attempt > self._newest_attempt >= 0
        self._newest_attempt = max(envelope.attempt, self._newest_attempt)
        if not is_later or self._starts.find_start(envelope.attempt) != "launcher":
            return None
        return self._build_alert(
            "restart", envelope, "its launcher has started it again", event.step
        )

    def _find_spike(self, envelope: Envelope, event: events.StepFinished) -> Alert | None:
        median = self._spikes.add_loss(event.loss)
        if median is None:
            return None
        text = (
            f"loss {event.loss:.4g} at step {event.step}, where the median of the steps before is"
            f" {median:.4g}"
        )
        facts = _convert_event_to_json(envelope) | {"median_loss": median}
        return Alert(
            "loss_spike", text, envelope.time_unix_s, envelope.attempt, int(event.step), facts=facts
        )

    def _build_alert(self, kind: AlertKind, envelope: Envelope, before: str, step: int) -> Alert:
        rank = None
        if kind in ("restart", "run_failed"):
            self._failure = ""
        elif envelope.rank > 0:
            rank = envelope.rank
        text = "; ".join(filter(None, (before, describe_event(envelope))))
        facts = _convert_event_to_json(envelope)
        return Alert(kind, text, envelope.time_unix_s, envelope.attempt, int(step), rank, 0, facts)

    def _hold_repetition(self, alert: Alert, now_s: float) -> Alert | None:
        """The alert, unless one of its series went out a moment ago: then it is held back."""
        series = _find_series(alert)
        _, num_held = self._held.get(series, (None, 0))
        if now_s - self._sent_s.get(series, -math.inf) < MIN_INTERVAL_S:
            self._held[series] = (alert, num_held + 1)
            return None
        self._sent_s[series] = now_s
        self._held.pop(series, None)
        return replace(alert, num_repeated=num_held)


def _find_series(alert: Alert) -> _Series:
    """What an alert is a repetition of: another check that fails, or another rank, is none."""
    if alert.kind == "invariant_failed":
        return (alert.kind, str(alert.facts.get("name", "")), alert.rank)
    return (alert.kind, "", alert.rank if alert.kind == "rank_slow" else None)


def _convert_event_to_json(envelope: Envelope) -> dict[str, Any]:
    """The event as its file has it: strict JSON, in which NaN is null."""
    body: dict[str, Any] = json.loads(envelope.to_line())
    return body
