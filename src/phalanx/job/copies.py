"""Copies of a job with other keys; among them the short one, which measurements and drills train in
its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from phalanx.job.learning_rate import count_decay_steps, count_warmup_steps
from phalanx.job.schema import Job

# What takes time beside the steps, writes or speaks to where the job's own run does, or strikes it.
_KEYS_OF_SHORT_COPIES: Mapping[str, Any] = {
    "train.sample_tokens": 0,
    "eval.tokens": 0,
    "eval.every_steps": None,
    "eval.keep_best": False,
    "checkpoint.every_steps": None,
    "checkpoint.every_minutes": None,
    "checkpoint.every": None,
    "checkpoint.mtbf_hours": None,
    "checkpoint.at_end": False,
    "checkpoint.url": None,
    "observe.sinks": [],
    "observe.metrics_port": None,
    "observe.alert_webhook": None,
    "observe.alert_command": [],
    "observe.trace_steps": [],
    "observe.profile_steps": [],
    "resilience.inject": [],
}


def list_short_copy_keys(job: Job, num_steps: int) -> dict[str, Any]:
    """The keys, by dotted key, that make of `job` one of `num_steps` steps and nothing but steps:
    without evaluations, saves, faults, traces, and sinks, alerts and ports of others.

    The warm-up is the job's as far as it fits before the decay. What the job says of its layout,
    its data and its run's directory stays.
    """
    keys = {"train.steps": num_steps, **_KEYS_OF_SHORT_COPIES}
    # Not a share of the steps: the peak right at the start would meet weights that nothing moved.
    num_free_steps = num_steps - count_decay_steps(apply_job_keys(job, keys))
    return keys | {"optim.warmup_steps": min(count_warmup_steps(job), num_free_steps)}


def make_short_copy(job: Job, num_steps: int) -> Job:
    """`job` with the keys of `list_short_copy_keys`."""
    return apply_job_keys(job, list_short_copy_keys(job, num_steps))


def apply_job_keys(job: Job, keys: Mapping[str, Any]) -> Job:
    """`job` with `keys` in place of what it says."""
    body = json.loads(job.model_dump_json(exclude_unset=True))
    for key, value in keys.items():
        section, _, name = key.partition(".")
        body.setdefault(section, {})[name] = value
    return Job.model_validate_json(json.dumps(body))


def drop_job_keys(job: Job, *keys: str) -> Job:
    """`job` without what it says of `keys`."""
    body = json.loads(job.model_dump_json(exclude_unset=True))
    for key in keys:
        section, _, name = key.partition(".")
        body.get(section, {}).pop(name, None)
    return Job.model_validate_json(json.dumps(body))
