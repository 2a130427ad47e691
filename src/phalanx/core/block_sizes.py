"""Sizes of the blocks, chunks and buckets that a rank cuts its work into, settable for a process.

The usual sizes are chosen for speed and memory; no result depends on them beyond rounding. They are
so large that a small model never reaches a second block: with `shrink_block_sizes` it goes through
every loop several times, the last block shorter than the others. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

from phalanx.core.units import KIB, MIB


@dataclass(frozen=True)
class BlockSizes:
    """One size for each loop over blocks. Each is at least 1; none has to divide anything."""

    query_block: int = 1024
    """Query tokens that share one attention mask (documents, sliding window). A longer sequence,
    with ring and all-gather a rank's longer share of it, is taken in blocks of so many; a shorter
    one has a single mask, made once for all layers."""

    loss_chunk_tokens: int | None = None
    """Tokens whose logits exist at a time in the built-in cross-entropy. None: the job's
    `train.loss_chunk_tokens`."""

    bucket_bytes: int | None = None
    """Bytes of a bucket: of one all-reduce of gradients, which holds at least one parameter, and of
    one all-gather of the weights that ZeRO-1 updated, over all ranks. None: the job's
    `parallel.bucket_mb`."""

    norm_elements: int = 1 << 16
    """Elements of a gradient whose norm a CPU computes at a time."""

    cpu_dropout_pairs: int = 1 << 16
    """Pairs of elements of a dropout mask that a CPU makes at a time: what stays in a core's
    cache."""

    gpu_dropout_pairs: int = 1 << 23
    """The same of other devices: what fills one (128 MiB)."""

    init_elements: int = 1 << 15
    """Initial weights drawn at a time: scratch memory of a quarter MiB, and few enough that torch
    starts no threads of its own."""

    recorded_init_bytes: int = 256 * MIB
    """Bytes of a user's module, its parameters in float32, from which training builds it without
    memory and fills each rank's parts: a smaller one is built sooner than it is recorded."""

    mapped_scratch_bytes: int = 4 * MIB
    """Bytes from which scratch memory on a CPU (logits of a chunk) has pages of its own."""

    reusable_file_bytes: int = MIB
    """Bytes from which a checkpoint puts its blocks that did not change into a file of their own,
    which the next one may link; fewer are written with the changed ones."""

    reusable_block_bytes: int = 64 * KIB
    """Bytes of the smallest block in such a file: when one of them changes, everything in it is
    written again."""

    replica_split_bytes: int = MIB
    """Bytes from which a block of a checkpoint that several ranks hold is written in parts, one by
    each of them; a smaller one is written by one rank. Ranks must have it alike."""

    checkpoint_read_bytes: int = 32 * MIB
    """Bytes that are read at once, at most, of a block of a checkpoint: of several rows with the
    gaps between them, or of one row."""

    shared_chunk_bytes: int = 4 * MIB
    """Bytes of a tensor, over all ranks' parts of it, that one transfer of a collective in shared
    memory moves: chunks stay in the processors' last cache. Ranks of a group must have it alike."""

    shared_whole_bytes: int = 16 * KIB
    """Bytes up to which each rank reduces all of a tensor in shared memory, and none waits twice;
    of longer ones each reduces a slice. Ranks of a group must have it alike."""

    shared_piece_bytes: int = 128 * KIB
    """Bytes of each operand that a reduction in shared memory takes at a time: such pieces of all
    operands lie in a core's second cache."""

    shared_mapped_bytes: int = 8 * MIB
    """Bytes of another rank's memory that are mapped at once while they are copied; a row that is
    not contiguous is not cut."""

    shared_bucket_bytes: int = 64 * KIB
    """Bytes from which a bucket of DDP's lies in shared memory; smaller ones are copied there in a
    few microseconds."""

    shared_rows_bytes: int = 256 * KIB
    """Bytes of the mean tensor of a bucket from which each rank of ZeRO-1 reduces in shared memory
    only its rows; a bucket of smaller tensors is averaged whole, which takes less time than to go
    through them. Ranks must have it alike."""

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            assert size is None or size >= 1, f"{field.name} is {size}"


SHARED_MEMORY_SIZES = tuple(
    field.name for field in fields(BlockSizes) if field.name.startswith("shared_")
)
_current_block_sizes = BlockSizes()


def get_block_sizes() -> BlockSizes:
    """The sizes in force. Read where a loop begins: an import or a default argument would keep
    those of another moment."""
    return _current_block_sizes


@contextmanager
def use_block_sizes(sizes: BlockSizes) -> Iterator[None]:
    """Put `sizes` in force for this process, all of its threads, until the block ends.

    Models must be built inside, too: buckets are cut when a model is parallelized.
    """
    # A variable of the process and not of the context: backwards run in threads of autograd.
    global _current_block_sizes
    before, _current_block_sizes = _current_block_sizes, sizes
    try:
        yield
    finally:
        _current_block_sizes = before


def restore_shared_memory_sizes(sizes: BlockSizes) -> BlockSizes:
    """`sizes` with the usual ones of what ranks exchange in shared memory."""
    usual = BlockSizes()
    return replace(sizes, **{name: getattr(usual, name) for name in SHARED_MEMORY_SIZES})


def shrink_block_sizes() -> BlockSizes:
    """Sizes with which a model of width 32, feed-forward width 90 and 251 tokens goes through each
    loop at least three times in sequences of 64 tokens on four ranks. All are odd: last blocks are
    shorter, and borders fall inside of rows and between the halves of pairs.
    """
    return BlockSizes(
        # Zigzag cuts 64 tokens for four ranks of cp into chunks of 8.
        query_block=3,
        # No smaller: with tp each chunk has collectives of its own.
        loss_chunk_tokens=37,
        # Norms share their bucket, a matrix of 32 x 90 in float64 fills one.
        bucket_bytes=16_411,
        norm_elements=1009,
        cpu_dropout_pairs=101,
        gpu_dropout_pairs=101,
        init_elements=1009,
        recorded_init_bytes=1,
        mapped_scratch_bytes=1,
        # A rank's part of a matrix is larger, and of a norm or a counter smaller.
        reusable_file_bytes=1009,
        reusable_block_bytes=509,
        # Embedding and head are written in parts. Matrices of blocks are not: another layout reads
        # rows from the middle of their only piece, two of 32 at a time, and one of 90 in turn.
        replica_split_bytes=30_011,
        checkpoint_read_bytes=577,
        # A bucket has three chunks. No smaller: each transfer is one of Python's calls.
        shared_chunk_bytes=6151,
        shared_whole_bytes=1009,
        shared_piece_bytes=577,
        shared_mapped_bytes=2053,
        shared_bucket_bytes=4099,
        shared_rows_bytes=1,
    )
