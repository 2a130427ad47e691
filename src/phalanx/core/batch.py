"""A batch is a `Mapping[str, Tensor]`: `inputs` and `targets` [B, T], `positions` [B, T], and what a model names."""

from __future__ import annotations

IGNORE_INDEX = -100  # a target that counts for nothing
BYTE_VOCAB_SIZE = 257  # what text needs: 256 byte values and the end of a document
