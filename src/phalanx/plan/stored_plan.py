"""Plans that runs have on record, checked as input: a disk, another program or a person may have
changed them.

Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from phalanx.core.errors import ExitCode, PhalanxError
from phalanx.core.files import read_json
from phalanx.job.shapes.stored import parse_stored_shape, require_shape_values
from phalanx.plan.plan import Plan

SCHEMA_PREFIX = "phalanx.plan/"
# No plan has as many bytes, seconds or FLOPs.
MAX_NUMBER = 1e300
KEYS_OF_EVERY_PLAN = (
    *(field.name for field in fields(Plan) if field.default is field.default_factory is MISSING),
    *("alternatives", "reasons", "warnings", "recompute", "shape"),
)
TYPE_OF_KEY: Mapping[str, type] = {
    **dict.fromkeys(("layout", "shape"), dict),
    **dict.fromkeys(("alternatives", "reasons", "warnings"), list),
    **dict.fromkeys(("job_digest", "device", "precision", "recompute"), str),
    "compile": bool,
}
WORD_OF_TYPE: Mapping[type, str] = {
    dict: "object",
    list: "list",
    str: "text",
    bool: "truth value",
}
SIZES_OF_MODEL = ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
COUNTS_OF_STEP = ("global_batch_size", "micro_batch_size", "num_microbatches", "seq_len")
COUNTS = ("vocab_size", "num_params", "capacity_bytes")
# Seconds, bytes, degrees and sizes are not below 0; a loss beyond the ideal is a difference.
PARTS_WITHOUT_NEGATIVES = (
    *(*COUNTS_OF_STEP, *COUNTS, "world_size", "layout", "alternatives", "memory", "pipeline"),
    *("peak_lr", "flops_per_token", "hardware_flops_per_token", "peak_flops_per_s", "step_time"),
    *("shape",),
)
KEYS_WITH_NEGATIVES = ("matmul loss", "measured")


class StoredPlanError(PhalanxError):
    """A stored plan that no run wrote so."""

    exit_code = ExitCode.JOB


def read_stored_plan(path: Path) -> Plan:
    """The plan in a run's plan.json. Raises StoredPlanError, with the file, where it cannot be
    read, no run wrote it so, or it is of another model than the job.json beside it."""
    try:
        plan = parse_stored_plan(read_json(path))
        _require_model_of_job(plan, path.with_name("job.json"))
        return plan
    except OSError as error:
        problem = f"the plan cannot be read: {error.strerror}"
    except ValueError as error:
        problem = f"the plan cannot be read: it is no JSON ({error!s:.80})"
    except StoredPlanError as error:
        problem = error.what
    raise StoredPlanError(problem, where=str(path), fix="give another run")


def _require_model_of_job(plan: Plan, job_file: Path) -> None:
    """Raise StoredPlanError where the job sets a size of the model, and the plan has another one:
    one of the files is another run's."""
    try:
        sizes = read_json(job_file)["model"]
    except (OSError, ValueError, LookupError, TypeError):
        # Whoever needs the job says what is wrong with it.
        return
    for key in SIZES_OF_MODEL:
        size = sizes.get(key) if isinstance(sizes, dict) else None
        planned = plan.shape.get(key)
        _require(
            type(size) is not int or size == planned,
            f"shape.{key} is {planned!r:.60}, and the run's job says {size!r:.60}",
        )


def read_stored_plan_or_none(path: Path) -> Plan | None:
    """The plan in a run's plan.json, for whoever can do without it; None where it is missing,
    damaged or of another release."""
    try:
        return read_stored_plan(path)
    except StoredPlanError:
        return None


