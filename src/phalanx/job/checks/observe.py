"""Whether a job's alerts can go where it says."""

from __future__ import annotations

from phalanx.core.webhooks import (
    VARIABLE_MARK,
    has_secret_in_path,
    is_http_url,
    is_variable_reference,
)
from phalanx.job.checks.check import declare_check, make_finding
from phalanx.job.findings import Finding
from phalanx.job.schema import Job


@declare_check("observe.alert_webhook")
def check_webhook_is_a_url_or_a_variable(job: Job) -> list[Finding]:
    """A finding for what is neither, and for a URL that is a secret itself: a run keeps its job."""
    webhook = job.observe.alert_webhook
    if webhook is None or is_variable_reference(webhook):
        return []
    key, fix = "observe.alert_webhook", 'put it into a variable, and write "$ALERT_WEBHOOK"'
    if webhook.startswith(VARIABLE_MARK):
        return [make_finding(key, f"{webhook!r} is no name of a variable", fix)]
    if not is_http_url(webhook):
        return [make_finding(key, "is no http:// or https:// URL, and no $NAME", fix)]
    if has_secret_in_path(webhook):
        problem = "has a token in its path, and a run keeps its job"
        return [make_finding(key, problem, fix)]
    return []


CHECKS = (check_webhook_is_a_url_or_a_variable,)
