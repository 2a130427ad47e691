"""The job file's sections and keys.

Types, bounds and one-line descriptions live here and nowhere else.

Nothing derived is stored in a job: `None` means "chosen by the plan".
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from phalanx.job.degrees import Degrees

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
AboveOne = Annotated[float, Field(gt=1, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class Run(Section):
    """The run's name, and the directory it writes to."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9._-]{1,64}$",
            json_schema_extra={"wanted": "a name of 1 to 64 letters, digits, '.', '_' or '-'"},
        ),
    ] = "train"
    """Names the run directory and its pages."""
    dir: Text | None = None
    """Run directory; default runs/<name>-<time>. Everything a run writes is inside."""
    seed: Count = 0
    """Initial weights and sample order are pure functions of it."""


class Model(Section):
    """Keys that are absent have the preset's value. Those of a shape have its names."""

    preset: Text | None = None
    """The shape to start from: small (the default; small-vit for kind = "vit"), or a published
    model's, say "llama3-8b" (docs/models.md lists them).

    The keys below change it; widths that they imply follow.
    """
    kind: str | None = None
    """A model of phalanx (the preset's), package.module:factory for your own nn.Module, or hf:DIR
    for a local directory of Hugging Face's (docs/hugging-face.md)."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your factory (kind = "package.module:factory"); of hf:DIR, settings
    beside config.json's."""
    objective: str | None = None
    """package.module:function for your own objective(outputs, batch) -> (loss_sum, num_targets)."""
    init_from: Text | None = None
    """Start from these weights: a run, a checkpoint, or what `phalanx checkpoint import` wrote; a
    path or a URL.

    The optimizer begins anew. A run that continues does not read it.
    """
    init_cast: bool = False
    """Round weights of init_from that have another floating-point type; without it that is exit
    5."""
    num_layers: Positive | None = None
    """Number of blocks."""
    dim: Positive | None = None
    """Width of the residual stream."""
    num_heads: Positive | None = None
    """Query heads."""
    num_kv_heads: Positive | None = None
    """Key and value heads (GQA); where nothing says, num_heads."""
    head_dim: Positive | None = None
    """Width of a head; where nothing says, dim / num_heads."""
    kv_rank: Count | None = None
    """Latent attention (DeepSeek-V2): width of what keys and values are made of (0: they are
    made of the input)."""
    query_rank: Count | None = None
    """Width of what its queries are made of (0: of the input)."""
    rope_head_dim: Positive | None = None
    """The part of head_dim that positions rotate in latent attention; all heads share its key."""
    value_head_dim: Positive | None = None
    """Width of a head's values in latent attention; where nothing says, head_dim less
    rope_head_dim."""
    ffn_dim: Positive | None = None
    """Inner width of the feed-forward; where nothing says, 4 dim, or with a gate 8/3 dim rounded up
    to a multiple of 32."""
    vocab_size: Positive | None = None
    """Rows of the embedding; where nothing says, what the data needs."""
    activation: Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh"] | None = None
    """The feed-forward's activation. swiglu and geglu have a gate; _tanh is GELU's approximation
    (GPT-2, Gemma)."""
    norm: Literal["rmsnorm", "layernorm"] | None = None
    """RMSNorm, or LayerNorm with a bias."""
    norm_eps: PositiveFloat | None = None
    """Epsilon of the norms."""
    norm_plus_one: bool | None = None
    """Norms multiply by 1 + their weight, which begins at 0 (Gemma)."""
    post_norms: bool | None = None
    """A norm after attention and feed-forward, too (Gemma 3)."""
    bias: Literal["none", "qkv", "all"] | None = None
    """The linear layers that have a bias: none (even if the preset's have), those of query, key
    and value, or all but the head."""
    qk_norm: bool | None = None
    """RMSNorm of each head's queries and keys (Qwen 3)."""
    tie_embeddings: bool | None = None
    """The head shares the embedding's weight."""
    scale_embeddings: bool | None = None
    """Multiply embeddings by the square root of dim (Gemma)."""
    positions: Literal["rope", "learned"] | None = None
    """Rotary positions, or a learned table of max_positions rows."""
    max_positions: Positive | None = None
    """The longest sequence that learned positions know; where nothing says, data.seq_len."""
    rope_theta: AboveOne | None = None
    """Base of the rotary positions."""
    local_rope_theta: AboveOne | None = None
    """Base in blocks with a sliding window, where it is another one (Gemma 3)."""
    rope_scaling: Literal["none", "linear", "ntk", "llama3", "yarn"] | None = None
    """The way rotary positions are stretched beyond the length they were trained for: not at all
    (even if the preset's are), position interpolation, another base (NTK-aware), Llama 3.1's
    rule, YaRN."""
    rope_factor: PositiveFloat | None = None
    """The factor by which rotary positions are stretched."""
    rope_original_len: Positive | None = None
    """The length that positions were trained for (llama3, yarn)."""
    rope_mscale: PositiveFloat | None = None
    """YaRN multiplies queries and keys by 1 + 0.1 x this x ln(rope_factor); where nothing says,
    1."""
    sliding_window: Count | None = None
    """A token attends to this many tokens, itself among them (0: to all before it)."""
    global_every: Count | None = None
    """Every n-th block has no window (0: every block has it)."""
    num_experts: Count | None = None
    """Experts of a block (0: none)."""
    experts_per_token: Count | None = None
    """Experts that one token visits."""
    expert_ffn_dim: Count | None = None
    """Inner width of an expert."""
    num_shared_experts: Count | None = None
    """Experts that every token visits, besides."""
    num_dense_layers: Count | None = None
    """Blocks at the beginning that have no experts."""
    router_scores: Literal["softmax", "sigmoid"] | None = None
    """The router's scores of experts: softmax over all of them, or sigmoid of each
    (DeepSeek-V3)."""
    router_normalize: bool | None = None
    """The weights of the experts that a token visits add up to 1 (Mixtral, Qwen 3)."""
    router_scale: PositiveFloat | None = None
    """The factor that the weights of visited experts are multiplied by."""
    expert_capacity: Annotated[float, Field(ge=0)] | None = None
    """Tokens of one sequence that an expert takes, as a multiple of its even share; those after
    them are dropped (0: none is)."""
    balance_loss: Annotated[float, Field(ge=0)] | None = None
    """Weight of the auxiliary loss, per sequence, that evens out what experts get (0: none)."""
    balance_bias: Annotated[float, Field(ge=0)] | None = None
    """The amount by which each step moves the bias that experts are chosen by, against the load
    of the step (0: no bias)."""
    image_size: Positive | None = None
    """Height and width of an image, in pixels (kind = "vit", as the keys below)."""
    patch_size: Positive | None = None
    """Height and width of a patch."""
    num_channels: Positive | None = None
    """Channels of an image."""
    num_classes: Positive | None = None
    """Number of classes that the head tells apart."""
    pooling: Literal["class_token", "mean"] | None = None
    """The input of the head: a token of its own, or the mean over all patches."""

    @property
    def is_foreign(self) -> bool:
        """True for the user's own module."""
        return self.kind is not None and ":" in self.kind


