"""A vision transformer (arXiv 2010.11929): patches of an image, the decoder's blocks without a
mask, one label.

Shape suffixes: B batch, C channels, H height, W width, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from phalanx.core.errors import LayoutError
from phalanx.job.shapes.own_rules import fill_shard_rules
from phalanx.job.shapes.vit import VitShape
from phalanx.mesh.logical import LogicalShard
from phalanx.nn.block import Block, list_block_init_rules
from phalanx.nn.init import initialize_shards
from phalanx.nn.norms import build_norm
from phalanx.nn.objective import Objective, classification_cross_entropy

# For tensor parallelism, as those of phalanx.nn.models.decoder; the ends are small, and stay whole.
SHARD_RULES = {
    "blocks.*.attention": "region",
    "blocks.*.attention.q": "column heads={num_heads}",
    "blocks.*.attention.k": "column heads={num_kv_heads}/{num_heads}",
    "blocks.*.attention.v": "column heads={num_kv_heads}/{num_heads}",
    "blocks.*.attention.o": "row heads={num_heads}",
    "blocks.*.attention.q_norm": "partial",
    "blocks.*.attention.k_norm": "partial",
    "blocks.*.ffn": "region",
    "blocks.*.ffn.down": "row",
    "blocks.*.ffn.up": "column",
    "blocks.*.ffn.gate": "column",
}


class VisionTransformer(nn.Module):
    """Images to logits over classes."""

    block_pattern = "blocks.*"

    block_inputs_are_cast = True

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.shape = shape
        self.shard_rules = fill_shard_rules(SHARD_RULES, shape)
        self.patch = nn.Conv2d(
            shape.num_channels, shape.dim, shape.patch_size, stride=shape.patch_size
        )
        with_class = shape.pooling == "class_token"
        self.embed_class = nn.Parameter(torch.empty(shape.dim)) if with_class else None
        self.embed_positions = nn.Parameter(torch.empty(shape.count_sample_tokens(0), shape.dim))
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.num_layers))
        self.norm = build_norm(shape)
        self.head = nn.Linear(shape.dim, shape.num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images: [B, C, H, W] numbers, already normalised. Returns logits [B, classes]."""
        x_BTD = self._embed_patches(images)
        for block in self.blocks:
            x_BTD = block(x_BTD, None, None)
        pooled_BD = x_BTD.mean(dim=1) if self.embed_class is None else x_BTD[:, 0].contiguous()
        return self.head(self.norm(pooled_BD))

    def _embed_patches(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        size, expected = (
            tuple(images_BCHW.shape[1:]),
            (self.shape.num_channels, *2 * (self.shape.image_size,)),
        )
        if size != expected:
            raise LayoutError(
                f"images are {' x '.join(map(str, size))} (channels x height x width), and the"
                f" model takes {' x '.join(map(str, expected))}",
                fix="set model.image_size and model.num_channels, or resize the images",
            )
        x_BTD = self.patch(images_BCHW.to(self.patch.weight.dtype)).flatten(2).transpose(1, 2)
        if self.embed_class is not None:
            x_BTD = torch.cat(
                (self.embed_class.to(x_BTD.dtype).expand(len(x_BTD), 1, -1), x_BTD), dim=1
            )
        x_BTD = x_BTD + self.embed_positions
        # The residual stream in the compute type, as under FSDP.
        if torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        return x_BTD

    def initialize(self, shards: Mapping[str, LogicalShard], seed: int) -> None:
        """Fill this rank's shards."""
        initialize_shards(shards, list_block_init_rules(self.shape), seed)


def build(shape: VitShape) -> VisionTransformer:
    """The vision transformer of `shape`, on the current default device."""
    return VisionTransformer(shape)


def default_objective(loss_chunk_tokens: int) -> Objective:
    """The objective of a vision transformer unless the job names another: over classes."""
    return classification_cross_entropy


def example_batch(
    shape: VitShape, batch_size: int, seq_len: int, seed: int
) -> dict[str, torch.Tensor]:
    """Random data as this model takes it. An image has its own length: seq_len does not matter."""
    generator = torch.Generator().manual_seed(seed)
    size = (batch_size, shape.num_channels, shape.image_size, shape.image_size)
    labels = torch.randint(shape.num_classes, (batch_size,), generator=generator)
    return {"images": torch.randn(size, generator=generator), "labels": labels}
