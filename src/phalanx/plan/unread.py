"""Keys of a job that the chosen layout does not read, and which nobody who wrote them would miss
in silence."""

from __future__ import annotations

from phalanx.job.schema import Job, Parallel
from phalanx.plan.plan import Candidate

SHARDED_KEYS = ("accumulate", "blocks_per_unit", "keep_whole_below", "prefetch")  # ZeRO 2 and 3
DDP_KEYS = ("static_graph",)
# Of a pipeline: a stage is gathered whole for a step, and a parameter without a gradient counts as
# zero.
PIPELINE_KEYS = ("blocks_per_unit", "prefetch", "static_graph", "unused_parameters")


def without_effect(job: Job, chosen: Candidate) -> list[str]:
    """A line for the keys that were set for another layout than `chosen`, one for those that
    compile rules out."""
    stage = chosen.zero_stage
    is_ddp = stage == 0 and chosen.layout.reduced.data_parallel_size > 1
    layout = (
        "one rank" if chosen.name == "one" else {"tp": "tp alone"}.get(chosen.name, chosen.name)
    )
    unread = [*(SHARDED_KEYS if stage < 2 else ()), *(() if is_ddp else DDP_KEYS)]
    if chosen.layout.pp > 1:
        layout = "pp" if chosen.name == "pp" else f"{layout} with pp"
        unread = list(dict.fromkeys((*unread, *PIPELINE_KEYS)))
    lines = [line for line in (_line(job, unread, f"under {layout}"),) if line]
    if (
        job.parallel.zero_stage
        and chosen.layout.reduced.dp_shard == 1
        and chosen.layout.world_size > 1
    ):
        said = f"parallel.zero_stage={job.parallel.zero_stage} shards nothing"
        lines.append(f"{said}: {layout} leaves no ranks to shard over")
    if chosen.layout.tp == 1:
        lines += [line for line in (_line(job, ("rules",), "without parallel.tp"),) if line]
    elif job.train.compile:
        lines += [line for line in (_line(job, ("tp_chunks",), "under train.compile"),) if line]
    return lines


def _line(job: Job, keys: tuple[str, ...] | list[str], where: str) -> str:
    fields = Parallel.model_fields
    found = [
        key
        for key in keys
        if getattr(job.parallel, key) != fields[key].get_default(call_default_factory=True)
    ]
    if not found:
        return ""
    return (
        f"{', '.join(f'parallel.{key}' for key in found)} {'has' if len(found) == 1 else 'have'} no"
        f" effect {where}"
    )
