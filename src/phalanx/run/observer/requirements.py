"""What the observer of a job needs of this machine: a port, a variable, a program."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.webhooks import VARIABLE_MARK, is_http_url
from phalanx.observe.alerts.targets import AlertTarget, CommandTarget, WebhookTarget
from phalanx.report.prometheus.http_server import open_metrics_server
from phalanx.run.observer.settings import ObserverSettings

if TYPE_CHECKING:
    from phalanx.job.schema import Job


def require_observer_can_start(job: Job) -> None:
    """Raise EnvironmentProblem (exit 6) for a port, a variable or a program that the job's observer
    needs and this machine does not have."""
    observe = job.observe
    if observe.alert_webhook is not None:
        resolve_webhook(observe.alert_webhook, os.environ)
    if observe.alert_command and shutil.which(observe.alert_command[0]) is None:
        raise EnvironmentProblem(
            f"observe.alert_command: there is no program {observe.alert_command[0]!r}",
            fix="install it, or give its path",
        )
    if observe.metrics_port is not None:
        # Bound and given back: what cannot be served is said before anything starts.
        open_metrics_server(observe.metrics_host, observe.metrics_port).close()


def resolve_webhook(webhook: str, environ: Mapping[str, str]) -> str:
    """The URL of a webhook, or of the variable that it names.

    Raises EnvironmentProblem, which never says the URL.
    """
    if not webhook.startswith(VARIABLE_MARK):
        return webhook
    name = webhook.removeprefix(VARIABLE_MARK)
    url = environ.get(name, "")
    if not url:
        raise EnvironmentProblem(
            f"observe.alert_webhook: the variable {name} is not set",
            fix=f"export {name}=https://...",
        )
    if not is_http_url(url):
        raise EnvironmentProblem(
            f"observe.alert_webhook: what the variable {name} holds is no http:// or https:// URL"
        )
    return url


def list_alert_targets(settings: ObserverSettings, environ: Mapping[str, str]) -> list[AlertTarget]:
    """The places that the run's alerts go to. Raises EnvironmentProblem."""
    targets: list[AlertTarget] = []
    if settings.webhook is not None:
        targets.append(WebhookTarget(resolve_webhook(settings.webhook, environ)))
    if settings.command:
        targets.append(CommandTarget(settings.command))
    return targets
