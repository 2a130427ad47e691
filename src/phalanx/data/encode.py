"""One task becomes one shard: read, encode in batches, write. What a worker process does.
Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.core.units import MIB
from phalanx.data.columns import ReadingPosition
from phalanx.data.cuts import build_text_cutter
from phalanx.data.readers import TextPiece, read_content_to_hash, read_text_pieces
from phalanx.data.shard_writer import ShardWriter
from phalanx.data.shards import ShardFacts, choose_smallest_token_dtype
from phalanx.data.spans import ShardTask, SourceFileSpan
from phalanx.data.tokenizer import Tokenizer

BATCH_BYTES = 2 * MIB  # of text, in memory together with what the tokenizer makes of it
BATCH_PIECES = 4096
REPORT_INTERVAL_S = 0.2


@dataclass
class EncodingCounts:
    """Counts of what was encoded so far, of one task or of all."""

    read_bytes: float = 0.0  # of the input files, compressed or not
    text_bytes: int = 0  # of UTF-8 that was encoded
    num_documents: int = 0
    num_tokens: int = 0
    num_null_rows: int = 0
    num_not_utf8: int = 0  # pieces of documents in which bytes were replaced
    num_ends_in_text: int = 0
    """How often the tokenizer gave the token that ends a document for something in a text."""
    encode_s: float = 0.0
    wall_s: float = 0.0


def add_up_encoding_counts(parts: Iterable[EncodingCounts]) -> EncodingCounts:
    total = EncodingCounts()
    for part in parts:
        for name, value in vars(part).items():
            setattr(total, name, getattr(total, name) + value)
    return total


@dataclass
class ShardOutcome:
    """The result of a task; without facts if it held no token."""

    facts: ShardFacts | None
    counts: EncodingCounts = field(default_factory=EncodingCounts)
    content: str = ""  # digest of what went in, see `hash_task_content`

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ShardOutcome:
        facts = None
        if value["facts"]:
            facts = ShardFacts(**value["facts"])
        return cls(facts, EncodingCounts(**value["counts"]), value["content"])


ReportCounts = Callable[[EncodingCounts], None]


class TaskContentHash:
    """A digest of what lies in the inputs of a task: the same wherever they lie, whenever they were
    written.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add(self, span: SourceFileSpan, column: str) -> None:
        self._hash.update(
            f"{span.name}\x1f{span.format}\x1f{span.begin}\x1f{span.end}\x1f".encode()
        )
        for part in read_content_to_hash(span, column):
            self._hash.update(part)

    def __str__(self) -> str:
        return self._hash.hexdigest()


def hash_task_content(task: ShardTask, column: str) -> str:
    """The digest that `build_shard` gives the content of `task`. Raises DataError for a file that
    cannot be read."""
    content = TaskContentHash()
    for span in task.spans:
        content.add(span, column)
    return str(content)


def build_shard(
    task: ShardTask, out: Path, tokenizer: Tokenizer, column: str, report: ReportCounts
) -> ShardOutcome:
    """Write the shard of `task` in `out`: whole or absent. Raises DataError, and OSError where
    writing fails.
    """
    began = time.monotonic()
    counts, reading, content = EncodingCounts(), ReadingPosition(), TaskContentHash()
    reported_s = 0.0
    first = task.spans[0]
    # A text that began in the shard before is no new document here.
    continues = first.format == "text" and first.begin > 0
    encode = _encode_batch_as_bytes if tokenizer.kind == "bytes" else _encode_batch_with_tokenizer
    dtype = choose_smallest_token_dtype(tokenizer.vocab_size)
    with ShardWriter(
        out / task.file, dtype, tokenizer.vocab_size, tokenizer.digest, continues=continues
    ) as writer:
        for batch in _group_pieces_into_batches(
            _read_text_pieces(task, column, tokenizer, reading, content)
        ):
            began_encoding = time.monotonic()
            encoded = encode(batch, tokenizer)
            counts.encode_s += time.monotonic() - began_encoding
            counts.num_ends_in_text += _count_end_tokens_in_text(encoded, tokenizer)
            _write_batch_with_document_ends(writer, batch, encoded, tokenizer.end_of_document)
            _add_batch_to_counts(counts, batch, reading)
            counts.num_tokens = writer.num_tokens
            counts.wall_s = time.monotonic() - began
            if counts.wall_s - reported_s >= REPORT_INTERVAL_S:
                report(counts)
                reported_s = counts.wall_s
        # Once more: where the last rows are null, no batch follows.
        counts.num_null_rows = reading.num_null_rows
        facts = None
        if writer.num_tokens:
            facts = writer.commit()
    counts.read_bytes, counts.wall_s = task.weight, time.monotonic() - began
    return ShardOutcome(facts, counts, str(content))


