"""Batches are one global sequence: the same at any number of ranks, from any step on, prefetched
or not."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from commands import DEADLINE_S
from phalanx.core.batch import IGNORE_INDEX
from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.core.errors import DataError
from phalanx.data.corpus import Corpus
from phalanx.data.loader import (
    Batch,
    HeldOutBatches,
    RankBatchShare,
    TrainBatches,
    build_held_out_batches,
)
from phalanx.data.order import SampleOrder
from phalanx.data.prepare import prepare_corpus
from phalanx.data.samples import (
    Arrays,
    SampleSpec,
    SampleWindows,
    TokenSamples,
    open_training_samples,
)
from phalanx.data.shards import PAYLOAD_OFFSET
from phalanx.data.user_dataset import UserDatasetFacts
from phalanx.job.schema import Data, Source
from second_device import CUDA, second_device

SEQ_LEN = 8


def corpus_of(folder: Path, num_tokens: int, held_out_fraction: float) -> Corpus:
    """Every token is its own position, so that a batch says what it read."""
    np.save(folder / "ids.npy", np.arange(num_tokens))
    data = Data(
        source=str(folder / "ids.npy"), held_out_fraction=held_out_fraction, seq_len=SEQ_LEN
    )
    return prepare_corpus(data, folder / "data", vocab_size=None)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of(tmp_path_factory.mktemp("corpus"), 1_000, 0.1)


@pytest.fixture
def open_batches(corpus: Corpus) -> Iterator[object]:
    opened: list[TrainBatches] = []

    def open_one(
        micro: int = 2, dp: int = 1, rank: int = 0, prefetch: bool = False, seed: int = 3
    ) -> TrainBatches:
        spec = SampleSpec(str(corpus.directory), SEQ_LEN, seed)
        opened.append(TrainBatches(spec, RankBatchShare(12, micro, dp, rank), prefetch=prefetch))
        return opened[-1]

    yield open_one
    for batches in opened:
        batches.close()


def held_out_of(
    corpus: Corpus, micro: int, dp: int, rank: int, max_tokens: int | None = None
) -> HeldOutBatches:
    return HeldOutBatches(
        corpus.sequences("held_out")[0], SampleWindows(SEQ_LEN), micro, dp, rank, max_tokens
    )


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
        assert all(
            (value.shape, value.dtype) == ((4, SEQ_LEN), torch.int64) for value in batch.values()
        )
        assert torch.equal(batch["targets"], batch["inputs"] + 1)
        assert torch.equal(batch["positions"], torch.arange(SEQ_LEN).repeat(4, 1))
        assert batch["inputs"].is_contiguous()
        assert batch["targets"].is_contiguous()


def test_steps_read_the_samples_of_the_order(corpus: Corpus, open_batches) -> None:
    order = SampleOrder(corpus.splits["train"].num_tokens, SEQ_LEN, seed=3)
    starts = order.sample_starts(np.arange(12 * 30))  # several epochs
    read = [row[0] for step in range(1, 31) for row in rows(open_batches().step_microbatches(step))]
    assert read == starts.tolist()


@pytest.mark.parametrize(
    ("micro", "dp"), [(1, 1), (12, 1), (1, 3), (2, 3), (3, 4), (1, 12), (6, 2)]
)
def test_the_union_over_ranks_is_what_one_rank_reads_in_order(
    open_batches, micro: int, dp: int
) -> None:
    for step in (1, 2, 40):
        ranks = [open_batches(micro, dp, rank).step_microbatches(step) for rank in range(dp)]
        together = [
            row for microbatch in zip(*ranks, strict=True) for row in rows(list(microbatch))
        ]
        assert together == rows(open_batches(12).step_microbatches(step))


def test_the_cursor_counts_samples_of_all_ranks() -> None:
    share = RankBatchShare(12, 2, 3, 1)
    assert [share.count_samples_before_step(step) for step in (1, 2, 11)] == [0, 12, 120]
    assert share.sample_indices(2).tolist() == [[14, 15], [20, 21]]


def test_another_batch_size_and_number_of_ranks_go_on_where_the_samples_ended() -> None:
    """Two ranks with batches of 8 for five steps, then four ranks with batches of 12: each
    sample once, in order."""
    before = [RankBatchShare(8, 2, 2, rank) for rank in range(2)]
    after = [RankBatchShare(12, 3, 4, rank, done_steps=5, done_samples=40) for rank in range(4)]
    steps = [[share.sample_indices(step) for share in before] for step in range(1, 6)]
    steps += [[share.sample_indices(step) for share in after] for step in range(6, 11)]
    seen = [sorted(np.concatenate([part.ravel() for part in parts]).tolist()) for parts in steps]
    assert [number for step in seen for number in step] == list(range(5 * 8 + 5 * 12))


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


def test_the_next_step_is_built_while_this_one_is_used(
    open_batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    second_built = threading.Event()
    take = TokenSamples.take

    def watch(self: TokenSamples, indices: np.ndarray) -> Arrays:
        built.append(int(indices[0]) // 12 + 1)
        if built[-1] == 2:
            second_built.set()
        return take(self, indices)

    monkeypatch.setattr(TokenSamples, "take", watch)
    batches = open_batches(prefetch=True)
    batches.step_microbatches(1)
    assert second_built.wait(DEADLINE_S)
    assert built == [1, 2]


def test_an_error_while_prefetching_is_raised_where_its_step_is_asked_for(
    open_batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = TokenSamples.take

    def fail(self: TokenSamples, indices: np.ndarray) -> Arrays:
        if indices[0] == 24:
            raise OSError("the disk is gone")
        return take(self, indices)

    monkeypatch.setattr(TokenSamples, "take", fail)
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
    assert rows(open_batches(seed=3).step_microbatches(1)) != rows(
        open_batches(seed=4).step_microbatches(1)
    )


@pytest.mark.parametrize("num_held_out", [2, 8, 9, 10, 64, 65, 101])
def test_every_held_out_token_but_the_first_is_predicted_once(
    tmp_path: Path, num_held_out: int
) -> None:
    corpus = corpus_of(tmp_path, 300, num_held_out / 300)
    for dp, micro, max_tokens in itertools.product((1, 2, 3), (1, 2, 5), (None, 0, 1, 8, 50)):
        ranks = [held_out_of(corpus, micro, dp, rank, max_tokens) for rank in range(dp)]
        batches = [list(rank) for rank in ranks]
        assert {len(each) for each in batches} == {
            len(ranks[0])
        }  # or an all-reduce would wait for ever
        predicted: list[int] = []
        for batch in itertools.chain(*batches):
            assert (
                batch["inputs"].shape
                == batch["targets"].shape
                == batch["positions"].shape
                == (micro, SEQ_LEN)
            )
            real = batch["targets"] != IGNORE_INDEX
            assert torch.equal(batch["inputs"][real] + 1, batch["targets"][real])
            assert batch["inputs"].min() >= 0
            predicted += batch["targets"][real].tolist()
        expected = num_held_out - 1 if max_tokens is None else min(num_held_out - 1, max_tokens)
        first = 300 - num_held_out
        assert sorted(predicted) == list(range(first + 1, first + 1 + expected)), (
            dp,
            micro,
            max_tokens,
        )
        assert ranks[0].num_targets == expected


def test_held_out_windows_are_in_order_and_dealt_to_the_ranks(corpus: Corpus) -> None:
    starts = [[row[0] for row in rows(list(held_out_of(corpus, 2, 2, rank)))] for rank in (0, 1)]
    assert starts[0][:3] == [900, 916, 932]
    assert starts[1][:3] == [908, 924, 940]


def test_no_held_out_tokens_are_no_batches(tmp_path: Path) -> None:
    batches = held_out_of(corpus_of(tmp_path, 100, 0.0), 2, 2, 0)
    assert (list(batches), len(batches), batches.num_targets) == ([], 0, 0)


# Documents


EOD = 256


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Sixty documents of one to thirteen bytes; each byte says the document."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "texts").mkdir()
    for number in range(60):
        (folder / "texts" / f"{number:02d}.txt").write_bytes(bytes([number]) * (number % 13 + 1))
    data = Data(source=str(folder / "texts"), held_out_fraction=0.4, seq_len=SEQ_LEN)
    return prepare_corpus(data, folder / "data", vocab_size=None)


def check_places(arrays: Arrays) -> None:
    """Ids step where an end of a document was the input before, from 0 on, and positions restart
    there."""
    for inputs, ids, positions in zip(
        arrays["inputs"], arrays["document_ids"], arrays["positions"], strict=True
    ):
        document, position = 0, 0
        for at in range(len(inputs)):
            assert (ids[at], positions[at]) == (document, position)
            ended = inputs[at] == EOD
            document, position = document + int(ended), 0 if ended else position + 1


def test_a_dataset_that_has_another_length_by_now_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its order is a permutation of its length: a replaced loader worker read other samples."""
    module = ModuleType("grown")
    length = 256
    module.dataset = lambda split: _Numbers(length)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "grown", module)
    facts = UserDatasetFacts("grown:dataset", {}, length, 0)
    corpus = Corpus(tmp_path, {}, (), facts)
    assert len(open_training_samples(corpus, 1, seed=3).take(np.arange(4))["number"]) == 4
    length = 300
    with pytest.raises(DataError, match="has 300 samples now, and had 256"):
        open_training_samples(corpus, 1, seed=3)


