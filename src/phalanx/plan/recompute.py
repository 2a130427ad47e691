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
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.plan.memory import activation_bytes
from phalanx.plan.segments import Segment, mixed, segments_of
from phalanx.plan.workload import Workload, of_one_rank


def with_recompute(job: Job, shape: ModelShape, work: Workload, reasons: list[str]) -> Workload:
    """`work` with the blocks that are recomputed; adds what must be said of them to `reasons`.

    Raises LayoutError for a budget that nothing keeps to, or of a module whose activations nobody
    can predict.
    """
    shape = of_one_rank(shape, work.tp, work.rules)
    if job.train.recompute == "budget":

        def activations(segments: tuple[Segment, ...]) -> float:
            return activation_bytes(shape, replace(work, segments=segments))

        segments = within_budget(job, shape, work, range(shape.num_layers), activations)
    else:
        segments = job_segments(job, shape)
    work = replace(work, segments=segments)
    reasons += said(job, shape, segments, activation_bytes(shape, work) if shape.is_known else 0)
    return work


def job_segments(job: Job, shape: ModelShape) -> tuple[Segment, ...]:
    """What a mode other than budget means for the model."""
    mode, every = job.train.recompute, job.train.recompute_every or 1
    return segments_of(mode, shape.num_layers, every) if shape.num_layers else ()


def within_budget(
    job: Job,
    shape: ModelShape,
    work: Workload,
    blocks: Sequence[int],
    activations: Callable[[tuple[Segment, ...]], float],
) -> tuple[Segment, ...]:
    """The first of `_from_cheap_to_dear` for `blocks`, those of one rank, with which its
    `activations` fit."""
    if not shape.is_known:
        raise LayoutError(
            "train.recompute=budget needs activations that can be predicted, and those of your own"
            " module cannot",
            fix="set train.recompute to selective, full, every-k or sqrt",
        )
    budget_bytes = budget_of(job)
    least: tuple[Segment, ...] = ()
    for counted in _from_cheap_to_dear(len(blocks)):
        least = tuple(Segment(blocks[s.start], blocks[s.start] + 1, s.mode) for s in counted)
        if activations(least) <= budget_bytes:
            return least
    needed = activations(least)
    raise LayoutError(
        f"with every block recomputed activations take {format_bytes(needed)} per rank, and "
        f"train.recompute_budget_gib allows {format_bytes(budget_bytes)}",
        fix=f"allow {_rounded_up(needed / 2**30)} GiB"
        + (" or use a smaller train.micro_batch_size" * (work.micro_batch_size > 1)),
    )


def budget_of(job: Job) -> int:
    return round((job.train.recompute_budget_gib or 0) * 2**30)


def _rounded_up(value: float) -> str:
    """In three digits, and enough."""
    digits = 2 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10**digits) / 10**digits:.{max(0, digits)}f}"


def _from_cheap_to_dear(num_blocks: int) -> Iterator[tuple[Segment, ...]]:
    """More and more blocks selectively, which costs little; then more and more of them in full."""
    for num_selective in range(num_blocks + 1):
        yield mixed(num_blocks, num_selective, 0)
    for num_full in range(1, num_blocks + 1):
        yield mixed(num_blocks, num_blocks, num_full)


def said(job: Job, shape: ModelShape, segments: Sequence[Segment], size: float) -> list[str]:
    """What is recomputed, where the job's own word does not say it.

    `size`: bytes of activations of a rank.
    """
    mode = job.train.recompute
    if mode in ("none", "full"):
        return []
    if not shape.is_known:
        return [f"recompute: {described(segments, shape.num_layers)}"]
    line = f"recompute: {described(segments, shape.num_layers)}, activations {format_bytes(size)}"
    return [f"{line} of the {format_bytes(budget_of(job))} asked" if mode == "budget" else line]


def described(segments: Sequence[Segment], num_blocks: int) -> str:
    """5 of 12 blocks selectively."""
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


def proposed(
    shape: ModelShape,
    work: Workload,
    fits: Callable[[Workload], bool],
    activations: Callable[[Workload], float],
) -> str:
    """The cheapest mode that would make the plan fit, as a fix; "" if none does, or nobody can
    say."""
    if not shape.is_known:
        return ""
    now = activations(work)
    for mode in ("selective", "full"):
        other = replace(work, segments=segments_of(mode, shape.num_layers))
        then = activations(other)
        if then < now and fits(other):
            return (
                f"set train.recompute={mode} (activations {format_bytes(then)} instead of"
                f" {format_bytes(now)})"
            )
    return ""
