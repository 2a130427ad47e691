"""`DecoderShape`: a causal decoder, with learned or rotary positions, sliding windows, experts and
latent attention where its numbers say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, Self

from phalanx.job.costs import ExpertCosts, Flops, ModelFlops
from phalanx.job.param_holder import ParamHolder
from phalanx.job.shapes import tensors, work
from phalanx.job.shapes.decoder_activations import DecoderActivations
from phalanx.job.shapes.transformer import TransformerShape
from phalanx.job.work import Matmul, ModelWork

Positions = Literal["rope", "learned"]
RopeScaling = Literal["none", "linear", "ntk", "llama3", "yarn"]
RouterScores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class DecoderShape(TransformerShape):
    """The numbers of a causal decoder. 0 stands for "there is none"."""

    vocab_size: int
    tie_embeddings: bool

    _: KW_ONLY
    kind: str = "decoder"

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

    # A sample is a sequence

    image_size = 0
    num_channels = 0
    num_classes = 0
    reads_images = False
    why_samples_stay_whole = ""
    has_token_table = True

    @property
    def is_per_token_outside_regions(self) -> bool:
        return True

    @property
    def longest_sequence(self) -> int:
        if self.positions == "learned":
            return self.max_positions
        return 0

    def count_sample_tokens(self, seq_len: int) -> int:
        return seq_len

    def get_sample_noun(self, *, of_own_data: bool) -> str:
        if of_own_data:
            return "samples"
        return "sequences"

    def count_targets(self, num_tokens: int) -> int:
        return num_tokens

    def choose_vocab_size(self, data_size: int | None) -> int:
        return self.vocab_size

    # Blocks that differ

    @property
    def has_latent_attention(self) -> bool:
        return self.kv_rank > 0

    @property
    def rotated_dim(self) -> int:
        """Features of a head that rotary positions turn."""
        return self.rope_head_dim or self.head_dim

    @property
    def num_rotated_features(self) -> int:
        if self.positions != "rope":
            return 0
        return (self.num_heads + self.num_kv_heads) * self.rotated_dim

    @property
    def value_dim(self) -> int:
        return self.value_head_dim or self.head_dim

    @property
    def num_expert_layers(self) -> int:
        if self.num_experts:
            return self.num_layers - self.num_dense_layers
        return 0

    def is_local(self, layer: int) -> bool:
        """True if the block `layer` (from 0) has the sliding window."""
        # Blocks count from 1 here: with 6, the sixth is global (Gemma 3).
        is_global = self.global_every > 0 and (layer + 1) % self.global_every == 0
        return self.sliding_window > 0 and not is_global

    def window_of_layer(self, layer: int) -> int:
        if self.is_local(layer):
            return self.sliding_window
        return 0

    @property
    def num_local_layers(self) -> int:
        if not self.sliding_window:
            return 0
        if not self.global_every:
            return self.num_layers
        return self.num_layers - self.num_layers // self.global_every

    # Parameters

    @property
    def attention_matrix_params(self) -> int:
        if not self.has_latent_attention:
            return super().attention_matrix_params
        # Multi-head latent attention (arXiv 2405.04434, section 2.1)
        heads, rotated, values = self.num_heads, self.rope_head_dim, self.value_head_dim
        queries = heads * self.head_dim
        # The latent, and the one rotated key that all heads share.
        into = self.dim * (self.kv_rank + rotated)
        out_of = self.kv_rank * heads * (self.head_dim - rotated + values)
        # Without a latent of their own, queries are one product.
        query = self.dim * queries
        if self.query_rank:
            query = self.query_rank * (self.dim + queries)
        return query + into + out_of + heads * values * self.dim

    @property
    def attention_vector_params(self) -> int:
        if self.has_latent_attention:
            return self.kv_rank + self.query_rank  # an RMSNorm of each latent
        return super().attention_vector_params

    @property
    def router_params(self) -> int:
        """Parameters of one block's router."""
        return self.dim * self.num_experts

    def count_experts_params(self, ep: int = 1) -> int:
        """Parameters of the experts of one block, without the router; if `ep` ranks spread them,
        of those that one rank has."""
        count = self.num_experts // ep + self.num_shared_experts
        return count * self.count_feed_forward_params(self.expert_ffn_dim)

    def count_experts_and_router_params(self, ep: int = 1) -> int:
        if self.num_expert_layers:
            return self.count_experts_params(ep) + self.router_params
        return 0

    @cached_property
    def experts(self) -> ExpertCosts | None:
        if not self.num_experts:
            return None
        first = self.num_layers - self.num_expert_layers
        return ExpertCosts(
            self.num_experts,
            self.experts_per_token,
            range(first, self.num_layers),
            self.expert_ffn_dim,
            self.dim,
            self.count_feed_forward_params(self.expert_ffn_dim),
            self.count_experts_params(),
        )

    @property
    def embedding_params(self) -> int:
        return (self.vocab_size + self.max_positions) * self.dim

    @property
    def head_params(self) -> int:
        if self.tie_embeddings:
            return 0
        return self.vocab_size * self.dim

    @property
    def tied_params(self) -> int:
        if self.tie_embeddings:
            return self.vocab_size * self.dim
        return 0

    @property
    def num_active_params(self) -> int:
        """Parameters that take part in one token: of the experts, only the ones it visits."""
        idle = self.num_experts - self.experts_per_token
        params = self.count_feed_forward_params(self.expert_ffn_dim)
        return self.num_params - self.num_expert_layers * idle * params

    def _expert_groups(self) -> dict[str, int]:
        count = self.num_expert_layers
        if not count:
            return {}
        return {
            "experts": count * self.count_experts_params(),
            "router": count * self.router_params,
        }

    def shard(self, tp: int, cut: Callable[[ParamHolder], ParamHolder]) -> Self:
        return replace(
            super().shard(tp, cut),
            # Rounded up: the rank with most.
            expert_ffn_dim=-(-self.expert_ffn_dim // tp),
            vocab_size=-(-self.vocab_size // tp),
        )

    # What computing costs

    def count_feed_forward_weights_per_token(self, layer: int) -> int:
        if not self.has_experts(layer):
            return super().count_feed_forward_weights_per_token(layer)
        visited = self.experts_per_token + self.num_shared_experts
        return visited * self.count_feed_forward_weights(self.expert_ffn_dim) + self.router_params

    def count_attended_pairs(self, tokens: int, layer: int) -> int:
        window = tokens
        if self.is_local(layer):
            window = min(self.sliding_window, tokens)
        # Causal: 1 + 2 + ... + window for the first tokens, then `window` for each of the others.
        return window * (window + 1) // 2 + (tokens - window) * window

    def flops(self, seq_len: int) -> ModelFlops:
        """FLOPs of each part for a sequence of `seq_len` tokens: looking them up costs nothing, and
        the head is multiplied by, tied or not."""
        head = Flops(2 * seq_len * self.vocab_size * self.dim)
        blocks = self._flops_of_blocks(seq_len)
        return ModelFlops(Flops(0), blocks, head, head_is_done_at_once=True)

    def work(self, seq_len: int) -> ModelWork:
        return _build_work(self, seq_len)

    def list_attention_matmuls(self) -> list[Matmul]:
        if self.has_latent_attention:
            return work.list_latent_attention_matmuls(self)
        return super().list_attention_matmuls()

    def list_feed_forward_matmuls(self, layer: int) -> list[Matmul]:
        if self.has_experts(layer):
            return work.list_expert_matmuls(self)
        return super().list_feed_forward_matmuls(layer)

    @cached_property
    def activations(self) -> DecoderActivations:
        return DecoderActivations(self)

    # Tensors

    def list_outer_tensors(self) -> dict[str, tensors.Size]:
        sizes: dict[str, tensors.Size] = {"embed.weight": (self.vocab_size, self.dim)}
        if self.positions == "learned":
            sizes["embed_positions.weight"] = (self.max_positions, self.dim)
        if not self.tie_embeddings:
            sizes["head.weight"] = (self.vocab_size, self.dim)
        return sizes | tensors.list_norm_tensors("norm", self)

    def list_attention_tensors(self) -> dict[str, tensors.Size]:
        if not self.has_latent_attention:
            return super().list_attention_tensors()
        heads, dim, plain = self.num_heads, self.dim, self.head_dim - self.rope_head_dim
        sizes: dict[str, tensors.Size] = {}
        if self.query_rank:
            sizes["attention.q_down.weight"] = (self.query_rank, dim)
            sizes["attention.q_norm.weight"] = (self.query_rank,)
            sizes["attention.q_up.weight"] = (heads * self.head_dim, self.query_rank)
        else:
            sizes["attention.q.weight"] = (heads * self.head_dim, dim)
        return sizes | {
            "attention.kv_down.weight": (self.kv_rank + self.rope_head_dim, dim),
            "attention.kv_norm.weight": (self.kv_rank,),
            "attention.kv_up.weight": (heads * (plain + self.value_head_dim), self.kv_rank),
            "attention.o.weight": (dim, heads * self.value_head_dim),
        }

    def list_feed_forward_tensors(self, layer: int) -> dict[str, tensors.Size]:
        if not self.has_experts(layer):
            return super().list_feed_forward_tensors(layer)
        sizes: dict[str, tensors.Size] = {"moe.router.weight": (self.num_experts, self.dim)}
        stacked = tensors.list_feed_forward_params("moe.experts", self, self.expert_ffn_dim)
        for name, size in stacked.items():
            sizes[name] = (self.num_experts, *size)
        if self.num_shared_experts:
            # Shared experts are one feed-forward of their joint width.
            width = self.num_shared_experts * self.expert_ffn_dim
            sizes |= tensors.list_feed_forward_params("moe.shared", self, width)
        return sizes

    def list_stored_tensors(self) -> dict[str, tensors.Size]:
        """Names and sizes of the tensors that a checkpoint holds: the parameters, and the biases
        by which experts are chosen, which are buffers."""
        sizes = self.list_tensors()
        if self.num_experts and self.balance_bias:
            for layer in range(self.num_dense_layers, self.num_layers):
                sizes[f"blocks.{layer}.moe.router.bias"] = (self.num_experts,)
        return sizes


def default_ffn_dim(dim: int) -> int:
    """8/3 dim, which gives SwiGLU's three matrices the size of two of 4 dim, rounded up to a
    multiple of 32."""
    # The ceiling of 8/3 dim / 32, in whole numbers.
    return -(-8 * dim // 96) * 32


# Each layout that is planned asks for it again.
@lru_cache(maxsize=8)
def _build_work(shape: DecoderShape, seq_len: int) -> ModelWork:
    return ModelWork(
        num_tokens=seq_len,
        dim=shape.dim,
        blocks=work.build_work_of_blocks(shape, seq_len),
        head=Matmul("head", shape.dim, shape.vocab_size, "column"),
        num_head_tokens=seq_len,
        num_embedding_params=shape.embedding_params,
        num_head_params=shape.head_params + shape.norm_params,
        num_tied_params=shape.tied_params,
    )
