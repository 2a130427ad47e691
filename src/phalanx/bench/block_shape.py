"""The block of phalanx's decoder that `bench` measures whole. Torch-free."""

from __future__ import annotations

from phalanx.job.shapes.decoder import DecoderShape

HEAD_DIM = 64


def make_block_shape(dim: int) -> DecoderShape:
    """A decoder of one block with heads of HEAD_DIM and an FFN that is 4 x as wide as `dim`."""
    heads = dim // HEAD_DIM
    return DecoderShape(
        num_layers=1,
        dim=dim,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=HEAD_DIM,
        ffn_dim=4 * dim,
        vocab_size=256,
        tie_embeddings=True,
    )
