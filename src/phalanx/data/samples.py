"""Samples by global number: a pure function of (seed, index), the same in a rank and in a loader
worker. Torch-free.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.core.batch import IGNORE_INDEX
from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.core.errors import DataError
from phalanx.data.corpus import Corpus, load_corpus
from phalanx.data.mixture import Mixture
from phalanx.data.order import SampleOrder
from phalanx.data.tokens import DamagedTokensError, Int64s, TokenSequence
from phalanx.data.user_dataset import UserSamples, open_user_dataset

Arrays = dict[str, NDArray[Any]]


class SampleSource(Protocol):
    """A source of samples. Memory-mapped, and any index is reached at once."""

    def take(self, indices: NDArray[np.int64]) -> Arrays:
        """The samples of these global numbers, each entry [n, ...] in their order."""
        ...


@dataclass(frozen=True)
class SampleSpec:
    """All that is needed to open a run's training samples in another process; JSON in and out."""

    directory: str
    seq_len: int
    seed: int
    document_masks: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def open(self) -> SampleSource:
        """Raises DataError if the corpus is missing, damaged or another one by now."""
        return open_training_samples(
            load_corpus(Path(self.directory)), self.seq_len, self.seed, self.document_masks
        )


def open_training_samples(
    corpus: Corpus, seq_len: int, seed: int, document_masks: bool = False
) -> SampleSource:
    """The training samples of a corpus."""
    if corpus.user is not None:
        dataset = open_user_dataset(corpus.user.source, corpus.user.args, "train")
        if len(dataset) != corpus.user.num_train:
            # Their order is a permutation of so many: another one repeats and leaves out samples.
            raise DataError(
                f"your dataset has {len(dataset):,} samples now, and had"
                f" {corpus.user.num_train:,} when the run began",
                where=f"data.source {corpus.user.source}",
                why="a process that opens it anew would read other samples than the others",
                fix="give it the samples that it had, or start a new run",
            )
        return UserSamples(dataset, corpus.user.source, seed)
    is_mixture = len(corpus.components) > 1
    sources = []
    for number, sequence in enumerate(corpus.sequences("train")):
        source_seed = seed
        if is_mixture:
            # One order for all would read sources of one size in step with each other.
            source_seed = hash_to_stable_64_bits("source", seed, number)
        order = SampleOrder(sequence.num_tokens, seq_len, source_seed)
        ends_are_marked = corpus.components[number].end_of_document is not None
        windows = SampleWindows(seq_len, document_masks, ends_are_marked)
        sources.append(TokenSamples(sequence, order, windows))
    if not is_mixture:
        return sources[0]
    return MixedSamples(sources, Mixture(corpus.weights, seed))


@dataclass(frozen=True)
class SampleWindows:
    """The rules by which a run of seq_len + 1 tokens becomes a sample.

    With document masks, `document_ids` count the documents of a sample from 0 and `positions`
    restart with each. Where no token marks the end of a document, its last token has no target:
    what follows is another document.
    """

    seq_len: int
    document_masks: bool = False
    ends_are_marked: bool = True

    def cut_samples(self, sequence: TokenSequence, starts: Int64s) -> Arrays:
        """`starts` [n]; every entry is int64 [n, seq_len]."""
        tokens = sequence.gather(starts, self.seq_len + 1)
        arrays = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        if not self.document_masks:
            return arrays | {"positions": np.tile(np.arange(self.seq_len), (starts.size, 1))}
        documents = sequence.document_ids(starts, self.seq_len + 1)
        if not self.ends_are_marked:
            arrays["targets"] = np.where(
                documents[:, 1:] == documents[:, :-1], arrays["targets"], IGNORE_INDEX
            )
        return arrays | self.number_positions_and_documents(documents[:, :-1])

    def number_positions_and_documents(self, documents: Int64s) -> Arrays:
        """Positions that restart with each document, and the documents counted from 0 in each
        sample.
        """
        at = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
        begins = np.diff(documents, axis=1, prepend=documents[:, :1]) > 0
        # Each token's newest begin, carried on to those behind it.
        positions = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
        return {"positions": positions, "document_ids": np.cumsum(begins, axis=1)}


class TokenSamples:
    """Windows of one sequence, in its order."""

    def __init__(self, sequence: TokenSequence, order: SampleOrder, windows: SampleWindows) -> None:
        self._sequence, self._order, self._windows = sequence, order, windows

    def take(self, indices: NDArray[np.int64]) -> Arrays:
        numbers = np.asarray(indices).ravel()
        try:
            return self._windows.cut_samples(self._sequence, self._order.sample_starts(numbers))
        except DamagedTokensError as error:
            raise DataError(
                error.what,
                where=error.where,
                why=f"{error.why}; read for sample {numbers[error.row]} of this source",
                fix=error.fix,
            ) from None


class MixedSamples:
    """Samples of several sources that take turns."""

    def __init__(self, sources: list[TokenSamples], mixture: Mixture) -> None:
        self._sources, self._mixture = sources, mixture

    def take(self, indices: NDArray[np.int64]) -> Arrays:
        source_of, sample_of = self._mixture.locate_samples(np.asarray(indices).ravel())
        columns: Arrays = {}
        for number, source in enumerate(self._sources):
            rows = np.flatnonzero(source_of == number)
            if not rows.size:
                continue
            for name, part in source.take(sample_of[rows]).items():
                if name not in columns:
                    shape = (source_of.size, *part.shape[1:])
                    columns[name] = np.empty(shape, part.dtype)
                columns[name][rows] = part
        return columns
