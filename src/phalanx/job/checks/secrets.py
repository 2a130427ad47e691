"""Whether a job carries a secret.

A run keeps its job to the letter, and shows it, so one that does is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from phalanx.core.secrets import explain_secret_beside_known, find_secret_values_by_variable
from phalanx.job.findings import Finding
from phalanx.job.positions import Path
from phalanx.job.schema import Job

SECRET_FIX = "give it through the environment: what trains can read os.environ"


def find_secrets_in_job(job: Job) -> list[Finding]:
    """One finding for each string of the job that is, holds or is named like a secret.

    Never says the value.
    """
    known = find_secret_values_by_variable(os.environ)
    return [
        Finding(path, why, SECRET_FIX)
        for path, text in _iterate_strings(job.to_json(), ())
        if (why := explain_secret_beside_known(_innermost_key(path), text, known))
    ]


def _iterate_strings(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _iterate_strings(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _iterate_strings(item, (*path, index))


def _innermost_key(path: Path) -> str:
    """The innermost key of a path; of a list, the key of the list; "" of a key of ours."""
    words = [part for part in path if isinstance(part, str)]
    # section.key is named by us, and none is for secrets; what lies deeper (args) is the user's.
    if len(words) > 2:
        return words[-1]
    return ""
