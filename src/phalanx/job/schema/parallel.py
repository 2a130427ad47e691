"""The section [parallel]."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field

from phalanx.job.degrees import Degrees
from phalanx.job.schema.base import Count, Positive, PositiveFloat, Section, Text


class Parallel(Section):
    """The layout of the ranks. The plan chooses what is left out: see `phalanx plan`."""

    ranks: Positive | None = None
    """Processes; default by the plan (GPUs, or CPU cores up to 8)."""
    dp_replicate: Positive | None = None
    """Copies of the model (DDP, or the outer axis of HSDP)."""
    dp_shard: Positive | None = None
    """Ranks that share one copy (FSDP2)."""
    zero_stage: Literal[1, 2, 3] | None = None
    """The states that dp_shard splits (without it: over all ranks).

    1: the optimizer's state; 2: gradients and parameters, too, which stay gathered from forward
    to backward; 3, its default: parameters are freed after use.
    """
    tp: Positive | None = None
    """Ranks that cut the matrices of a model between them (tensor parallelism), by sharding
    rules."""
    sequence_parallel: bool | None = None
    """With tp: between the cut matrices each rank has a part of the sequence.

    Default: where the model says it can.
    """
    tp_chunks: Positive = 1
    """With tp: a product beside a collective is cut into so many chunks, so that one is computed
    while another travels.

    1: one after the other.
    """
    cp: Positive | None = None
    """Ranks that each have a part of every sequence's tokens (context parallelism):
    docs/context-parallel.md."""
    cp_attention: Literal["ring", "all-gather", "ulysses"] = "ring"
    """With cp: how attention sees all tokens: keys and values travel from rank to rank while blocks
    are computed; or every rank gathers them all; or ranks change tokens for heads, which cp must
    divide."""
    cp_load_balance: Literal["zigzag", "none"] = "zigzag"
    """With cp: zigzag gives each rank an early and a late part of a sequence, so that all have
    equal work under a causal mask; none: one run of tokens.

    (ulysses has equal work anyway, and cuts no further than none.)
    """
    ep: Positive | None = None
    """Ranks over which the experts of a model are spread (expert parallelism): docs/experts.md.

    They are ranks of dp_shard x cp, which ep must divide; it adds none.
    """
    pp: Positive | None = None
    """Ranks over which the blocks of a model are spread in stages (pipeline parallelism):
    docs/pipeline.md."""
    schedule: (
        Literal["gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zb-v", "dualpipe-v"]
        | None
    ) = None
    """With pp: the order in which the stages compute. Default: 1f1b."""
    schedule_file: Text | None = None
    """With pp: a schedule of your own instead, CSV with a line for each rank: 0F0,0F1,0B0,0B1
    (docs/pipeline.md)."""
    stages_per_rank: Positive | None = None
    """With pp: stages on each rank. Default: 2 for the interleaved and the V schedules, else 1."""
    stage_blocks: tuple[Count, ...] = ()
    """With pp: how many blocks each stage has, from first to last.

    Default: cut so that the slowest is as fast as can be.
    """
    first_stage: tuple[Text, ...] = ()
    """With pp: modules outside the blocks that the first stage holds besides those registered
    before the blocks."""
    last_stage: tuple[Text, ...] = ()
    """With pp: modules outside the blocks that the last stage holds besides those registered
    after the blocks."""
    rules: dict[str, str] = Field(default_factory=dict)
    """Sharding rules for tp by name of module, before those that the model brings:
    docs/tensor-parallel.md."""
    sync_batchnorm: bool = True
    """BatchNorm layers use the statistics of the whole microbatch over all data-parallel ranks."""
    dropout: Literal["global", "local"] = "global"
    """global: what dropout drops is a function of seed, step and sample, in any layout the same;
    local: ranks draw."""
    bucket_mb: PositiveFloat = 25.0
    """Bytes of one all-reduce of DDP, and of one all-gather of updated weights (ZeRO-1), in MiB."""
    static_graph: bool = False
    """DDP: the graph and the parameters it uses are the same in every step; DDP then learns them
    once."""
    collectives: Literal["auto", "shared", "gloo"] = "auto"
    """How ranks that compute on CPUs exchange tensors: auto: through the memory that the ranks of a
    host share, and through gloo with other hosts; shared: the same, and refused where some two
    ranks share none; gloo: always (docs/shared-memory.md).
    """
    unused_parameters: Literal["refuse", "allow"] = "refuse"
    """DDP and ZeRO-1: a parameter without part in a rank's loss ends the run by name, or counts as
    a gradient of zero where other ranks used it.

    ZeRO 2 and 3 always do the latter. What no rank has used in a step is left alone.
    """
    accumulate: Literal["unsharded", "sharded"] = "unsharded"
    """ZeRO 2 and 3, between microbatches: gradients stay whole and ranks talk once per step, or
    they are reduced and split after each microbatch (less memory, more communication)."""
    blocks_per_unit: Positive | Literal["all"] = 1
    """ZeRO 2 and 3: how many blocks are gathered and freed together; all: the whole model is one
    unit."""
    keep_whole_below: Count = 0
    """ZeRO 2 and 3: parameters of fewer elements are not split; their gradients are reduced
    together, once per step."""
    prefetch: Count | None = None
    """ZeRO 2 and 3: how many units ahead are gathered while one computes; default torch's choice,
    the next one in the backward of a GPU."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """The tensors that wait in host memory: optimizer state and update; or (ZeRO 2 and 3)
    parameters and gradients, too."""
    compress: Text = "none"
    """The form in which gradients travel between the ranks of DDP: fp16, bf16, int8, topk,
    powersgd, or another file of parallel/hooks; none: in fp32, as they are
    (docs/compression.md)."""
    compress_rank: Positive = 4
    """Columns of the thin matrices that stand for a gradient (powersgd)."""
    compress_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    """The part of each gradient's elements that is sent (topk)."""

    @property
    def has_state_on_host(self) -> bool:
        """True where the optimizer's state waits in host memory."""
        return self.offload != "none"

    @property
    def has_parameters_on_host(self) -> bool:
        """True where parameters and gradients wait in host memory, too."""
        return self.offload == "parameters"

    @property
    def degrees(self) -> Degrees:
        """The degrees along the axes, 1 where the job gives none."""
        return Degrees(**{axis.name: getattr(self, axis.name) or 1 for axis in fields(Degrees)})
