"""A split as one sequence of tokens: ranges of memory-mapped arrays in order, of which nothing is
copied. Torch-free.

Where a token lies does not matter to whoever reads: shards, a .npy or a Megatron .bin are each a
`TokenArray`, and a split is the documents of all of them that belong to it, one after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError
from phalanx.data.order import hash_uint64_bits

Tokens = NDArray[np.integer]
Int64s = NDArray[np.int64]
Uint64s = NDArray[np.uint64]

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
SplitBy = Literal["document", "few_documents", "position"]


class TokenArray(Protocol):
    """Tokens on disk with the documents in them; a Shard is one.

    `ends`: where each document ends, ascending, the last of them the number of tokens. `keys`: who
    each document is, as a uniformly distributed hash that does not depend on where it lies.
    """

    @property
    def tokens(self) -> Tokens: ...

    @property
    def ends(self) -> Uint64s: ...

    @property
    def keys(self) -> Uint64s: ...


@runtime_checkable
class CheckedTokenArray(Protocol):
    """A TokenArray with checksums of parts of it."""

    def list_chunks_of_tokens(self, start: int, stop: int) -> range: ...

    def require_sound_chunk(self, chunk: int) -> None: ...


class DamagedTokensError(DataError):
    """Tokens are not what was written; `row` of those that were asked for."""

    def __init__(self, damage: DataError, row: int) -> None:
        super().__init__(damage.what, where=damage.where, why=damage.why, fix=damage.fix)
        self.row = row


@dataclass(frozen=True)
class TokenRange:
    """Neighbouring tokens: from `start` to `stop` of array number `array`."""

    array: int
    start: int
    stop: int


class TokenSequence:
    """The tokens of some extents, one after another, and where documents end in them.

    `len()` and slices read like an array does, which is how n-gram models use it.
    """

    def __init__(
        self, arrays: Sequence[TokenArray], array_of: Int64s, starts: Int64s, stops: Int64s
    ) -> None:
        """Extent e is tokens `starts[e]` to `stops[e]` of `arrays[array_of[e]]`; none of them is
        empty.
        """
        self._arrays = tuple(arrays)
        # A plain view of each: slicing a memmap makes an object of its own class, which costs more.
        self._tokens = [np.asarray(array.tokens) for array in arrays]
        self._checked = [each if isinstance(each, CheckedTokenArray) else None for each in arrays]
        self._array_of, self._starts = array_of, starts
        # In the sequence, extent e lies from _bounds[e] to _bounds[e + 1].
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])
        self._document_ends: Int64s | None = None
        self.num_tokens = int(self._bounds[-1])

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, part: slice) -> Tokens:
        start, stop, step = part.indices(self.num_tokens)
        assert step == 1, "only neighbours can be read"
        return self.read(start, stop)

    @property
    def num_documents(self) -> int:
        """Documents with at least one token here."""
        return len(self.document_ends())

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens from `start` to `stop`, as they are stored: a view where they are neighbours,
        otherwise a copy.
        """
        start, stop = max(0, start), min(stop, self.num_tokens)
        if start >= stop:
            return np.zeros(0, np.int64)
        extent = int(np.searchsorted(self._bounds, start, "right")) - 1
        pieces = list(self._iterate_token_views(extent, start, stop))
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces)

    def _iterate_token_views(self, extent: int, start: int, stop: int) -> Iterator[Tokens]:
        """Tokens from `start` (which lies in `extent`) to `stop`, a view for each extent that they
        touch.
        """
        for number, offset, until in self._iterate_places(extent, start, stop):
            yield self._tokens[number][offset:until]

    def _iterate_places(self, extent: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where tokens from `start` (which lies in `extent`) to `stop` are: for each extent that
        they touch, the number of the array, and from where to where in it."""
        while start < stop:
            until = min(stop, int(self._bounds[extent + 1]))
            offset = int(self._starts[extent]) + start - int(self._bounds[extent])
            yield int(self._array_of[extent]), offset, offset + until - start
            start, extent = until, extent + 1

    def gather(self, starts: Int64s, length: int) -> Int64s:
        """`length` tokens from each of `starts` on: [..., length].

        Neighbours are copied as blocks. Raises DamagedTokensError for those of a shard that are not
        what was written.
        """
        assert starts.size == 0 or (
            starts.min() >= 0 and starts.max() + length <= self.num_tokens
        ), (starts, length)
        gathered = np.empty((starts.size, length), np.int64)
        extents = np.searchsorted(self._bounds, starts.ravel(), "right") - 1
        for row, extent, start in zip(
            gathered, extents.tolist(), starts.ravel().tolist(), strict=True
        ):
            at = 0
            for piece in self._iterate_token_views(extent, start, start + length):
                row[at : at + len(piece)] = piece
                at += len(piece)
        self._require_sound(extents, starts.ravel(), length)
        return gathered.reshape(*starts.shape, length)

    def _require_sound(self, extents: Int64s, starts: Int64s, length: int) -> None:
        """Raise DamagedTokensError for the first of `starts` whose tokens are not what was written.

        After they were copied: what is damaged in between is found.
        """
        sound = set()
        for row, (first, start) in enumerate(zip(extents.tolist(), starts.tolist(), strict=True)):
            for number, offset, until in self._iterate_places(first, start, start + length):
                array = self._checked[number]
                if array is None:
                    continue
                for chunk in array.list_chunks_of_tokens(offset, until):
                    if (number, chunk) in sound:
                        continue
                    try:
                        array.require_sound_chunk(chunk)
                    except DataError as error:
                        raise DamagedTokensError(error, row) from None
                    sound.add((number, chunk))

    def document_ids(self, starts: Int64s, length: int) -> Int64s:
        """The number of the document that each of `length` tokens belongs to, counted over the
        sequence.
        """
        at = starts[..., None] + np.arange(length)
        return np.asarray(np.searchsorted(self.document_ends(), at, "right"), np.int64)

    def document_ends(self) -> Int64s:
        """Positions at which documents end in the sequence, ascending; the last one ends with the
        sequence, cut off or not.
        """
        if self._document_ends is None:
            parts = [
                self._find_document_ends_of_array(number) for number in range(len(self._arrays))
            ]
            ends = np.concatenate([*parts, np.array([self.num_tokens], np.int64)])
            # Ascending already: only repetitions go.
            self._document_ends = ends[np.diff(ends, prepend=0) > 0]
        return self._document_ends

    def _find_document_ends_of_array(self, number: int) -> Int64s:
        """The ends of documents of array `number` that lie inside its extents, as places in the
        sequence.
        """
        rows = np.flatnonzero(self._array_of == number)
        ends = np.asarray(self._arrays[number].ends).astype(np.int64)
        if rows.size and self._does_document_continue_in_next(number):
            # The array's end is no end of this document, whose rest is in the next one.
            ends = ends[:-1]
        if rows.size == 0 or ends.size == 0:
            return np.zeros(0, np.int64)
        # The extent that begins before this end.
        at = np.searchsorted(self._starts[rows], ends, "left") - 1
        sizes = self._bounds[rows + 1] - self._bounds[rows]
        within = ends - self._starts[rows][at]
        is_inside = (at >= 0) & (within <= sizes[at])
        return np.asarray((self._bounds[rows][at] + within)[is_inside], np.int64)

    def _does_document_continue_in_next(self, number: int) -> bool:
        """True if the last document of an array is also the first of the next: a long one that two
        shards share.
        """
        if number + 1 == len(self._arrays):
            return False
        this, following = self._arrays[number].keys, self._arrays[number + 1].keys
        return bool(len(this) and len(following) and this[-1] == following[0])


CHUNK_TOKENS = 1 << 22


def find_token_outside_vocabulary(tokens: Tokens, vocab_size: int) -> tuple[int, int] | None:
    """(offset, token) of the first token outside [0, vocab_size), or None."""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = np.asarray(tokens[start : start + CHUNK_TOKENS])
        if int(chunk.min()) < 0 or int(chunk.max()) >= vocab_size:
            at = int(np.argmax((chunk < 0) | (chunk >= vocab_size)))
            return start + at, int(chunk[at])
    return None


@dataclass(frozen=True)
class TrainHeldOutSplit:
    """The two sides of a source; no document is on both unless it was split by position."""

    train: TokenSequence
    held_out: TokenSequence

    def __getitem__(self, split: Split) -> TokenSequence:
        if split == "train":
            return self.train
        return self.held_out


class SplitChoice(NamedTuple):
    """The split of a source; `keys` are the documents held out of few."""

    by: SplitBy
    keys: tuple[int, ...] = ()


# Of all tokens may be held out by "few_documents", unless the fraction is larger.
MAX_HELD_OUT_FRACTION = 0.5


def choose_split(arrays: Sequence[TokenArray], fraction: float, seq_len: int) -> SplitChoice:
    """Choose a split that leaves each side at least one sequence of seq_len + 1 tokens.

    By document where the fraction does; else the documents of the smallest keys, as few as hold a
    sequence; by position where no choice of whole documents does.
    """
    # Nothing is held out, which needs no look at documents.
    if fraction == 0:
        return SplitChoice("position")
    needed, total = seq_len + 1, sum(len(array.tokens) for array in arrays)
    num_held_out = sum(_count_held_out_tokens(array, fraction) for array in arrays)
    if min(num_held_out, total - num_held_out) >= needed:
        return SplitChoice("document")
    if total >= 2 * needed:
        keys = _choose_held_out_of_few_documents(arrays, fraction, needed)
        if keys:
            return SplitChoice("few_documents", keys)
    return SplitChoice("position")


def _choose_held_out_of_few_documents(
    arrays: Sequence[TokenArray], fraction: float, needed: int
) -> tuple[int, ...]:
    """Documents to hold out, by ascending key, so that each side has `needed` tokens; none if that
    cannot be.

    Those that would take more than `fraction` of the tokens are passed over; if nothing is left,
    those that would take more than twice that, and so on: of a long document and a short one, the
    short one is held out whatever their keys.
    """
    all_keys = np.concatenate([array.keys for array in arrays])
    keys, number_of = np.unique(all_keys, return_inverse=True)
    lengths = np.concatenate([_compute_document_lengths(array) for array in arrays])
    # A document may lie in several shards: its parts have one key.
    sizes = np.bincount(number_of.ravel(), lengths, len(keys)).astype(np.int64)
    total, limit = int(sizes.sum()), max(fraction, MAX_HELD_OUT_FRACTION)
    part = max(fraction, needed / total)
    while True:
        most = min(int(part * total), total - needed)
        chosen = _select_documents_by_smallest_keys(keys.tolist(), sizes.tolist(), needed, most)
        if chosen or part >= limit:
            return chosen
        part = min(2 * part, limit)


def _select_documents_by_smallest_keys(
    keys: Sequence[int], sizes: Sequence[int], needed: int, most: int
) -> tuple[int, ...]:
    """The first documents that have `needed` tokens together, without those that would make it more
    than `most`.
    """
    chosen: list[int] = []
    num_held_out = 0
    for key, size in zip(keys, sizes, strict=True):
        if num_held_out >= needed:
            break
        if size > 0 and num_held_out + size <= most:
            chosen.append(key)
            num_held_out += size
    if num_held_out < needed:
        return ()
    return tuple(chosen)


def split_into_train_and_held_out(
    arrays: Sequence[TokenArray], fraction: float, split_by: SplitBy, keys: Sequence[int] = ()
) -> TrainHeldOutSplit:
    """Hold out the documents whose key, as a part of 2**64, lies below `fraction`: wherever they
    lie, whatever else is.

    Of few documents, those of `keys`. By position, the last part of the last arrays.
    """
    if split_by == "document":
        return _split_by_document_masks(
            arrays, [choose_held_out_documents(array.keys, fraction) for array in arrays]
        )
    if split_by == "few_documents":
        chosen = np.array(keys, np.uint64)
        return _split_by_document_masks(arrays, [np.isin(array.keys, chosen) for array in arrays])
    total = sum(len(array.tokens) for array in arrays)
    num_held_out = 0
    if fraction:
        # At least two: the first token is an input only, so one alone has no target.
        num_held_out = min(total, max(2, math.ceil(total * fraction)))
    return _split_at_token(arrays, total - num_held_out)


def _split_by_document_masks(
    arrays: Sequence[TokenArray], held_out: Sequence[NDArray[np.bool_]]
) -> TrainHeldOutSplit:
    """The two sides of documents; those under the masks `held_out` are on the second."""
    return TrainHeldOutSplit(
        _build_sequence_of_documents(arrays, [~mask for mask in held_out]),
        _build_sequence_of_documents(arrays, held_out),
    )


def _count_held_out_tokens(array: TokenArray, fraction: float) -> int:
    is_held_out = choose_held_out_documents(array.keys, fraction)
    return int(_compute_document_lengths(array)[is_held_out].sum())


def _compute_document_lengths(array: TokenArray) -> Int64s:
    # Signed before they are subtracted: uint64 and a Python 0 would become float64.
    return np.asarray(np.diff(np.asarray(array.ends).astype(np.int64), prepend=0), np.int64)


def choose_held_out_documents(keys: Uint64s, fraction: float) -> NDArray[np.bool_]:
    """A mask over documents, by their keys: True for those that are held out, about `fraction` of
    them.
    """
    return np.asarray(keys).astype(np.float64) / 2.0**64 < fraction


def _build_sequence_of_documents(
    arrays: Sequence[TokenArray], masks: Sequence[NDArray[np.bool_]]
) -> TokenSequence:
    """The documents under the masks; those that are neighbours become one extent."""
    array_of, starts, stops = [], [], []
    for number, (array, mask) in enumerate(zip(arrays, masks, strict=True)):
        if not mask.any():
            continue
        ends = np.asarray(array.ends).astype(np.int64)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
        first, beyond = edges[0::2], edges[1::2]  # runs of documents
        # At first == 0 the index is -1, a valid one whose value `where` does not take.
        start, stop = np.where(first > 0, ends[first - 1], 0), ends[beyond - 1]
        filled = stop > start
        starts.append(start[filled])
        stops.append(stop[filled])
        array_of.append(np.full(int(filled.sum()), number))
    return _build_token_sequence(arrays, array_of, starts, stops)


def _split_at_token(arrays: Sequence[TokenArray], num_train: int) -> TrainHeldOutSplit:
    """The first `num_train` tokens of all arrays, and the rest."""
    train, held_out, before = [], [], 0
    for number, array in enumerate(arrays):
        cut = min(max(0, num_train - before), len(array.tokens))
        train.append(TokenRange(number, 0, cut))
        held_out.append(TokenRange(number, cut, len(array.tokens)))
        before += len(array.tokens)
    return TrainHeldOutSplit(
        _build_sequence_of_token_ranges(arrays, train),
        _build_sequence_of_token_ranges(arrays, held_out),
    )


def _build_sequence_of_token_ranges(
    arrays: Sequence[TokenArray], extents: Sequence[TokenRange]
) -> TokenSequence:
    array_of, starts, stops = [], [], []
    for extent in extents:
        if extent.stop > extent.start:
            array_of.append(extent.array)
            starts.append(extent.start)
            stops.append(extent.stop)
    return TokenSequence(
        arrays,
        np.array(array_of, np.int64),
        np.array(starts, np.int64),
        np.array(stops, np.int64),
    )


def _build_token_sequence(
    arrays: Sequence[TokenArray],
    array_of: Sequence[Int64s],
    starts: Sequence[Int64s],
    stops: Sequence[Int64s],
) -> TokenSequence:
    return TokenSequence(
        arrays,
        _concatenate_integers(array_of),
        _concatenate_integers(starts),
        _concatenate_integers(stops),
    )


def _concatenate_integers(parts: Sequence[Int64s]) -> Int64s:
    # An empty array first: numpy cannot concatenate none at all.
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


@dataclass(frozen=True)
class SingleDocumentTokenArray:
    """Tokens without anything known about documents: all of them are one."""

    tokens: Tokens
    ends: Uint64s
    keys: Uint64s

    @classmethod
    def from_tokens(cls, tokens: Tokens) -> SingleDocumentTokenArray:
        return cls(
            tokens,
            np.array([len(tokens)], np.uint64),
            hash_document_numbers(np.zeros(1, np.int64)),
        )


def hash_document_numbers(numbers: Int64s) -> Uint64s:
    """Keys of documents that have numbers instead of names."""
    # From 1 on: 0 is hashed to 0, which is below every fraction.
    return hash_uint64_bits(numbers.astype(np.uint64) + np.uint64(1))
