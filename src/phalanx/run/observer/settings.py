"""`ObserverSettings`: what the observer of a run does, as data that its process is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.core.typed_json import JsonRecord

if TYPE_CHECKING:
    # pydantic's, which the observer's process does without.
    from phalanx.job.schema import Job

LAST_ALERTS_TIMEOUT_S = 20.0
# Prometheus' own default interval is a minute: who scrapes less often misses the end of a run.
MAX_LAST_SCRAPE_WAIT_S = 60.0


@dataclass(frozen=True)
class ObserverSettings(JsonRecord):
    """`metrics_port` is None where no metrics are served. `webhook`: a URL or `$NAME`."""

    run_dir: Path
    attempt_from: int
    metrics_host: str
    metrics_port: int | None
    webhook: str | None
    command: tuple[str, ...]
    hang_alert_s: float

    @property
    def has_alerts(self) -> bool:
        return self.webhook is not None or bool(self.command)


def build_observer_settings(job: Job, run_dir: Path, attempt: int) -> ObserverSettings:
    """The settings that a job asks for. Alerts are of attempts from `attempt` on."""
    observe = job.observe
    return ObserverSettings(
        run_dir=run_dir.resolve(),
        attempt_from=attempt,
        metrics_host=observe.metrics_host,
        metrics_port=observe.metrics_port,
        webhook=observe.alert_webhook,
        command=observe.alert_command,
        hang_alert_s=observe.hang_alert_s,
    )
