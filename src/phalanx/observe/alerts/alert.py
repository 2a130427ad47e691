"""`Alert`: one message of a run to a person, as the JSON that a webhook or a command gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

AlertKind = Literal[
    "run_failed",
    "restart",
    "hang",
    "rank_slow",
    "rolled_back",
    "step_skipped",
    "loss_spike",
    "invariant_failed",
    "checkpoint_failed",
]
ALERT_SCHEMA = "phalanx.alert/1"

# The run has ended, or does not go on without somebody.
CRITICAL_KINDS = frozenset(("run_failed", "hang", "invariant_failed"))


@dataclass(frozen=True)
class Alert:
    """Something that happened to a run. `text` is one sentence for people.

    `step` and `rank` are None where the alert is not of one. `num_repeated`: so many of the same
    kind came since the one before and were not sent on their own. `facts`: the event behind it.
    """

    kind: AlertKind
    text: str
    time_unix_s: float
    attempt: int = 0
    step: int | None = None
    rank: int | None = None
    num_repeated: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def severity(self) -> str:
        """ "critical" where the run has ended or stands still, else "warning"."""
        return "critical" if self.kind in CRITICAL_KINDS else "warning"

    def to_json(self, run: str, run_dir: str, host: str) -> dict[str, Any]:
        """The message, with the run that it is of and the host that sends it."""
        return {
            "schema": ALERT_SCHEMA,
            "kind": self.kind,
            "severity": self.severity,
            "text": f"{run}: {self.text}",
            "run": run,
            "run_dir": run_dir,
            "host": host,
            "time_unix_s": round(self.time_unix_s, 3),
            "attempt": self.attempt,
            "step": self.step,
            "rank": self.rank,
            "num_repeated": self.num_repeated,
            "facts": dict(self.facts),
        }
