"""What one key cannot know: combinations of keys that no cluster could run.

One small function per question.

A check says which keys it reads. It runs when the user gave one of them, and none of them was
itself refused.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from phalanx.job import (
    checkpoint_checks,
    expert_checks,
    fault_checks,
    kind_checks,
    pipeline_checks,
    rank_checks,
    train_checks,
)
from phalanx.job.data_checks import QUESTIONS as DATA_QUESTIONS
from phalanx.job.explain import Finding
from phalanx.job.model_checks import QUESTIONS as MODEL_QUESTIONS
from phalanx.job.question import Check, path_of
from phalanx.job.schema import Job
from phalanx.job.secret_checks import secrets_in

CHECKS: tuple[Check, ...] = (
    *(Check(question, keys, keys) for question, keys in MODEL_QUESTIONS),
    *kind_checks.CHECKS,
    *(Check(question, keys, keys) for question, keys in DATA_QUESTIONS),
    *rank_checks.CHECKS,
    *pipeline_checks.CHECKS,
    *expert_checks.CHECKS,
    *train_checks.CHECKS,
    *checkpoint_checks.CHECKS,
    *fault_checks.CHECKS,
)


def run_checks(job: Job, given: Collection[str], refused: Collection[str]) -> list[Finding]:
    """All findings about `job`.

    `given` and `refused` hold dotted keys: what the user wrote, and what was wrong.
    """
    findings: list[Finding] = []
    for check in CHECKS:
        if any(key in given for key in check.asked_by) and not any(
            key in refused for key in check.reads
        ):
            also = tuple(path_of(key) for key in check.reads)
            findings += [replace(finding, also=also) for finding in check.run(job)]
    return findings + secrets_in(job)
