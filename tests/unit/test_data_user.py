"""A user's own dataset: stacked as they would expect, and what cannot be a batch is said with
its sample."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.core.errors import DataError, ExitCode, LayoutError
from phalanx.data import workers
from phalanx.data.loader import RankBatchShare, build_held_out_batches
from phalanx.data.prepare import prepare_corpus
from phalanx.data.user_dataset import (
    NUM_COMPARED_SAMPLES,
    UserSamples,
    collate_samples,
    hash_sample_subset,
    open_user_dataset,
)
from phalanx.job.schema import Data
from phalanx.job.user_dataset import count_loader_processes, is_own_dataset
from phalanx.parallel.call.bind_batch import build_forward_arguments


class Listed:
    """A dataset of given samples."""

    def __init__(self, samples: list[object]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        return self.samples[index]


def batch_of(*samples: object) -> dict[str, np.ndarray]:
    return UserSamples(Listed(list(samples)), "own:data", 0, shuffled=False).take(
        np.arange(len(samples))
    )


def test_arrays_tensors_and_numbers_are_stacked() -> None:
    batch = batch_of(
        {
            "inputs": np.ones((2, 3), np.float16),
            "t": torch.zeros(4),
            "n": 3,
            "x": 0.5,
            "y": np.float64(2),
            "b": True,
        },
        {
            "inputs": np.zeros((2, 3), np.float16),
            "t": torch.ones(4),
            "n": 4,
            "x": 1,
            "y": np.float64(3),
            "b": False,
        }
        | {"x": 1.0},
    )
    types = {name: (array.dtype.name, array.shape) for name, array in batch.items()}
    assert types == {
        "inputs": ("float16", (2, 2, 3)),
        "t": ("float32", (2, 4)),
        "n": ("int64", (2,)),
        "x": ("float32", (2,)),
        "y": ("float32", (2,)),
        "b": ("int64", (2,)),
    }
    assert batch["t"].tolist() == [[0] * 4, [1] * 4]
    wide = batch_of({"inputs": np.zeros(3), "meant": torch.zeros(3, dtype=torch.float64)})
    assert (wide["inputs"].dtype, wide["meant"].dtype) == (np.float32, np.float64)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (([1, 2],), "a sample must be a dict of arrays, tensors or numbers (it is list)"),
        (((np.zeros(3), 1),), "it is tuple"),
        (({},), "(it is dict)"),
        (
            ({"inputs": np.zeros(3)}, {"inputs": np.zeros(4)}),
            "'inputs' of different shapes ((3,) in sample 0, (4,)",
        ),
        (
            ({"inputs": 1}, {"inputs": 1.5}),
            "'inputs' of different types (int64 in sample 0, float32 in sample 1)",
        ),
        (({"inputs": 1}, {"inputs": 1, "mask": 2}), "sample 1 has ['inputs', 'mask']"),
        (({"inputs": 1, "name": "cat"},), "'name' is no number and no array of numbers (str)"),
        (({"inputs": [[1, 2], [3]]},), "sample 0"),
        (({"inputs": 10**30},), "sample 0 of own:data: 'inputs' cannot be made an array"),
        (({"inputs": np.array([10**30])},), "no array of numbers (ndarray of object)"),
        (({"inputs": np.zeros(3, np.longdouble)},), f"(ndarray of {np.dtype(np.longdouble)})"),
        (
            ({"inputs": np.ma.masked_array([1.0], mask=[True])},),
            "sample 0 of own:data: 'inputs' is a masked array, and a tensor has no mask",
        ),
        (({"inputs": [np.ma.masked_array([1, 2], mask=False)]},), "'inputs' is a masked array"),
        (({"a.b": 1, "a": {"b": 2}},), "sample 0 of own:data: two entries are both called 'a.b'"),
    ],
)
def test_what_cannot_be_a_batch(samples: tuple[object, ...], said: str) -> None:
    with pytest.raises(DataError) as caught:
        batch_of(*samples)
    assert said in str(caught.value)
    assert "own:data" in str(caught.value)


@pytest.mark.parametrize("stored", [np.uint16, ">u2", np.uint32, np.uint64])
def test_tokens_as_they_are_stored_become_int64(stored: str) -> None:
    """An embedding of torch looks up no others."""
    tokens = np.array([7, 250], stored)
    assert batch_of({"inputs": tokens})["inputs"].dtype == np.int64
    assert batch_of({"inputs": tokens})["inputs"].tolist() == [[7, 250]]
    unsigned = torch.tensor([7, 250]).to(torch.uint16)
    assert batch_of({"inputs": unsigned})["inputs"].dtype == np.int64
    with pytest.raises(DataError, match="'inputs' holds 18446744073709551615, which is beyond"):
        batch_of({"inputs": np.array([2**64 - 1], np.uint64)})
    assert batch_of({"inputs": tokens.astype(np.uint8)})["inputs"].dtype == np.uint8


def test_a_sample_that_holds_itself() -> None:
    sample: dict[str, object] = {"inputs": 1}
    sample["itself"] = sample
    with pytest.raises(DataError, match="sample 0 of own:data: it is nested too deeply, or holds"):
        batch_of(sample)


def test_another_machines_order_of_bytes_becomes_this_ones() -> None:
    swapped = np.dtype(np.float32).newbyteorder("S")
    inputs = batch_of({"inputs": np.array([1.5, -2], swapped)})["inputs"]
    assert torch.from_numpy(inputs).tolist() == [[1.5, -2]]


def test_nothing_is_shared_with_the_samples() -> None:
    array = np.zeros(3)
    batch = collate_samples([{"inputs": array}], [0], "own:data")
    batch["inputs"][:] = 1
    assert array.sum() == 0


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("package.module:factory", True),
        ("module:factory.inner", True),
        ("s3://bucket", False),
        ("a b:c", False),
        ("notes.txt", False),
        (":x", False),
    ],
)
def test_a_name_of_a_dataset_is_told_from_a_file(source: str, expected: bool) -> None:
    assert is_own_dataset(source) is expected


def test_a_file_of_that_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_own_dataset("notes:today")
    Path("notes:today").write_text("a file")
    assert not is_own_dataset("notes:today")


# Before the ranks start: the factory is called in a process of its own

FACTORIES = """
class Data:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"inputs": index, "targets": index}


