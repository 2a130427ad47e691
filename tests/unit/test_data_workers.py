"""Loader workers read ahead in order; real ones are killed and stopped here, and the samples
stay what they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from commands import DEADLINE_S, wait_until
from phalanx.core.errors import DataError, DataSourceError
from phalanx.data.loader import Batch, RankBatchShare, TrainBatches
from phalanx.data.prepare import prepare_corpus
from phalanx.data.samples import SampleSpec
from phalanx.job.schema import Data
from phalanx.observe.events import Event, LoaderWorkerReplaced

SEQ_LEN, BATCH = 8, 12
Open = Callable[..., TrainBatches]

OWN_DATASETS = '''
"""Datasets as a user might write them."""
import os
import signal

import numpy as np


class Numbers:
    def __init__(self, bad=None, how=""):
        self.bad, self.how = bad, how

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == self.bad:
            if self.how == "raise":
                raise ValueError("no such picture")
            if self.how == "other shape":
                return self[index - 1] | {"inputs": np.full(5, index)}
            if self.how == "warn":
                print("this picture is odd")
                return self[index - 1]
            print("about to die of this sample")
            os.kill(os.getpid(), signal.SIGKILL)
        return {"inputs": np.full(4, index), "targets": index, "noise": np.random.rand()}


def numbers(split, **args):
    return Numbers(**args) if split == "train" else None
'''


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token is its own position, so that a batch says what it read."""
    folder = tmp_path_factory.mktemp("tokens")
    np.save(folder / "ids.npy", np.arange(1_000))
    data = Data(source=str(folder / "ids.npy"), held_out_fraction=0.1, seq_len=SEQ_LEN)
    prepare_corpus(data, folder / "data", vocab_size=None)
    return folder / "data"


@pytest.fixture
def heard() -> list[Event]:
    return []


@pytest.fixture
def open_batches(tokens: Path, heard: list[Event]) -> Iterator[Open]:
    opened: list[TrainBatches] = []

    def open_one(directory: Path = tokens, workers: int = 2, **options: object) -> TrainBatches:
        share = RankBatchShare(BATCH, 4, data_parallel_size=3, data_parallel_rank=1)
        spec = SampleSpec(str(directory), SEQ_LEN, seed=3)
        opened.append(TrainBatches(spec, share, workers=workers, emit=heard.append, **options))
        return opened[-1]

    yield open_one
    for batches in opened:
        batches.close()