class Source(Section):
    """One source of a mixture."""

    source: Text
    """Text, tokens or a dataset, as data.source takes them."""
    weight: PositiveFloat = 1.0
    """Its share of the samples, relative to the other sources."""


class Data(Section):
    """The data to learn from, and how it becomes samples."""

    source: Text = "stdlib"
    """"stdlib" (the interpreter's own source text), a file, a directory, a glob of text, JSONL,
    Parquet or Arrow; token shards that `phalanx data build` wrote; a 1-D integer .npy of token ids;
    a Megatron .bin; or package.module:factory for your own map-style dataset."""
    mixture: tuple[Source, ...] = ()
    """Several sources with weights, instead of source: [[data.mixture]] tables with source and
    weight."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own dataset (source = "package.module:factory")."""
    tokenizer: Text | None = None
    """The tokenizer of text: "bytes", or a Hugging Face tokenizer.json.

    Default: that of the model's directory or weights (model.kind = "hf:DIR", model.init_from),
    else bytes. Token shards know theirs, and another is refused.
    """
    column: Text = "text"
    """The field of JSONL rows, or the column of Parquet and Arrow files, that holds the text."""
    seq_len: Positive = 128
    """Tokens of one sequence."""
    document_masks: bool = False
    """Keep the documents that are packed into one sequence from seeing each other; positions
    restart with each."""
    workers: Count | None = None
    """Processes of each rank that read ahead.

    With 0 a thread does, for tokens; your own dataset is then read in the step. Default: 1 for your
    own dataset, else 0.
    """
    worker_timeout_s: PositiveFloat = 60.0
    """A worker that is silent for this long is replaced.

    Before the start: what a sample of your dataset may take.
    """
    held_out_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Part of the documents kept for evaluation, chosen by document name (by position if there
    is one)."""


class Train(Section):
    """The length of the run, and the size of one update."""

    steps: Positive = 500
    """Optimizer updates in all."""
    global_batch_size: Annotated[int, Field(ge=1, le=2**31)] = 16
    """Sequences per update over all ranks."""
    micro_batch_size: Positive | None = None
    """Sequences per forward-backward of one rank; default the rank's whole share."""
    recompute: Literal["none", "selective", "full", "every-k", "sqrt", "budget"] = "none"
    """The results that are computed again in the backward instead of kept: none; all but those
    of matmuls and attention; all of a block but its input; each recompute_every-th block;
    segments of about the square root of the blocks; or as few blocks as keep to
    recompute_budget_gib (docs/memory.md)."""
    recompute_every: Positive | None = None
    """k of recompute = "every-k": the blocks k, 2k and so on are recomputed in full; 1: all of
    them."""
    recompute_budget_gib: PositiveFloat | None = None
    """GiB that activations may take on a rank (recompute = "budget")."""
    offload_activations: bool = False
    """Keep activations in host memory from the forward to the backward.

    On a CPU that changes nothing but the path.
    """
    compile: bool = False
    """torch.compile each block."""
    deterministic: bool | Literal["layout-free"] = False
    """Use only the algorithms of torch whose results are the same in every run: slower on GPUs.

    An operation that has none is refused. Built-in models are deterministic on CPUs without it
    (docs/precision.md). "layout-free": losses and weights have the same bits on 1, 2, 4, ...
    data-parallel ranks (docs/layout-free.md).
    """
    loss_chunk_tokens: Positive = 2048
    """Logits exist for at most this many tokens at a time."""
    sample_tokens: Count = 256
    """Tokens of text generated at the end, where the data is text (0: none)."""


