"""What one key cannot know: combinations of keys that no cluster could run.

One small function per question.

A check says which keys it reads. It runs when the user gave one of them, and none of them was
itself refused.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from phalanx.job.checks import (
    checkpoint,
    experts,
    faults,
    names,
    observe,
    pipeline,
    ranks,
    traces,
    training,
)
from phalanx.job.checks.check import JobCheck, split_dotted_key
from phalanx.job.checks.data import DATA_CHECKS as DATA_QUESTIONS
from phalanx.job.checks.model import MODEL_CHECKS as MODEL_QUESTIONS
from phalanx.job.checks.secrets import find_secrets_in_job
from phalanx.job.findings import Finding
from phalanx.job.schema import Job

CHECKS: tuple[JobCheck, ...] = (
    *(JobCheck(question, keys, keys) for question, keys in MODEL_QUESTIONS),
    *names.CHECKS,
    *(JobCheck(question, keys, keys) for question, keys in DATA_QUESTIONS),
    *ranks.CHECKS,
    *pipeline.CHECKS,
    *experts.CHECKS,
    *training.CHECKS,
    *checkpoint.CHECKS,
    *faults.CHECKS,
    *observe.CHECKS,
    *traces.CHECKS,
)


def run_checks(job: Job, given_keys: Collection[str], refused: Collection[str]) -> list[Finding]:
    """All findings about `job`.

    `given_keys` and `refused` hold dotted keys: what the user wrote, and what was wrong.
    """
    findings: list[Finding] = []
    given_keys, refused = frozenset(given_keys), frozenset(refused)
    for check in CHECKS:
        # A refused key has its default in `job`: what a check says of it would be of no value that
        # the user wrote.
        if given_keys.isdisjoint(check.asked_by) or not refused.isdisjoint(check.reads):
            continue
        # With all its keys a finding can be told of the one that the user wrote last.
        also = tuple(map(split_dotted_key, check.reads))
        findings += [replace(finding, also=also) for finding in check.run(job)]
    # Always, whichever keys were given: a secret may lie in any of them.
    return findings + find_secrets_in_job(job)
