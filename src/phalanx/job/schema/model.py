"""The section [model]."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.job.schema.base import (
    AboveOne,
    Count,
    LayerCount,
    Positive,
    PositiveFloat,
    Section,
    Text,
)


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
    num_layers: LayerCount | None = None
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