def _read_text_pieces(
    task: ShardTask,
    column: str,
    tokenizer: Tokenizer,
    reading: ReadingPosition,
    content: TaskContentHash,
) -> Iterator[TextPiece]:
    cutter = build_text_cutter(tokenizer)
    for span in task.spans:
        # One pass before the other: the second finds the bytes in memory.
        content.add(span, column)
        yield from read_text_pieces(span, column, cutter, tokenizer.kind == "bytes", reading)


def _group_pieces_into_batches(pieces: Iterator[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    num_bytes = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += piece.num_bytes
        if num_bytes >= BATCH_BYTES or len(batch) >= BATCH_PIECES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


class EncodedBatch(NamedTuple):
    """The ids of all pieces of a batch one after another, and how many each has."""

    ids: NDArray[np.integer]
    sizes: NDArray[np.int64]


def _encode_batch_as_bytes(batch: list[TextPiece], tokenizer: Tokenizer) -> EncodedBatch:
    """A byte is a token."""
    joined = b"".join(piece.text for piece in batch)  # type: ignore[misc]
    return EncodedBatch(
        np.frombuffer(joined, np.uint8), np.array([len(piece.text) for piece in batch], np.int64)
    )


def _encode_batch_with_tokenizer(batch: list[TextPiece], tokenizer: Tokenizer) -> EncodedBatch:
    encodings = tokenizer.encode_batch([piece.text for piece in batch])  # type: ignore[misc]
    return EncodedBatch(
        np.concatenate(encodings), np.array([ids.size for ids in encodings], np.int64)
    )


def _count_end_tokens_in_text(encoded: EncodedBatch, tokenizer: Tokenizer) -> int:
    if tokenizer.end_of_document is None or tokenizer.kind == "bytes":
        return 0
    return int(np.count_nonzero(encoded.ids == tokenizer.end_of_document))


def _write_batch_with_document_ends(
    writer: ShardWriter, batch: list[TextPiece], encoded: EncodedBatch, end_of_document: int | None
) -> None:
    """Put the ends of documents into a batch and write it in one go."""
    ends = np.array([piece.ends for piece in batch]) & (end_of_document is not None)
    sizes = encoded.sizes + ends
    tokens = encoded.ids
    if end_of_document is not None and ends.any():
        stops = np.cumsum(sizes)
        tokens = np.full(int(stops[-1]), end_of_document, writer.dtype)
        is_text = np.ones(tokens.size, bool)
        # The last place of each document that ends here keeps the end.
        is_text[stops[ends] - 1] = False
        tokens[is_text] = encoded.ids
    starts, keys, at = [], [], 0
    begun: int | None = None
    for piece, size in zip(batch, sizes.tolist(), strict=True):
        if piece.begins:
            begun = piece.key
        # A document begins with its first token; without any it is none.
        if begun is not None and size:
            starts.append(at)
            keys.append(begun)
            begun = None
        at += size
    writer.write_documents(tokens, np.array(starts, np.int64), keys)
    if begun is not None:  # nothing of it has come yet
        writer.begin_document(begun)


def _add_batch_to_counts(
    counts: EncodingCounts, batch: list[TextPiece], reading: ReadingPosition
) -> None:
    for piece in batch:
        counts.text_bytes += piece.num_bytes
        counts.num_documents += piece.ends
        counts.num_not_utf8 += not piece.is_utf8
    counts.read_bytes = reading.read
    counts.num_null_rows = reading.num_null_rows
