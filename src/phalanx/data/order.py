"""The order of samples: a pure function of (seed, global index), without state or a table of what
was seen. Torch-free.

Sample `i` of a run is the same at any number of ranks, so that the data cursor of a checkpoint is
one integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.core.digest import hash_to_stable_64_bits

Uint64s = NDArray[np.uint64]

_NUM_FEISTEL_ROUNDS = 6  # of the Feistel network: each half is changed three times
# 2**64 over the golden ratio: consecutive multiples are far apart.
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
# Tells the key of an epoch's phase from those of its permutation.
_PHASE_KEY_SALT = 0x5851F42D4C957F2D
_MASK64 = 2**64 - 1


def permute_indices(index: NDArray[np.integer], n: int, key: int | Uint64s) -> NDArray[np.int64]:
    """Apply a keyed permutation of [0, n) to each of `index`: a bijection for every key and every
    n >= 1.

    `key` is one number, or one per index. A Feistel network over the next power of two from n on,
    and again for what falls outside [0, n) (cycle-walking; fewer than half of the values do): O(1)
    memory, a few passes over `index`.
    """
    assert n >= 1, n
    values = np.asarray(index, dtype=np.uint64).ravel()
    assert values.size == 0 or int(values.max()) < n, (n, index)
    keys = np.broadcast_to(np.asarray(key, dtype=np.uint64).ravel(), values.shape)
    round_keys = []
    for number in range(1, _NUM_FEISTEL_ROUNDS + 1):
        # np.uint64 refuses a number that does not fit.
        round_keys.append(hash_uint64_bits(keys + np.uint64(number * _GOLDEN_RATIO_64 & _MASK64)))
    num_bits = (n - 1).bit_length()
    permuted = _apply_feistel_rounds(values, round_keys, num_bits)
    # This ends: the cycle of a value in [0, n) comes back to that value.
    while (outside := permuted >= n).any():
        permuted = np.where(
            outside, _apply_feistel_rounds(permuted, round_keys, num_bits), permuted
        )
    return permuted.astype(np.int64).reshape(np.shape(index))


def _apply_feistel_rounds(values: Uint64s, round_keys: list[Uint64s], num_bits: int) -> Uint64s:
    """A keyed bijection of [0, 2**num_bits): each round changes one half by a hash of the other,
    which undoes it.
    """
    # The halves may differ by a bit: each is changed by a hash of the other, whatever its width.
    low_bits = num_bits // 2
    low_mask = np.uint64((1 << low_bits) - 1)
    high_mask = np.uint64((1 << (num_bits - low_bits)) - 1)
    low, high = values & low_mask, values >> np.uint64(low_bits)
    for number, round_key in enumerate(round_keys):
        if number % 2 == 0:
            high = high ^ (hash_uint64_bits(low ^ round_key) & high_mask)
        else:
            low = low ^ (hash_uint64_bits(high ^ round_key) & low_mask)
    return (high << np.uint64(low_bits)) | low


def hash_uint64_bits(values: Uint64s) -> Uint64s:
    """A bijective hash of 64 bits (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class SampleOrder:
    """The tokens that sample `i` of a run reads: seq_len + 1 of them from `starts([i])` on.

    An epoch reads every window of seq_len that fits, each once, in a permuted order. What does not
    fill a window is left out: fewer than seq_len tokens, before the first window and after the
    last. How much of it before is drawn anew for each epoch, so that the cuts move and over epochs
    every token is read.
    """

    num_tokens: int
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        assert self.num_tokens > self.seq_len, "prepare_corpus refuses these"

    @property
    def samples_per_epoch(self) -> int:
        # Nothing comes after the last token: it is a target only.
        return (self.num_tokens - 1) // self.seq_len

    def sample_starts(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """Offset of the first token of each sample, same shape as `indices` (global sample numbers
        from 0).
        """
        epochs, samples = np.divmod(
            np.asarray(indices, dtype=np.int64).ravel(), self.samples_per_epoch
        )
        keys = self._hash_epoch_keys(epochs)
        starts = permute_indices(
            samples, self.samples_per_epoch, keys
        ) * self.seq_len + self._count_skipped_tokens_of_epochs(keys)
        return starts.reshape(np.shape(indices))

    def _hash_epoch_keys(self, epochs: NDArray[np.int64]) -> Uint64s:
        return hash_uint64_bits(
            epochs.astype(np.uint64) ^ np.uint64(hash_to_stable_64_bits("sample order", self.seed))
        )

    def _count_skipped_tokens_of_epochs(self, epoch_keys: Uint64s) -> NDArray[np.int64]:
        """Number of tokens that each epoch leaves out before its first window, of those that it
        leaves out at all.
        """
        num_left_out = (self.num_tokens - 1) % self.seq_len
        return (
            hash_uint64_bits(epoch_keys ^ np.uint64(_PHASE_KEY_SALT)) % np.uint64(num_left_out + 1)
        ).astype(np.int64)


@dataclass(frozen=True)
class ShuffledSampleOrder:
    """The order of `num_samples` ready-made samples in a run: a new keyed permutation in each
    epoch."""

    num_samples: int
    seed: int

    def shuffled_positions(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """The place of each sample in the dataset, same shape as `indices` (global sample numbers
        from 0).
        """
        epochs, samples = np.divmod(np.asarray(indices, dtype=np.int64).ravel(), self.num_samples)
        keys = hash_uint64_bits(
            epochs.astype(np.uint64) ^ np.uint64(hash_to_stable_64_bits("sample order", self.seed))
        )
        return permute_indices(samples, self.num_samples, keys).reshape(np.shape(indices))


def count_held_out_targets(num_tokens: int, max_tokens: int | None) -> int:
    """Number of held-out tokens that are scored: all but the first, which nothing predicts, and at
    most `max_tokens`.
    """
    available = max(0, num_tokens - 1)
    if max_tokens is None:
        return available
    return min(available, max_tokens)


def split_by_weights(total: int, weights: Sequence[float]) -> list[int]:
    """`total` divided by weight, rounded down."""
    return [int(total * weight / sum(weights)) for weight in weights]