def parse_stored_plan(body: Any) -> Plan:
    """The plan that `Plan.to_json` gave `body`. Raises StoredPlanError, with the key, for what that
    cannot have given."""
    _require(isinstance(body, dict), "it holds no plan")
    schema = body.get("schema", SCHEMA_PREFIX)
    _require(
        isinstance(schema, str) and schema.startswith(SCHEMA_PREFIX),
        f"it is a {schema!s:.60}, and no plan of a run",
    )
    missing = [key for key in KEYS_OF_EVERY_PLAN if key not in body]
    _require(not missing, f"the plan has no {', '.join(missing)}")
    _check_types(body)
    _check_numbers(body)
    try:
        plan = Plan.from_json(body)
        # Here, where what it lacks is said in words.
        require_shape_values(parse_stored_shape(plan.shape))
    except KeyError as error:
        raise StoredPlanError(f"the plan has no {error.args[0]}") from None
    except (ValueError, IndexError, TypeError, AttributeError, PhalanxError) as error:
        raise StoredPlanError(f"the plan cannot be used: {error!s:.200}") from None
    _check_agreement(plan, body)
    return plan


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise StoredPlanError(problem)


def _check_types(body: Mapping[str, Any]) -> None:
    for key, kind in TYPE_OF_KEY.items():
        value = f"{json.dumps(body[key]):.60}"
        _require(type(body[key]) is kind, f"{key} is {value}, and no {WORD_OF_TYPE[kind]}")
    for keys, least in ((COUNTS_OF_STEP, 1), (COUNTS, 0)):
        for key in keys:
            is_count = type(body[key]) is int and body[key] >= least
            words = f"{key} is {body[key]!r:.60}, and no whole number of at least {least}"
            _require(is_count, words)
    for candidate in body["alternatives"]:
        has_bytes = isinstance(candidate, dict) and isinstance(
            candidate.get("predicted_bytes"), dict
        )
        _require(has_bytes, "an alternative has no predicted_bytes")
        for category, num_bytes in candidate["predicted_bytes"].items():
            _require(
                type(num_bytes) is int,
                f"predicted_bytes.{category!s:.40} is {num_bytes!r:.60}, and no whole number",
            )


def _check_numbers(body: Mapping[str, Any]) -> None:
    """Raise StoredPlanError for a number that is none, and for one below 0 where none is."""
    for path, value in _iterate_numbers(body, ()):
        words = f"{'.'.join(path)} is {value!r:.60}"
        # Not isfinite, which whole numbers of 310 digits overflow.
        _require(abs(value) < MAX_NUMBER, f"{words}, and no number")
        may_be_negative = path[0] not in PARTS_WITHOUT_NEGATIVES or any(
            key in KEYS_WITH_NEGATIVES for key in path
        )
        _require(value >= 0 or may_be_negative, f"{words}, and less than 0")


def _iterate_numbers(
    value: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], float | int]]:
    """(keys that lead to it, number) of each number in a value of JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _iterate_numbers(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _iterate_numbers(item, (*path, str(index)))
    elif type(value) in (int, float):
        yield path, value


def _check_agreement(plan: Plan, body: Mapping[str, Any]) -> None:
    """Raise StoredPlanError where what is stored twice, or follows from the rest, disagrees."""
    layout = plan.layout
    stored_ranks = body.get("world_size", layout.world_size)
    _require(
        stored_ranks == layout.world_size,
        f"world_size is {stored_ranks!r:.60}, and the layout has {layout.world_size} ranks",
    )
    batch = plan.micro_batch_size * plan.num_microbatches * layout.data_parallel_size
    _require(
        batch == plan.global_batch_size,
        f"global_batch_size is {plan.global_batch_size}, and {plan.num_microbatches} microbatches"
        f" of {plan.micro_batch_size} on {layout.data_parallel_size} data-parallel ranks make"
        f" {batch}",
    )
    chosen = [candidate for candidate in plan.alternatives if candidate.chosen]
    _require(len(chosen) == 1, f"{len(chosen)} of its alternatives are chosen, and not one")
    for candidate, stored in zip(plan.alternatives, body["alternatives"], strict=True):
        total = stored.get("total_bytes", candidate.total_bytes)
        _require(
            total == candidate.total_bytes,
            f"total_bytes of {candidate.name!s:.40} is {total!r:.60}, and its predicted_bytes add"
            f" up to {candidate.total_bytes}",
        )
    if plan.pipeline is not None:
        memory = plan.pipeline.rank_memory
        _require(
            plan.pipeline.num_ranks == layout.pp and len(memory) in (0, layout.pp),
            f"the pipeline has {plan.pipeline.num_ranks} ranks, and the layout pp={layout.pp}",
        )
