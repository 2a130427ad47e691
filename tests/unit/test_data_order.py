"""The order of samples is a bijection, a pure function of (seed, index), and different in each
epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.order import (
    SampleOrder,
    ShuffledSampleOrder,
    count_held_out_targets,
    permute_indices,
)

keys = st.integers(0, 2**64 - 1)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 3000), key=keys)
def test_permute_is_a_bijection_for_any_n(n: int, key: int) -> None:
    assert sorted(permute_indices(np.arange(n), n, key)) == list(range(n))


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 2**62), key=keys, index=st.integers(0, 2**62))
def test_permute_stays_inside_at_any_size_and_needs_no_table(n: int, key: int, index: int) -> None:
    at = permute_indices(np.array([index % n]), n, key)[0]
    assert 0 <= at < n


@settings(deadline=None, max_examples=40)
@given(n=st.integers(100, 2000), first=keys, second=keys)
def test_distinct_keys_give_different_orders(n: int, first: int, second: int) -> None:
    same = np.array_equal(
        permute_indices(np.arange(n), n, first), permute_indices(np.arange(n), n, second)
    )
    assert same == (first == second)


def test_a_key_per_index_is_the_same_as_one_call_per_key() -> None:
    keys_of = np.array([3, 3, 9, 2**63], dtype=np.uint64)
    together = permute_indices(np.array([5, 6, 5, 5]), 77, keys_of)
    one_by_one = [
        permute_indices(np.array([i]), 77, int(key))[0]
        for i, key in zip([5, 6, 5, 5], keys_of, strict=True)
    ]
    assert list(together) == one_by_one


def test_permute_spreads_every_index_evenly_over_keys() -> None:
    n, num_keys = 16, 20_000
    at = permute_indices(np.full(num_keys, 3), n, np.arange(num_keys, dtype=np.uint64))
    counts = np.bincount(at, minlength=n)
    assert abs(counts - num_keys / n).max() < 6 * np.sqrt(num_keys / n)


@settings(deadline=None, max_examples=80)
@given(seq_len=st.integers(1, 40), extra=st.integers(1, 400), seed=st.integers(0, 2**40))
def test_an_epoch_reads_every_window_that_fits_once_within_the_tokens(
    seq_len: int, extra: int, seed: int
) -> None:
    order = SampleOrder(seq_len + extra, seq_len, seed)
    per_epoch = order.samples_per_epoch
    num_with_target = order.num_tokens - 1  # of the last token nothing is to be predicted
    for epoch in range(3):
        starts = order.sample_starts(np.arange(per_epoch) + epoch * per_epoch)
        assert starts.min() >= 0
        assert starts.max() + seq_len + 1 <= order.num_tokens
        assert (
            np.diff(np.sort(starts)) == seq_len
        ).all()  # distinct, side by side: no input is read twice
        before, after = starts.min(), num_with_target - (starts.max() + seq_len)
        assert before + after == num_with_target % seq_len


@settings(deadline=None, max_examples=40)
@given(seq_len=st.integers(1, 12), extra=st.integers(1, 60), seed=st.integers(0, 2**40))
def test_every_token_is_read_over_epochs(seq_len: int, extra: int, seed: int) -> None:
    order = SampleOrder(seq_len + extra, seq_len, seed)
    starts = order.sample_starts(np.arange(300 * order.samples_per_epoch))
    read = np.unique(starts[:, None] + np.arange(seq_len + 1))
    assert np.array_equal(read, np.arange(order.num_tokens))


def test_a_split_of_one_window_is_that_window_in_every_epoch() -> None:
    assert SampleOrder(9, 8, seed=5).samples_per_epoch == 1
    assert SampleOrder(9, 8, seed=5).sample_starts(np.arange(50)).tolist() == [0] * 50
    assert SampleOrder(16, 8, seed=5).samples_per_epoch == 1
    assert set(SampleOrder(16, 8, seed=5).sample_starts(np.arange(500)).tolist()) == set(range(8))
    assert SampleOrder(17, 8, seed=5).samples_per_epoch == 2


def test_epochs_differ_in_order_and_in_where_they_cut() -> None:
    order = SampleOrder(10_048, 64, seed=1)
    samples = np.arange(order.samples_per_epoch)
    epochs = [order.sample_starts(samples + epoch * order.samples_per_epoch) for epoch in range(20)]
    windows = {tuple(starts // 64) for starts in epochs}
    phases = {int(starts.min()) for starts in epochs}
    assert len(windows) == 20
    assert len(phases) > 10
    assert max(phases) < 64


def test_starts_depend_on_nothing_but_seed_and_index() -> None:
    order = SampleOrder(5_000, 32, seed=7)
    indices = np.arange(1_000)
    whole = order.sample_starts(indices)
    shuffled = np.random.default_rng(0).permutation(indices)
    assert np.array_equal(SampleOrder(5_000, 32, seed=7).sample_starts(shuffled), whole[shuffled])
    assert np.array_equal(order.sample_starts(indices.reshape(10, 100)), whole.reshape(10, 100))
    assert not np.array_equal(SampleOrder(5_000, 32, seed=8).sample_starts(indices), whole)


def test_the_order_never_changes_between_releases() -> None:
    # A checkpoint's cursor means these samples. If this fails, old runs no longer resume exactly.
    assert SampleOrder(1_000_000, 128, seed=0).sample_starts(
        np.array([0, 1, 2, 7_812, 10**9])
    ).tolist() == [
        586298,
        300858,
        844730,
        855084,
        391222,
    ]


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "expected"),
    [(0, None, 0), (1, 5, 0), (2, 5, 1), (10, 0, 0), (10, None, 9), (10, 3, 3)],
)
def test_held_out_targets_are_all_tokens_but_the_first(
    num_tokens: int, max_tokens: int | None, expected: int
) -> None:
    assert count_held_out_targets(num_tokens, max_tokens) == expected


def test_a_shuffled_order_has_every_sample_once_in_each_epoch_and_another_order_in_the_next() -> (
    None
):
    order = ShuffledSampleOrder(1_000, seed=4)
    epochs = order.shuffled_positions(np.arange(3_000)).reshape(3, 1_000)
    assert all(sorted(epoch) == list(range(1_000)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert np.array_equal(
        order.shuffled_positions(np.array([[2_999, 5]])), [[epochs[2, 999], epochs[0, 5]]]
    )
    assert not np.array_equal(
        ShuffledSampleOrder(1_000, seed=5).shuffled_positions(np.arange(1_000)), epochs[0]
    )
