"""A split is one sequence over several arrays: what a concatenation of its documents holds,
without making one."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.tokens import (
    SingleDocumentTokenArray,
    choose_split,
    find_token_outside_vocabulary,
    hash_document_numbers,
    split_into_train_and_held_out,
)


class Array:
    """Tokens that say where they are, in documents of given lengths and numbers."""

    def __init__(self, lengths: list[int], first_token: int, numbers: list[int]) -> None:
        self.tokens = np.arange(first_token, first_token + sum(lengths)).astype("<u4")
        self.ends = np.cumsum(lengths).astype(np.uint64)
        self.keys = hash_document_numbers(np.array(numbers, np.int64))


def arrays_of(lengths: list[list[int]]) -> list[Array]:
    arrays, first_token, number = [], 0, 0
    for each in lengths:
        arrays.append(Array(each, first_token, list(range(number, number + len(each)))))
        first_token, number = first_token + sum(each), number + len(each)
    return arrays


def slow_split(arrays: list[Array], fraction: float) -> tuple[list[list[int]], list[list[int]]]:
    """The documents of both sides, by Python."""
    sides: tuple[list[list[int]], list[list[int]]] = ([], [])
    for array in arrays:
        start = 0
        for end, key in zip(array.ends.tolist(), array.keys.tolist(), strict=True):
            sides[key / 2**64 < fraction].append(array.tokens[start:end].tolist())
            start = end
    return sides


lengths_of_arrays = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=80)
@given(
    lengths=lengths_of_arrays, fraction=st.sampled_from([0.1, 0.4, 0.9]), length=st.integers(1, 12)
)
def test_a_split_by_document_is_the_concatenation_of_its_documents(
    lengths: list[list[int]], fraction: float, length: int
) -> None:
    arrays = arrays_of(lengths)
    splits = split_into_train_and_held_out(arrays, fraction, "document")
    for sequence, documents in zip(
        (splits.train, splits.held_out), slow_split(arrays, fraction), strict=True
    ):
        tokens = [token for document in documents for token in document]
        ids = [number for number, document in enumerate(documents) for _ in document]
        assert len(sequence) == len(tokens)
        assert sequence[:].tolist() == tokens
        assert sequence[3:11].tolist() == tokens[3:11]
        assert sequence.num_documents == len(documents)
        starts = np.arange(max(0, len(tokens) - length + 1))
        windows = [tokens[start : start + length] for start in starts]
        assert sequence.gather(starts, length).tolist() == windows
        assert sequence.document_ids(starts, length).tolist() == [
            ids[start : start + length] for start in starts
        ]


@settings(deadline=None, max_examples=50)
@given(lengths=lengths_of_arrays, fraction=st.floats(0.0, 0.99))
def test_a_split_by_position_is_a_cut(lengths: list[list[int]], fraction: float) -> None:
    arrays = arrays_of(lengths)
    total = sum(map(sum, lengths))
    splits = split_into_train_and_held_out(arrays, fraction, "position")
    assert [*splits.train[:].tolist(), *splits.held_out[:].tolist()] == list(range(total))
    held_out = min(total, max(2, int(np.ceil(total * fraction)))) if fraction else 0
    assert len(splits.held_out) == held_out
    every = splits.train.num_documents + splits.held_out.num_documents
    assert every - len([n for each in lengths for n in each]) in (
        0,
        1,
    )  # one document may be cut in two


def test_gather_takes_starts_of_any_shape() -> None:
    sequence = split_into_train_and_held_out(
        [SingleDocumentTokenArray.from_tokens(np.arange(50))], 0.0, "position"
    ).train
    starts = np.array([[0, 7], [40, 47]])
    assert sequence.gather(starts, 3).tolist() == (starts[..., None] + np.arange(3)).tolist()
    assert sequence.gather(np.zeros((0,), np.int64), 3).shape == (0, 3)


def test_a_document_that_two_shards_share_is_one() -> None:
    arrays = [Array([3, 4], 0, [1, 2]), Array([5, 6], 7, [2, 3])]
    splits = split_into_train_and_held_out(arrays, 0.0, "position")
    assert splits.train.num_documents == 3
    assert splits.train.document_ends().tolist() == [3, 12, 18]


def test_the_same_documents_are_held_out_however_they_lie() -> None:
    arrays = arrays_of([[5] * 40, [5] * 60])
    one = [Array([5] * 100, 0, list(range(100)))]
    assert split_into_train_and_held_out(arrays, 0.3, "document").held_out[:].tolist() == (
        split_into_train_and_held_out(one, 0.3, "document").held_out[:].tolist()
    )
    fewer = split_into_train_and_held_out(one, 0.1, "document").held_out[:].tolist()
    assert set(fewer) < set(
        split_into_train_and_held_out(one, 0.3, "document").held_out[:].tolist()
    )


@pytest.mark.parametrize(
    ("lengths", "fraction", "seq_len", "expected"),
    [
        ([[5] * 100], 0.3, 10, "document"),
        ([[5] * 100], 0.0, 10, "position"),
        ([[500]], 0.3, 10, "position"),  # one document
        ([[5] * 100], 0.3, 450, "position"),  # training would have no sequence
        ([[5] * 100], 1e-6, 10, "few_documents"),  # nothing would be held out
        ([[5] * 100], 0.99, 30, "few_documents"),  # little would be left to train on
        ([[11, 11]], 0.05, 10, "few_documents"),
        ([[11, 10]], 0.05, 10, "position"),  # one of them is no sequence
        ([[30], [30]], 0.05, 10, "few_documents"),
    ],
)
def test_documents_decide_unless_a_side_would_be_left_without_a_sequence(
    lengths: list[list[int]], fraction: float, seq_len: int, expected: str
) -> None:
    assert choose_split(arrays_of(lengths), fraction, seq_len).by == expected


@settings(deadline=None, max_examples=100)
@given(lengths=lengths_of_arrays, fraction=st.floats(0.001, 0.99), seq_len=st.integers(1, 20))
def test_both_sides_have_a_sequence_of_whole_documents_or_the_split_is_by_position(
    lengths: list[list[int]], fraction: float, seq_len: int
) -> None:
    arrays = arrays_of(lengths)
    chosen = choose_split(arrays, fraction, seq_len)
    splits = split_into_train_and_held_out(arrays, fraction, *chosen)
    assert splits.train.num_tokens + splits.held_out.num_tokens == sum(map(sum, lengths))
    if chosen.by != "position":
        assert min(splits.train.num_tokens, splits.held_out.num_tokens) >= seq_len + 1
    if chosen.by == "few_documents":
        keys = np.concatenate([array.keys for array in arrays])
        assert set(chosen.keys) < set(keys.tolist())
        assert splits.held_out.num_tokens <= max(fraction, 0.5) * sum(map(sum, lengths))


def test_of_a_long_and_a_short_document_the_short_one_is_held_out() -> None:
    for lengths in ([1000, 20], [20, 1000]):  # whichever has the smaller key
        arrays = arrays_of([lengths])
        chosen = choose_split(arrays, 0.001, 10)
        assert split_into_train_and_held_out(arrays, 0.001, *chosen).held_out.num_tokens == 20
    for lengths in permutations([650, 340, 870, 2300, 1150]):  # of which no more than a tenth
        arrays = arrays_of([list(lengths)])
        assert (
            split_into_train_and_held_out(
                arrays, 0.001, *choose_split(arrays, 0.001, 32)
            ).held_out.num_tokens
            == 340
        )


def test_a_document_that_two_shards_share_is_held_out_whole() -> None:
    arrays = arrays_of([[50, 30], [30, 50]])
    arrays[1].keys = np.concatenate([arrays[0].keys[-1:], arrays[1].keys[1:]])
    chosen = choose_split(arrays, 1e-9, 10)
    splits = split_into_train_and_held_out(arrays, 1e-9, *chosen)
    assert chosen.by == "few_documents"
    assert splits.held_out.num_tokens in (50, 60)
    assert splits.train.num_documents == 2
    assert choose_split([arrays_of([[80]])[0], arrays_of([[80]])[0]], 0.1, 10).by == "position"


def test_ten_million_documents_take_no_loop() -> None:
    """By its structure, not by a clock: extents are neighbours joined, so few documents held out
    make few extents."""
    array = Array([1], 0, [0])
    array.ends = np.arange(1, 10_000_001).astype(np.uint64)
    array.keys = hash_document_numbers(np.arange(10_000_000))
    array.tokens = np.zeros(10_000_000, np.uint16)
    splits = split_into_train_and_held_out([array], 0.001, "document")
    assert splits.train.num_tokens + splits.held_out.num_tokens == 10_000_000
    assert 9_000 < splits.held_out.num_documents == splits.held_out.num_tokens < 11_000


def test_the_first_token_outside_a_vocabulary_is_found() -> None:
    tokens = np.zeros(100, np.int32)
    assert find_token_outside_vocabulary(tokens, 1) is None
    tokens[40], tokens[70] = 9, -3
    assert find_token_outside_vocabulary(tokens, 9) == (40, 9)
    assert find_token_outside_vocabulary(tokens, 10) == (70, -3)
