"""Batches are one global sequence: the same at any number of ranks, from any step on, prefetched or not."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.data.corpus import Corpus, prepare_corpus
from phalanx.data.loader import IGNORE_INDEX, Batch, HeldOutBatches, TrainBatches
from phalanx.data.order import SampleOrder

SEQ_LEN = 8


def corpus_of(folder: Path, num_tokens: int, held_out_fraction: float) -> Corpus:
    """Every token is its own position, so that a batch says what it read."""
    np.save(folder / "ids.npy", np.arange(num_tokens))
    return prepare_corpus(str(folder / "ids.npy"), held_out_fraction, folder / "data", seq_len=SEQ_LEN, vocab_size=None)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of(tmp_path_factory.mktemp("corpus"), 1_000, 0.1)


@pytest.fixture
def open_batches(corpus: Corpus) -> Iterator[object]:
    opened: list[TrainBatches] = []

    def open_one(micro: int = 2, dp: int = 1, rank: int = 0, prefetch: bool = False, seed: int = 3) -> TrainBatches:
        opened.append(TrainBatches(corpus, SEQ_LEN, seed, 12, micro, dp, rank, prefetch=prefetch))
        return opened[-1]

    yield open_one
    for batches in opened:
        batches.close()


def rows(microbatches: list[Batch]) -> list[list[int]]:
    return [row for batch in microbatches for row in batch["inputs"].tolist()]


def same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


def test_a_batch_is_inputs_targets_one_later_and_positions(open_batches) -> None:
    for batch in open_batches(micro=4).step_microbatches(1):
        assert set(batch) == {"inputs", "targets", "positions"}
        assert all((value.shape, value.dtype) == ((4, SEQ_LEN), torch.int64) for value in batch.values())
        assert torch.equal(batch["targets"], batch["inputs"] + 1)
        assert torch.equal(batch["positions"], torch.arange(SEQ_LEN).repeat(4, 1))
        assert batch["inputs"].is_contiguous()
        assert batch["targets"].is_contiguous()


def test_steps_read_the_samples_of_the_order(corpus: Corpus, open_batches) -> None:
    order = SampleOrder(corpus.splits["train"].num_tokens, SEQ_LEN, seed=3)
    starts = order.starts(np.arange(12 * 30))  # several epochs
    read = [row[0] for step in range(1, 31) for row in rows(open_batches().step_microbatches(step))]
    assert read == starts.tolist()


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (12, 1), (1, 3), (2, 3), (3, 4), (1, 12), (6, 2)])
def test_the_union_over_ranks_is_what_one_rank_reads_in_order(open_batches, micro: int, dp: int) -> None:
    for step in (1, 2, 40):
        ranks = [open_batches(micro, dp, rank).step_microbatches(step) for rank in range(dp)]
        together = [row for microbatch in zip(*ranks, strict=True) for row in rows(list(microbatch))]
        assert together == rows(open_batches(12).step_microbatches(step))


def test_the_cursor_counts_samples_of_all_ranks(open_batches) -> None:
    assert [open_batches(2, 3, 1).cursor(step) for step in (1, 2, 11)] == [0, 12, 120]
    assert open_batches(2, 3, 1).sample_indices(2).tolist() == [[14, 15], [20, 21]]


@pytest.mark.parametrize("prefetch", [False, True])
def test_resuming_by_step_number_gives_identical_batches(open_batches, prefetch: bool) -> None:
    straight = open_batches(prefetch=prefetch)
    steps = [straight.step_microbatches(step) for step in range(1, 21)]
    resumed = open_batches(prefetch=prefetch)
    assert all(same(resumed.step_microbatches(step), steps[step - 1]) for step in range(11, 21))


def test_prefetched_batches_are_those_built_directly_also_after_jumps(open_batches) -> None:
    prefetched, direct = open_batches(prefetch=True), open_batches()
    for step in [1, 2, 3, 3, 2, 50, 51, 52, 1, 53]:
        assert same(prefetched.step_microbatches(step), direct.step_microbatches(step))


def test_the_next_step_is_built_while_this_one_is_used(open_batches, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    second_built = threading.Event()
    build = TrainBatches._build

    def watch(self: TrainBatches, step: int) -> list[Batch]:
        built.append(step)
        if step == 2:
            second_built.set()
        return build(self, step)

    monkeypatch.setattr(TrainBatches, "_build", watch)
    batches = open_batches(prefetch=True)
    batches.step_microbatches(1)
    assert second_built.wait(10)
    assert built == [1, 2]


def test_an_error_while_prefetching_is_raised_where_its_step_is_asked_for(
    open_batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = TrainBatches._build

    def fail(self: TrainBatches, step: int) -> list[Batch]:
        if step == 3:
            raise OSError("the disk is gone")
        return build(self, step)

    monkeypatch.setattr(TrainBatches, "_build", fail)
    batches = open_batches(prefetch=True)
    batches.step_microbatches(1)
    batches.step_microbatches(2)
    with pytest.raises(OSError, match="the disk is gone"):
        batches.step_microbatches(3)
    assert len(batches.step_microbatches(4)) == 6


def test_closing_ends_the_thread_and_may_be_repeated(open_batches) -> None:
    batches = open_batches(prefetch=True)
    batches.step_microbatches(1)
    assert any(thread.name.startswith("phalanx-data") for thread in threading.enumerate())
    batches.close()
    batches.close()
    assert not any(thread.name.startswith("phalanx-data") for thread in threading.enumerate())


def test_seeds_give_other_samples(open_batches) -> None:
    assert rows(open_batches(seed=3).step_microbatches(1)) != rows(open_batches(seed=4).step_microbatches(1))


@pytest.mark.parametrize("num_held_out", [2, 8, 9, 10, 64, 65, 101])
def test_every_held_out_token_but_the_first_is_predicted_once(tmp_path: Path, num_held_out: int) -> None:
    corpus = corpus_of(tmp_path, 300, num_held_out / 300)
    for dp, micro, max_tokens in itertools.product((1, 2, 3), (1, 2, 5), (None, 0, 1, 8, 50)):
        ranks = [HeldOutBatches(corpus, SEQ_LEN, micro, dp, rank, max_tokens) for rank in range(dp)]
        batches = [list(rank) for rank in ranks]
        assert {len(each) for each in batches} == {len(ranks[0])}  # or an all-reduce would wait for ever
        predicted: list[int] = []
        for batch in itertools.chain(*batches):
            assert batch["inputs"].shape == batch["targets"].shape == batch["positions"].shape == (micro, SEQ_LEN)
            real = batch["targets"] != IGNORE_INDEX
            assert torch.equal(batch["inputs"][real] + 1, batch["targets"][real])
            assert batch["inputs"].min() >= 0
            predicted += batch["targets"][real].tolist()
        expected = num_held_out - 1 if max_tokens is None else min(num_held_out - 1, max_tokens)
        first = 300 - num_held_out
        assert sorted(predicted) == list(range(first + 1, first + 1 + expected)), (dp, micro, max_tokens)
        assert ranks[0].num_targets == expected


def test_held_out_windows_are_in_order_and_dealt_to_the_ranks(corpus: Corpus) -> None:
    starts = [[row[0] for row in rows(list(HeldOutBatches(corpus, SEQ_LEN, 2, 2, rank)))] for rank in (0, 1)]
    assert starts[0][:3] == [900, 916, 932]
    assert starts[1][:3] == [908, 924, 940]


def test_no_held_out_tokens_are_no_batches(tmp_path: Path) -> None:
    batches = HeldOutBatches(corpus_of(tmp_path, 100, 0.0), SEQ_LEN, 2, 2, 0)
    assert (list(batches), len(batches), batches.num_targets) == ([], 0, 0)