class Eval(Section):
    """The evaluation of the model on held-out data."""

    tokens: Count = 262144
    """Held-out tokens of one evaluation, at most what there is (0: none).

    Of your own dataset: samples.
    """
    every_steps: Positive | None = None
    """Evaluate each time this many steps are done, besides the end."""
    keep_best: bool = False
    """Save whenever an evaluation is the best so far, and name that checkpoint in RUN/best.json."""
    metric: Text = "loss"
    """The measure that evaluations are compared by: "loss", or the name of a metric of your own
    objective."""
    mode: Literal["min", "max"] | None = None
    """The best value of eval.metric: the lowest (min) or the highest (max); must be set for a
    metric of your own."""


class Optim(Section):
    """The optimizer, and the learning rate over time."""

    kind: Text = "adamw"
    """An optimizer of phalanx (adamw, sgd), or package.module:build for your own build(groups,
    optim)."""
    lr: PositiveFloat | Literal["auto"] = "auto"
    """Peak learning rate. auto: 3e-3 for random weights; for weights that are trained already
    (model.init_from, hf:DIR with weights) 2e-5, and 1e-3 with sgd.

    An own optimizer gets the number.
    """
    lr_scaling: Literal["none", "auto", "linear", "sqrt"] = "none"
    """The rule by which lr follows the batch when it is not reference_batch_size: linear, in
    proportion (SGD; Goyal et al. 2017); sqrt, with its square root (Adam; Malladi et al. 2022);
    auto takes the optimizer's rule."""
    reference_batch_size: Positive | None = None
    """The train.global_batch_size that lr was tuned for."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of sgd."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat | Literal["auto"] = "auto"
    """Decoupled (adamw; auto: 0.1) or added to the gradient (sgd; auto: 0).

    Norms, biases, other vectors and embeddings do not decay.
    """
    clip_norm: PositiveFloat | None = 1.0
    """Global gradient norm above which gradients are scaled down; none when absent (clip_norm =
    "none")."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up. wsd: constant, then linear over the last decay_fraction."""
    warmup_steps: Count | None = None
    """Steps of linear warm-up; 0: none. Without it a tenth of train.steps, and 50 at most."""
    min_lr_ratio: Fraction = 0.1
    """Last learning rate over the peak."""
    decay_fraction: Fraction = 0.2
    """Part of the steps that wsd decays."""


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
    unused_parameters: Literal["refuse", "allow"] = "refuse"
    """DDP and ZeRO-1: a parameter without part in a rank's loss ends the run by name, or counts as
    a gradient of zero where other ranks used it.

    ZeRO 2 and 3 always do the latter.
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


class Precision(Section):
    """The types of numbers."""

    compute: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Type of matmuls and activations; auto: bf16 on GPUs of compute capability 8.0 and higher,
    else fp32.

    Weights, optimizer and gradient reduction stay fp32. fp16 scales the loss; fp8, for GPUs that
    have it, multiplies blocks' matrices in fp8 and does the rest in bf16 (docs/precision.md).
    """
    loss_scale: PositiveFloat | Literal["dynamic"] = "dynamic"
    """The factor that the loss is multiplied by before the backward with fp16; dynamic: halved
    when gradients overflow, doubled after loss_scale_growth_steps good steps."""
    loss_scale_initial: PositiveFloat = 65536.0
    """The first value of the dynamic scale."""
    loss_scale_growth_steps: Positive = 2000
    """Steps without an overflow after which the dynamic scale doubles."""


