"""Which source a sample is of: exact shares everywhere, each source in its own order, and no
state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.mixture import (
    SHARE_DENOMINATOR,
    SHUFFLED_RUN_LENGTH,
    Mixture,
    apportion_samples_by_weights,
)

weights_of = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@settings(deadline=None, max_examples=30)
@given(weights=weights_of)
def test_quotas_are_the_shares_rounded_and_sum_up(weights: list[float]) -> None:
    found = apportion_samples_by_weights(weights)
    assert found.sum() == SHARE_DENOMINATOR
    assert np.abs(found - np.array(weights) / sum(weights) * SHARE_DENOMINATOR).max() < 1


@settings(deadline=None, max_examples=15)
@given(weights=weights_of, seed=st.integers(0, 2**40), table=st.integers(0, 50))
def test_shares_are_exact_in_every_run_of_samples(
    weights: list[float], seed: int, table: int
) -> None:
    mixture = Mixture(weights, seed)
    source = mixture.locate_samples(np.arange(SHARE_DENOMINATOR) + table * SHARE_DENOMINATOR).source
    counts = np.bincount(source, minlength=len(weights))
    assert counts.tolist() == mixture.quotas.tolist()
    runs = np.stack(
        [
            np.bincount(run, minlength=len(weights))
            for run in source.reshape(-1, SHUFFLED_RUN_LENGTH)
        ]
    )
    assert np.abs(runs - np.array(weights) / sum(weights) * SHUFFLED_RUN_LENGTH).max() <= len(
        weights
    )


@settings(deadline=None, max_examples=15)
@given(weights=weights_of, seed=st.integers(0, 2**40), num_runs=st.integers(1, 2100))
def test_every_sample_of_a_source_has_its_turn_once(
    weights: list[float], seed: int, num_runs: int
) -> None:
    mixture = Mixture(weights, seed)
    source, index = mixture.locate_samples(np.arange(num_runs * SHUFFLED_RUN_LENGTH))
    for number in range(len(weights)):
        mine = np.sort(index[source == number])
        assert np.array_equal(mine, np.arange(mine.size)), number


def test_turns_depend_on_nothing_but_seed_and_index() -> None:
    indices = np.random.default_rng(0).integers(0, 2**50, (40, 5))
    mixture = Mixture([5, 1, 2], seed=1)
    together = mixture.locate_samples(indices)
    again = [Mixture([5, 1, 2], seed=1).locate_samples(np.array([i])) for i in indices.ravel()]
    assert together.source.ravel().tolist() == [int(turn.source[0]) for turn in again]
    assert together.sample.ravel().tolist() == [int(turn.sample[0]) for turn in again]
    some = np.arange(10_000)
    assert not np.array_equal(
        mixture.locate_samples(some).source, Mixture([5, 1, 2], seed=2).locate_samples(some).source
    )


def test_turns_have_no_rhythm() -> None:
    source = Mixture([1, 1], seed=0).locate_samples(np.arange(64_000)).source
    for period in (2, 4, 8, 16):
        assert abs(source[::period].mean() - 0.5) < 0.03, period


def test_the_order_never_changes_between_releases() -> None:
    # A checkpoint's cursor means these samples. If this fails, old runs no longer resume exactly.
    source, index = Mixture([0.7, 0.2, 0.1], seed=0).locate_samples(
        np.array([0, 1, 2, 3, 65_536, 10**9])
    )
    assert source.tolist() == [0, 2, 1, 0, 0, 1]
    assert index.tolist() == [15, 5, 12, 38, 45_908, 199_996_950]


@pytest.mark.parametrize("weights", [[1.0], [3]])
def test_one_source_has_every_turn(weights: list[float]) -> None:
    assert Mixture(weights, seed=0).locate_samples(np.arange(1_000)).source.max() == 0
