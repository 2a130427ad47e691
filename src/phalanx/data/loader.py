"""Batches of one rank, cut from the global sequence of samples so that the union over ranks does
not depend on them.

A batch of tokens has `inputs`, `targets` and `positions`, int64 tensors [micro_batch_size, seq_len]
on the CPU, and with document masks `document_ids`. Batches of a user's own dataset have the keys of
its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.core.batch import IGNORE_INDEX
from phalanx.core.errors import DataError
from phalanx.data.corpus import Corpus
from phalanx.data.order import count_held_out_targets, split_by_weights
from phalanx.data.samples import Arrays, SampleSource, SampleSpec, SampleWindows
from phalanx.data.tokens import Split, TokenSequence
from phalanx.data.user_dataset import (
    UserDatasetFacts,
    UserSamples,
    hash_sample,
    open_user_dataset,
)
from phalanx.data.workers import WorkerPool
from phalanx.observe.events import Event, SamplesRead

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RankBatchShare:
    """The part of every global batch that a rank reads, and from where on: `done_samples` were
    consumed by `done_steps`.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    done_steps: int = 0
    done_samples: int = 0
    has_contiguous_held_out: bool = False
    """True where a held-out batch has the same windows on any number of ranks."""

    def __post_init__(self) -> None:
        assert self.global_batch_size % (self.micro_batch_size * self.data_parallel_size) == 0, (
            "the plan refuses these"
        )
        assert 0 <= self.data_parallel_rank < self.data_parallel_size

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def held_out_share(self) -> tuple[int, int, int]:
        """(micro_batch_size, data_parallel_size, data_parallel_rank), as held-out batches take
        them.
        """
        return self.micro_batch_size, self.data_parallel_size, self.data_parallel_rank

    def count_samples_before_step(self, step: int) -> int:
        """Samples consumed by all ranks before `step` (1-based), whatever the batch size was before
        `done_steps`; that step itself had the batch size of those that follow.
        """
        assert step >= max(1, self.done_steps), (step, self.done_steps)
        return self.done_samples + (step - 1 - self.done_steps) * self.global_batch_size

    def sample_indices(self, step: int) -> NDArray[np.int64]:
        """Global sample numbers of this rank, [num_microbatches, micro_batch_size].

        A microbatch of all ranks together is contiguous: rank r takes the r-th part of each.
        """
        indices = np.arange(
            self.global_batch_size, dtype=np.int64
        ) + self.count_samples_before_step(step)
        shape = (self.num_microbatches, self.data_parallel_size, self.micro_batch_size)
        return indices.reshape(shape)[:, self.data_parallel_rank]