class Checkpoint(Section):
    """When the state is saved, and which checkpoints stay.

    Of several intervals the first that is due counts.
    """

    every_steps: Positive | None = None
    """Save each time this many steps are done."""
    every_minutes: PositiveFloat | None = None
    """Save each time this many minutes have passed (rank 0's clock decides for all)."""
    every: Literal["auto"] | None = None
    """auto: save as often as costs the least time, by what a save is measured to cost and
    mtbf_hours (Young/Daly)."""
    mtbf_hours: PositiveFloat | None = None
    """Hours between two failures of the whole job, on average (for every = "auto")."""
    at_end: bool = True
    """Save after the last step."""
    asynchronous: bool = True
    """Training goes on while a copy of the state in host memory is written.

    The saves at the end and at a stop are waited for, and need no copy.
    """
    keep_last: Positive | None = None
    """Remove all but the last so many checkpoints, in the background, once a newer one has been
    verified; the best one stays.

    Without it nothing is removed.
    """
    keep_every: Positive | None = None
    """Besides those of keep_last, keep the first checkpoint of each so many steps: that of the
    multiple itself, unless saves come by the clock or had to wait."""
    url: str | None = None
    """The place of checkpoints, if not in the run's own directory: an object store, as
    s3://bucket/run-7, or another directory, as file:///data/run-7.

    Credentials come from the environment, never from the job.
    """
    incremental: bool = True
    """Blocks that are as in the last checkpoint are linked to it (or copied by the store), not
    written again."""
    fallback: bool = False
    """Continue from the newest checkpoint that verifies, if newer ones are damaged; without it
    that is exit 5."""

    @property
    def has_interval(self) -> bool:
        """True where the state is saved on the way, and not at the end alone."""
        return (
            self.every_steps is not None or self.every_minutes is not None or self.every is not None
        )


