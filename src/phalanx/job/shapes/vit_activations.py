"""What a vision transformer keeps from the forward to the backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.job.costs import BlockBytes, FreedGradients, LossBytes, RankMicrobatch
from phalanx.job.shapes.block_activations import (
    TransformerActivations,
    count_attention_bytes,
    count_feed_forward_bytes,
    scale_block_bytes,
    sum_block_bytes,
)

if TYPE_CHECKING:
    from phalanx.job.shapes.vit import VitShape


@dataclass(frozen=True)
class VitActivations(TransformerActivations):
    """The activations of the vision transformer `shape`."""

    shape: VitShape

    def block(self, layer: int, batch: RankMicrobatch) -> BlockBytes:
        shape, c = self.shape, batch.compute_bytes
        attention = count_attention_bytes(shape, c, is_rotated=False)
        feed_forward = count_feed_forward_bytes(shape, c)
        per_token = sum_block_bytes(shape, c, batch.sequence_parts, attention, feed_forward)
        return scale_block_bytes(per_token, batch.tokens)

    def list_block_kinds(self, batch: RankMicrobatch) -> tuple[bool, ...]:
        return (False,) * self.shape.num_layers

    def count_bytes_in_every_stage(self, batch: RankMicrobatch) -> int:
        return 0

    def count_embedding_bytes(self, batch: RankMicrobatch) -> int:
        """Bytes of the images, which the patches' matrix saves."""
        pixels = self.shape.num_channels * self.shape.image_size**2
        return batch.micro_batch_size * pixels * batch.compute_bytes

    def count_final_norm_bytes(self, batch: RankMicrobatch) -> int:
        return 0  # the last norm and the head see one token of each image

    def count_final_norm_passing_bytes(self, batch: RankMicrobatch) -> int:
        return 0

    def count_block_mask_bytes(self, batch: RankMicrobatch) -> int:
        return 0

    def count_loss_bytes(self, batch: RankMicrobatch) -> LossBytes:
        """Bytes over classes, where there are no chunks: logits, their log-softmax and its
        gradient in fp32."""
        numbers = 4 * batch.micro_batch_size * self.shape.num_classes
        return LossBytes(3 * numbers, 2 * numbers, 3 * numbers)

    def fp8_params(self) -> int:
        return self.shape.blocks_params

    def find_freed_gradients(self, ep: int) -> FreedGradients:
        return FreedGradients(0, 0, 0, self.shape.ffn_dim * self.shape.dim)