@pytest.fixture
def own_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A corpus of the user's dataset, its module importable here and so in the workers."""
    (tmp_path / "own_numbers.py").write_text(OWN_DATASETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_numbers", raising=False)

    def prepare(**args: object) -> Path:
        data = Data(source="own_numbers:numbers", args=args)
        prepare_corpus(data, tmp_path / "own", vocab_size=None)
        return tmp_path / "own"

    return prepare


def worker_pids() -> list[int]:
    """The live workers of this process."""
    children = [child for child in psutil.Process().children() if _runs(child.pid)]
    return sorted(child.pid for child in children if "phalanx.data.worker" in child.cmdline())


def read_all(batches: TrainBatches) -> None:
    """More than an epoch of the datasets here."""
    for step in range(1, 200):
        batches.step_microbatches(step)


def same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


def test_workers_give_what_the_rank_itself_reads_also_after_jumps(
    open_batches: Open, heard: list[Event]
) -> None:
    direct, behind = open_batches(workers=0, prefetch=False), open_batches(workers=2)
    for step in (1, 2, 3, 4, 5, 90, 91, 7):
        assert same(behind.step_microbatches(step), direct.step_microbatches(step)), step
    assert heard == []


def test_reading_ahead_is_bounded(open_batches: Open) -> None:
    batches = open_batches(workers=2)
    batches.step_microbatches(1)
    pool = batches._reader
    owed = [step for worker in pool._workers for step in worker.owed]
    assert sorted({*owed, *pool._ready}) == [
        2,
        3,
        4,
    ]  # two steps of each worker, one of which is delivered


def test_a_killed_worker_is_replaced_and_the_order_kept(
    open_batches: Open, heard: list[Event]
) -> None:
    direct, behind = open_batches(workers=0, prefetch=False), open_batches(workers=2)
    for step in range(1, 19):
        assert same(behind.step_microbatches(step), direct.step_microbatches(step)), step
        if step in (3, 10):
            os.kill(worker_pids()[0], signal.SIGKILL)
    assert len(heard) == 2
    assert all(
        isinstance(event, LoaderWorkerReplaced) and "SIGKILL" in event.reason for event in heard
    )
    assert 3 < heard[0].step <= 8 < 10 < heard[1].step  # what it had answered before counts


def test_a_frozen_worker_is_replaced_and_the_order_kept(
    open_batches: Open, heard: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, behind = (
        open_batches(workers=0, prefetch=False),
        open_batches(workers=2, worker_timeout_s=1.0),
    )
    pool = behind._reader
    timeout_s, receive_answer = pool._timeout_s, pool._receive_answer
    frozen_pids: list[int] = []

    def receive_answer_patiently(number: int) -> None:
        # On a busy machine the other worker, or the one that starts in place of the frozen one, may
        # be silent for longer.
        is_frozen = bool(frozen_pids) and number == 1 and not heard
        pool._timeout_s = timeout_s if is_frozen else DEADLINE_S
        receive_answer(number)

    monkeypatch.setattr(pool, "_receive_answer", receive_answer_patiently)
    for step in range(1, 9):
        assert same(behind.step_microbatches(step), direct.step_microbatches(step)), step
        if step == 3:
            frozen_pids.append(worker_pids()[1])
            os.kill(frozen_pids[0], signal.SIGSTOP)
    assert [event.reason for event in heard] == ["worker 1 silent for 1 s"]
    assert not psutil.pid_exists(frozen_pids[0])


def test_a_step_that_kills_every_worker_is_an_error_with_their_last_words(
    own_dataset: Callable[..., Path], open_batches: Open, heard: list[Event]
) -> None:
    batches = open_batches(own_dataset(bad=17, how="die"), workers=2)
    with pytest.raises(
        DataSourceError, match=r"SIGKILL at sample 17; it said last: about to die of this sample"
    ) as caught:
        read_all(batches)
    assert "again and again" in caught.value.what
    assert len(heard) == 3
    assert len({event.step for event in heard}) == 1


def test_what_workers_print_is_in_their_logs_and_said_by_name_when_one_dies(
    own_dataset: Callable[..., Path],
    open_batches: Open,
    heard: list[Event],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    logs = tmp_path / "logs" / "rank-0001-attempt-00"
    batches = open_batches(own_dataset(bad=17, how="die"), workers=2, worker_logs=logs, rank=1)
    with pytest.raises(DataError, match="all of it:") as caught:
        read_all(batches)
    (guilty,) = {event.reason.split()[1] for event in heard}
    assert [event.reason for event in heard] == [
        f"worker {guilty} of rank 1 killed by SIGKILL at sample 17; it said last: about to die of"
        " this sample"
    ] * 3
    path = logs.with_name(f"{logs.name}-worker-{guilty}.log")
    assert str(path) in str(caught.value)
    assert path.read_text() == "about to die of this sample\n" * 3
    said = capfd.readouterr().err
    assert said == f"[loader worker {guilty} of rank 1] about to die of this sample\n" * 3
    assert list(logs.parent.iterdir()) == [path]  # the other printed nothing


def test_what_a_living_worker_prints_is_only_in_its_log(
    own_dataset: Callable[..., Path],
    open_batches: Open,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = {"workers": 1, "worker_logs": tmp_path / "rank-0000-attempt-02"}
    batches = open_batches(own_dataset(bad=17, how="warn"), **options)
    read_all(batches)
    batches.close()
    assert "this picture is odd" in (tmp_path / "rank-0000-attempt-02-worker-0.log").read_text()
    assert "odd" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_dataset_raises_names_the_line_and_the_sample_and_is_not_retried(
    own_dataset: Callable[..., Path], open_batches: Open, heard: list[Event], workers: int
) -> None:
    batches = open_batches(own_dataset(bad=17, how="raise"), workers=workers)
    with pytest.raises(DataSourceError, match="ValueError: no such picture") as caught:
        read_all(batches)
    assert "own_numbers.py:19, sample 17 of own_numbers:numbers" in str(caught.value)
    assert heard == []


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_no_batch_are_no_failure_of_their_source(
    own_dataset: Callable[..., Path], open_batches: Open, workers: int
) -> None:
    batches = open_batches(own_dataset(bad=17, how="other shape"), workers=workers)
    with pytest.raises(DataError, match="of different shapes") as caught:
        read_all(batches)
    assert type(caught.value) is DataError


def test_own_samples_are_a_permutation_of_each_epoch_and_draw_the_same_everywhere(
    own_dataset: Callable[..., Path], open_batches: Open
) -> None:
    directory = own_dataset()
    by_worker, by_rank = open_batches(directory, workers=2), open_batches(directory, workers=0)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    drawn = []
    for step in range(1, 6):
        ours = by_rank.step_microbatches(step)
        assert same(by_worker.step_microbatches(step), ours)
        drawn += ours[0]["noise"].tolist()
    assert len(set(drawn)) == len(drawn)
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    every = [
        TrainBatches(SampleSpec(str(directory), 1, 3), RankBatchShare(1_000, 500, 2, rank))
        for rank in (0, 1)
    ]
    first, second = (
        torch.cat([rank.step_microbatches(step)[0]["targets"] for rank in every]) for step in (1, 2)
    )
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(1_000))
    assert first.tolist() != second.tolist()


def test_workers_end_when_closed_and_when_their_rank_is_killed(
    tokens: Path, open_batches: Open
) -> None:
    batches = open_batches(workers=2)
    batches.step_microbatches(1)
    assert len(worker_pids()) == 2
    batches.close()
    batches.close()
    assert worker_pids() == []

    script = f"""
import os, sys, signal, psutil
from phalanx.data.loader import RankBatchShare, TrainBatches
from phalanx.data.samples import SampleSpec
batches = TrainBatches(SampleSpec({str(tokens)!r}, {SEQ_LEN}, 3), RankBatchShare(12, 12), workers=2)
batches.step_microbatches(1)
pids = [child.pid for child in psutil.Process().children()]
while {{psutil.Process(pid).name() for pid in pids}} != {{"phalanx-data"}}:  # their name once they are at work
    pass
os.kill(pids[0], signal.SIGSTOP)  # one that could not notice by itself
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_until(lambda: not any(psutil.pid_exists(pid) and _runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