class Resilience(Section):
    """Reactions to failures, and failures to rehearse."""

    max_restarts: Count = 3
    """Restarts within an hour before the run is given up (exit 10)."""
    grace_s: PositiveFloat = 25.0
    """Seconds the ranks have to save after SIGTERM."""
    collective_timeout_s: PositiveFloat = 600.0
    """A collective that takes longer fails on every rank."""
    hang_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Seconds without progress of any rank in a step after which the ranks that cause it are killed
    and started again (docs/hangs.md); 0 never does.

    Default: 4, or eight of the slowest steps of this run if that is longer.
    """
    rendezvous_s: PositiveFloat | None = None
    """Seconds in which all ranks must have started; null is 20 for ranks that phalanx starts, 300
    for those of another launcher."""
    min_ranks: Positive | None = None
    """The fewest ranks to go on with when some do not come back: data parallelism shrinks,
    accumulation grows, and all ranks are tried again at a checkpoint. null: all, or none."""
    keep_ranks: bool = True
    """Ranks that only lost another one keep their process and what they hold of the state when it
    is started again; false starts all of them anew from the newest checkpoint."""
    check_collectives: Literal["off", "sampled", "all"] = "off"
    """Ranks compare each collective that they are about to call ("all"), or every 32nd with all
    before it ("sampled"), and stop with both lines where they differ (docs/where.md)."""
    check_collectives_wait_s: PositiveFloat = 30.0
    """Seconds that a rank waits in a collective that another one has not called before that is an
    error, where collectives are checked; a save or an evaluation of one rank alone must fit in."""
    on_oom: Literal["stop", "recompute"] = "stop"
    """When a rank has no memory left: stop (exit 7) and say what would need less; or go on with
    train.recompute = "full"."""
    on_loss_spike: Literal["warn", "skip", "rollback"] = "warn"
    """With a loss far above the last ones: say so; or leave out the update of that step; or that,
    and after three in a row go back to a checkpoint and read on behind their batches."""
    on_corruption: Literal["warn", "rollback"] = "rollback"
    """When replicas that had the same bits have others: say so, or go back to the newest checkpoint
    of when they were equal."""
    check_memory_every: Count = 0
    """Steps between checks that parameters and the optimizer's state have not changed since the
    last update, on each rank, also of what no other rank holds; 0: none. 1 checks all steps."""
    max_rollbacks: Count = 3
    """Times that a run goes back by itself; then it says so and goes on."""
    max_skipped_steps: Count = 100
    """Steps in a row with non-finite gradients or without targets before the run is given up
    (exit 8)."""
    inject: tuple[str, ...] = ()
    """Faults to inject, for drills: "kill:rank=1,step=7,phase=backward"."""


class Observe(Section):
    """The places that the facts of a run go to."""

    sinks: tuple[str, ...] | None = None
    """The places that facts go to besides RUN/events: names of phalanx.observe.sinks, or
    package.module:function that opens your own (open_sink(run_dir)).

    Default: tensorboard where it is installed.
    """
    samples: bool = False
    """Record which samples every step read, so that `phalanx data ledger RUN` can prove that none
    was repeated or left out."""
    log_every: Positive = 10
    """Steps between lines when the output is not a terminal."""
    invariants_every: Count = 100
    """Steps between checks of what must hold in any training: replicas have the same bits, the
    optimizer has the model's parameters, and each that has a gradient moves.

    The first step and the last are checked, too, and sums of targets and of experts' loads in
    every step. 0 checks nothing.
    """
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on which the run's metrics are served for Prometheus, at /metrics, by a process of its
    own (docs/metrics.md). 0 takes a free one, which RUN/metrics-target.json names.

    Default: none are served; `phalanx metrics RUN` does it for any run.
    """
    metrics_host: Text = "127.0.0.1"
    """Address that the metrics are served on; "0.0.0.0" for all of this machine, to whoever
    reaches it."""
    alert_webhook: Text | None = None
    """URL that alerts (docs/alerts.md) are POSTed to as JSON; $NAME takes it from that environment
    variable, where it belongs if whoever has it may write there."""
    alert_command: tuple[Text, ...] = ()
    """Program and arguments that are run for each alert, which comes as JSON on standard input."""
    hang_alert_s: PositiveFloat = 300.0
    """Seconds without progress of any rank, in steps, evaluations or saves, after which a hang is
    alerted. A collective that takes longer than resilience.collective_timeout_s ends the
    attempt."""
    trace_steps: tuple[Positive | Text, ...] = ()
    """Steps that all ranks trace, as numbers or ranges: [100, "200:203"]; at most 100.

    `phalanx trace RUN` makes the trace a file for Perfetto (docs/traces.md).
    """
    profile_steps: tuple[Positive | Text, ...] = ()
    """Steps that are traced with every operator and kernel that torch.profiler sees; at most 10.

    They are slower than others.
    """
    nvtx: bool = False
    """On a GPU, name phases as NVTX ranges, for Nsight Systems."""

    @property
    def has_observer(self) -> bool:
        """True where metrics are to be served or somebody is to be alerted."""
        return (
            self.metrics_port is not None
            or self.alert_webhook is not None
            or bool(self.alert_command)
        )