class TrainBatches:
    """The microbatches of one rank, by step number: any step from the share's first on; steps in a
    row are read ahead.

    `workers=0` reads ahead in a thread; a user's own dataset is then read in the step itself,
    because its code may not run beside the training's (it draws from the same global generators).
    `emit` takes what becomes of workers; what they print goes to files whose names begin with
    `worker_logs`; `rank` is whose they are. `keep_record` makes `record` answer. `pin_for`, a GPU:
    batches lie in page-locked memory, from which it copies them without being waited for; the
    thread that reads ahead puts them there.
    """

    def __init__(
        self,
        spec: SampleSpec,
        share: RankBatchShare,
        *,
        workers: int = 0,
        worker_timeout_s: float = 60.0,
        prefetch: bool = True,
        keep_record: bool = False,
        emit: Callable[[Event], None] = lambda event: None,
        worker_logs: Path | None = None,
        rank: int | None = None,
        pin_for: torch.device | None = None,
    ) -> None:
        self.share, self._pin_for, self._spec = share, pin_for, spec
        self._samples: SampleSource | None = None
        self._reader: WorkerPool | _StepPrefetcher | None = None
        if workers:
            self._reader = WorkerPool(
                spec.to_json(),
                workers,
                indices_of=share.sample_indices,
                timeout_s=worker_timeout_s,
                emit=emit,
                logs=worker_logs,
                rank=rank,
            )
        else:
            self._samples = spec.open()
            # A user's code draws from the same global generators as the training's.
            if prefetch and not isinstance(self._samples, UserSamples):
                self._reader = _StepPrefetcher(self._read_step)
        self._keep_record = keep_record
        self._digests: dict[int, str] = {}

    def step_microbatches(self, step: int) -> list[Batch]:
        """The microbatches of `step` (1-based), in order. An error of what reads ahead is raised
        here.
        """
        if isinstance(self._reader, _StepPrefetcher):
            loaded = self._reader.get(step)
        elif self._reader is not None:
            loaded = self._convert_arrays_to_tensors(self._reader.get_step(step))
        else:
            loaded = self._read_step(step)
        if self._keep_record:
            self._digests[step] = hash_sample(loaded.arrays)
        size = self.share.micro_batch_size
        microbatches = []
        for number in range(self.share.num_microbatches):
            # Not tensor.split, whose views autograd lets nobody change in place.
            rows = slice(number * size, (number + 1) * size)
            microbatches.append({name: tensor[rows] for name, tensor in loaded.tensors.items()})
        return microbatches

    def record(self, step: int) -> list[Event]:
        """Events about the samples that were read for `step`, to be emitted when the step is done.

        Empty without `keep_record`.
        """
        if step not in self._digests:
            return []
        ranges: list[int] = []
        for row in self.share.sample_indices(step).tolist():
            ranges += (row[0], row[-1] + 1)
        size, rank = self.share.data_parallel_size, self.share.data_parallel_rank
        event = SamplesRead(step, rank, size, ranges, self._digests[step])
        self._digests = {later: digest for later, digest in self._digests.items() if later > step}
        return [event]

    def digest_step_again(self, step: int) -> None:
        """Have `record` tell of the samples of `step`, which another process of this rank had
        read."""
        if self._keep_record:
            samples = self._samples or self._spec.open()
            arrays = samples.take(self.share.sample_indices(step).ravel())
            self._digests[step] = hash_sample(arrays)

    def close(self) -> None:
        """Stop reading ahead. Safe to call twice."""
        if self._reader:
            self._reader.close()

    def _read_step_arrays(self, step: int) -> Arrays:
        assert self._samples is not None
        return self._samples.take(self.share.sample_indices(step).ravel())

    def _read_step(self, step: int) -> _LoadedStep:
        return self._convert_arrays_to_tensors(self._read_step_arrays(step))

    def _convert_arrays_to_tensors(self, arrays: Arrays) -> _LoadedStep:
        pins = self._pin_for is not None and self._pin_for.type == "cuda"
        if pins:
            # The device of a new thread is GPU 0: pinning would open a context there, whichever
            # GPU the rank has.
            torch.cuda.set_device(self._pin_for)
        tensors = {}
        for name, array in arrays.items():
            # Inputs and targets may be views of the same tokens: each gets memory of its own.
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            if pins:
                tensor = tensor.pin_memory()
            tensors[name] = tensor
        return _LoadedStep(arrays, tensors)


class _LoadedStep(NamedTuple):
    """The arrays that were read for a step, and the same as tensors."""

    arrays: Arrays
    tensors: Batch


class _StepPrefetcher:
    """Builds the step after the one asked for in one background thread; at most one finished step
    waits.
    """

    def __init__(self, load: Callable[[int], _LoadedStep]) -> None:
        # One thread: steps are built in the order in which they were asked for.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="phalanx-data")
        self._read_step = load
        self._waiting: tuple[int, Future[_LoadedStep]] | None = None

    def get(self, step: int) -> _LoadedStep:
        if self._waiting is not None and self._waiting[0] == step:
            future = self._waiting[1]
        else:  # the first step, or a jump: after resuming, rolling back
            future = self._thread.submit(self._read_step, step)
        # Asked for before this one is waited for, so that the thread never idles.
        self._waiting = (step + 1, self._thread.submit(self._read_step, step + 1))
        return future.result()

    def close(self) -> None:
        self._waiting = None
        self._thread.shutdown(wait=True, cancel_futures=True)


