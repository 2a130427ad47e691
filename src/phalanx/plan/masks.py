"""Bytes of attention's masks of documents and windows: one that all blocks share, or many that
pass.

Torch-free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.job.shape import ModelShape
from phalanx.plan.activations import num_kinds

if TYPE_CHECKING:
    from phalanx.plan.memory import Workload

QUERY_BLOCK = (
    1024  # rows of one mask at most: the queries of longer sequences are taken in blocks of so many
)


def kept_mask_bytes(shape: ModelShape, work: Workload) -> int:
    """Of a microbatch, where one mask has all queries: one for each kind of block that needs one;
    of documents, one for every sequence.

    With cp of a rank's own queries, but of ulysses, whole.
    """
    if not _is_masked(shape, work) or _num_queries(work) > QUERY_BLOCK:
        return 0
    pairs = _num_queries(work) * work.seq_len * work.compute_bytes
    return work.micro_batch_size * pairs * num_kinds(shape) if work.document_masks else pairs


def passing_mask_bytes(shape: ModelShape, work: Workload) -> int:
    """At the worst moment, where masks are made for a block of queries at a time: the mask of a
    block, and the booleans that it is made of.

    Autograd keeps none of them.
    """
    if not _is_masked(shape, work) or _num_queries(work) <= QUERY_BLOCK:
        return 0
    has_full = shape.num_local_layers < shape.num_layers or not _has_window(shape, work)
    num_keys = (
        work.seq_len
        if has_full and work.document_masks
        else min(work.seq_len, _window_reach(shape))
    )
    if work.cp_attention != "ulysses":
        num_keys = min(num_keys, work.seq_len // work.cp)  # those of one rank at a time
    return (
        (work.micro_batch_size if work.document_masks else 1)
        * QUERY_BLOCK
        * num_keys
        * (work.compute_bytes + 1)
    )


def _is_masked(shape: ModelShape, work: Workload) -> bool:
    return not shape.reads_images and (work.document_masks or _has_window(shape, work))


def _has_window(shape: ModelShape, work: Workload) -> bool:
    return 0 < shape.sliding_window < work.seq_len and shape.num_local_layers > 0


def _window_reach(shape: ModelShape) -> int:
    """Keys that a block of queries sees through the window."""
    return QUERY_BLOCK + shape.sliding_window - 1


def _num_queries(work: Workload) -> int:
    """Of a mask: this rank's; with ulysses, which has some heads of all tokens, those of the
    sequence."""
    return work.seq_len if work.cp_attention == "ulysses" else work.seq_len // work.cp
