"""The numbers of a decoder and of a vision transformer, as plain values. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockSettings:
    """The numbers of a stack of blocks.

    Named as the keys of a job's [model] section, which docs say what they mean. 0 stands for
    "there is none".
    """

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    activation: str
    norm: str
    norm_eps: float
    norm_plus_one: bool
    post_norms: bool
    bias: str
    qk_norm: bool


@dataclass(frozen=True)
class VisionSettings(BlockSettings):
    """The numbers of a vision transformer."""

    patch_size: int
    pooling: str


@dataclass(frozen=True)
class PlainSettings(BlockSettings):
    """The numbers of a decoder."""

    tie_embeddings: bool
    scale_embeddings: bool

    positions: str
    rope_theta: float
    local_rope_theta: float
    rope_scaling: str
    rope_factor: float
    rope_original_len: int
    rope_mscale: float
    sliding_window: int
    global_every: int

    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    num_dense_layers: int
    router_scores: str
    router_normalize: bool
    router_scale: float
    expert_capacity: float
    balance_loss: float
    balance_bias: float

    query_rank: int
    kv_rank: int
    rope_head_dim: int
    value_head_dim: int

    def is_local(self, layer: int) -> bool:
        """True if the block `layer`, from 0, has the sliding window: all but every n-th (Gemma 3,
        arXiv 2503.19786)."""
        if self.sliding_window == 0:
            return False
        return self.global_every == 0 or (layer + 1) % self.global_every != 0

    def has_experts(self, layer: int) -> bool:
        """True if the block `layer`, from 0, has experts: all but the first few (DeepSeekMoE, arXiv
        2401.06066, 4.1)."""
        return self.num_experts > 0 and layer >= self.num_dense_layers
