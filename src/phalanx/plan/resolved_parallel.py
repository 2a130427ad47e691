"""The section [parallel] of a job with every value that is used, and why each is what it is.

Torch-free. A plan copies no key: it has this object. So a new option is one edit in the schema, and
one where it acts.

Reasons stand where a value is chosen, and `--explain` prints them. They follow from values alone:
which defaults a user wrote down is lost in JSON, and a plan would differ between a file and the run
that was made of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field

from phalanx.job.schema import Count, Parallel, Positive
from phalanx.plan.choice import AUTO, REASON_DEFAULT, REASON_JOB_SAYS, Choice

ALL_BLOCKS_MARKER = 0  # how stored plans write blocks_per_unit = "all"
# Plans of 0.1 store these keys at the top, as they were fields of Plan; readers of them stay right.
TOP_LEVEL_STORED_KEYS = (
    *("zero_stage", "bucket_mb", "sync_batchnorm", "dropout", "sequence_parallel", "tp_chunks"),
    *("rules", "compress", "compress_rank", "compress_fraction", "cp_attention"),
    "cp_load_balance",
)
DATA_PARALLEL_KEYS = (
    *("accumulate", "blocks_per_unit", "keep_whole_below", "prefetch", "offload"),
    *("static_graph", "unused_parameters"),
)
UNDECIDED_KEY_REASONS = {
    "sequence_parallel": "the module says on the ranks if it can be cut",
    "prefetch": "torch chooses",
    "schedule": "there is no pipeline",
    "schedule_file": "none is given",
    "stages_per_rank": "there is no pipeline",
}


class ResolvedParallel(Parallel):
    """Every key of [parallel] with the value that is used. None is left open.

    A key that a job may leave open has a narrower type here; all others are the schema's, so that
    a new option of the schema is here by itself.
    """

    # Every command imports this: its validator is built with the first plan.
    model_config = ConfigDict(defer_build=True)

    ranks: Positive = 1
    dp_replicate: Positive = 1
    dp_shard: Positive = 1
    zero_stage: Literal[0, 1, 2, 3] = 0  # type: ignore[assignment]
    """0: nothing is sharded."""
    tp: Positive = 1
    # This and `prefetch` may stay "auto", as no plan can know them: only the ranks build a module
    # of a user's own, and torch has a prefetching of its own.
    sequence_parallel: bool | Literal["auto"] = "auto"  # type: ignore[assignment]
    """auto: the module decides, once a rank has built it."""
    cp: Positive = 1
    ep: Positive = 1
    pp: Positive = 1
    schedule: str = ""  # type: ignore[assignment]
    """"": no pipeline, or one by schedule_file."""
    schedule_file: str = ""
    """"": no pipeline, or one by schedule."""
    stages_per_rank: Positive = 1
    prefetch: Count | Literal["auto"] = "auto"  # type: ignore[assignment]
    """auto: torch decides."""
    reasons: dict[str, str] = Field(default_factory=dict)
    """Why each key has its value."""

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_stored_keys(self) -> dict[str, Any]:
        """The keys at the top of a stored plan that say what this object says, in the form that
        plans of 0.1 have."""
        values = self.to_json()
        # Plans of 0.1 have here what the job says, and no reasons.
        why = self.reasons.get("sequence_parallel", REASON_JOB_SAYS)
        if self.sequence_parallel == AUTO or why != REASON_JOB_SAYS:
            values["sequence_parallel"] = None
        if self.prefetch == AUTO:
            values["prefetch"] = None
        if self.blocks_per_unit == "all":
            values["blocks_per_unit"] = ALL_BLOCKS_MARKER
        options = {key: values[key] for key in DATA_PARALLEL_KEYS}
        return {key: values[key] for key in TOP_LEVEL_STORED_KEYS} | {"data_parallel": options}


def resolve_parallel(parallel: Parallel, choices: Mapping[str, Choice[Any]]) -> ResolvedParallel:
    """The keys of a job's [parallel] with the values and the reasons of `choices`; a key without
    a choice has the job's value."""
    values, reasons = {}, {}
    for key, field in Parallel.model_fields.items():
        requested, default = getattr(parallel, key), field.get_default(call_default_factory=True)
        choice = choices.get(key) or Choice(requested, REASON_DEFAULT)
        if choice.value is None:
            undecided = ResolvedParallel.model_fields[key].default
            choice = Choice(undecided, UNDECIDED_KEY_REASONS.get(key, REASON_DEFAULT))
        values[key], reasons[key] = choice.value, choice.why
        if requested not in (default, None) and requested == choice.value:
            reasons[key] = REASON_JOB_SAYS
    return ResolvedParallel(**values, reasons=reasons)


def parse_stored_parallel(plan: Mapping[str, Any]) -> ResolvedParallel:
    """The `parallel` of a stored plan; of one from before it was stored, what its other keys say,
    without reasons."""
    stored = plan.get("parallel")
    if stored is None:
        stored = {"ranks": plan.get("world_size"), **plan["layout"], **plan["data_parallel"]}
        stored |= {key: plan[key] for key in TOP_LEVEL_STORED_KEYS if key in plan}
        if stored["blocks_per_unit"] == ALL_BLOCKS_MARKER:
            stored["blocks_per_unit"] = "all"
    # A plan of a later version may have keys that this one does not know.
    values = {
        key: stored[key]
        for key in ResolvedParallel.model_fields
        if key in stored and stored[key] is not None
    }
    # As JSON: the schema is strict, and lists are tuples in JSON alone.
    return ResolvedParallel.model_validate_json(json.dumps(values))
