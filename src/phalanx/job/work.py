"""What computing one sample takes, piece by piece: matrix products, attention, and what is read and
written between them.

A time model needs more than FLOPs: a product's sides decide how well it fills a GPU, and what norms
and activations move takes memory bandwidth. Equal blocks are equal and hash equally, so that the
kinds of blocks are counted by hashing. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Cut = Literal["column", "row", "none"]


@dataclass(frozen=True)
class Matmul:
    """The product of tokens with a weight matrix of `inputs` x `outputs`."""

    name: str
    inputs: int
    outputs: int
    cut: Cut = "none"
    """The side that tensor parallelism divides: outputs ("column"), inputs ("row"), or neither."""
    num_experts: int = 1
    """Matrices of this size, of which a token visits `visited`: more than 1 in routed experts."""
    visited: int = 1

    @property
    def num_params(self) -> int:
        """Elements of all its matrices."""
        return self.inputs * self.outputs * self.num_experts

    @property
    def flops_per_token(self) -> int:
        """FLOPs of one token's forward: a multiply-add is two."""
        return 2 * self.inputs * self.outputs * self.visited


@dataclass(frozen=True)
class AttentionWork:
    """Attention between the tokens of one sample."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Features of a query and of a key."""
    value_dim: int
    num_tokens: int
    """Tokens of one sample."""
    num_pairs: int
    """Pairs of tokens that the mask keeps: what a kernel that skips the others computes."""
    is_causal: bool
    is_computed_as_counted: bool = False
    """True if `num_pairs` are those that are computed, whatever a mask keeps of them."""

    @property
    def flops(self) -> int:
        """FLOPs of one sample's forward over the pairs that the mask keeps."""
        return 2 * self.num_heads * (self.head_dim + self.value_dim) * self.num_pairs

    @property
    def has_window(self) -> bool:
        """True if a causal mask keeps far fewer pairs than all before the diagonal."""
        return self.is_causal and 4 * self.num_pairs < self.num_tokens * (self.num_tokens + 1)

    @property
    def kept_share(self) -> float:
        """The part of all pairs of tokens that the mask keeps, 0 to 1."""
        return self.num_pairs / self.num_tokens**2


@dataclass(frozen=True)
class BlockWork:
    """One block of a model. Features are counted per token."""

    matmuls: tuple[Matmul, ...]
    attention: AttentionWork | None
    norm_features: int
    """Features that norms of the residual stream read: every rank of tp does them all, unless it
    has only a part of the sequence."""
    residual_features: int
    """Features that are added to the residual stream."""
    head_features: int
    """Features of queries and keys that are rotated or normalised: heads, which tp divides."""
    activation_features: int
    """Features that come out of activation functions, of all experts that a token visits."""
    is_gated: bool
    """The activation function multiplies two such inputs."""
    num_params: int
    num_routed_params: int = 0
    """Parameters of the experts that tokens choose: what ep divides."""
    num_uncut_params: int = 0
    """Parameters that tp does not divide: norms, routers, biases after a sum."""
    routed_dim: int = 0
    """Features of a row that travels to an expert; 0 where there are none."""
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def num_tensors(self) -> int:
        """Weight matrices and norms: what a framework that looks at parameters one by one sees."""
        return sum(matmul.num_experts for matmul in self.matmuls) + 2

    def count_flops(self, num_tokens: int) -> int:
        """FLOPs of the forward of one sample of `num_tokens`, in products and attention."""
        flops = num_tokens * sum(matmul.flops_per_token for matmul in self.matmuls)
        if self.attention is not None:
            flops += self.attention.flops
        return flops


@dataclass(frozen=True)
class ModelWork:
    """One sample's way through a model: before, in and after its blocks."""

    num_tokens: int
    """Tokens of one sample."""
    dim: int
    """Features of what goes from one block to the next."""
    blocks: tuple[BlockWork, ...]
    head: Matmul
    num_head_tokens: int
    """Tokens of one sample that the head sees."""
    embedding: Matmul | None = None
    """The product before the blocks; None where tokens are looked up in a table."""
    num_embedding_tokens: int = 0
    """Tokens of one sample that `embedding` multiplies."""
    num_embedding_params: int = 0
    num_head_params: int = 0
    """Parameters of the head with the norm before it, without those that it shares with the
    embedding."""
    num_tied_params: int = 0
    """Parameters that head and embedding share, counted in the embedding."""
    before_blocks: tuple[BlockWork, ...] = ()
    """What else is computed before the blocks, and never again: a stem. Its parameters are those of
    the embedding."""
    after_blocks: tuple[BlockWork, ...] = ()
    """What else is computed after them, as a decoder behind an encoder; its parameters are the
    head's."""

    @cached_property
    def block_kinds(self) -> tuple[tuple[BlockWork, int], ...]:
        """Each different block, and how many there are of it, in order of first appearance."""
        return tuple(Counter(self.blocks).items())

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def num_params(self) -> int:
        """Parameters stored: what head and embedding share counts once."""
        in_blocks = sum(block.num_params for block in self.blocks)
        return self.num_embedding_params + in_blocks + self.num_head_params

    @property
    def matmul_flops(self) -> int:
        """FLOPs of one sample's forward in products with weights, the head among them."""
        per_token = 0
        for block, count in (*self.block_kinds, *((block, 1) for block in self._outer_blocks)):
            per_token += count * sum(matmul.flops_per_token for matmul in block.matmuls)
        flops = self.num_tokens * per_token + self.num_head_tokens * self.head.flops_per_token
        if self.embedding is not None:
            flops += self.num_embedding_tokens * self.embedding.flops_per_token
        return flops

    @property
    def attention_flops(self) -> int:
        """FLOPs of one sample's forward in attention."""
        return sum(
            count * block.attention.flops
            for block, count in (*self.block_kinds, *((block, 1) for block in self._outer_blocks))
            if block.attention is not None
        )

    @property
    def flops_before_blocks(self) -> int:
        """FLOPs of one sample's forward before the blocks."""
        flops = sum(block.count_flops(self.num_tokens) for block in self.before_blocks)
        if self.embedding is not None:
            flops += self.num_embedding_tokens * self.embedding.flops_per_token
        return flops

    @property
    def flops_after_blocks(self) -> int:
        """FLOPs of one sample's forward after the blocks."""
        flops = sum(block.count_flops(self.num_tokens) for block in self.after_blocks)
        return flops + self.num_head_tokens * self.head.flops_per_token

    @property
    def _outer_blocks(self) -> tuple[BlockWork, ...]:
        return self.before_blocks + self.after_blocks
