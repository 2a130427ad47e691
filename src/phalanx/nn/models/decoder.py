"""A causal decoder in the styles of Llama, GPT-2, Mixtral, Qwen, Gemma and DeepSeek: what its
`DecoderShape` says.

Shape suffixes: B batch, T sequence, D model width, V vocabulary. Seams that parallelism may swap:
`attention.core(q, k, v, positions, document_ids, mask)`, `moe.dispatch(rows, counts, experts)`,
`embed`, the norms.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.own_rules import fill_shard_rules
from phalanx.mesh.logical import LogicalShard
from phalanx.nn.attention import make_shared_attention_mask
from phalanx.nn.block import Block, list_block_init_rules
from phalanx.nn.init import initialize_shards
from phalanx.nn.norms import build_norm
from phalanx.nn.objective import CausalOutput, Objective, causal_cross_entropy
from phalanx.nn.rotary import make_rotary_table
from phalanx.nn.routing import ExpertBalance

# For tensor parallelism: module -> how it is cut (phalanx.plan.rules), for all decoders. Those of
# modules that a decoder has not are left out, and numbers of its shape filled in. A literal:
# planning reads it without importing this file.
SHARD_RULES = {
    "blocks.*.attention": "region",
    "blocks.*.attention.q": "column heads={num_heads}",
    "blocks.*.attention.k": "column heads={num_kv_heads}/{num_heads}",
    "blocks.*.attention.v": "column heads={num_kv_heads}/{num_heads}",
    # Latent attention: every rank makes whole latents, and the part of their gradient that its
    # heads cause is a part of a sum. They are narrow, and every head reads all of them.
    "blocks.*.attention.q_down": "partial",
    "blocks.*.attention.q_up": "column heads={num_heads}",
    "blocks.*.attention.kv_down": "partial",
    "blocks.*.attention.kv_norm": "partial",
    "blocks.*.attention.kv_up": "column heads={num_heads}",
    "blocks.*.attention.o": "row heads={num_heads}",
    "blocks.*.attention.q_norm": "partial",
    "blocks.*.attention.k_norm": "partial",
    "blocks.*.ffn": "region",
    "blocks.*.ffn.down": "row",
    "blocks.*.ffn.up": "column",
    "blocks.*.ffn.gate": "column",
    "blocks.*.moe": "region summed",
    "blocks.*.moe.experts.down": "row unsummed",
    "blocks.*.moe.experts.up": "column",
    "blocks.*.moe.experts.gate": "column",
    "blocks.*.moe.shared.down": "row unsummed",
    "blocks.*.moe.shared.up": "column",
    "blocks.*.moe.shared.gate": "column",
    "embed": "vocab",
    "embed_positions": "sequence",
    "head": "vocab",
}


# Modules whose weights no backward reads, if the objective `frees_head`: rows are looked up, and
# the head's gradient is made in the forward. A literal, too.
READ_IN_FORWARD_ONLY = ("embed", "embed_positions", "head")


class Decoder(nn.Module):
    """Tokens to hidden states; the objective owns the head (see CausalOutput)."""

    # What FSDP wraps, recompute recomputes and compile compiles.
    block_pattern = "blocks.*"

    # The embedding's output is in the compute type, and so is all that follows.
    block_inputs_are_cast = True

    read_in_forward_only = READ_IN_FORWARD_ONLY

    # Norms and residuals: a rank may have a part of the sequence there.
    is_per_token_outside_regions = True

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.shard_rules = fill_shard_rules(SHARD_RULES, shape)
        self.embed = nn.Embedding(shape.vocab_size, shape.dim)
        learned = shape.positions == "learned"
        self.embed_positions = nn.Embedding(shape.max_positions, shape.dim) if learned else None
        self.balance = ExpertBalance() if shape.num_experts else None
        self.blocks = nn.ModuleList(
            Block(shape, layer, self.balance) for layer in range(shape.num_layers)
        )
        self.norm = build_norm(shape)
        if shape.tie_embeddings:
            self.head = None
        else:
            self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        # The seam that makes masks: context parallelism puts in its own.
        self.attention_mask = make_shared_attention_mask
        # A pipeline's last stage computes the head, and so holds the embedding that it is tied to.
        self.last_stage = ("embed",) if shape.tie_embeddings else ()

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> CausalOutput:
        """inputs, positions, document_ids: [B, T] integers; positions default to 0..T-1.

        Where a rank has a part of the tokens, document_ids are those of the whole sequence.
        """
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        x_BTD = self._embed_tokens(inputs, positions)
        # Blocks with a sliding window and blocks without: what one kind needs is made once.
        tables = {
            local: self._make_rotary_table(positions, x_BTD.dtype, local)
            for local in self._list_attention_window_kinds()
        }
        masks = {
            local: self._make_attention_mask(inputs.shape[1], x_BTD, document_ids, local)
            for local in self._list_attention_window_kinds()
        }
        for block in self.blocks:
            local = block.is_local
            x_BTD = block(x_BTD, tables[local], positions, document_ids, masks[local])
        head = self.embed.weight if self.head is None else self.head.weight
        return CausalOutput(self.norm(x_BTD), head, balance=self.balance)

    def _embed_tokens(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed(inputs)
        if self.shape.scale_embeddings:
            x_BTD = x_BTD * self.shape.dim**0.5
        if self.embed_positions is not None:
            x_BTD = x_BTD + self.embed_positions(positions)
        # The residual stream in the compute type, as under FSDP.
        if torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        return x_BTD

    def _list_attention_window_kinds(self) -> set[bool]:
        return {self.shape.is_local(layer) for layer in range(self.shape.num_layers)}

    def _make_rotary_table(
        self, positions: torch.Tensor, dtype: torch.dtype, local: bool
    ) -> torch.Tensor | None:
        if self.embed_positions is not None:
            return None
        return make_rotary_table(positions, self.shape, dtype, local=local)

    def _make_attention_mask(
        self, num_tokens: int, x_BTD: torch.Tensor, document_ids: torch.Tensor | None, local: bool
    ) -> torch.Tensor | None:
        window = self.shape.sliding_window if local else 0
        return self.attention_mask(num_tokens, window, document_ids, x_BTD.dtype, x_BTD.device)

    def after_step(self) -> None:
        """Move the routers' biases by the load of their experts: to be called after each update in
        a loop of your own, on one process."""
        for block in self.blocks:
            if block.has_experts:
                router = block.moe.router
                router.move_bias(router.load.take(router.num_experts, router.weight.device)[:-1])

    def initialize(self, shards: Mapping[str, LogicalShard], seed: int) -> None:
        """Fill this rank's shards."""
        initialize_shards(shards, list_block_init_rules(self.shape), seed)


def build(shape: DecoderShape) -> Decoder:
    """The decoder of `shape`, on the current default device (phalanx builds on meta and
    initialises shards)."""
    return Decoder(shape)


def default_objective(loss_chunk_tokens: int) -> Objective:
    """The objective of a decoder unless the job names another: cross-entropy over next tokens."""
    return causal_cross_entropy(loss_chunk_tokens)


def example_batch(
    shape: DecoderShape, batch_size: int, seq_len: int, seed: int
) -> dict[str, torch.Tensor]:
    """Random data as this model takes it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.vocab_size, (batch_size, seq_len + 1), generator=generator)
    return {
        "inputs": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
        "positions": torch.arange(seq_len).repeat(batch_size, 1),
    }
