"""Rules of memory: head-room, and mechanisms that a plan could do without."""

from __future__ import annotations

from phalanx.core.units import format_bytes, format_seconds
from phalanx.plan.advice.facts import PlanFacts
from phalanx.plan.advice.rule import RuleMeasurement, RuleOfThumb

# Of what a plan may fill: plans of memory are wrong by several per cent, and what is left beside
# that is for the context, libraries and fragments.
MAX_MEMORY_SHARE = 0.97
MAX_OFFLOAD_WAIT_SHARE = 0.05
# Times the step: data parallelism that is slower by more is a reason for other axes.
MAX_SLOWDOWN_RATIO = 1.03


def measure_peak_memory(facts: PlanFacts) -> RuleMeasurement | None:
    """The part of what a plan may fill that the largest peak does."""
    share = None
    capacity = facts.capacity_bytes
    if facts.peak_bytes is not None and capacity:
        share = facts.peak_bytes / capacity
    return RuleMeasurement(
        share,
        MAX_MEMORY_SHARE,
        consequence=(
            f"of the {format_bytes(capacity or 0)} that a plan may fill: its memory is known to"
            " several per cent, and what is left free beside it is for libraries and fragments"
        ),
        remedy=(
            "train.recompute=full, a smaller train.micro_batch_size, or a higher ZeRO stage"
            if facts.recompute == "none"
            else "a smaller train.micro_batch_size, a higher ZeRO stage, or more ranks"
        ),
        missing="the activations of this model",
    )


def measure_needless_model_parallelism(facts: PlanFacts) -> RuleMeasurement | None:
    """Axes of model parallelism where data parallelism alone would fit."""
    layout = facts.layout
    axes = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(layout, axis) > 1]
    if not axes:
        return None
    if facts.data_parallel_bytes is None or facts.capacity_bytes is None:
        return RuleMeasurement(None, 0, missing="the memory of data parallelism alone")
    needless = 0
    speed, other_s = "", facts.data_parallel_step_s
    is_slower = False
    if facts.step_s is not None and other_s is not None:
        is_slower = other_s > MAX_SLOWDOWN_RATIO * facts.step_s
        speed = f" and takes {format_seconds(other_s)} a step, not {format_seconds(facts.step_s)}"
    if facts.data_parallel_bytes <= facts.capacity_bytes and not is_slower:
        needless = len(axes)
    data_parallel = format_bytes(facts.data_parallel_bytes)
    capacity = format_bytes(facts.capacity_bytes)
    return RuleMeasurement(
        needless,
        0,
        consequence=(
            f"data parallelism alone needs {data_parallel} of the {capacity} that a rank may"
            f" fill{speed}; {', '.join(axes)} send activations in every block"
        ),
        remedy=f"without {', '.join(f'parallel.{axis}' for axis in axes)}",
    )


def measure_needless_zero_stages(facts: PlanFacts) -> RuleMeasurement | None:
    """ZeRO stages above the lowest one that fits."""
    if facts.zero_stage == 0:
        return None
    if facts.smaller_zero_bytes is None or facts.capacity_bytes is None:
        return RuleMeasurement(None, 0, missing="the memory of the lower stages")
    needless = int(facts.smaller_zero_bytes <= facts.capacity_bytes)
    return RuleMeasurement(
        needless,
        0,
        consequence=(
            f"stage {facts.zero_stage - 1} needs {format_bytes(facts.smaller_zero_bytes)} per rank"
            " in this layout"
        ),
        remedy=_suggest_zero_stage_remedy(facts.zero_stage - 1),
    )


def _suggest_zero_stage_remedy(stage: int) -> str:
    if stage == 0:
        return "without parallel.dp_shard and parallel.zero_stage: plain data parallelism"
    return f"parallel.zero_stage={stage}"


def measure_needless_recompute(facts: PlanFacts) -> RuleMeasurement | None:
    """Recomputation where the memory is there without it."""
    if facts.recompute == "none":
        return None
    if facts.plain_bytes is None or facts.capacity_bytes is None:
        return RuleMeasurement(None, 0, missing="the memory without recomputation")
    return RuleMeasurement(
        int(facts.plain_bytes <= facts.capacity_bytes),
        0,
        consequence=(
            f"without recomputation a rank needs {format_bytes(facts.plain_bytes)}; full"
            " recomputation computes a third more"
        ),
        remedy="train.recompute=none",
    )


def measure_offload_wait(facts: PlanFacts) -> RuleMeasurement | None:
    """The part of a step that waits for host memory."""
    if facts.offload == "none":
        return None
    return RuleMeasurement(
        facts.step_share_of_terms("offload"),
        MAX_OFFLOAD_WAIT_SHARE,
        consequence=f"{facts.offload} travel over PCIe in every step, and this much is not hidden",
        remedy="more ranks with a higher ZeRO stage, or a larger batch per step",
        missing="the time of a step",
    )


RULES = (
    RuleOfThumb(
        "memory-headroom",
        "Memory has room to spare",
        "at most",
        "%",
        measure_peak_memory,
        evidence="as the line `room` of the answer; measured runs beside plans: docs/memory.md",
        correction=(
            "16 bytes per parameter are the states alone: activations, buffers and gathered weights"
            " come on top, and fp32 gradients make it 18 (E51)."
        ),
    ),
    RuleOfThumb(
        "data-parallel-first",
        "No model parallelism where data parallelism would do",
        "at most",
        "needless axes",
        measure_needless_model_parallelism,
        evidence="planned: the same batch on the same ranks without tp, pp, cp and ep",
        correction="The size of a model alone does not say what it needs (E01).",
    ),
    RuleOfThumb(
        "smallest-zero-stage",
        "The smallest ZeRO stage that fits",
        "at most",
        "needless stages",
        measure_needless_zero_stages,
        evidence="planned: the same layout with the stage below",
        correction=(
            "4 and 8 times less memory are limits for many ranks: with 8 ranks stage 1 saves 2.9"
            " times, stage 2 4.3 times (E16). ZeRO and FSDP are not stacked: FSDP is stage 3 (E02)."
        ),
    ),
    RuleOfThumb(
        "recompute-where-needed",
        "Recomputation only where memory asks for it",
        "at most",
        "needless mode",
        measure_needless_recompute,
        evidence="planned: the same layout without recomputation",
        correction=(
            "Full recomputation is one more forward, a third more work, not one per segment (E47)."
        ),
    ),
    RuleOfThumb(
        "offload-hidden",
        "Offloading waits for PCIe only where that is hidden",
        "at most",
        "%",
        measure_offload_wait,
        evidence="predicted: copies that no computation hides",
        correction="What leaves the device lies in the host's memory, which must be there (E15).",
    ),
)
