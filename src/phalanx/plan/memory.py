"""Bytes per rank, by category, from published arithmetic.

States follow the ZeRO paper (arXiv 1910.02054, §5): stage 1 splits optimizer state over the data-parallel ranks,
stage 2 also gradients, stage 3 also parameters. Activations count what autograd keeps (phalanx.plan.activations).
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.job.shape import ModelShape
from phalanx.plan import activations

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "loss", "communication", "allocator", "staging")

# glibc keeps freed blocks: 0.2 to 0.5 of the activations in the fp32 runs of docs/benchmarks.md. What CUDA's caching
# allocator keeps is not counted: its statistics, which a plan is compared with, are in allocated bytes.
CPU_ALLOCATOR_SHARE = 0.4
CPU_LIBRARY_BYTES = 8 * 2**20  # what torch allocates for itself when it first trains


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of each kind of state. The default is phalanx's: everything fp32, two Adam moments."""

    parameters: float = 4
    gradients: float = 4
    optimizer: float = 8


MIXED_FP16_ADAM = StateBytes(2, 2, 12)  # the ZeRO paper's: fp16 weights and gradients, fp32 copy and two moments


def state_bytes(num_params: float, zero_stage: int, dp_size: int, per: StateBytes) -> dict[str, float]:
    """Model-state bytes of one rank at a ZeRO stage (0: plain data parallelism)."""
    split = {kind: dp_size if zero_stage >= stage else 1 for kind, stage in _SPLIT_FROM_STAGE.items()}
    return {kind: num_params * getattr(per, kind) / split[kind] for kind in _SPLIT_FROM_STAGE}


_SPLIT_FROM_STAGE = {"optimizer": 1, "gradients": 2, "parameters": 3}


@dataclass(frozen=True)
class Workload:
    """What one rank does with the model in one microbatch."""

    micro_batch_size: int
    seq_len: int  # of an image: its patches (and class token)
    precision: str  # "fp32" | "bf16"
    recompute: str  # "none" | "full"
    loss_chunk_tokens: int
    num_microbatches: int = 1
    document_masks: bool = False
    optimizer_bytes: int = 8  # per parameter
    copies_state: bool = False  # saves are written from a copy while training goes on

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.seq_len

    @property
    def compute_bytes(self) -> int:
        return 2 if self.precision == "bf16" else 4


def activation_bytes(shape: ModelShape, work: Workload) -> float:
    """Bytes autograd keeps from the forward to the backward, all layers.

    Recompute keeps each layer's input, and one layer is alive while it is redone.
    """
    c = work.compute_bytes
    dense, sparse = (activations.block_bytes(shape, c, experts=experts) for experts in (False, True))
    num_sparse = shape.num_expert_layers
    layers = (shape.num_layers - num_sparse) * dense + num_sparse * sparse
    if work.recompute == "full":
        largest = max(dense if num_sparse < shape.num_layers else 0, sparse if num_sparse else 0)
        layers = shape.num_layers * shape.dim * c + largest
    masks = activations.mask_bytes(shape, work.micro_batch_size, work.seq_len, c, documents=work.document_masks)
    if shape.reads_images:  # the last norm and the head see one token of each image
        return work.tokens * layers + work.micro_batch_size * activations.image_bytes(shape, c)
    last = activations.norm_bytes(shape, shape.dim, c) + activations.table_bytes(shape)
    return work.tokens * (layers + last) + masks


def loss_bytes(shape: ModelShape, work: Workload) -> float:
    """Bytes of the chunked cross-entropy: fp32 logits of one chunk, gradients of hidden states and head.

    In bf16 a chunk also exists in the compute type twice: as it leaves the matmul and as it enters the next. Over
    classes there are no chunks: logits, their log-softmax and its gradient in fp32.
    """
    if shape.reads_images:
        return 3 * 4 * work.micro_batch_size * shape.num_classes
    chunk = min(work.loss_chunk_tokens, work.tokens)
    low = 0 if work.compute_bytes == 4 else 2 * work.compute_bytes
    logits = chunk * shape.vocab_size * (4 + low)
    return logits + work.tokens * shape.dim * work.compute_bytes + shape.vocab_size * shape.dim * 4


def communication_bytes(shape: ModelShape, work: Workload, zero_stage: int) -> float:
    """Bytes of what sharding gathers for use: the unsharded weights and gradients of the units alive at the worst time.

    DDP reduces in the gradients' own storage and needs nothing more. Under bf16 autocast it keeps cast weights.
    """
    if zero_stage == 0:
        return shape.num_params * 2 if work.precision == "bf16" else 0
    # Between microbatches gradients are not reduced, and stay whole.
    accumulated = shape.num_params * 4 if work.num_microbatches > 1 else 0
    block, rest = shape.block_params, shape.num_params - shape.blocks_params
    if zero_stage == 3:
        # The root unit (embedding, head) stays whole through the forward; one block is gathered beside it.
        return (rest + block) * work.compute_bytes + max(rest, block) * 4 + accumulated
    return shape.num_params * work.compute_bytes + max(rest, block) * 4 + accumulated


def staging_bytes(shape: ModelShape, work: Workload, num_ranks: int) -> int:
    """Host memory of one rank for the copy that asynchronous saves are written from: its part of weights and optimizer
    state, which is an equal one in every layout, because no block is written twice."""
    return round(shape.num_params * (StateBytes().parameters + work.optimizer_bytes) / num_ranks)


def rank_memory(
    shape: ModelShape, work: Workload, zero_stage: int, dp_size: int, device: str, num_ranks: int
) -> dict[str, int]:
    """Bytes of one rank by category (see CATEGORIES), on top of interpreter and torch; of a GPU those on it.

    Of a user's own module only the states are known: activations, loss and communication count zero.
    """
    memory = state_bytes(shape.num_params, zero_stage, dp_size, StateBytes(optimizer=work.optimizer_bytes))
    if shape.is_known:
        memory["activations"] = activation_bytes(shape, work)
        memory["loss"] = loss_bytes(shape, work)
        memory["communication"] = communication_bytes(shape, work, zero_stage)
    if device == "cpu":
        memory["allocator"] = CPU_LIBRARY_BYTES + CPU_ALLOCATOR_SHARE * memory.get("activations", 0)
        if work.copies_state:
            memory["staging"] = staging_bytes(shape, work, num_ranks)
    always = [category for category in CATEGORIES if category != "staging" or category in memory]
    return {category: round(memory.get(category, 0)) for category in always}
