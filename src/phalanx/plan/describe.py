"""A plan in words: the lines that a terminal and a log show of it."""

from __future__ import annotations

from phalanx.core.units import format_bytes, format_count
from phalanx.plan.pipeline.words import MAX_LISTED
from phalanx.plan.plan import Plan


def describe(plan: Plan, *, of_samples: bool = False) -> list[str]:
    """The plan in a few lines of text for a terminal or a log.

    `of_samples`: of the user's own data, no sequences.
    """
    chosen, shape = plan.chosen, plan.model_shape
    what = (
        f"images x {plan.seq_len} tokens"
        if shape.reads_images
        else f"sequences x {plan.seq_len} tokens"
    )
    if plan.seq_len == 1 or (of_samples and not shape.reads_images):
        what = "samples"
    active = (
        f", {format_count(shape.num_active_params)} of them active" if shape.num_experts else ""
    )
    flops = f" ({format_count(plan.flops_per_token)}FLOP per token)" if plan.flops_per_token else ""
    lines = [
        (
            f"plan    {format_count(plan.num_params)} parameters{active}{flops}, {plan.precision}"
            f" on {plan.world_size} {plan.device} rank{'s' if plan.world_size > 1 else ''}:"
            f" {chosen.name} ({plan.layout})"
        ),
        (
            f"        {plan.global_batch_size} {what} per step = {plan.layout.data_parallel_size} "
            f"{_others(plan)}ranks x {plan.num_microbatches} x {plan.micro_batch_size}"
        ),
    ]
    lines += [f"why     {reason}" for reason in plan.reasons]
    lines += [f"warn    {warning.text}" for warning in plan.warnings]
    parts = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in chosen.predicted_bytes.items() if size
    )
    where = (
        "per rank predicted" if plan.pipeline is None else "predicted on the rank that needs most"
    )
    lines.append(f"memory  {format_bytes(chosen.total_bytes)} {where}: {parts}")
    if plan.pipeline is not None:
        totals = [format_bytes(total) for total in plan.pipeline.rank_bytes]
        shown = ", ".join(totals) if len(totals) <= MAX_LISTED else f"{totals[0]} to {totals[-1]}"
        lines.append(f"        by pipeline rank: {shown}")
    for candidate in plan.alternatives:
        if not candidate.chosen:
            lines.append(
                f"not     {candidate.name} ({format_bytes(candidate.total_bytes)}): {candidate.why}"
            )
    return lines


def _others(plan: Plan) -> str:
    """What a share of the batch has besides data parallelism: "x pp 4 x tp 2 "."""
    degrees = {"pp": plan.layout.pp, "cp": plan.layout.cp, "tp": plan.layout.tp}
    return "".join(f"x {axis} {degree} " for axis, degree in degrees.items() if degree > 1)
