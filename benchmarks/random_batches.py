"""The data of benchmarks that measure what goes on around it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class RandomBatches:
    """The same random tokens in each step: what is measured is not the data."""

    def __init__(
        self, vocab_size: int, num_sequences: int, per_microbatch: int, seq_len: int
    ) -> None:
        tokens = torch.randint(vocab_size, (num_sequences, seq_len + 1))
        positions = torch.arange(seq_len).repeat(per_microbatch, 1)
        self._microbatches = [
            {
                "inputs": part[:, :-1].contiguous(),
                "targets": part[:, 1:].contiguous(),
                "positions": positions,
            }
            for part in tokens.split(per_microbatch)
        ]

    def step_microbatches(self, step: int) -> Sequence[dict[str, torch.Tensor]]:
        return self._microbatches
