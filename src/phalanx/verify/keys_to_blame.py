"""Finds the keys of a model without which phalanx's module and the plain implementation agree: what
they do is where to look."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.job.model import build_model_shape
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.run.one_process.plain_loss import Batch
from phalanx.verify.plain_row import compare_with_plain_implementation
from phalanx.verify.row import Row
from phalanx.verify.verified_job import build_job_from_dict

# What a key is set to, to do without it. Of two ways the other one.
_WITHOUT: dict[str, Any] = {
    "expert_capacity": 0.0,
    "balance_loss": 0.0,
    "balance_bias": 0.0,
    "num_shared_experts": 0,
    "num_dense_layers": 0,
    "router_scale": 1.0,
    "router_normalize": {True: False, False: True},
    "router_scores": {"sigmoid": "softmax", "softmax": "sigmoid"},
    "sliding_window": 0,
    "global_every": 0,
    "rope_scaling": "none",
    "qk_norm": False,
    "post_norms": False,
    "norm_plus_one": False,
    "bias": "none",
    "query_rank": 0,
    "scale_embeddings": False,
    "tie_embeddings": False,
    "pooling": {"class_token": "mean", "mean": "class_token"},
    "norm": {"rmsnorm": "layernorm", "layernorm": "rmsnorm"},
    "activation": dict.fromkeys(("geglu", "geglu_tanh", "gelu", "gelu_tanh"), "swiglu")
    | {"swiglu": "gelu"},
}
# Without one of these there is less to compare: asked where none of the others is to blame.
_WITHOUT_MUCH: dict[str, Any] = {
    "num_experts": 0,
    "positions": {"rope": "learned", "learned": "rope"},
}
_OF_EXPERTS = ("router_scale", "router_normalize", "router_scores", "num_dense_layers")
# More say that none is.
MAX_KEYS = 3
# Other ranks wait meanwhile. Each key takes as long as the row did.
MAX_ROW_S, MAX_SEARCH_S = 10.0, 60.0


def name_keys_to_blame(
    row: Row, job: Job, plan: Plan, steps: Sequence[Sequence[Batch]], dtype: str
) -> Row:
    """`row`, of `compare_with_plain_implementation`; where it differs, its cause also names the
    keys of the model without which the two agree.

    Only in float64, whose cause is that of all types, and where that takes a minute at most.
    """
    if row.first is None or dtype != "float64" or row.wall_s > MAX_ROW_S:
        return row
    deadline_s = time.monotonic() + MAX_SEARCH_S
    found: list[str] = []
    for table in (_WITHOUT, _WITHOUT_MUCH):
        if found:
            break
        for words, other_job, other_plan in _list_changed_jobs(job, plan, table):
            if time.monotonic() > deadline_s or len(found) > MAX_KEYS:
                break
            if _do_agree(other_job, other_plan, steps, dtype):
                found.append(words)
    if not 0 < len(found) <= MAX_KEYS:
        return row
    words = (
        f"{row.first.cause}; they agree with {', and with '.join(found)}: look at what that does"
    )
    return replace(row, first=replace(row.first, cause=words))


def _list_changed_jobs(
    job: Job, plan: Plan, table: dict[str, Any]
) -> Iterator[tuple[str, Job, Plan]]:
    """(what is changed, the job with it, its plan) for each key of `table` that the model has."""
    shape = plan.model_shape
    has_experts = bool(getattr(shape, "num_experts", 0))
    for key, without in table.items():
        if key in _OF_EXPERTS and not has_experts:
            continue
        now = getattr(shape, key, None)
        other = without.get(now, now) if isinstance(without, dict) else without
        if now is None or now == other:
            continue
        body = job.to_json()
        body["model"][key] = other
        try:
            other_job = build_job_from_dict(body)
            other_shape = build_model_shape(other_job, shape.vocab_size)
        # Some keys need others, which a job is refused without.
        except (PhalanxError, ValueError):
            continue
        words = f"model.{key} = {_format(other)} in place of {_format(now)}"
        yield words, other_job, replace(plan, shape=other_shape.to_json())


def _do_agree(job: Job, plan: Plan, steps: Sequence[Sequence[Batch]], dtype: str) -> bool:
    try:
        return compare_with_plain_implementation(job, plan, steps, dtype).ok is True
    # A model that cannot be built or computed so says nothing.
    except (PhalanxError, ValueError, RuntimeError, AssertionError, KeyError, IndexError):
        return False


def _format(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if value else "0"
