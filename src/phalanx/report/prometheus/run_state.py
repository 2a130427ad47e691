"""The state of a run as its events tell it: live or ended, and what its ranks were started again
for."""

from __future__ import annotations

from phalanx.observe.attempt_starts import AttemptStarts
from phalanx.observe.events import (
    RESUMED,
    Envelope,
    Note,
    RankFailed,
    RanksStarted,
    RestartScheduled,
    RunFinished,
    RunStarted,
    StepFinished,
    StepsSummed,
)
from phalanx.report.prometheus.definitions import RUN_STATES
from phalanx.report.prometheus.values import MetricValues

LIVE_STATES = RUN_STATES[:3]
_LAUNCHER = "launcher"  # cause of a restart that the supervisor did not order


class RunStateMetrics:
    """Follows the state of a run and counts how often its ranks were started again."""

    def __init__(self, values: MetricValues) -> None:
        self._values = values
        self._state = "starting"
        self._failure_cause = _LAUNCHER
        self._attempt = -1
        # The newest whose ranks the supervisor said to start.
        self._announced_attempt = -1
        self._starts = AttemptStarts()
        values.add("phalanx_resumes_total", 0)
        self._set_state("starting")

    @property
    def is_live(self) -> bool:
        """False once the run has ended, until it is resumed."""
        return self._state in LIVE_STATES

    @property
    def state(self) -> str:
        return self._state

    def add_event(self, envelope: Envelope) -> None:
        self._starts.add_event(envelope)
        match envelope.event:
            case RanksStarted():
                self._announced_attempt = envelope.attempt
                self._set_state("starting")
            case StepFinished() | StepsSummed() if self._state == "starting":
                # Where the file of rank 0, which says that training begins, was lost.
                if envelope.attempt >= self._announced_attempt:
                    self._set_state("training")
            case RunStarted():
                self._begin_attempt(envelope.attempt)
            case RankFailed(cause=cause):
                self._failure_cause = cause
            case RestartScheduled():
                self._values.add("phalanx_restarts_total", 1, self._failure_cause)
                self._set_state("restarting")
            case Note(code=code) if code == RESUMED:
                self._values.add("phalanx_resumes_total", 1)
                self._set_state("starting")
            case RunFinished(status=status):
                self._set_state(status)

    def _begin_attempt(self, attempt: int) -> None:
        is_later = attempt > self._attempt >= 0
        if is_later and self._starts.find_start(attempt) == "launcher":
            self._values.add("phalanx_restarts_total", 1, _LAUNCHER)
        self._attempt = max(attempt, self._attempt)
        self._failure_cause = _LAUNCHER
        self._set_state("training")

    def _set_state(self, state: str) -> None:
        self._state = state
        for each in RUN_STATES:
            self._values.set("phalanx_run_state", each == state, each)
