"""Which source a sample comes from: a pure function of (seed, global index), in exact proportions.
Torch-free.

A table of SHARE_DENOMINATOR places says how the sources take turns, each spread as evenly as its
share allows; it repeats. Runs of SHUFFLED_RUN_LENGTH places are permuted by a keyed permutation, so
that turns have no rhythm. Any index is reached at once, and the memory is the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.data.order import permute_indices

Int64s = NDArray[np.int64]

SHARE_DENOMINATOR = 1 << 16  # shares are rounded to one in so many
SHUFFLED_RUN_LENGTH = 64
# An odd number: multiplying by it modulo 2**64 keeps distinct runs distinct.
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15


class SampleSources(NamedTuple):
    """The source of each sample, by number, and the sample's index in that source, from 0."""

    source: Int64s
    sample: Int64s


class Mixture:
    """Sources that take turns by weight.

    Of any SHUFFLED_RUN_LENGTH samples from a multiple of SHUFFLED_RUN_LENGTH on, a source has its
    share to within the number of sources, and of each SHARE_DENOMINATOR samples exactly its quota;
    shares are rounded to 1/SHARE_DENOMINATOR.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.quotas = apportion_samples_by_weights(weights)
        times, ranks = [], []
        for quota in self.quotas.tolist():
            # In the middle of `quota` equal parts of the table: as even as can be.
            times.append((np.arange(quota) + 0.5) / quota)
            ranks.append(np.arange(quota))
        numbers = np.repeat(np.arange(len(weights)), self.quotas)
        # Stable, so that turns at the same time come in the order of the sources.
        by_time = np.argsort(np.concatenate(times), kind="stable")
        self._source = numbers[by_time]
        self._rank = np.concatenate(ranks)[by_time]
        self._key = hash_to_stable_64_bits("mixture", seed)

    def locate_samples(self, indices: NDArray[np.integer]) -> SampleSources:
        """Whose turn each global sample number is; both of the same shape as `indices`."""
        flat = np.asarray(indices, np.int64).ravel()
        runs, within = np.divmod(flat, SHUFFLED_RUN_LENGTH)
        keys = (runs.astype(np.uint64) * np.uint64(_GOLDEN_RATIO_64)) ^ np.uint64(self._key)
        tables, slot = np.divmod(
            runs * SHUFFLED_RUN_LENGTH + permute_indices(within, SHUFFLED_RUN_LENGTH, keys),
            SHARE_DENOMINATOR,
        )
        source = self._source[slot]
        sample = self._rank[slot] + tables * self.quotas[source]
        return SampleSources(source.reshape(np.shape(indices)), sample.reshape(np.shape(indices)))


def apportion_samples_by_weights(weights: Sequence[float]) -> Int64s:
    """Number of the SHARE_DENOMINATOR samples that each source has: its share, rounded so that the
    sum is exact (largest remainders).
    """
    shares = np.asarray(weights, np.float64) / sum(weights) * SHARE_DENOMINATOR
    floors = np.floor(shares).astype(np.int64)
    by_remainder = np.argsort(floors - shares, kind="stable")
    floors[by_remainder[: SHARE_DENOMINATOR - int(floors.sum())]] += 1
    return floors
