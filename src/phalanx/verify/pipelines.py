"""The pipelines that a model is judged in, by name, and what they need of batch and blocks.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from phalanx.job.schema import Parallel
from phalanx.plan.pipeline.generate import SCHEDULE_NAMES, get_default_stages_per_rank
from phalanx.plan.pipeline.pipeline_plan import SCHEDULE_FROM_FILE
from phalanx.plan.pipeline.requested_schedule import DEFAULT_SCHEDULE
from phalanx.plan.pipeline.schedule import load_schedule_csv
from phalanx.plan.plan import Plan

PIPELINE_KEYS = ("pp", "schedule", "schedule_file", "stages_per_rank", "stage_blocks")
# Which of the model's modules these stages hold, in any pipeline.
MODEL_STAGE_KEYS = ("first_stage", "last_stage")
MICROBATCHES_PER_RANK = 2  # the fewest that every schedule can run
# One with whole backwards and one with split ones: they run many small microbatches, far more than
# are in flight at a time.
MANY_MICROBATCH_SCHEDULES = ("1f1b", "zb-v")
ROWS_OF_SMALL_MICROBATCH = 2
_NUM_STAGES_OUTSIDE_BLOCKS = 1  # the head can be a stage of its own

NamedLayouts = Iterator[tuple[str, dict[str, Any]]]


def list_pipeline_layouts(num_ranks: int) -> NamedLayouts:
    """Every schedule alone, with FSDP, with TP and with both; what else there is inside of
    stages with one or two."""
    for pp in (d for d in range(2, num_ranks + 1) if num_ranks % d == 0):
        for suffix, axes in _list_layouts_inside_stages(num_ranks // pp):
            for schedule in SCHEDULE_NAMES:
                yield f"pp{pp}{suffix}-{schedule}", {"pp": pp, "schedule": schedule} | axes
    yield from _list_pipeline_variants(num_ranks)


def _list_layouts_inside_stages(rest: int) -> NamedLayouts:
    """The layouts of the `rest` ranks of each stage: FSDP, TP, and the two together."""
    if rest == 1:
        yield "", {}
        return
    yield "-zero3", {"dp_shard": rest, "zero_stage": 3}
    yield f"-tp{rest}", {"tp": rest}
    if rest % 2 == 0 and rest > 2:
        yield "-zero3-tp2", {"dp_shard": rest // 2, "zero_stage": 3, "tp": 2}


def _list_pipeline_variants(num_ranks: int) -> NamedLayouts:
    """Other ways of data parallelism, of recomputing and of cutting, in a schedule with whole
    backwards and in one that splits them."""
    if num_ranks % 2:
        return
    rest = num_ranks // 2
    if rest > 1:
        ways: dict[str, dict[str, Any]] = {"ddp": {"dp_replicate": rest}}
        ways |= {f"zero{stage}": {"dp_shard": rest, "zero_stage": stage} for stage in (1, 2)}
        if rest % 2 == 0 and rest > 2:
            ways |= {
                f"hsdp2x{rest // 2}-zero3": {
                    "dp_replicate": 2,
                    "dp_shard": rest // 2,
                    "zero_stage": 3,
                }
            }
        for name, axes in ways.items():
            for schedule in ("1f1b", "zb-v"):
                yield f"pp2-{name}-{schedule}", {"pp": 2, "schedule": schedule} | axes
        if rest == 2:
            for schedule in ("1f1b", "interleaved-zero-bubble", "zb-v"):
                yield f"pp2-cp2-{schedule}", {"pp": 2, "schedule": schedule, "cp": 2}
            yield (
                "pp2-cp2-full-1f1b",
                {"pp": 2, "schedule": "1f1b", "cp": 2, "train.recompute": "full"},
            )
    fsdp = {"dp_shard": rest, "zero_stage": 3} if rest > 1 else {}
    suffix = "-zero3" if rest > 1 else ""
    for how, schedule in (
        ("full", "zb-v"),
        ("selective", "1f1b"),
        ("sqrt", "interleaved-zero-bubble"),
    ):
        axes = {"pp": 2, "schedule": schedule} | fsdp
        yield f"pp2{suffix}-{how}-{schedule}", axes | {"train.recompute": how}
    yield (
        f"pp2{suffix}-uneven-1f1b",
        {"pp": 2, "schedule": "1f1b", "stage_blocks": UNEVEN_STAGES} | fsdp,
    )
    if rest > 1:
        axes = {"pp": 2, "schedule": "1f1b", "tp": rest}
        yield f"pp2-tp{rest}-odd-sequence-1f1b", axes | ODD_SEQUENCE_OVERRIDE


# All blocks but one in the last stage: how many these are is known when there is a model.
UNEVEN_STAGES = "uneven"


# Sequences that no number of ranks divides: how long they are is known when there is a job.
SHORTER_SEQUENCE = "data.seq_len"
ODD_SEQUENCE_OVERRIDE: dict[str, Any] = {SHORTER_SEQUENCE: "odd"}


def resolve_odd_sequence_override(
    parallel: Mapping[str, Any], seq_len: int, num_ranks: int
) -> dict[str, Any]:
    """The same for sequences of `seq_len` tokens: an odd one is so short that the last of
    `num_ranks` ranks has the least of it."""
    if parallel.get(SHORTER_SEQUENCE) != ODD_SEQUENCE_OVERRIDE[SHORTER_SEQUENCE]:
        return dict(parallel)
    return {**parallel, SHORTER_SEQUENCE: max(1, seq_len - (num_ranks - 1))}


def resolve_uneven_stage_blocks(parallel: Mapping[str, Any], num_blocks: int) -> dict[str, Any]:
    """The same for a model of `num_blocks`."""
    if parallel.get("stage_blocks") != UNEVEN_STAGES:
        return dict(parallel)
    return {**parallel, "stage_blocks": (1, max(0, num_blocks - 1))}


def num_microbatches(plan: Plan) -> int:
    """The number of microbatches in which a pipeline is verified; 0 without a pipeline."""
    if plan.pipeline is None:
        return 0
    if plan.pipeline.schedule_name == SCHEDULE_FROM_FILE:
        return plan.pipeline.num_microbatches
    least = MICROBATCHES_PER_RANK * plan.layout.pp
    if (
        plan.pipeline.schedule_name not in MANY_MICROBATCH_SCHEDULES
        or plan.layout.data_parallel_size > 1
    ):
        return least
    return max(least, plan.global_batch_size // ROWS_OF_SMALL_MICROBATCH)


def count_blocks_for_stages(layouts: Iterable[Mapping[str, Any]]) -> int:
    """The number of blocks that all of these layouts need: of a pipeline one less than its
    stages."""
    needed = 0
    for parallel in layouts:
        if (parallel.get("pp") or 1) > 1:
            needed = max(needed, _count_pipeline_stages(parallel))
    return max(0, needed - _NUM_STAGES_OUTSIDE_BLOCKS)


def _count_pipeline_stages(parallel: Mapping[str, Any]) -> int:
    file = parallel.get("schedule_file")
    if file is not None:
        return load_schedule_csv(Path(file)).num_stages
    per_rank = parallel.get("stages_per_rank")
    return int(
        parallel["pp"]
        * (per_rank or get_default_stages_per_rank(parallel.get("schedule") or DEFAULT_SCHEDULE))
    )


def find_batch_multiple(parallel: Parallel, rows_per_rank: int) -> int:
    """The factor by which a batch of `rows_per_rank` grows so that a schedule from a file has
    its microbatches."""
    if parallel.degrees.pp == 1 or parallel.schedule_file is None:
        return 1
    num_microbatches = load_schedule_csv(Path(parallel.schedule_file)).num_microbatches
    # The least factor with which n microbatches divide the rows of one data-parallel rank.
    return num_microbatches // math.gcd(
        num_microbatches, rows_per_rank * parallel.degrees.model_parallel_size
    )