def good(split, length=20, held_out=7):
    length = length if split == "train" else held_out
    return Data(length) if length is not None else None


def raises(split):
    raise RuntimeError("no disk")


def a_list_of_nothing(split):
    return []


def an_iterator(split):
    return iter([1, 2])


def tuples(split):
    return [(1, 2)]


def dies(split):
    import os
    print("the library says why", flush=True)
    os._exit(3)


class Sticky(Data):
    def __init__(self, how):
        super().__init__(20)
        self.how = how

    def __getitem__(self, index):
        import os
        import time
        if index != 9:
            return super().__getitem__(index)
        os._exit(0) if self.how == "ends" else time.sleep(1000)


class LessThanNothing(Data):
    def __len__(self):
        return -1


def less_than_nothing(split):
    return LessThanNothing(1)


def sticky(split, how):
    return Sticky(how) if split == "train" else None
"""


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    (tmp_path / "own_factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_factories", raising=False)

    def prepare_one(name: str, worker_timeout_s: float = 60.0, **args: object) -> object:
        data = Data(source=f"own_factories:{name}", args=args, worker_timeout_s=worker_timeout_s)
        return prepare_corpus(data, tmp_path / "data", vocab_size=None)

    return prepare_one


def test_the_facts_of_a_dataset_are_known_before_the_start(prepare: Callable[..., object]) -> None:
    corpus = prepare("good", length=12)
    assert (corpus.user.num_train, corpus.user.num_held_out) == (12, 7)
    assert (corpus.vocab_size, corpus.tokenizer(), corpus.sequences("train")) == (None, None, [])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "raises",
            (
                "own_factories.py:19, data.source own_factories:raises, split 'train':"
                " RuntimeError: no disk"
            ),
        ),
        ("a_list_of_nothing", "the dataset is empty"),
        ("an_iterator", "has no __len__"),
        (
            "less_than_nothing",
            "own_factories:less_than_nothing, split 'train', len(): ValueError: __len__()",
        ),
        ("tuples", "a sample must be a dict of arrays, tensors or numbers (it is tuple)"),
        ("dies", "the library says why"),
    ],
)
def test_a_dataset_that_cannot_be_used(
    prepare: Callable[..., object], tmp_path: Path, name: str, said: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepare(name)
    assert said in str(caught.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os\nx = y", "own_broken.py:2, data.source own_broken:data, import: NameError: "),
        ("def f(:", "own_broken.py:1, data.source own_broken:data, import: SyntaxError: "),
        # A ValueError before Python 3.11.4.
        ("\0", "data.source own_broken:data, import: "),
        ("import no_such_module", "own_broken.py:1, data.source own_broken:data, import: ModuleN"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (tmp_path / "own_broken.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DataError) as caught:
        open_user_dataset("own_broken:data", {}, "train")
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(said)
    assert caught.value.exit_code is ExitCode.DATA


def test_a_sample_that_ends_the_process_is_named(prepare: Callable[..., object]) -> None:
    with pytest.raises(
        DataError, match=r"the process that read sample 9 ended \(ended with exit code 0\)"
    ):
        prepare("sticky", how="ends")


def test_a_sample_that_never_comes_is_waited_for_aloud_and_not_for_ever(
    prepare: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(workers, "FIRST_WAIT_NOTICE_S", 0.1)
    with pytest.raises(
        DataError, match=r"sample 9 did not come within 3 s; .* raise data\.worker_timeout_s"
    ):
        prepare("sticky", how="hangs", worker_timeout_s=3.0)
    assert "own_factories:sticky: waiting for sample 9 (" in capsys.readouterr().err


def test_a_factory_that_does_not_exist(prepare: Callable[..., object]) -> None:
    with pytest.raises(LayoutError, match="has no 'goood'"):
        prepare("goood")


def test_held_out_samples_are_dealt_once_and_in_equally_many_batches(
    prepare: Callable[..., object],
) -> None:
    corpus = prepare("good")
    for num_ranks, micro in itertools.product((1, 2, 3, 5, 7), (1, 2, 4)):
        shares = [
            RankBatchShare(micro * num_ranks, micro, num_ranks, rank) for rank in range(num_ranks)
        ]
        found = [
            build_held_out_batches(corpus, share, seq_len=1, max_tokens=100, seed=0)[""]
            for share in shares
        ]
        ranks = [[batch["targets"].tolist() for batch in batches] for batches in found]
        assert len({len(batches) for batches in ranks}) == 1
        assert sorted(target for batches in ranks for batch in batches for target in batch) == list(
            range(7)
        )


def test_no_held_out_dataset_is_no_evaluation(prepare: Callable[..., object]) -> None:
    corpus = prepare("good", held_out=None)
    assert (
        build_held_out_batches(corpus, RankBatchShare(4, 4), seq_len=1, max_tokens=100, seed=0)
        == {}
    )


def test_fewer_held_out_samples_than_ranks_are_refused(prepare: Callable[..., object]) -> None:
    corpus = prepare("good")
    with pytest.raises(
        DataError, match="7 held-out samples cannot be shared by 8 data-parallel ranks"
    ):
        build_held_out_batches(
            corpus, RankBatchShare(8, 1, 8, 0), seq_len=1, max_tokens=100, seed=0
        )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"source": "own:data"}, 1),
        ({"source": "own:data", "workers": 0}, 0),
        ({"source": "own:data", "workers": 3}, 3),
        ({"source": "stdlib"}, 0),
        ({"source": "stdlib", "workers": 2}, 2),
    ],
)
def test_an_own_dataset_is_read_ahead_by_a_worker_unless_the_job_says_otherwise(
    keys: dict, expected: int
) -> None:
    assert count_loader_processes(Data(**keys)) == expected


class Plain(torch.nn.Module):
    def forward(self, inputs, positions=None): ...


class Anything(torch.nn.Module):
    def forward(self, inputs, **unread): ...


class Masking(torch.nn.Module):
    def forward(self, inputs, document_ids=None, **unread): ...


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Plain(), "forward names no document_ids; add"),
        (Anything(), "it takes any keyword, which does not say"),
    ],
)
def test_a_module_that_may_let_documents_see_each_other_is_refused(
    module: torch.nn.Module, why: str
) -> None:
    batch = {name: torch.zeros(1) for name in ("inputs", "positions", "document_ids")}
    with pytest.raises(LayoutError, match=f"cannot keep documents apart.*{why}"):
        build_forward_arguments(module, batch)
    args, kwargs = build_forward_arguments(Masking(), batch)
    assert args == (batch["inputs"],)
    assert kwargs["document_ids"] is batch["document_ids"]


def test_datasets_that_differ_in_few_samples_are_told_apart_though_one_looks_the_same() -> None:
    """Two classes, shuffled by each process: any single sample is the same in both half of the
    time."""
    one, other = (
        [{"inputs": np.zeros(2), "labels": (i >> bit) & 1} for i in range(64)] for bit in (0, 1)
    )
    assert sum(a["labels"] == b["labels"] for a, b in zip(one, other, strict=True)) == 32
    assert hash_sample_subset(Listed(one), "own:data") == hash_sample_subset(
        Listed(one), "own:data"
    )
    assert hash_sample_subset(Listed(one), "own:data") != hash_sample_subset(
        Listed(other), "own:data"
    )
    for length in (
        1,
        NUM_COMPARED_SAMPLES + 1,
    ):  # places that exist, of samples that could not be stacked
        hash_sample_subset(Listed([{"inputs": np.zeros(i)} for i in range(length)]), "own:data")
