"""What glibc's allocator keeps on a CPU beside what is alive, and from which size on blocks go back
to the system.

Numbers are measured (docs/memory.md, "What glibc keeps"). Up to glibc 2.37 a freed block that was
aligned, as torch's are, is too small for the next one of its size, so holes grow with activations.
What CUDA's caching allocator keeps is not counted: its statistics, which a plan is compared with,
are in allocated bytes. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.core.units import MIB
from phalanx.job.costs import ModelCosts
from phalanx.plan.layout import Layout
from phalanx.plan.workload import Workload

# What torch, MKL and oneDNN allocate for themselves when they first train.
LIBRARY_BYTES = 12 * MIB
# Of the activations, where the heap takes blocks of up to 32 MiB.
RETAINED_ACTIVATION_SHARE = 0.4
# The same where gradients of several microbatches accumulate without a pipeline: they come to lie
# between the activations, which are elsewhere in the next microbatch.
RETAINED_SHARE_WHEN_ACCUMULATING = 0.8
# Of each rank of tensor parallelism, up to the share above: what collectives gather has the whole
# width, and holes that cut activations leave are too small for it. The more ranks, the smaller.
RETAINED_SHARE_PER_TENSOR_RANK = 0.2
# Of what is alive at other moments of a step than the highest: holes that its tensors left.
RETAINED_SHARE_OF_OTHER_MOMENTS = 1.0
# Of the gradients that microbatches add up in DDP's buckets: true peaks are that much higher, in
# the second step (5 rows of benchmarks/memory_truth.py: 0.4 to 1.2). A dry run has none of it.
RETAINED_SHARE_OF_BUCKETS = 0.7
# Graphs and code of torch.compile in a rank, without its imports: 2 to 40 MiB (docs/memory.md).
COMPILER_BYTES = 40 * MIB
# Larger blocks are mapped, and returned as they are freed: mallopt(3), MALLOPT_MMAP_THRESHOLD.
# Smaller thresholds return more, and cost page faults where activations are many:
# docs/benchmarks.md.
MAX_HEAP_BLOCK_BYTES = 32 * MIB
SHARDED_MAX_HEAP_BLOCK_BYTES = 4 * MIB


def choose_max_heap_block_bytes(layout: Layout) -> int:
    """The size up to which a CPU rank's freed blocks stay in its heap."""
    if layout.gradient_reduction_layout.dp_shard > 1:
        return SHARDED_MAX_HEAP_BLOCK_BYTES
    return MAX_HEAP_BLOCK_BYTES


def estimate_retained_bytes(
    work: Workload, activations: float, *, is_staged: bool = False
) -> float:
    """Bytes that a CPU rank's allocator and libraries keep, beside freed gradients.

    `activations`: bytes that the rank keeps for the backward. `is_staged`: of a pipeline's rank.
    """
    share = RETAINED_ACTIVATION_SHARE
    if work.num_microbatches > 1 and not is_staged:
        share = RETAINED_SHARE_WHEN_ACCUMULATING
    elif work.tp > 1:
        share = min(RETAINED_SHARE_PER_TENSOR_RANK * work.tp, RETAINED_SHARE_WHEN_ACCUMULATING)
    compiler = COMPILER_BYTES if work.is_compiled else 0
    return LIBRARY_BYTES + share * activations + compiler


def estimate_retained_bytes_of_other_moments(largest: Iterable[float], highest: float) -> float:
    """Bytes that a CPU rank's allocator keeps of what is freed before the highest moment of a step.

    `largest`: by category, the most bytes at any moment; `highest`: bytes at the highest moment.
    """
    return RETAINED_SHARE_OF_OTHER_MOMENTS * max(sum(largest) - highest, 0.0)


def estimate_retained_gradient_bytes(shape: ModelCosts, work: Workload, zero_stage: int) -> int:
    """Bytes of freed gradients that glibc keeps on a CPU.

    Where gradients accumulate over microbatches, each of a block is made anew, in bf16 first in the
    compute type, and freed: those of one block lie between what stays, and so does the
    embedding's, which is as large as its table. FSDP's gradients are a part of communication.
    """
    if zero_stage >= 2 or work.num_microbatches == 1 or shape.activations is None:
        return 0
    freed = shape.activations.find_freed_gradients(work.ep)
    freed_bytes = 0
    # A block's largest matrix decides: larger ones are mapped, and go back as they are freed.
    if freed.matrix * 4 <= MAX_HEAP_BLOCK_BYTES:
        freed_bytes = freed.block * (4 + work.cast_bytes)
    if freed.table * 4 <= MAX_HEAP_BLOCK_BYTES:
        freed_bytes += freed.table * 4
    return freed_bytes
