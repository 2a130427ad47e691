"""Batches of one rank, cut from the global sequence of samples so that the union over ranks does not depend on them.

A batch has `inputs`, `targets` and `positions`, int64 tensors [micro_batch_size, seq_len] on the CPU. Positions run
from 0 to seq_len - 1; they do not restart where a document ends, and attention is not masked there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.core.batch import IGNORE_INDEX
from phalanx.data.corpus import Corpus
from phalanx.data.order import SampleOrder, num_held_out_targets
from phalanx.data.token_stream import Tokens

Batch = dict[str, torch.Tensor]
_Build = Callable[[int], list[Batch]]


class TrainBatches:
    """The microbatches of one rank, by step number: any step at any time; steps in a row are prefetched.

    The data cursor is one integer: (step - 1) * global_batch_size samples are consumed before `step`.
    """

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        data_parallel_rank: int,
        *,
        prefetch: bool = True,
    ) -> None:
        assert global_batch_size % (micro_batch_size * data_parallel_size) == 0, "the plan refuses these"
        assert 0 <= data_parallel_rank < data_parallel_size
        self.num_microbatches = global_batch_size // (micro_batch_size * data_parallel_size)
        self._tokens = corpus.open_tokens("train")
        self._order = SampleOrder(len(self._tokens), seq_len, seed)
        self._global_batch_size, self._micro_batch_size = global_batch_size, micro_batch_size
        self._data_parallel_size, self._data_parallel_rank = data_parallel_size, data_parallel_rank
        self._prefetch = _Prefetch() if prefetch else None

    def cursor(self, step: int) -> int:
        """Samples consumed by all ranks before `step` (1-based)."""
        return (step - 1) * self._global_batch_size

    def sample_indices(self, step: int) -> NDArray[np.int64]:
        """Global sample numbers of this rank, [num_microbatches, micro_batch_size].

        A microbatch of all ranks together is contiguous: rank r takes the r-th part of each.
        """
        indices = np.arange(self._global_batch_size, dtype=np.int64) + self.cursor(step)
        shape = (self.num_microbatches, self._data_parallel_size, self._micro_batch_size)
        return indices.reshape(shape)[:, self._data_parallel_rank]

    def step_microbatches(self, step: int) -> list[Batch]:
        """The microbatches of `step` (1-based), in order. An error of the prefetch is raised here."""
        assert step >= 1, step
        return self._prefetch.get(step, self._build) if self._prefetch else self._build(step)

    def close(self) -> None:
        """Stop prefetching. Safe to call twice."""
        if self._prefetch:
            self._prefetch.close()

    def _build(self, step: int) -> list[Batch]:
        starts = self._order.starts(self.sample_indices(step))
        offsets = np.arange(self._order.seq_len + 1)
        samples = _gather(self._tokens, starts[..., None] + offsets)  # one gather for the whole step
        inputs = torch.from_numpy(np.ascontiguousarray(samples[..., :-1]))
        targets = torch.from_numpy(np.ascontiguousarray(samples[..., 1:]))
        return [_batch(inputs[number], targets[number]) for number in range(self.num_microbatches)]


class _Prefetch:
    """Builds the step after the one asked for in one background thread; at most one finished step waits."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="phalanx-data")
        self._waiting: tuple[int, Future[list[Batch]]] | None = None

    def get(self, step: int, build: _Build) -> list[Batch]:
        if self._waiting is not None and self._waiting[0] == step:
            future = self._waiting[1]
        else:  # the first step, or a jump: after resuming, rolling back
            future = self._thread.submit(build, step)
        self._waiting = (step + 1, self._thread.submit(build, step + 1))
        return future.result()

    def close(self) -> None:
        self._waiting = None
        self._thread.shutdown(wait=True, cancel_futures=True)


class HeldOutBatches:
    """The held-out tokens in order, in windows that do not overlap; rank r has every data_parallel_size-th.

    Every token but the first is a target exactly once over all ranks, up to `max_tokens` targets. All ranks yield the
    same number of batches, as collectives require: what is missing is padding, whose targets are IGNORE_INDEX.
    """

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        micro_batch_size: int,
        data_parallel_size: int,
        data_parallel_rank: int,
        max_tokens: int | None = None,
    ) -> None:
        assert 0 <= data_parallel_rank < data_parallel_size
        self._tokens = corpus.open_tokens("held_out")
        self._seq_len, self._micro_batch_size = seq_len, micro_batch_size
        self._data_parallel_size, self._data_parallel_rank = data_parallel_size, data_parallel_rank
        self.num_targets = num_held_out_targets(len(self._tokens), max_tokens)
        """Targets over all ranks."""

    def __len__(self) -> int:
        """Batches of each rank."""
        num_windows = -(-self.num_targets // self._seq_len)
        return -(-num_windows // (self._data_parallel_size * self._micro_batch_size))

    def __iter__(self) -> Iterator[Batch]:
        rows = np.arange(self._micro_batch_size)
        for number in range(len(self)):
            windows = (number * self._micro_batch_size + rows) * self._data_parallel_size + self._data_parallel_rank
            yield self._build(windows)

    def _build(self, windows: NDArray[np.int64]) -> Batch:
        """`windows` [micro_batch_size]; those beyond the tokens become padding."""
        input_at = windows[:, None] * self._seq_len + np.arange(self._seq_len)
        is_real = input_at < self.num_targets  # the target of input i is token i + 1
        input_at = np.where(is_real, input_at, 0)
        inputs = np.where(is_real, _gather(self._tokens, input_at), 0)
        targets = np.where(is_real, _gather(self._tokens, input_at + 1), IGNORE_INDEX)
        return _batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def _gather(tokens: Tokens, at: NDArray[np.int64]) -> NDArray[np.int64]:
    return tokens[at].astype(np.int64)


def _batch(inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> Batch:
    positions_BT = torch.arange(inputs_BT.shape[1]).expand(inputs_BT.shape)
    return {"inputs": inputs_BT, "targets": targets_BT, "positions": positions_BT}