class _Numbers:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"number": index}


def test_masks_number_the_documents_of_a_sample_and_restart_positions(documents: Corpus) -> None:
    plain = open_training_samples(documents, SEQ_LEN, seed=3).take(np.arange(200))
    masked = open_training_samples(documents, SEQ_LEN, seed=3, document_masks=True).take(
        np.arange(200)
    )
    assert set(masked) == {*plain, "document_ids"}
    assert np.array_equal(masked["inputs"], plain["inputs"])
    assert np.array_equal(
        masked["targets"], plain["targets"]
    )  # after the end of a document comes what begins one
    assert masked["document_ids"].max() > 2
    check_places(masked)


def test_held_out_documents_are_masked_too(documents: Corpus) -> None:
    ranks = [
        build_held_out_batches(documents, RankBatchShare(4, 2, 2, rank), **EVERYTHING)
        for rank in (0, 1)
    ]
    for batch in itertools.chain(*(rank[""] for rank in ranks)):
        real = [(batch["targets"][row] != IGNORE_INDEX).sum() for row in range(2)]
        for row, num_real in enumerate(real):
            check_places(
                {name: tensor[row : row + 1, :num_real].numpy() for name, tensor in batch.items()}
            )
            assert not set(batch["document_ids"][row, num_real:].tolist()) & set(range(SEQ_LEN))


