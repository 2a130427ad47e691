"""Bytes of a decoder's attention masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.block_sizes import BlockSizes
from phalanx.job.costs import RankMicrobatch

if TYPE_CHECKING:
    from phalanx.job.shapes.decoder import DecoderShape

# Rows of one mask at most: the queries of longer sequences are taken in blocks of so many.
# The usual size whatever is in force: what is predicted is a training run.
DEFAULT_QUERY_BLOCK = BlockSizes().query_block


def count_block_kinds(shape: DecoderShape) -> int:
    """The number of kinds of blocks: 2 if some blocks have a window and others have not, else 1."""
    if 0 < shape.num_local_layers < shape.num_layers:
        return 2
    return 1


def count_shared_mask_bytes(shape: DecoderShape, batch: RankMicrobatch) -> int:
    """Bytes of the masks of a microbatch that all blocks share, where one mask has all queries: one
    for each kind of block that needs one; of documents, one for every sequence.

    With cp a mask has a rank's own queries; ulysses has all of them.
    """
    if not _needs_masks(shape, batch) or _count_mask_queries(batch) > DEFAULT_QUERY_BLOCK:
        return 0
    pairs = _count_mask_queries(batch) * batch.seq_len * batch.compute_bytes
    if batch.document_masks:
        return batch.micro_batch_size * pairs * count_block_kinds(shape)
    return pairs


def count_query_block_mask_bytes(shape: DecoderShape, batch: RankMicrobatch) -> int:
    """Bytes, at the worst moment, of masks that are made for a block of queries at a time: the mask
    of one block, and the booleans that it is made of.

    Autograd keeps none of them.
    """
    if not _needs_masks(shape, batch) or _count_mask_queries(batch) <= DEFAULT_QUERY_BLOCK:
        return 0
    has_full = shape.num_local_layers < shape.num_layers or not _has_window(shape, batch)
    num_keys = batch.seq_len
    if not (has_full and batch.document_masks):
        # The first query of a block sees window - 1 keys before it, the last one the block itself.
        num_keys = min(num_keys, DEFAULT_QUERY_BLOCK + shape.sliding_window - 1)
    if batch.cp_attention != "ulysses":
        num_keys = min(num_keys, batch.seq_len // batch.cp)  # those of one rank at a time
    num_masks = 1
    if batch.document_masks:
        num_masks = batch.micro_batch_size
    # A boolean takes a byte, beside the mask in the compute type.
    return num_masks * DEFAULT_QUERY_BLOCK * num_keys * (batch.compute_bytes + 1)


def _needs_masks(shape: DecoderShape, batch: RankMicrobatch) -> bool:
    return batch.document_masks or _has_window(shape, batch)


def _has_window(shape: DecoderShape, batch: RankMicrobatch) -> bool:
    return 0 < shape.sliding_window < batch.seq_len and shape.num_local_layers > 0


def _count_mask_queries(batch: RankMicrobatch) -> int:
    """The number of queries in a mask: those of this rank; with ulysses, which has some heads of
    all tokens, those of the whole sequence."""
    if batch.cp_attention == "ulysses":
        return batch.seq_len
    return batch.seq_len // batch.cp
