"""What is recomputed, chosen by memory: the fewest blocks that make activations fit, and why.

Torch-free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes
from phalanx.job.costs import ModelCosts
from phalanx.job.schema import Job
from phalanx.plan.memory import activation_bytes
from phalanx.plan.segments import Segment, list_recompute_segments, mix_recompute_modes
from phalanx.plan.workload import Workload, shard_shape


def plan_recompute(job: Job, shape: ModelCosts, work: Workload, reasons: list[str]) -> Workload:
    """`work` with the blocks that are recomputed; adds what must be said of them to `reasons`.

    Raises LayoutError for a budget that nothing keeps to, or of a module whose activations nobody
    can predict.
    """
    shape = shard_shape(shape, work.tp, work.rules)
    if job.train.recompute == "budget":

        def activations(segments: tuple[Segment, ...]) -> float:
            return activation_bytes(shape, replace(work, segments=segments))

        # Segments of one rank: without a pipeline it has all blocks.
        segments = fit_recompute_budget(job, shape, work, range(shape.num_layers), activations)
    else:
        segments = list_job_segments(job, shape)
    work = replace(work, segments=segments)
    reasons += list_recompute_notes(job, shape, segments, activation_bytes(shape, work))
    return work


def list_job_segments(job: Job, shape: ModelCosts) -> tuple[Segment, ...]:
    """The segments of a mode other than budget for the model."""
    mode, interval = job.train.recompute, job.train.recompute_every or 1
    if shape.num_layers:
        return list_recompute_segments(mode, shape.num_layers, interval)
    return ()


def fit_recompute_budget(
    job: Job,
    shape: ModelCosts,
    work: Workload,
    blocks: Sequence[int],
    activations: Callable[[tuple[Segment, ...]], float],
) -> tuple[Segment, ...]:
    """The first segments of `_list_segment_choices_by_cost` with which `activations` of one rank,
    whose blocks are `blocks`, fit its budget."""
    if shape.activations is None:
        raise LayoutError(
            "train.recompute=budget needs activations that can be predicted, and those of your own"
            " module cannot",
            fix="set train.recompute to selective, full, every-k or sqrt",
        )
    budget_bytes = get_recompute_budget_bytes(job)
    least: tuple[Segment, ...] = ()
    for counted in _list_segment_choices_by_cost(len(blocks)):
        least = tuple(Segment(blocks[s.start], blocks[s.start] + 1, s.mode) for s in counted)
        if activations(least) <= budget_bytes:
            return least
    needed = activations(least)
    raise LayoutError(
        f"with every block recomputed activations take {format_bytes(needed)} per rank, and "
        f"train.recompute_budget_gib allows {format_bytes(budget_bytes)}",
        fix=f"allow {_round_up_to_three_digits(needed / 2**30)} GiB"
        + (" or use a smaller train.micro_batch_size" * (work.micro_batch_size > 1)),
    )


def get_recompute_budget_bytes(job: Job) -> int:
    return round((job.train.recompute_budget_gib or 0) * 2**30)


def _round_up_to_three_digits(value: float) -> str:
    """`value` rounded up to three digits."""
    # Up and never down: what a message proposes has to be enough.
    digits = 2 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10**digits) / 10**digits:.{max(0, digits)}f}"


def _list_segment_choices_by_cost(num_blocks: int) -> Iterator[tuple[Segment, ...]]:
    """Choices of segments from cheap to dear: more and more blocks selectively, which costs little;
    then more and more of them in full."""
    for num_selective in range(num_blocks + 1):
        yield mix_recompute_modes(num_blocks, num_selective, 0)
    for num_full in range(1, num_blocks + 1):
        yield mix_recompute_modes(num_blocks, num_blocks, num_full)


def list_recompute_notes(
    job: Job, shape: ModelCosts, segments: Sequence[Segment], size: float
) -> list[str]:
    """A line about what is recomputed, where the job's own word does not say it.

    `size`: bytes of activations of a rank.
    """
    mode = job.train.recompute
    if mode in ("none", "full"):
        return []
    line = f"recompute: {describe_segments(segments, shape.num_layers)}"
    if shape.activations is None:
        return [line]
    line += f", activations {format_bytes(size)}"
    if mode == "budget":
        line += f" of the {format_bytes(get_recompute_budget_bytes(job))} asked"
    return [line]


def describe_segments(segments: Sequence[Segment], num_blocks: int) -> str:
    """Segments in words: 5 of 12 blocks selectively."""
    if not segments:
        return f"none of {num_blocks} blocks"
    longest = max(segment.num_blocks for segment in segments)
    if longest > 1:
        return f"{num_blocks} blocks in {len(segments)} segments of {longest} at most"
    count = Counter(segment.mode for segment in segments)
    words = [
        f"{count[mode]} {word}"
        for mode, word in (("selective", "selectively"), ("full", "in full"))
        if count[mode]
    ]
    if len(words) == 1:
        number, word = words[0].split(" ", 1)
        return f"{number} of {num_blocks} blocks {word}"
    return f"{len(segments)} of {num_blocks} blocks, {' and '.join(words)}"


def suggest_recompute(
    shape: ModelCosts,
    work: Workload,
    fits: Callable[[Workload], bool],
    activations: Callable[[Workload], float],
) -> str:
    """The cheapest mode that would make the plan fit, as a fix; "" if none does, or nothing can be
    predicted."""
    if shape.activations is None:
        return ""
    now = activations(work)
    for mode in ("selective", "full"):
        other = replace(work, segments=list_recompute_segments(mode, shape.num_layers))
        then = activations(other)
        if then < now and fits(other):
            return (
                f"set train.recompute={mode} (activations {format_bytes(then)} instead of"
                f" {format_bytes(now)})"
            )
    return ""
