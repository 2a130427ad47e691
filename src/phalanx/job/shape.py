"""`ModelShape`: what planning needs to know of a model, as numbers. Nothing here builds the model or imports torch.

FLOPs follow the usual model-FLOP convention: a multiply-add is two, the backward is twice the forward, recomputation
is not counted. See Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from phalanx.core.registry import is_foreign
from phalanx.job.schema import Job


@dataclass(frozen=True)
class Measured:
    """What can be counted of a user's own module without knowing what it computes."""

    num_params: int
    num_trainable_params: int
    block_params: int
    """Of the largest block, or of the whole module if it shows no blocks."""
    blocks_params: int
    """Of all blocks together."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal blocks: attention with grouped queries, a feed-forward, two norms; no biases.

    Of a user's own module (`measured` is set) only parameters and blocks are known, and its widths are 0.
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
    gated_ffn: bool = True
    """Three matrices (gate, up, down: SwiGLU) instead of two."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """RMSNorm has a weight; LayerNorm a weight and a bias."""
    measured: Measured | None = None

    @property
    def is_known(self) -> bool:
        """True if the widths are known, and so activations and FLOPs can be told."""
        return self.measured is None

    @property
    def attention_params(self) -> int:
        """Of one block: wq, wk, wv and wo."""
        return self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def ffn_params(self) -> int:
        """Of one block."""
        return (3 if self.gated_ffn else 2) * self.dim * self.ffn_dim

    @property
    def norm_params(self) -> int:
        """Of one norm."""
        return self.dim * (2 if self.norm == "layernorm" else 1)

    @property
    def block_params(self) -> int:
        """Of the largest block."""
        if self.measured is not None:
            return self.measured.block_params
        return self.attention_params + self.ffn_params + 2 * self.norm_params

    @property
    def num_params(self) -> int:
        """Parameters stored: a tied head counts once, as the embedding."""
        return sum(self.params_by_group().values())

    def params_by_group(self) -> dict[str, int]:
        """Parameters of the whole model by what they do. `norms` includes the one before the head."""
        if self.measured is not None:
            blocks = self.measured.blocks_params
            return {"blocks": blocks, "other": self.measured.num_params - blocks}
        table = self.vocab_size * self.dim
        return {
            "embedding": table,
            "attention": self.num_layers * self.attention_params,
            "ffn": self.num_layers * self.ffn_params,
            "norms": (2 * self.num_layers + 1) * self.norm_params,
            "head": 0 if self.tie_embeddings else table,
        }

    def flops_per_token(self, seq_len: int) -> dict[str, int]:
        """FLOPs for one token of a causal sequence: forward `matmul` and `attention`; `training`: 3x both.

        `matmul` includes the head, tied or not, and leaves out the embedding, which is a lookup. A token attends to
        (seq_len + 1) / 2 others on average.
        """
        assert self.is_known, "a parameter count does not say how often each parameter is used"
        matmul = 2 * (self.num_layers * (self.attention_params + self.ffn_params) + self.vocab_size * self.dim)
        attention = self.num_layers * 2 * self.num_heads * self.head_dim * (seq_len + 1)
        return {"matmul": matmul, "attention": attention, "training": 3 * (matmul + attention)}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelShape:
        measured = value.get("measured")
        return cls(**{**value, "measured": Measured(**measured) if measured else None})


def measured_shape(kind: str, num_layers: int, measured: Measured) -> ModelShape:
    """The shape of a user's own module."""
    return ModelShape(num_layers, 0, 0, 0, 0, 0, 0, False, kind, measured=measured)


def shape_of(job: Job, vocab_size: int) -> ModelShape:
    """The shape of the job's built-in model. `vocab_size` is what the plan settled on, with the data known."""
    assert not is_foreign(job.model.kind), "a foreign model is measured: see phalanx.job.foreign"
    model = job.model
    return ModelShape(
        kind=model.kind,
        num_layers=model.num_layers,
        dim=model.dim,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_dim=model.dim // model.num_heads,
        ffn_dim=model.ffn_dim or default_ffn_dim(model.dim),
        vocab_size=vocab_size,
        tie_embeddings=model.tie_embeddings,
    )


def default_ffn_dim(dim: int) -> int:
    """8/3 dim, which gives SwiGLU's three matrices the size of two of 4 dim, rounded up to a multiple of 32."""
    return -(-8 * dim // 96) * 32
