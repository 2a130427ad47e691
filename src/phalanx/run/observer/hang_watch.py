"""Notices that a run stands still, and says who keeps it waiting."""

from __future__ import annotations

import time
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.core.units import format_seconds
from phalanx.launch.positions import read_clock_of_ranks, read_rank_states
from phalanx.observe.alerts.alert import Alert
from phalanx.observe.rank_waits import judge_ranks
from phalanx.observe.where_words import describe_waits
from phalanx.run.observer.follower import RunFollower


class HangWatch:
    """Alerts once for each time that a training run shows no progress for `hang_alert_s`."""

    def __init__(self, run_dir: Path, hang_alert_s: float) -> None:
        self._run_dir, self._hang_alert_s = run_dir, hang_alert_s
        self._is_told = False

    def find_alert(self, follower: RunFollower) -> Alert | None:
        # Before the first step compilation and reading data take as long as they take, and the
        # ranks' rendezvous has a limit of its own.
        if follower.metrics.state != "training" or follower.stalled_s < self._hang_alert_s:
            self._is_told = False
            return None
        if self._is_told:
            return None
        self._is_told = True
        lasts = format_seconds(follower.stalled_s)
        sentences = [f"no rank has shown progress for {lasts}", *self._describe_waits()]
        return Alert("hang", "; ".join(sentences), time.time())

    def _describe_waits(self) -> list[str]:
        try:
            states = read_rank_states(self._run_dir)
            if not states:
                return []
            now_s = read_clock_of_ranks(states)
            return describe_waits(judge_ranks(states, now_s), states, now_s)
        except (PhalanxError, OSError):
            return []
