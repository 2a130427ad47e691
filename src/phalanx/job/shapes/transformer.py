"""`TransformerShape`: what the built-in models have in common, a stack of blocks, each attention
and a feed-forward with norms.

FLOPs follow the usual model-FLOP convention: a multiply-add is two, the backward is twice the
forward, recomputation is not counted, nor are norms, activations and softmax. See Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (2022). Attention counts the
pairs that the mask keeps, not what a kernel computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

from phalanx.job.costs import (
    AttentionHeads,
    DocumentIds,
    ExpertCosts,
    Flops,
    ModelFlops,
    PartParams,
)
from phalanx.job.param_holder import ParamHolder
from phalanx.job.shapes import tensors, work
from phalanx.job.shapes.own_rules import load_own_shard_rules
from phalanx.job.shapes.stored_keys import complete_stored_keys
from phalanx.job.work import Matmul, ModelWork

Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh"]
Norm = Literal["rmsnorm", "layernorm"]
Bias = Literal["none", "qkv", "all"]


@dataclass(frozen=True)
class TransformerShape(ABC):
    """The numbers that every built-in model has. The defaults are Llama's."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int

    _: KW_ONLY
    kind: str
    """The file of phalanx.nn.models that builds it."""
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

    # What every model of phalanx has or has not; DecoderShape says otherwise of some

    num_batchnorms = 0
    num_dropouts = 0
    num_narrow_params = 0
    num_idle_layers = 0
    has_attention_seam = True
    has_proven_rules = True
    is_causal = True

    @property
    @abstractmethod
    def reads_images(self) -> bool:
        """True for images in, one label each; False for tokens in, the next token of each."""

    @property
    @abstractmethod
    def longest_sequence(self) -> int:
        """Tokens that a sample may have; 0: as many as one likes."""

    @property
    def has_latent_attention(self) -> bool:
        return False

    @property
    def num_expert_layers(self) -> int:
        return 0

    @property
    def takes_document_ids(self) -> DocumentIds:
        return "by name"

    @property
    def experts(self) -> ExpertCosts | None:
        return None

    @property
    def may_have_routers(self) -> bool:
        return self.experts is not None

    def has_experts(self, layer: int) -> bool:
        """True if the block `layer` (from 0) has them in place of a feed-forward."""
        return layer >= self.num_layers - self.num_expert_layers

    def window_of_layer(self, layer: int) -> int:
        """Tokens that one of the block `layer` attends to, itself among them; 0: all that the mask
        keeps."""
        return 0

    @property
    def is_gated(self) -> bool:
        """True for three feed-forward matrices."""
        return self.activation.startswith(("swiglu", "geglu"))

    @property
    def num_matrices(self) -> int:
        """Matrices of one feed-forward: up and down, and a gate."""
        if self.is_gated:
            return 3
        return 2

    @property
    def value_dim(self) -> int:
        """Features of a head's values."""
        return self.head_dim

    @property
    def num_rotated_features(self) -> int:
        """Features of one token's queries and keys that rotary positions turn; 0 where positions
        are learned."""
        return 0

    @abstractmethod
    def count_sample_tokens(self, seq_len: int) -> int:
        """Tokens of one sample."""

    # Parameters

    @property
    def norm_params(self) -> int:
        """Parameters of one norm of the residual stream."""
        return self.dim * (2 if self.norm == "layernorm" else 1)

    @property
    def attention_matrix_params(self) -> int:
        """Elements of one block's attention matrices."""
        # q and o have the query heads, k and v those of keys.
        return self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def attention_vector_params(self) -> int:
        """Elements of the biases of one block's attention, and of the norms inside."""
        heads = self.num_heads + 2 * self.num_kv_heads
        size = 0
        if self.bias != "none":
            size += heads * self.head_dim
        if self.bias == "all":
            size += self.dim
        if self.qk_norm:
            size += 2 * self.head_dim
        return size

    @property
    def attention_params(self) -> int:
        """Parameters of one block's attention: the projections, their biases and the norms
        inside."""
        return self.attention_matrix_params + self.attention_vector_params

    def count_feed_forward_weights(self, width: int) -> int:
        """Elements of the matrices of a feed-forward of inner `width`."""
        return self.num_matrices * self.dim * width

    def count_feed_forward_params(self, width: int) -> int:
        """Parameters of a feed-forward of inner `width`."""
        biases = 0
        if self.bias == "all":
            # up (and gate) put out `width`, down puts out dim.
            biases = (self.num_matrices - 1) * width + self.dim
        return self.count_feed_forward_weights(width) + biases

    @property
    def ffn_params(self) -> int:
        """Parameters of the feed-forward of one dense block."""
        return self.count_feed_forward_params(self.ffn_dim)

    def count_experts_and_router_params(self, ep: int = 1) -> int:
        """Parameters of a block's experts with their router, on one rank of `ep`; 0 if there are
        none."""
        return 0

    @property
    def _norms_of_block(self) -> int:
        return (4 if self.post_norms else 2) * self.norm_params

    def count_block(self, layer: int, ep: int = 1) -> int:
        """Parameters of the block `layer`, counted from 0; of experts those of one rank of
        `ep`."""
        if self.has_experts(layer):
            return self._count_expert_block(ep)
        return self._count_dense_block()

    def _count_dense_block(self) -> int:
        return self.attention_params + self._norms_of_block + self.ffn_params

    def _count_expert_block(self, ep: int) -> int:
        inside = self.count_experts_and_router_params(ep)
        return self.attention_params + self._norms_of_block + inside

    def count_largest_block_params(self, ep: int = 1) -> int:
        """Parameters of the largest block; of experts those that one rank of `ep` has."""
        dense = 0
        if self.num_expert_layers < self.num_layers:
            dense = self.ffn_params
        return (
            self.attention_params
            + self._norms_of_block
            + max(dense, self.count_experts_and_router_params(ep))
        )

    def count_all_blocks_params(self, ep: int = 1) -> int:
        """Parameters of all blocks together; of experts those that one rank of `ep` has."""
        num_dense = self.num_layers - self.num_expert_layers
        inside = (
            num_dense * self.ffn_params
            + self.num_expert_layers * self.count_experts_and_router_params(ep)
        )
        return self.num_layers * (self.attention_params + self._norms_of_block) + inside

    @property
    def block_params(self) -> int:
        """Parameters of the largest block."""
        return self.count_largest_block_params()

    @property
    def blocks_params(self) -> int:
        """Parameters of all blocks together."""
        return self.count_all_blocks_params()

    @property
    @abstractmethod
    def embedding_params(self) -> int:
        """Parameters before the blocks."""

    @property
    @abstractmethod
    def head_params(self) -> int:
        """Parameters of the head; 0 if it is the embedding's weight."""

    @property
    def tied_params(self) -> int:
        """Parameters that embedding and head share."""
        return 0

    @property
    def trained_share(self) -> float:
        return 1.0

    @property
    def num_params(self) -> int:
        """Parameters stored: a tied head counts once, as the embedding."""
        outside = self.embedding_params + self.norm_params + self.head_params
        return self.blocks_params + outside

    @property
    def num_active_params(self) -> int:
        """Parameters that take part in one token."""
        return self.num_params

    def params_by_group(self) -> dict[str, int]:
        """Parameters of the whole model by what they do; groups for experts only where there are
        some.

        `norms` includes the one before the head.
        """
        return {
            "embedding": self.embedding_params,
            "attention": self.num_layers * self.attention_params,
            "ffn": (self.num_layers - self.num_expert_layers) * self.ffn_params,
            **self._expert_groups(),
            "norms": self.num_layers * self._norms_of_block + self.norm_params,
            "head": self.head_params,
        }

    def _expert_groups(self) -> dict[str, int]:
        return {}

    def count_part_params(
        self, first_stage: Sequence[str] = (), last_stage: Sequence[str] = (), ep: int = 1
    ) -> PartParams:
        """Parameters of the model's parts. What a job names in `first_stage` and `last_stage` is
        no more than a built-in model has there."""
        tied = self.tied_params
        # Those with experts come last.
        num_dense = self.num_layers - self.num_expert_layers
        blocks = num_dense * (self._count_dense_block(),)
        blocks += self.num_expert_layers * (self._count_expert_block(ep),)
        # A tied head has no parameters of its own, but its stage holds the table.
        after = self.norm_params + self.head_params + tied
        # Images are multiplied by what stands before the blocks, and tokens looked up in it.
        looked_up = 0 if self.reads_images else self.embedding_params
        return PartParams(self.embedding_params, blocks, after, looked_up, both=tied)

    # FLOPs

    @abstractmethod
    def count_attended_pairs(self, tokens: int, layer: int) -> int:
        """Pairs of tokens of one sample, in one block, of which one attends to the other."""

    def count_feed_forward_weights_per_token(self, layer: int) -> int:
        """Elements of the matrices of a block's feed-forward that one token is multiplied by."""
        return self.count_feed_forward_weights(self.ffn_dim)

    def block_flops(self, seq_len: int, layer: int) -> Flops:
        """FLOPs of one sample in the block `layer`, counted from 0."""
        tokens = self.count_sample_tokens(seq_len)
        # Scores are products over head_dim, their use one over values; 2 FLOPs a multiply-add.
        pair = 2 * self.num_heads * (self.head_dim + self.value_dim)
        return Flops(
            2
            * tokens
            * (self.attention_matrix_params + self.count_feed_forward_weights_per_token(layer)),
            pair * self.count_attended_pairs(tokens, layer),
        )

    @abstractmethod
    def flops(self, seq_len: int) -> ModelFlops:
        """FLOPs of each part of the model for a sequence of `seq_len` tokens, or an image."""

    def _flops_of_blocks(self, seq_len: int) -> tuple[Flops, ...]:
        # Blocks differ in their experts and in their window alone.
        flops_of_kind: dict[tuple[bool, int], Flops] = {}
        blocks = []
        for layer in range(self.num_layers):
            kind = (self.has_experts(layer), self.window_of_layer(layer))
            if kind not in flops_of_kind:
                flops_of_kind[kind] = self.block_flops(seq_len, layer)
            blocks.append(flops_of_kind[kind])
        return tuple(blocks)

    def flops_per_sample(self, seq_len: int) -> dict[str, int]:
        """FLOPs for a sequence of `seq_len` tokens, or an image: forward `matmul` and `attention`;
        `training`: 3x both.

        `matmul` includes the head, tied or not, and leaves out the embedding of tokens, which is a
        lookup.
        """
        # Each layout that is planned asks for them again.
        if seq_len not in self._flops_by_seq_len:
            flops = self.flops(seq_len)
            parts = [*flops.blocks, flops.embedding, flops.head]
            matmul = sum(part.matmul for part in parts)
            attention = sum(part.attention for part in parts)
            training = 3 * (matmul + attention)
            counted = {"matmul": matmul, "attention": attention, "training": training}
            self._flops_by_seq_len[seq_len] = counted
        return dict(self._flops_by_seq_len[seq_len])

    @cached_property
    def _flops_by_seq_len(self) -> dict[int, dict[str, int]]:
        return {}

    def flops_per_token(self, seq_len: int) -> dict[str, int]:
        """FLOPs for one token, the average over a sample: forward `matmul` and `attention`;
        `training`: 3x both."""
        tokens = self.count_sample_tokens(seq_len)
        flops = self.flops_per_sample(seq_len)
        return {part: round(count / tokens) for part, count in flops.items()}

    @abstractmethod
    def work(self, seq_len: int) -> ModelWork:
        """The work of one sample, by block and product."""

    def list_attention_matmuls(self) -> list[Matmul]:
        """The matrix products of one block's attention."""
        return work.list_attention_matmuls(self)

    def list_feed_forward_matmuls(self, layer: int) -> list[Matmul]:
        """The matrix products of the feed-forward of the block `layer`."""
        return work.list_dense_matmuls(self, self.ffn_dim)

    # What can be cut

    @property
    def heads(self) -> AttentionHeads:
        return AttentionHeads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def shard_rules(self) -> tuple[tuple[str, str], ...]:
        """The sharding rules of the model, by pattern: those that its file in phalanx.nn.models
        has."""
        return load_own_shard_rules(self)

    @property
    def module_names(self) -> tuple[str, ...]:
        return tensors.list_module_names(self)

    @property
    def holders(self) -> tuple[ParamHolder, ...]:
        return tensors.list_param_holders(self)

    @property
    def block_names(self) -> tuple[str, ...]:
        return tuple(f"blocks.{layer}" for layer in range(self.num_layers))

    def shard(self, tp: int, cut: Callable[[ParamHolder], ParamHolder]) -> Self:
        """The part that one rank of `tp` holds: fewer heads and features of the same width. The
        model's own rules are counted, whatever `cut` says."""
        return replace(
            self,
            num_heads=self.num_heads // tp,
            # More ranks than key heads: each holds one, several the same.
            num_kv_heads=max(1, self.num_kv_heads // tp),
            ffn_dim=-(-self.ffn_dim // tp),
        )

    # Tensors

    @abstractmethod
    def list_outer_tensors(self) -> dict[str, tensors.Size]:
        """Names and sizes of the parameters outside of blocks."""

    def list_attention_tensors(self) -> dict[str, tensors.Size]:
        """Names within a block, and sizes, of the parameters of its attention."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes: dict[str, tensors.Size] = {}
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            sizes |= tensors.list_linear_tensors(
                f"attention.{name}", width, self.dim, self.bias != "none"
            )
        sizes |= tensors.list_linear_tensors("attention.o", self.dim, queries, self.bias == "all")
        if self.qk_norm:
            sizes |= dict.fromkeys(
                ("attention.q_norm.weight", "attention.k_norm.weight"), (self.head_dim,)
            )
        return sizes

    def list_feed_forward_tensors(self, layer: int) -> dict[str, tensors.Size]:
        """Names within the block `layer`, and sizes, of the parameters of its feed-forward."""
        return tensors.list_feed_forward_params("ffn", self, self.ffn_dim)

    def list_tensors(self) -> dict[str, tensors.Size]:
        """Each parameter's name and size, tied ones once."""
        return tensors.list_all_tensors(self)

    def list_stored_tensors(self) -> dict[str, tensors.Size]:
        """Names and sizes of the tensors that a checkpoint holds."""
        return self.list_tensors()

    def to_json(self) -> dict[str, Any]:
        return complete_stored_keys(self)
