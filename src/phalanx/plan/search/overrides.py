"""What a job must say otherwise to have another layout, as overrides of the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from phalanx.job.checks.run import run_checks
from phalanx.job.schema import Job

ABSENT = "none"  # the word that an override has for a key that is left out


def list_given_keys(job: Job) -> dict[str, Any]:
    """The keys that a job gives, by dotted key."""
    body = json.loads(job.model_dump_json(exclude_unset=True))
    return {
        f"{section}.{name}": value for section, keys in body.items() for name, value in keys.items()
    }


def list_changed_keys(job: Job, target: Job) -> dict[str, Any]:
    """The keys that turn `job` into `target`, with their values; ABSENT for one that `target`
    leaves out and that has no default."""
    before, after = list_given_keys(job), list_given_keys(target)
    changed = {}
    for key, value in before.items():
        target_value = after.get(key, get_default_of_key(key))
        if target_value != value:
            changed[key] = target_value
    # What the job says otherwise comes first, then what it did not say, of that the layout.
    added = sorted(after.keys() - before.keys(), key=list(after).index)
    for key in sorted(added, key=lambda key: not key.startswith("parallel.")):
        changed[key] = after[key]
    return {key: ABSENT if value is None else value for key, value in changed.items()}


def get_default_of_key(key: str) -> Any:
    """The value that a job has for a dotted key which it leaves out."""
    section, _, name = key.partition(".")
    return json.loads(Job().model_dump_json(include={section: {name}}))[section][name]


def format_overrides(keys: Mapping[str, Any]) -> str:
    """Keys as arguments of the command line: 'parallel.tp=2 train.recompute=full'."""
    return " ".join(f"{key}={format_override_value(value)}" for key, value in keys.items())


def format_override_value(value: Any) -> str:
    """A value as an override takes it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"))


def passes_job_checks(job: Job) -> bool:
    """True if the keys that a job gives do not contradict each other, as for a job that is
    loaded."""
    return not run_checks(job, list_given_keys(job), ())
