"""Ways to do the same step of a rank in less memory, as keys of the job: what an error may advise
once it has counted that it helps. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.job.nearest import list_divisors
from phalanx.plan.segments import list_recompute_segments
from phalanx.plan.workload import Workload

MIN_LOSS_CHUNK_TOKENS = 64  # fewer logits at a time keep no device busy


def list_smaller_works(
    work: Workload, num_layers: int, *, is_pipeline: bool
) -> Iterator[tuple[str, Workload]]:
    """(overrides, the work with them), from what changes a step least: fewer samples of a
    microbatch, fewer logits at a time, saves that are waited for; then everything recomputed
    beside the smallest microbatch. A pipeline's microbatches are its schedule's, and stay."""
    sizes = [] if is_pipeline or work.gradient_copies else list_divisors(work.micro_batch_size)
    for size in reversed(sizes[:-1]):
        yield f"train.micro_batch_size={size}", _split_microbatches(work, size)
    chunk = min(work.loss_chunk_tokens, work.tokens) // 2
    while chunk >= MIN_LOSS_CHUNK_TOKENS:
        yield f"train.loss_chunk_tokens={chunk}", replace(work, loss_chunk_tokens=chunk)
        chunk //= 2
    if work.copies_state:
        yield "checkpoint.asynchronous=false", replace(work, copies_state=False)
    if len(sizes) > 1 and work.recompute != "full":
        segments = list_recompute_segments("full", num_layers)
        smallest = _split_microbatches(work, 1)
        yield (
            "train.micro_batch_size=1 train.recompute=full",
            replace(smallest, recompute="full", segments=segments),
        )


def _split_microbatches(work: Workload, size: int) -> Workload:
    """`work` with as many samples a step, in microbatches of `size`."""
    number = work.num_microbatches * work.micro_batch_size // size
    return replace(work, micro_batch_size=size, num_microbatches=number)
