"""Rows of JSONL, plain or compressed by gzip or zstd: one JSON object per line. Torch-free."""

from __future__ import annotations

import codecs
import gzip
import io
import json
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from phalanx.core.errors import DataError
from phalanx.core.files import open_regular_file
from phalanx.core.registry import import_optional_dependency
from phalanx.core.units import MIB, format_bytes
from phalanx.data.columns import ReadingPosition, missing_column_error
from phalanx.data.cuts import MAX_ROW_BYTES, row_too_long_error
from phalanx.data.spans import SourceFileSpan

_BLOCK_BYTES = MIB


def iterate_json_rows(
    span: SourceFileSpan, column: str, reading: ReadingPosition
) -> Iterator[tuple[int, str]]:
    """(byte offset of the line, in what was decompressed; its text)."""
    with open_regular_file(span.path) as raw:
        file = _open_decompressed(raw, span)
        is_plain = span.format == "jsonl"
        offset = _skip_to_next_line(file, span.begin) if is_plain else 0
        before = reading.read
        while not is_plain or offset < span.end:
            # One byte more, which tells that a line is too long.
            line = file.readline(MAX_ROW_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_ROW_BYTES:
                raise row_too_long_error(
                    _format_row_location(span, offset),
                    f"a line of more than {format_bytes(MAX_ROW_BYTES)}",
                )
            text = _extract_row_text(line, column, lambda: _format_row_location(span, offset))  # noqa: B023
            if text is not None:
                yield offset, text
            elif not line.isspace():
                reading.num_null_rows += 1
            offset += len(line)
            # Progress is in bytes of the file, compressed or not.
            if is_plain:
                reading.read = before + (offset - span.begin)
            else:
                reading.read = before + raw.tell()


def _open_decompressed(raw: BinaryIO, span: SourceFileSpan) -> BinaryIO:
    if span.format == "jsonl.gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if span.format == "jsonl.zst":
        arrow = import_optional_dependency(
            "pyarrow", extra="data", needed_for=f"reading {span.path}"
        )
        return cast(BinaryIO, io.BufferedReader(arrow.CompressedInputStream(raw, "zstd")))
    return raw


def _skip_to_next_line(file: BinaryIO, offset: int) -> int:
    """Move the file to the first line that begins at or after `offset`; returns its position."""
    if offset == 0:
        return 0
    # One byte before, so that a line that begins at `offset` is found.
    file.seek(offset - 1)
    at = offset - 1
    # In blocks: the line may be of any length, which the reader of its beginning refuses.
    while block := file.readline(_BLOCK_BYTES):
        at += len(block)
        if block.endswith(b"\n"):
            break
    return at


def _extract_row_text(line: bytes, column: str, where: Callable[[], str]) -> str | None:
    """The field of a row; None if it is null, or the line is blank."""
    if line.isspace():
        return None
    try:
        # Bytes that are not UTF-8 come through: they are counted where the text is encoded.
        row = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            "not JSON", where=where(), why=str(error), fix="one JSON object per line"
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f"the row is {_name_json_type(row)}, not an object",
            where=where(),
            fix="one JSON object per line",
        )
    if column not in row:
        raise missing_column_error(column, list(row), where(), "field", "it has")
    text = row[column]
    if text is not None and not isinstance(text, str):
        fix = None
        if isinstance(text, list | dict):
            fix = "make one text of it first (of messages: by their chat template)"
        raise DataError(
            f"the field {column!r} is {_name_json_type(text)}, not a string", where=where(), fix=fix
        )
    return text


def _format_row_location(span: SourceFileSpan, offset: int) -> str:
    """file:line, counted only when something is wrong."""
    with open_regular_file(span.path) as raw:
        file = _open_decompressed(raw, span)
        line = 1
        while offset > 0 and (block := file.read(min(offset, _BLOCK_BYTES))):
            line += block.count(b"\n")
            offset -= len(block)
    return f"{span.path}:{line}"


def _name_json_type(value: object) -> str:
    if value is None:
        return "null"
    # By exact type, for a bool is an int as well.
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "an integer",
    }
    return names.get(type(value), "a number")
