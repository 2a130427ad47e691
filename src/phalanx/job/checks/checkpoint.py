"""Where checkpoints go and weights come from, when a save is due, and what is kept."""

from __future__ import annotations

from phalanx.core.store_urls import find_url_problem
from phalanx.job.checks.check import declare_check, make_finding
from phalanx.job.findings import Finding, shorten_to_one_line
from phalanx.job.schema import Job


@declare_check("checkpoint.url")
def check_checkpoint_url(job: Job) -> list[Finding]:
    url = job.checkpoint.url
    refused = find_url_problem(url, in_job=True) if url is not None else None
    if url is None or refused is None:
        return []
    return [
        make_finding("checkpoint.url", f"{shorten_to_one_line(url)!r} {refused.what}", refused.fix)
    ]


@declare_check("model.init_from")
def check_initial_weights_url(job: Job) -> list[Finding]:
    origin = job.model.init_from
    if origin is not None and ("://" in origin or "::" in origin):
        refused = find_url_problem(origin)
    else:
        refused = None
    if origin is None or refused is None:
        return []
    return [
        make_finding(
            "model.init_from", f"{shorten_to_one_line(origin)!r} {refused.what}", refused.fix
        )
    ]


@declare_check("checkpoint.every", "checkpoint.mtbf_hours")
def check_auto_interval_has_mtbf(job: Job) -> list[Finding]:
    checkpoint = job.checkpoint
    if checkpoint.every == "auto" and checkpoint.mtbf_hours is None:
        problem = (
            '"auto" weighs what a save costs against how often the job fails, and nothing says how'
            " often"
        )
        return [
            make_finding(
                "checkpoint.every", problem, "set checkpoint.mtbf_hours, or every_minutes instead"
            )
        ]
    if checkpoint.every is None and checkpoint.mtbf_hours is not None:
        return [
            make_finding(
                "checkpoint.mtbf_hours",
                'is for checkpoint.every = "auto"',
                'set every = "auto" as well',
            )
        ]
    return []


@declare_check("checkpoint.keep_last", "checkpoint.keep_every")
def check_keep_every_has_keep_last(job: Job) -> list[Finding]:
    if job.checkpoint.keep_every is None or job.checkpoint.keep_last is not None:
        return []
    problem = "keeps some of what is removed, and without keep_last nothing is"
    return [make_finding("checkpoint.keep_every", problem, "set checkpoint.keep_last")]


CHECKS = (
    check_checkpoint_url,
    check_initial_weights_url,
    check_auto_interval_has_mtbf,
    check_keep_every_has_keep_last,
)