class HeldOutBatches:
    """Held-out tokens in order, in windows that do not overlap; rank r has every
    data_parallel_size-th, or with `is_contiguous` every such batch of windows in a row.

    Every token but the first is a target exactly once over all ranks, up to `max_tokens` targets.
    All ranks yield the same number of batches, as collectives require: what is missing is padding,
    whose targets are IGNORE_INDEX.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        windows: SampleWindows,
        micro_batch_size: int,
        data_parallel_size: int,
        data_parallel_rank: int,
        max_tokens: int | None = None,
        *,
        is_contiguous: bool = False,
    ) -> None:
        assert 0 <= data_parallel_rank < data_parallel_size
        self._is_contiguous = is_contiguous
        self._sequence, self._windows, self._micro_batch_size = sequence, windows, micro_batch_size
        self._data_parallel_size, self._data_parallel_rank = data_parallel_size, data_parallel_rank
        self.num_targets = count_held_out_targets(len(sequence), max_tokens)
        """Targets over all ranks, before those that document masks leave out."""

    def __len__(self) -> int:
        """Batches of each rank."""
        num_windows = -(-self.num_targets // self._windows.seq_len)
        # Rounded up for all ranks together, which makes it the same number on each.
        return -(-num_windows // (self._data_parallel_size * self._micro_batch_size))

    def __iter__(self) -> Iterator[Batch]:
        rows = np.arange(self._micro_batch_size)
        for number in range(len(self)):
            if self._is_contiguous:
                batch_number = number * self._data_parallel_size + self._data_parallel_rank
                windows = batch_number * self._micro_batch_size + rows
            else:
                windows = (
                    number * self._micro_batch_size + rows
                ) * self._data_parallel_size + self._data_parallel_rank
            rows_of = list(map(self._build_window, windows.tolist()))
            batch: Batch = {}
            for name in rows_of[0]:
                batch[name] = torch.from_numpy(np.stack([row[name] for row in rows_of]))
            yield batch

    def _build_window(self, number: int) -> Arrays:
        """One window, [seq_len]; what lies beyond the tokens is padding: a document of its own
        without targets.
        """
        # Without a gap: the last target of a window is the first input of the next.
        seq_len, start = self._windows.seq_len, number * self._windows.seq_len
        # The target of input i is token i + 1.
        num_real = min(max(0, self.num_targets - start), seq_len)
        # seq_len is no document of the window: it has at most that many, counted from 0.
        fill = {"inputs": 0, "targets": IGNORE_INDEX, "positions": 0, "document_ids": seq_len}
        if not self._windows.document_masks:
            del fill["document_ids"]
        padded = {name: np.full(seq_len, value, np.int64) for name, value in fill.items()}
        if num_real:
            cut = SampleWindows(
                num_real, self._windows.document_masks, self._windows.ends_are_marked
            )
            for name, array in cut.cut_samples(self._sequence, np.array([start])).items():
                padded[name][:num_real] = array[0]
        if not self._windows.document_masks:
            padded["positions"] = np.arange(seq_len)
        return padded


class HeldOutSamples:
    """The first samples of a user's held-out dataset, as they lie, dealt to the ranks; none is
    repeated or left out.

    All ranks yield the same number of batches; their sizes may differ by one.
    """

    def __init__(
        self,
        samples: UserSamples,
        num_samples: int,
        micro_batch_size: int,
        data_parallel_size: int,
        data_parallel_rank: int,
    ) -> None:
        assert num_samples >= data_parallel_size, "build_held_out_batches refuses these"
        self._samples = samples
        self._own_indices = np.arange(data_parallel_rank, num_samples, data_parallel_size)
        self._num_batches = -(-(num_samples // data_parallel_size) // micro_batch_size)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        for indices in np.array_split(self._own_indices, self._num_batches):
            arrays = self._samples.take(indices)
            yield {name: torch.from_numpy(array) for name, array in arrays.items()}


def build_held_out_batches(
    corpus: Corpus,
    share: RankBatchShare,
    *,
    seq_len: int,
    max_tokens: int,
    seed: int,
    document_masks: bool = False,
    split: Split = "held_out",
) -> dict[str, Iterable[Batch]]:
    """The batches to evaluate, by source ("" if there is only one); empty if nothing is evaluated.

    `split` "train" evaluates the other side of tokens: all of them, where nothing is held out.

    The sources of a mixture share `max_tokens` by their weights. Of a user's own dataset it is a
    number of samples. Raises DataError if there are fewer than ranks.
    """
    if corpus.user is not None:
        return _build_held_out_of_user_dataset(corpus.user, share, max_tokens, seed)
    budgets = split_by_weights(max_tokens, corpus.weights)
    batches_by_source: dict[str, Iterable[Batch]] = {}
    for number, sequence in enumerate(corpus.sequences(split)):
        ends_are_marked = corpus.components[number].end_of_document is not None
        windows = SampleWindows(seq_len, document_masks, ends_are_marked)
        if len(sequence) > 1 and budgets[number]:
            name = ""
            if len(budgets) > 1:
                name = corpus.names[number]
            batches_by_source[name] = HeldOutBatches(
                sequence,
                windows,
                *share.held_out_share,
                budgets[number],
                is_contiguous=share.has_contiguous_held_out,
            )
    return batches_by_source


def _build_held_out_of_user_dataset(
    user: UserDatasetFacts, share: RankBatchShare, max_samples: int, seed: int
) -> dict[str, Iterable[Batch]]:
    if min(user.num_held_out, max_samples) == 0:
        return {}
    num_samples = min(user.num_held_out, max(max_samples, share.data_parallel_size))
    if num_samples < share.data_parallel_size:
        raise DataError(
            f"{num_samples} held-out samples cannot be shared by {share.data_parallel_size}"
            " data-parallel ranks",
            where=f"data.source {user.source}, split 'held_out'",
            fix="give at least one for each, or set eval.tokens=0",
        )
    samples = UserSamples(
        open_user_dataset(user.source, user.args, "held_out"), user.source, seed, shuffled=False
    )
    return {"": HeldOutSamples(samples, num_samples, *share.held_out_share)}
