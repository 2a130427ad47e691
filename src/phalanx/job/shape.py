"""`ModelShape`: what planning needs to know of a model, as numbers.

Nothing here builds the model or imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from phalanx.job import counts

Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh"]
Norm = Literal["rmsnorm", "layernorm"]
Bias = Literal["none", "qkv", "all"]
Positions = Literal["rope", "learned"]
RopeScaling = Literal["none", "linear", "ntk", "llama3", "yarn"]
Pooling = Literal["class_token", "mean"]
RouterScores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class ParamHolder:
    """A module that holds parameters itself.

    Of a linear layer and an embedding also their widths; else 0.

    `kind`: "linear", "grouped" (those of several experts in one), "stacked", "stacked with gates"
    (experts; `num_outputs` of their first matrices), "embedding", "attention" (a part of an
    nn.MultiheadAttention), or the name of its class.
    """

    name: str
    kind: str
    num_params: int
    num_outputs: int = 0
    num_inputs: int = 0


@dataclass(frozen=True)
class Measured:
    """Facts of a user's own module that can be counted without knowing what it computes."""

    num_params: int
    num_trainable_params: int
    block_params: int
    """Of the largest block, or of the whole module if it shows no blocks."""
    blocks_params: int
    """Of all blocks together."""
    num_batchnorms: int = 0
    num_dropouts: int = 0
    """Layers with a probability above 0."""
    takes_document_ids: Literal["by name", "as any keyword", "no"] = "by name"
    """How its forward does: only one that names them may keep documents apart."""
    names: tuple[str, ...] = ()
    """Of all its modules, the first being itself ("")."""
    holders: tuple[ParamHolder, ...] = ()
    shard_rules: tuple[tuple[str, str], ...] = ()
    """What it brings for tensor parallelism: (pattern, rule)."""
    blocks: tuple[tuple[str, int], ...] = ()
    """(name, parameters) of each block, in order."""
    last_stage: tuple[str, ...] = ()
    """What it says that a pipeline's last stage holds, too: names of its parts."""
    has_attention_seam: bool = True
    """Whether its attention can be swapped for one that asks other ranks."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "names": list(self.names),
            "holders": [asdict(holder) for holder in self.holders],
            "shard_rules": [list(rule) for rule in self.shard_rules],
            "blocks": [list(block) for block in self.blocks],
            "last_stage": list(self.last_stage),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Measured:
        return cls(
            **{
                **value,
                "names": tuple(value.get("names", ())),
                "holders": tuple(ParamHolder(**holder) for holder in value.get("holders", ())),
                "shard_rules": tuple(
                    (pattern, text) for pattern, text in value.get("shard_rules", ())
                ),
                "blocks": tuple((name, size) for name, size in value.get("blocks", ())),
                "last_stage": tuple(value.get("last_stage", ())),
            }
        )


@dataclass(frozen=True)
class ModelShape:
    """A stack of blocks, each attention and a feed-forward with norms: a causal decoder, or a
    vision transformer.

    The defaults are Llama's. 0 stands for "there is none". Of a user's own module (`measured` is
    set) only parameters and blocks are known, and its widths are 0.
    """

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    tie_embeddings: bool
    kind: str = "decoder"

    activation: Activation = "swiglu"
    """swiglu and geglu have three matrices (gate, up, down), gelu two; _tanh is GPT-2's and
    Gemma's approximation."""
    norm: Norm = "rmsnorm"
    """RMSNorm has a weight; LayerNorm a weight and a bias."""
    norm_eps: float = 1e-5
    norm_plus_one: bool = False
    """Gemma: the stored weight of a norm is what it multiplies by, less one."""
    post_norms: bool = False
    """Gemma 3: a second norm after attention and after the feed-forward."""
    bias: Bias = "none"
    """Which linear layers have one: none, those of query, key and value (Qwen 2), all (GPT-2)."""
    qk_norm: bool = False
    """An RMSNorm of each head's queries and keys (Qwen 3)."""

    positions: Positions = "rope"
    max_positions: int = 0
    """Rows of the table of learned positions."""
    rope_theta: float = 10000.0
    local_rope_theta: float = 0.0
    """Of blocks with a sliding window, unscaled (Gemma 3); 0: as in the others."""
    rope_scaling: RopeScaling = "none"
    rope_factor: float = 1.0
    """How many times longer than rope_original_len a sequence may be."""
    rope_original_len: int = 0
    """The sequence length before scaling: what llama3 and yarn measure wavelengths against."""
    rope_mscale: float = 1.0
    """YaRN multiplies queries and keys by 1 + 0.1 x this x ln(rope_factor)."""

    sliding_window: int = 0
    """A token attends to this many, itself among them; 0: to all before it."""
    global_every: int = 0
    """Every n-th block has no window; 0: every block has."""
    scale_embeddings: bool = False
    """Gemma: embeddings are multiplied by sqrt(dim)."""

    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_dim: int = 0
    num_shared_experts: int = 0
    """Experts of the same width that every token visits (DeepSeek)."""
    num_dense_layers: int = 0
    """The first blocks, with a feed-forward of ffn_dim instead of experts."""
    router_scores: RouterScores = "softmax"
    """How a router scores experts: softmax over all of them, or sigmoid of each."""
    router_normalize: bool = True
    """The weights of the experts that a token visits add up to 1 (before router_scale)."""
    router_scale: float = 1.0
    """What these weights are multiplied by."""
    expert_capacity: float = 0.0
    """Tokens of a sequence that an expert takes, as a multiple of its even share; 0: all that
    come."""
    balance_loss: float = 0.0
    """Weight of the auxiliary loss that evens out what experts get, per sequence; 0: none."""
    balance_bias: float = 0.0
    """What a step adds to or takes from the bias by which experts are chosen; 0: there is no
    bias."""

    query_rank: int = 0
    """Of latent attention (DeepSeek-V2): rank of the queries; 0: they are projected at once."""
    kv_rank: int = 0
    """Rank of keys and values; 0: there is no latent attention."""
    rope_head_dim: int = 0
    """The part of head_dim that is rotated; its key is shared by all heads."""
    value_head_dim: int = 0
    """At most head_dim."""

    image_size: int = 0
    patch_size: int = 0
    num_channels: int = 0
    num_classes: int = 0
    pooling: Pooling = "class_token"

    measured: Measured | None = None

    @property
    def is_known(self) -> bool:
        """True if the widths are known, and so activations and FLOPs can be told."""
        return self.measured is None

    @property
    def reads_images(self) -> bool:
        """True for what has an image_size: images in, one label each.

        False: tokens in, the next token of each.
        """
        if self.measured is None and self.kind == "decoder":
            return False
        return self.kind == "vit" or self.image_size > 0

    @property
    def is_gated(self) -> bool:
        """True for three feed-forward matrices."""
        return self.activation.startswith(("swiglu", "geglu"))

    @property
    def num_patches(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2 if self.patch_size else 0

    @property
    def rotated_dim(self) -> int:
        """Features of a head that rotary positions turn."""
        return self.rope_head_dim or self.head_dim

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    def has_experts(self, layer: int) -> bool:
        """True if the block `layer` (from 0) has them in place of a feed-forward."""
        return self.num_experts > 0 and layer >= self.num_dense_layers

    def is_local(self, layer: int) -> bool:
        """True if the block `layer` (from 0) has the sliding window."""
        is_global = self.global_every > 0 and (layer + 1) % self.global_every == 0
        return self.sliding_window > 0 and not is_global

    @property
    def num_local_layers(self) -> int:
        if not self.sliding_window:
            return 0
        return self.num_layers - (self.num_layers // self.global_every if self.global_every else 0)

    def tokens_of(self, seq_len: int) -> int:
        """Tokens of one sample: the job's sequence length, or an image's patches (and class
        token)."""
        return self.num_patches + (self.pooling == "class_token") if self.reads_images else seq_len

    # What is counted (see phalanx.job.counts)

    @property
    def attention_params(self) -> int:
        """Parameters of one block's attention: the projections, their biases and the norms
        inside."""
        return counts.attention_params(self)

    @property
    def ffn_params(self) -> int:
        """Parameters of the feed-forward of one dense block."""
        return counts.ffn_params(self, self.ffn_dim)

    @property
    def norm_params(self) -> int:
        """Parameters of one norm."""
        return counts.norm_params(self)

    @property
    def block_params(self) -> int:
        """Parameters of the largest block."""
        return (
            self.measured.block_params if self.measured is not None else counts.block_params(self)
        )

    @property
    def blocks_params(self) -> int:
        """Parameters of all blocks together."""
        return (
            self.measured.blocks_params if self.measured is not None else counts.blocks_params(self)
        )

    @property
    def num_params(self) -> int:
        """Parameters stored: a tied head counts once, as the embedding."""
        return (
            self.measured.num_params
            if self.measured is not None
            else sum(self.params_by_group().values())
        )

    @property
    def num_active_params(self) -> int:
        """Parameters that take part in one token: of the experts, only the ones it visits."""
        return self.num_params - counts.idle_params(self)

    def params_by_group(self) -> dict[str, int]:
        """Parameters of the whole model by what they do.

        `norms` includes the one before the head.
        """
        if self.measured is not None:
            blocks = self.measured.blocks_params
            return {"blocks": blocks, "other": self.measured.num_params - blocks}
        return counts.params_by_group(self)

    def flops_per_token(self, seq_len: int) -> dict[str, int]:
        """FLOPs for one token, the average over a sample: forward `matmul` and `attention`;
        `training`: 3x both."""
        return {
            part: round(count / self.tokens_of(seq_len))
            for part, count in self.flops_per_sample(seq_len).items()
        }

    def flops_per_sample(self, seq_len: int) -> dict[str, int]:
        """FLOPs for a sequence of `seq_len` tokens, or an image."""
        assert self.is_known, "a parameter count does not say how often each parameter is used"
        return counts.flops_per_sample(self, seq_len)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"measured": self.measured and self.measured.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelShape:
        measured = value.get("measured")
        return cls(**{**value, "measured": Measured.from_json(measured) if measured else None})


def measured_shape(kind: str, num_layers: int, measured: Measured) -> ModelShape:
    """The shape of a user's own module."""
    return ModelShape(num_layers, 0, 0, 0, 0, 0, 0, False, kind, measured=measured)


def default_ffn_dim(dim: int) -> int:
    """8/3 dim, which gives SwiGLU's three matrices the size of two of 4 dim, rounded up to a
    multiple of 32."""
    return -(-8 * dim // 96) * 32