class Link(Section):
    """One level of a cluster's network."""

    name: Text
    """What it is called in reports: nvlink, rail, spine."""
    num_devices: Positive
    """Devices that it joins: 8 GPUs of a node, all 256 of a cluster."""
    gb_s: PositiveFloat
    """GB (1e9 bytes) a second, of one device and in one direction."""
    latency_us: PositiveFloat | None = None
    """Microseconds until a small message has arrived; where nothing says, a usual value."""
    oversubscription: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """How many times more the level below can send than this one can carry, when all send."""
    topology: Literal["switch", "rail", "fat-tree", "torus", "dragonfly"] = "switch"
    """How it joins them."""


class Cluster(Section):
    """The machine, where it should not be found out; or the one that a plan is for."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device that the ranks compute on."""
    memory_gib: PositiveFloat | None = None
    """Memory one rank may use; default what the machine has, divided by its ranks."""
    gpu: Text | None = None
    """Plan for a cluster of this kind of GPU, wherever the plan is made: "h100-sxm" (docs/plan.md
    lists them)."""
    instance: Text | None = None
    """Plan for machines of this type: "p5.48xlarge". Its GPUs, network and price are known
    (docs/plan.md)."""
    file: Text | None = None
    """Plan for the cluster that this TOML file describes: keys of this section, at its top."""
    nodes: Positive | None = None
    """Machines of the cluster; default 1."""
    gpus_per_node: Positive | None = None
    """GPUs of one machine; default what it is usually sold with."""
    links: tuple[Link, ...] = ()
    """Levels of the network, from the innermost outwards: [[cluster.links]] tables.

    Default: what the GPU or the instance is usually sold with.
    """
    host_memory_gib: PositiveFloat | None = None
    """Memory of one machine, for what is offloaded to it."""
    price_per_hour: PositiveFloat | None = None
    """US dollars for one machine and hour; default that of cluster.instance."""
    spot_price_per_hour: PositiveFloat | None = None
    """The same where a machine may be taken away at any time."""
    watts: PositiveFloat | None = None
    """Watts of one GPU at work; default what its data sheet allows it."""

    @property
    def has_described_machine(self) -> bool:
        """True where the section says for which GPUs a plan is, instead of this machine's."""
        return any((self.gpu, self.instance, self.file))


class Job(Section):
    """All that the user said, with defaults filled in.

    Frozen; serialises to JSON and back unchanged.
    """

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    eval: Eval = Eval()
    optim: Optim = Optim()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    checkpoint: Checkpoint = Checkpoint()
    resilience: Resilience = Resilience()
    observe: Observe = Observe()
    cluster: Cluster = Cluster()

    @classmethod
    def from_json(cls, document: object) -> Job:
        """The job that `to_json` wrote."""
        # As JSON: strict models take a list for a tuple in JSON alone.
        return cls.model_validate_json(json.dumps(document))

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
