"""What is in a dataset: how long its documents are, which tokens it is made of.

One pass, memory of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError
from phalanx.data.dataset import Dataset
from phalanx.data.shards import Progress, Shard

Int64s = NDArray[np.int64]

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
NUM_MOST_FREQUENT_TOKENS = 20
_CHUNK_TOKENS = 1 << 22  # counted at a time: numpy makes 8 bytes of each
_MIN_HISTOGRAM_BINS = 8


@dataclass(frozen=True)
class LengthBin:
    """Documents of `low` to `high` tokens (both included), and the tokens in them."""

    low: int
    high: int
    num_documents: int
    num_tokens: int


@dataclass(frozen=True)
class FrequentToken:
    token: int
    text: str  # empty where the tokens have no text
    count: int


@dataclass(frozen=True)
class DatasetStats:
    """`quantiles` are document lengths in tokens, by part of the documents; exact."""

    num_documents: int
    num_tokens: int
    num_shards: int
    num_bytes: int  # on disk
    source_bytes: int  # of the text
    vocab_size: int
    num_tokens_used: int  # of the vocabulary
    mean_length: float
    quantiles: dict[float, int]
    bins: tuple[LengthBin, ...]
    frequent: tuple[FrequentToken, ...]
    counts_by_rank: tuple[tuple[int, int], ...]  # (rank from 1, count), a few per decade

    @property
    def tokens_per_byte(self) -> float:
        if self.source_bytes:
            return self.num_tokens / self.source_bytes
        return 0.0

    def to_json(self) -> dict[str, Any]:
        fields = dict(vars(self))
        for name in ("bins", "frequent", "quantiles"):
            del fields[name]
        return {
            **fields,
            "tokens_per_byte": self.tokens_per_byte,
            "length_quantiles": {f"{part:g}": length for part, length in self.quantiles.items()},
            "length_histogram": list(map(vars, self.bins)),
            "frequent_tokens": list(map(vars, self.frequent)),
        }


def compute_dataset_stats(dataset: Dataset, progress: Progress | None = None) -> DatasetStats:
    """Read all tokens of a dataset once. Raises DataError for a shard with tokens or documents
    that no build wrote."""
    lengths, num_of_length = _count_document_lengths(dataset.shards)
    counts = np.zeros(dataset.vocab_size, np.int64)
    for shard in dataset.shards:
        for start in range(0, len(shard.tokens), _CHUNK_TOKENS):
            chunk = shard.tokens[start : start + _CHUNK_TOKENS]
            # bincount makes a count of each number up to the largest, which may be any.
            if int(chunk.max()) >= dataset.vocab_size:
                raise _build_damaged_shard_error(
                    shard, f"it holds token {chunk.max()}, and the vocabulary has {len(counts)}"
                )
            counts += np.bincount(chunk, minlength=dataset.vocab_size)
            if progress is not None:
                progress(chunk.nbytes)
    num_documents = int(num_of_length.sum())
    return DatasetStats(
        num_documents=num_documents,
        num_tokens=dataset.num_tokens,
        num_shards=len(dataset.shards),
        num_bytes=sum(shard.facts.num_bytes for shard in dataset.shards),
        source_bytes=dataset.source_bytes,
        vocab_size=dataset.vocab_size,
        num_tokens_used=int((counts > 0).sum()),
        mean_length=dataset.num_tokens / num_documents,
        quantiles=_compute_length_quantiles(lengths, num_of_length),
        bins=_bin_document_lengths(lengths, num_of_length),
        frequent=_list_frequent_tokens(dataset, counts),
        counts_by_rank=_thin_out_counts_by_rank(counts),
    )


def _build_damaged_shard_error(shard: Shard, why: str) -> DataError:
    return DataError(
        "the shard is damaged",
        where=str(shard.path),
        why=why,
        fix="phalanx data verify says where; build the dataset again, or copy the shard again",
    )


def _count_document_lengths(shards: Sequence[Shard]) -> tuple[Int64s, Int64s]:
    """Distinct document lengths, ascending, and how many documents have each.

    A continued document counts once.
    """
    lengths, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    unfinished = 0
    for number, shard in enumerate(shards):
        sizes: Int64s = np.diff(shard.ends, prepend=np.uint64(0)).astype(np.int64)
        # Differences wrap around, and are negative again as int64.
        is_sound = sizes.min() >= 0 and sizes.max() <= len(shard.tokens)
        # With its part in the shard before.
        sizes[0] += unfinished
        unfinished = 0
        if number + 1 < len(shards) and shards[number + 1].facts.continues:
            # It goes on: counted once, where it ends.
            unfinished, sizes = int(sizes[-1]), sizes[:-1]
        if not is_sound or (len(sizes) and sizes.min() < 1):
            raise _build_damaged_shard_error(shard, "its documents do not add up")
        lengths, counts = _add_length_counts(lengths, counts, sizes)
    return lengths, counts


def _add_length_counts(lengths: Int64s, counts: Int64s, sizes: Int64s) -> tuple[Int64s, Int64s]:
    more, more_counts = np.unique(sizes, return_counts=True)
    merged, at = np.unique(np.concatenate([lengths, more]), return_inverse=True)
    return merged, np.bincount(at, np.concatenate([counts, more_counts])).astype(np.int64)


def _compute_length_quantiles(lengths: Int64s, counts: Int64s) -> dict[float, int]:
    """Quantiles of the documents' lengths: for each part the smallest length that so many of them
    do not exceed."""
    upto = np.cumsum(counts)
    ranks = [max(1, math.ceil(part * int(upto[-1]))) for part in QUANTILES]
    places = np.searchsorted(upto, ranks, "left")
    return {part: int(lengths[index]) for part, index in zip(QUANTILES, places, strict=True)}


def _bin_document_lengths(lengths: Int64s, counts: Int64s) -> tuple[LengthBin, ...]:
    """Powers of two: 1, 2 to 3, 4 to 7, and so on; parts of them where there would be few."""
    first, last = int(lengths[0]).bit_length() - 1, int(lengths[-1]).bit_length() - 1
    num_parts = 1 << (-(-_MIN_HISTOGRAM_BINS // (last + 1 - first)) - 1).bit_length()
    distinct_edges = set()
    for power in range(first, last + 1):
        for part in range(num_parts):
            # Small powers have fewer lengths than parts: edges repeat.
            distinct_edges.add(2**power + 2**power * part // num_parts)
    edges = [*sorted(distinct_edges), 2 ** (last + 1)]
    low, high = np.searchsorted(edges, [lengths[0], lengths[-1]], "right")
    edges = edges[int(low) - 1 : int(high) + 1]
    number = np.searchsorted(edges, lengths, "right") - 1
    documents = np.bincount(number, counts, len(edges) - 1).astype(np.int64)
    tokens = np.bincount(number, counts * lengths, len(edges) - 1).astype(np.int64)
    bins = []
    for i, (low, high) in enumerate(pairwise(edges)):
        bins.append(LengthBin(low, high - 1, int(documents[i]), int(tokens[i])))
    return tuple(bins)


def _list_frequent_tokens(dataset: Dataset, counts: Int64s) -> tuple[FrequentToken, ...]:
    tokenizer = dataset.load_tokenizer()
    frequent = []
    # Stable, so that of tokens as frequent as each other the smaller id comes first.
    for token in np.argsort(-counts, kind="stable")[:NUM_MOST_FREQUENT_TOKENS].tolist():
        if not counts[token]:
            break
        text = ""
        if token == dataset.end_of_document:
            text = "(end of document)"
        elif tokenizer is not None:
            text = tokenizer.decode([token])
        frequent.append(FrequentToken(token, text, int(counts[token])))
    return tuple(frequent)


def _thin_out_counts_by_rank(counts: Int64s) -> tuple[tuple[int, int], ...]:
    """Zipf's picture: the count of the most frequent token, of the second, ... thinned out
    evenly on a log scale."""
    descending = np.sort(counts[counts > 0])[::-1]
    ranks = np.unique(np.round(np.geomspace(1, len(descending), 60)).astype(np.int64))
    return tuple((int(rank), int(descending[rank - 1])) for rank in ranks)
