"""A source as one stream of checked tokens, each document with the part of it that is for training. Torch-free."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.core.batch import BYTE_VOCAB_SIZE
from phalanx.core.digest import stable_hash64
from phalanx.core.errors import DataError
from phalanx.data.sources import (
    CHUNK_TOKENS,
    END_OF_DOCUMENT,
    Document,
    find_documents,
    is_token_ids,
    open_token_ids,
    read_tokens,
    where_of,
)

Tokens = NDArray[np.integer]


@dataclass(frozen=True)
class Part:
    """One document on its way: its chunks of tokens, the first `num_train` of them for training."""

    chunks: Iterator[Tokens]
    num_train: int


@dataclass(frozen=True)
class TokenStream:
    """The documents of a source in order, read as `parts` is iterated (once), and what is known before."""

    parts: Iterable[Part]
    tokenizer: Literal["bytes", "none"]
    vocab_size: int
    source_bytes: int
    num_skipped_files: int


def open_source(source: str, held_out_fraction: float, seq_len: int, vocab_size: int | None) -> TokenStream:
    """Find `source` and decide what is held out. Raises DataError here, or while `parts` is read."""
    open_one = _open_ids if is_token_ids(source) else _open_text
    return open_one(source, held_out_fraction, seq_len, vocab_size)


def in_chunks(ids: Tokens) -> Iterator[Tokens]:
    """The ids as they are, at most CHUNK_TOKENS at a time."""
    for start in range(0, ids.size, CHUNK_TOKENS):
        yield ids[start : start + CHUNK_TOKENS]


def _open_text(source: str, fraction: float, seq_len: int, vocab_size: int | None) -> TokenStream:
    documents = find_documents(source)
    shares = training_shares(documents.found, fraction, seq_len)
    return TokenStream(
        parts=(
            Part(checked(read_tokens(document), vocab_size, where_of(document.path), "byte"), share)
            for document, share in zip(documents.found, shares, strict=True)
        ),
        tokenizer="bytes",
        vocab_size=BYTE_VOCAB_SIZE,
        source_bytes=sum(document.num_bytes for document in documents.found),
        num_skipped_files=documents.num_skipped,
    )


def _open_ids(source: str, fraction: float, seq_len: int, vocab_size: int | None) -> TokenStream:
    ids = open_token_ids(source)
    limit = 2**32 if vocab_size is None else vocab_size
    max_id = max(int(chunk.max()) for chunk in checked(in_chunks(ids), limit, where_of(source), "index"))
    return TokenStream(
        parts=[Part(in_chunks(ids), ids.size - _held_out_by_position(ids.size, fraction))],
        tokenizer="none",
        vocab_size=max_id + 1,
        source_bytes=ids.nbytes,
        num_skipped_files=0,
    )


def checked(chunks: Iterable[Tokens], vocab_size: int | None, where: str, unit: str) -> Iterator[Tokens]:
    """Pass chunks on, or raise DataError at the first token outside [0, vocab_size): `where`, at which `unit`."""
    offset = 0
    for chunk in chunks:
        if chunk.size and (int(chunk.min()) < 0 or (vocab_size is not None and int(chunk.max()) >= vocab_size)):
            outside = chunk < 0 if vocab_size is None else (chunk < 0) | (chunk >= vocab_size)
            first = int(np.argmax(outside))
            raise _outside(int(chunk[first]), vocab_size, f"{where}: {unit} {offset + first}", unit)
        offset += chunk.size
        yield chunk


def _outside(token: int, vocab_size: int | None, where: str, unit: str) -> DataError:
    if token < 0:
        return DataError(f"token id {token} is negative", where=where)
    meaning = " (the end of a document)" if token == END_OF_DOCUMENT and unit == "byte" else ""
    return DataError(
        f"token {token}{meaning} does not fit a vocabulary of {vocab_size}",
        where=where,
        fix="raise model.vocab_size, or leave it out to take what the data needs",
    )


def training_shares(documents: Sequence[Document], fraction: float, seq_len: int) -> list[int]:
    """How many of its first tokens each document gives to training: all or none, or by position (see prepare_corpus).

    "All" is sys.maxsize, so that a file that grows meanwhile stays on its side.
    """
    if fraction == 0:
        return [sys.maxsize] * len(documents)
    held_out = [stable_hash64("held_out", document.name) / 2**64 < fraction for document in documents]
    num_tokens = [document.num_tokens for document in documents]
    num_held_out = sum(n for n, held in zip(num_tokens, held_out, strict=True) if held)
    total = sum(num_tokens)
    if len(documents) > 1 and num_held_out >= 2 and total - num_held_out >= seq_len + 1:
        return [0 if held else sys.maxsize for held in held_out]
    shares, left = [], total - _held_out_by_position(total, fraction)
    for n in num_tokens:
        shares.append(min(n, left) if left < n else sys.maxsize)
        left -= min(n, left)
    return shares


def _held_out_by_position(num_tokens: int, fraction: float) -> int:
    """Tokens at the end to hold out: at least two where any, since the first of them is never a target."""
    return min(num_tokens, max(2, math.ceil(num_tokens * fraction))) if fraction else 0
