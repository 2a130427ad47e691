"""A part of a file becomes pieces of documents: text, JSONL (plain, gzip, zstd), Parquet, Arrow,
Feather. Torch-free.

A text file is one document, a row of the others is one. Memory does not grow with a file, except
that a row is read whole, and a Parquet row group as far as pyarrow does.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.core.errors import DataError
from phalanx.core.files import open_regular_file
from phalanx.core.units import MIB
from phalanx.data.columns import ReadingPosition
from phalanx.data.cuts import (
    MAX_UNCUT_CHARS,
    TARGET_PIECE_CHARS,
    TokenSafeTextCutter,
    text_too_long_error,
)
from phalanx.data.rows_arrow import (
    iterate_arrow_rows,
    iterate_parquet_rows,
    list_arrow_record_batches,
    list_parquet_row_groups,
    read_arrow_column_buffers,
    read_parquet_column_pages,
)
from phalanx.data.rows_json import iterate_json_rows
from phalanx.data.sources import SourceFile
from phalanx.data.spans import (
    SourceFileParts,
    SourceFileSpan,
    make_unsplittable_file_parts,
    split_file_at_any_byte,
)
from phalanx.data.tokenizer import replace_surrogates
from phalanx.data.unreadable import build_unreadable_data_error

BLOCK_BYTES = MIB
# A zstd file may begin with frames of metadata: 16 magic numbers (RFC 8878, section 3.1.2).
_ZSTD_SKIPPABLE_MAGICS = tuple(bytes([0x50 + number]) + b"\x2a\x4d\x18" for number in range(16))
_MAGICS_OF_FORMAT = {
    "jsonl.gz": (b"\x1f\x8b",),
    "jsonl.zst": (b"\x28\xb5\x2f\xfd", *_ZSTD_SKIPPABLE_MAGICS),
}
# So many characters behind a place tell for sure whether a text can be cut there: more than the
# context that cuts look at.
_CUT_LOOKAHEAD_CHARS = 1024


class TextPiece(NamedTuple):
    """Neighbouring text of one document: all of it if it both `begins` and `ends`. Bytes where
    bytes are the tokens.
    """

    key: int
    text: str | bytes
    begins: bool
    ends: bool
    num_bytes: int  # of UTF-8
    is_utf8: bool = True


def hash_document_key(name: str) -> int:
    """The identity of a document: a uniformly distributed number that does not depend on where
    files lie or shards begin.
    """
    return hash_to_stable_64_bits("held_out", name)


def build_row_key_function(name: str) -> Callable[[int], int]:
    """`hash_to_stable_64_bits("held_out", name, row)` as a function of the row, quicker for
    millions of them.
    """
    # A blake2b can be copied half-way: the name is hashed once.
    of_file = hashlib.blake2b(f"held_out\x1f{name}\x1f".encode(), digest_size=8)

    def key_of(row: int) -> int:
        of_row = of_file.copy()
        of_row.update(str(row).encode())
        return int.from_bytes(of_row.digest(), "little")

    return key_of


def plan_file_parts(
    file: SourceFile, column: str, step_bytes: int, can_cut_text: bool
) -> SourceFileParts:
    """The parts into which a file can be divided. Raises DataError for a Parquet or Arrow file
    without a `column` of text.
    """
    if file.format == "jsonl" or (file.format == "text" and can_cut_text):
        return split_file_at_any_byte(file, step_bytes)
    if file.format == "parquet":
        return list_parquet_row_groups(file, column)
    if file.format == "arrow":
        return list_arrow_record_batches(file, column)
    _require_named_compression(file)
    return make_unsplittable_file_parts(file)


def _require_named_compression(file: SourceFile) -> None:
    """Raise DataError for a file that is not compressed as its name says: before all of it is read
    for nothing.
    """
    magics = _MAGICS_OF_FORMAT.get(file.format)
    if magics is None or not file.num_bytes:
        return
    try:
        with open_regular_file(file.path) as opened:
            magic = opened.read(4)
    except OSError as error:
        raise build_unreadable_data_error(error, file.path) from None
    if not magic.startswith(magics):
        kind = "gzip" if file.format == "jsonl.gz" else "zstd"
        raise DataError(
            f"not a {kind} file, or a damaged one", where=file.path, why=f"it begins with {magic!r}"
        )


def read_text_pieces(
    span: SourceFileSpan,
    column: str,
    cutter: TokenSafeTextCutter,
    wants_bytes: bool,
    reading: ReadingPosition,
) -> Iterator[TextPiece]:
    """The documents of a span in order. Raises DataError (exit 4) naming the file and the line or
    row.
    """
    before = reading.read
    with _name_file_in_errors(span):
        if span.format == "text":
            yield from _read_text_file(span, cutter, wants_bytes, reading)
        else:
            read_rows = {"parquet": iterate_parquet_rows, "arrow": iterate_arrow_rows}.get(
                span.format, iterate_json_rows
            )
            key_of = build_row_key_function(span.name)
            for row, text in read_rows(span, column, reading):
                # Most rows are short and ASCII: they need no look at their bytes.
                if text.isascii() and len(text) <= 2 * TARGET_PIECE_CHARS:
                    content = text.encode() if wants_bytes else text
                    yield TextPiece(key_of(row), content, True, True, len(text))
                else:
                    where = f"{span.path}: row {row}"
                    yield from _split_row_into_pieces(key_of(row), text, where, cutter, wants_bytes)
        # After the last row: a file written meanwhile may have given parts of two contents.
        _require_unchanged_file(span)
    reading.read = before + span.weight


def read_content_to_hash(span: SourceFileSpan, column: str) -> Iterator[Any]:
    """Buffers of bytes that decide what `read_text_pieces` gives: as they lie in the file, nothing
    is parsed.
    """
    with _name_file_in_errors(span):
        if span.format == "parquet":
            yield from read_parquet_column_pages(span, column)
        elif span.format == "arrow":
            yield from read_arrow_column_buffers(span, column)
        else:
            with open_regular_file(span.path, buffering=0) as file:
                file.seek(span.begin)
                yield from _read_blocks(file, span.end - span.begin)


@contextmanager
def _name_file_in_errors(span: SourceFileSpan) -> Iterator[None]:
    """Turn errors of the body into a DataError that names the file."""
    try:
        yield
    except gzip.BadGzipFile as error:  # an OSError without a number
        raise DataError(
            "not a gzip file, or a damaged one", where=span.path, why=str(error)
        ) from None
    except OSError as error:
        raise build_unreadable_data_error(error, span.path) from None
    except (EOFError, zlib.error) as error:
        raise DataError("the compressed file is damaged", where=span.path, why=str(error)) from None


def _require_unchanged_file(span: SourceFileSpan) -> None:
    status = os.stat(span.path)
    if (status.st_size, status.st_mtime_ns) != (span.file_bytes, span.modified_ns):
        raise DataError(
            "the file changed while it was being read",
            where=span.path,
            why=f"{status.st_size} bytes, {span.file_bytes} when the build began",
            fix="run it again",
        )


# --- text ---------------------------------------------------------------------------------------


def _read_text_file(
    span: SourceFileSpan, cutter: TokenSafeTextCutter, wants_bytes: bool, reading: ReadingPosition
) -> Iterator[TextPiece]:
    key = hash_document_key(span.name)
    with open_regular_file(span.path) as file:
        # The end is found as the next span finds its start: no text is read twice or left out.
        start = cutter.find_token_safe_cut_in_file(file, span.begin, span.file_bytes)
        end = cutter.find_token_safe_cut_in_file(file, span.end, span.file_bytes)
        if start == end and span.file_bytes:
            return  # all of it went to the spans around
        file.seek(start)
        pieces: Iterator[tuple[str | bytes, int, bool]]
        if wants_bytes:
            pieces = ((block, len(block), True) for block in _read_blocks(file, end - start))
        else:
            pieces = _decode_blocks_at_cuts(file, end - start, span, cutter)
        begins = True
        for text, num_bytes, is_utf8 in pieces:
            yield TextPiece(key, text, begins, False, num_bytes, is_utf8)
            reading.read += num_bytes
            begins = False
        if end == span.file_bytes:
            # The end is a piece of its own: a file's last block is not known before it is read.
            nothing: str | bytes = b"" if wants_bytes else ""
            yield TextPiece(key, nothing, begins, True, 0)


def _read_blocks(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    while num_bytes and (block := file.read(min(BLOCK_BYTES, num_bytes))):
        num_bytes -= len(block)
        yield block


def _decode_blocks_at_cuts(
    file: BinaryIO, num_bytes: int, span: SourceFileSpan, cutter: TokenSafeTextCutter
) -> Iterator[tuple[str, int, bool]]:
    """The text of each block, its size in bytes, and True if it is UTF-8."""
    for block in _read_blocks_between_cuts(file, num_bytes, span, cutter):
        text, is_utf8 = _decode_block(block)
        yield text, len(block), is_utf8


def _read_blocks_between_cuts(
    file: BinaryIO, num_bytes: int, span: SourceFileSpan, cutter: TokenSafeTextCutter
) -> Iterator[bytes]:
    """Blocks of about TARGET_PIECE_CHARS that end where the tokenizer allows it; larger ones where
    it does not.
    """
    pending, searched = b"", 0
    for block in _read_blocks(file, num_bytes):
        pending += block
        if len(pending) > 2 * TARGET_PIECE_CHARS and cutter.can_cut:
            text = pending.decode("utf-8", "surrogateescape")
            start = 0
            while (
                cut := cutter.find_token_safe_cut(text, max(start + TARGET_PIECE_CHARS, searched))
            ) is not None:
                if len(text) - cut < _CUT_LOOKAHEAD_CHARS:
                    break
                yield text[start:cut].encode("utf-8", "surrogateescape")
                start = cut
            # The next block goes on behind what was searched: no place is tried twice.
            searched = (cut or max(start, len(text) - _CUT_LOOKAHEAD_CHARS)) - start
            pending = text[start:].encode("utf-8", "surrogateescape")
        if len(pending) > MAX_UNCUT_CHARS:
            raise text_too_long_error(len(pending), span.path)
    if pending:
        yield pending


def _decode_block(block: bytes) -> tuple[str, bool]:
    try:
        return block.decode("utf-8"), True
    except UnicodeDecodeError:
        return block.decode("utf-8", "replace"), False


# --- rows ---------------------------------------------------------------------------------------


def _split_row_into_pieces(
    key: int, text: str, where: str, cutter: TokenSafeTextCutter, wants_bytes: bool
) -> Iterator[TextPiece]:
    is_utf8 = True
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        text, is_utf8 = replace_surrogates(text), False
        encoded = text.encode()
    if wants_bytes or len(text) <= 2 * TARGET_PIECE_CHARS:
        yield TextPiece(key, encoded if wants_bytes else text, True, True, len(encoded), is_utf8)
        return
    begins = True
    for part in cutter.cut_into_pieces(text, where):
        yield TextPiece(key, part, begins, False, len(part.encode()), is_utf8)
        begins = False
    yield TextPiece(key, "", False, True, 0)
