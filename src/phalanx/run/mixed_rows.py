"""Warnings about a loss whose rows see each other: tried in another process, and kept.

Torch-free.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from phalanx.core.digest import digest
from phalanx.core.errors import LayoutError
from phalanx.core.files import read_json, write_json_atomically
from phalanx.core.registry import is_foreign
from phalanx.job.module_probe import (
    SHAPE_CACHE_DIR,
    find_last_line,
    find_module_sources,
    list_file_states,
    run_request_process,
)
from phalanx.job.schema import Job
from phalanx.plan.mixed_rows import (
    MAX_PROBED_PARAMS,
    BatchRowMixing,
    has_user_loss_code,
    warn_of_mixed_rows,
)
from phalanx.plan.plan import EarlyWarning, Plan

ROWS_PROBE_MODULE = "phalanx.run.one_process.rows_probe"
# A run waits for it before its ranks start.
ROWS_PROBE_TIMEOUT_S = 30.0


def find_mixed_rows_warnings(job: Job, plan: Plan, *, ask: bool = True) -> tuple[EarlyWarning, ...]:
    """Return warnings of a loss that mixes rows; none for phalanx's own, or if it cannot be tried.

    Raises LayoutError for an objective that is not there.

    Without `ask`, user code is not called: only an answer that is kept from before counts.
    """
    if not has_user_loss_code(job) or plan.num_params > MAX_PROBED_PARAMS:
        return ()
    facts = _read_or_probe_row_mixing(job, plan, ask)
    if facts.unknown:
        raise LayoutError(f"model.objective={job.model.objective}: {facts.unknown}")
    return warn_of_mixed_rows(facts, job, plan)


def _read_or_probe_row_mixing(job: Job, plan: Plan, ask: bool) -> BatchRowMixing:
    cached = _locate_row_mixing_cache(job, plan)
    # Without a home there is no cache, and no folder that is called "~".
    has_cache = cached.is_absolute()
    try:
        if has_cache:
            return BatchRowMixing(**read_json(cached))
    except (OSError, ValueError, TypeError):
        # No answer is kept, or none that this version can read.
        pass
    if not ask:
        return BatchRowMixing()
    request = {"job": job.to_json(), "plan": plan.to_json()}
    try:
        facts = BatchRowMixing(
            **json.loads(
                find_last_line(
                    run_request_process(ROWS_PROBE_MODULE, request, ROWS_PROBE_TIMEOUT_S)
                )
            )
        )
    except (ChildProcessError, ValueError, TypeError):
        # Nothing is known of what cannot be tried: training says what is wrong with it.
        return BatchRowMixing()
    if not has_cache:
        return facts
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        # Not durable: what a crash loses is asked again.
        write_json_atomically(cached, asdict(facts), durable=False)
    except OSError:
        # The cache only saves time.
        pass
    return facts


def _locate_row_mixing_cache(job: Job, plan: Plan) -> Path:
    """The file that keeps the answer, named by the user's sources and by our own."""
    named = [job.model.kind, job.model.objective, job.data.source]
    user_files: list[Path] = []
    for name in named:
        if name and is_foreign(name):
            user_files += find_module_sources(name.partition(":")[0].split("."))
    package = Path(__file__).parents[1]
    # Our own count, too: an answer of another version may be wrong.
    phalanx_files = [
        *sorted((package / "nn").glob("*.py")),
        *sorted((package / "run" / "one_process").glob("*.py")),
    ]
    settings = [
        job.model.model_dump(mode="json"),
        job.data.model_dump(mode="json"),
        job.run.seed,
        plan.shape,
    ]
    sources = list_file_states([*user_files, *phalanx_files])
    return SHAPE_CACHE_DIR / f"rows-{digest([settings, sources, sys.version])}.json"