EVERYTHING = {"seq_len": SEQ_LEN, "max_tokens": 10**6, "seed": 0, "document_masks": True}


def test_where_no_token_marks_an_end_the_last_token_of_a_document_has_no_target(
    documents: Corpus,
) -> None:
    (sequence,) = documents.sequences("train")
    starts = np.arange(0, 160, SEQ_LEN)
    marked = SampleWindows(SEQ_LEN, document_masks=True).cut_samples(sequence, starts)
    unmarked = SampleWindows(SEQ_LEN, document_masks=True, ends_are_marked=False).cut_samples(
        sequence, starts
    )
    assert np.array_equal(unmarked["targets"] == IGNORE_INDEX, marked["inputs"] == EOD)


# Mixtures


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Two sources whose tokens do not meet: 0 to 999, three of four samples, and 1,000 to 1,999."""
    folder = tmp_path_factory.mktemp("mixed")
    for number, name in enumerate("ab"):
        np.save(folder / f"{name}.npy", np.arange(1_000) + number * 1_000)
    sources = tuple(
        Source(source=str(folder / f"{name}.npy"), weight=w) for name, w in (("a", 3.0), ("b", 1.0))
    )
    data = Data(mixture=sources, held_out_fraction=0.1, seq_len=SEQ_LEN)
    return prepare_corpus(data, folder / "data", vocab_size=None)


def test_samples_of_a_mixture_come_by_weight_each_source_in_an_order_of_its_own(
    mixed: Corpus,
) -> None:
    starts = open_training_samples(mixed, SEQ_LEN, seed=3).take(np.arange(640))["inputs"][:, 0]
    assert (starts < 1_000).sum() == 480
    for number, mine in enumerate((starts[starts < 1_000], starts[starts >= 1_000] - 1_000)):
        order = SampleOrder(900, SEQ_LEN, hash_to_stable_64_bits("source", 3, number))
        assert len(mine) > order.samples_per_epoch
        assert sorted(mine) == sorted(order.sample_starts(np.arange(len(mine))))


def test_a_mixture_is_the_same_at_any_number_of_ranks(mixed: Corpus) -> None:
    spec = SampleSpec(str(mixed.directory), SEQ_LEN, 3)
    alone = TrainBatches(spec, RankBatchShare(12, 12), prefetch=False)
    ranks = [
        TrainBatches(spec, RankBatchShare(12, 2, 3, rank), prefetch=False) for rank in range(3)
    ]
    for step in (1, 30):
        parts = zip(*(rank.step_microbatches(step) for rank in ranks), strict=True)
        assert [row for part in parts for row in rows(list(part))] == rows(
            alone.step_microbatches(step)
        )


def test_a_mixture_is_evaluated_by_source_with_tokens_by_weight(mixed: Corpus) -> None:
    found = build_held_out_batches(
        mixed, RankBatchShare(4, 4), seq_len=SEQ_LEN, max_tokens=100, seed=0
    )
    assert list(found) == mixed.names
    assert [batches.num_targets for batches in found.values()] == [75, 25]


# Records


def test_a_record_names_what_was_read_and_is_told_once(corpus: Corpus) -> None:
    share = RankBatchShare(12, 2, 3, 1, done_steps=4, done_samples=100)
    batches = TrainBatches(
        SampleSpec(str(corpus.directory), SEQ_LEN, 3), share, prefetch=False, keep_record=True
    )
    first, again = batches.step_microbatches(5), batches.step_microbatches(5)
    assert same(first, again)
    (event,) = batches.record(5)
    assert (event.step, event.data_parallel_rank, event.ranges) == (5, 1, [102, 104, 108, 110])
    assert batches.record(5) == batches.record(6) == []
    batches.step_microbatches(6)
    assert batches.record(6)[0].xxh3 != event.xxh3
    assert (
        TrainBatches(SampleSpec(str(corpus.directory), SEQ_LEN, 3), share, prefetch=False).record(5)
        == []
    )


def test_batches_for_a_gpu_lie_in_page_locked_memory_before_they_are_asked_for(
    corpus: Corpus,
) -> None:
    """From other memory a copy waits for the device.

    The thread that reads ahead puts them there, on its own GPU.
    """
    chosen: list[tuple[str, object]] = []
    spec = SampleSpec(str(corpus.directory), SEQ_LEN, 3)
    plain = TrainBatches(spec, RankBatchShare(12, 4), prefetch=False).step_microbatches(1)
    with second_device() as waits, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.cuda,
            "set_device",
            lambda device: chosen.append((threading.current_thread().name, device)),
        )
        batches = TrainBatches(spec, RankBatchShare(12, 4), pin_for=CUDA)
        try:
            found = batches.step_microbatches(1)
        finally:
            batches.close()
        assert same(found, plain)
        assert all(tensor.is_pinned() for batch in found for tensor in batch.values())
        for batch in found:
            for tensor in batch.values():
                tensor.to(CUDA, non_blocking=True)
        assert not waits.counts
    assert {(name.rpartition("_")[0], device) for name, device in chosen} == {
        ("phalanx-data", CUDA)
    }


def test_a_bit_that_flips_while_the_data_are_read_is_named_with_its_sample(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("abcdefgh" * 1_000)
    data = Data(source=str(tmp_path / "text"), held_out_fraction=0.0, seq_len=SEQ_LEN)
    samples = open_training_samples(
        prepare_corpus(data, tmp_path / "data", vocab_size=None), SEQ_LEN, seed=3
    )
    assert samples.take(np.arange(4))["inputs"].shape == (4, SEQ_LEN)
    (shard,) = (tmp_path / "data").rglob("*.tokens")
    with shard.open("r+b") as file:
        file.seek(PAYLOAD_OFFSET + 2_000)
        (byte,) = file.read(1)
        file.seek(PAYLOAD_OFFSET + 2_000)
        file.write(bytes([byte ^ 16]))
    with pytest.raises(DataError) as damaged:
        samples.take(np.array([17, 5]))
    assert damaged.value.where == str(shard)
    assert f"bytes {PAYLOAD_OFFSET} to " in damaged.value.what
    assert "read for sample 17 of this source" in str(damaged.value)
