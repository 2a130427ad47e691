"""`StepSetup`: what decides how long a step takes beside model and cluster. `SoftwareStack`: how a
framework computes and communicates, so that published runs of other frameworks and our own plans go
through one model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from phalanx.plan.layout import Layout

Kernels = Literal["fused", "eager", "compiled"]
AttentionKernel = Literal["flash", "cudnn", "unfused"]
Precision = Literal["fp32", "fp16", "bf16", "fp8", "mxfp8", "fp4"]
Recompute = Literal["none", "selective", "attention", "per-op", "full"]
CpAttention = Literal["ring", "all-gather", "ulysses"]
Launch = Literal["eager", "graph"]
ExpertDispatch = Literal["by expert", "by rank", "by rank in order"]


@dataclass(frozen=True)
class SoftwareStack:
    """The ways in which a framework computes and communicates, where frameworks differ."""

    name: str = "phalanx"
    """For readers: no formula asks for it."""
    kernels: Kernels = "eager"
    """Between matrix products: fused by hand, one kernel an operation, or by a compiler."""
    attention: AttentionKernel = "flash"
    """flash: FlashAttention 2 or torch's own; cudnn: cuDNN or FlashAttention 3; unfused: scores
    are written to memory."""
    launch: Launch = "eager"
    """Whether the CPU starts every kernel, or a graph of them ("graph": CUDA graphs, XLA)."""
    launch_weight: float = 1.0
    """CPU time of one block, as a multiple of a plain one's."""
    launches_in_order: bool = False
    """A block starts fewer kernels, for tokens arrive in the experts' order."""
    overlaps_reduce: bool = True
    """Gradients are reduced beside the backward."""
    overlaps_gather: bool = True
    """Parameters are gathered beside the computation before."""
    overlaps_tp: bool = False
    """tp's collectives run in chunks beside its matrix products."""
    overlaps_ep: bool = False
    """Tokens travel to experts beside the computation of others."""
    overlaps_experts: bool = False
    """Tokens travel to experts beside all that another microbatch computes."""
    expert_dispatch: ExpertDispatch = "by expert"
    """How tokens travel to experts. by expert: a copy for each expert that a token visits, as rows
    of one all-to-all; by rank: one for each rank that has some of them, and one for each other link
    domain, where it is passed on (DeepEP); in order: so, and written in the experts' order as they
    arrive (HybridEP)."""
    attention_has_8_bits: bool = False
    """Queries, keys and values enter attention's products in fp8."""
    head_has_8_bits: bool = False
    """The head's product has the type of those of blocks."""
    fuses_experts: bool = False
    """An expert's first product, its activation and the cast of what it gives are one kernel."""
    reads_expert_sizes: bool = True
    """The CPU reads how many rows each expert got before it starts what computes with them."""
    overlaps_p2p: bool = False
    """Messages between stages travel beside the computation of others."""
    grad_bytes: int = 4
    """Bytes of one element of a gradient as it is reduced."""
    gather_bytes: int = 4
    """Bytes of one element of a parameter as it is gathered."""
    has_main_grad: bool = False
    """Gradients add up in fp32 buffers beside the 16-bit weights (Megatron)."""
    reduces_each_microbatch: bool = False
    """ZeRO 2 and 3 reduce gradients after every microbatch."""
    keeps_gathered: bool = False
    """ZeRO 3 keeps the parameters that it gathered in the forward until the backward."""
    gathers_each_tensor: bool = False
    """Parameters are gathered tensor by tensor, not block by block."""
    cuts_experts: bool = True
    """tp divides the features of an expert; else ep folds over tp, too, and experts are whole."""
    is_head_fused: bool = True
    """The loss is computed with the head's product, in chunks or in one kernel."""
    balances_stages: bool = False
    """Stages have the blocks with which the slowest takes least, embedding and head among it; else
    as many blocks as the others, or one less."""
    extra_dropout: bool = False
    """Dropout after attention and feed-forward, and on attention's scores."""


PHALANX_STACK = SoftwareStack(balances_stages=True)
PHALANX_COMPILED_STACK = SoftwareStack(kernels="compiled", launch_weight=0.5, balances_stages=True)
MEGATRON_STACK = SoftwareStack(
    "megatron",
    kernels="fused",
    attention="cudnn",
    overlaps_p2p=True,
    gather_bytes=2,
    has_main_grad=True,
    cuts_experts=False,
)


@dataclass(frozen=True)
class StepSetup:
    """One way to run a step: layout, batch, schedule, precision, recomputation and software.

    A step has `num_microbatches` microbatches on each data-parallel rank, of `micro_batch_size`
    sequences of `seq_len` tokens each.
    """

    layout: Layout = field(default_factory=Layout)
    zero_stage: int = 0
    micro_batch_size: int = 1
    num_microbatches: int = 1
    seq_len: int = 2048
    precision: Precision = "bf16"
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recompute: Recompute = "none"
    """What is computed again in the backward. none; attention: scores and their use;
    selective: all but matrix products and attention; per-op: that, and every second product;
    full: all."""
    recompute_share: float = 1.0
    """The part of the blocks that is recomputed so, 0 to 1."""
    recompute_of_others: Recompute = "none"
    """What is computed again of the other blocks."""
    sequence_parallel: bool = True
    """Between tp's regions, each rank has a part of the sequence."""
    cp_attention: CpAttention = "ring"
    accumulate: Literal["unsharded", "sharded"] = "unsharded"
    """Whether gradients of microbatches add up before they are reduced (ZeRO 2 and 3)."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    stack: SoftwareStack = PHALANX_STACK
    folded_ep: int = 0
    """Ranks that experts are spread over, where ep folds over tp, too (`cuts_experts` is False)
    and may be larger than the layout could say; 0: the layout's ep."""
    last_stage_blocks: int = 0
    """Blocks of the rank with the head, where a layout gives it another number than the others;
    0: none is stated."""
    imbalance: float = 1.0
    """Tokens of the busiest expert rank, as a multiple of the mean."""

    @property
    def num_sequences(self) -> int:
        """Sequences of one step, of all ranks."""
        per_rank = self.micro_batch_size * self.num_microbatches
        return per_rank * self.layout.data_parallel_size
