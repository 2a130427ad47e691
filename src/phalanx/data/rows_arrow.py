"""Rows of Parquet, Arrow and Feather: a column of text, read in batches by pyarrow. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any, cast

from phalanx.core.errors import DataError
from phalanx.core.files import open_regular_file, resolve_regular_file_path
from phalanx.core.registry import import_optional_dependency
from phalanx.core.units import MIB, format_bytes
from phalanx.data.columns import MAX_SHOWN_COLUMNS, ReadingPosition, missing_column_error
from phalanx.data.cuts import MAX_ROW_BYTES, row_too_long_error
from phalanx.data.sources import SourceFile
from phalanx.data.spans import SourceFileParts, SourceFileSpan, make_unsplittable_file_parts
from phalanx.data.unreadable import build_unreadable_data_error

# Whichever is less: rows may be of any length, and become Python strings all at once.
_ROWS_PER_BATCH, _BATCH_BYTES = 1024, 4 * MIB


def list_parquet_row_groups(file: SourceFile, column: str) -> SourceFileParts:
    """Row groups. Raises DataError for a file without a `column` of text."""
    with _open_columnar_file(file.path, _open_parquet) as parquet:
        _require_text_column(parquet.schema_arrow, column, file.path)
        sizes = []
        for number in range(parquet.num_row_groups):
            sizes.append(parquet.metadata.row_group(number).total_byte_size)
        return _build_weighted_parts(file, sizes)


def list_arrow_record_batches(file: SourceFile, column: str) -> SourceFileParts:
    """Record batches; a stream has no index of them and stays whole.

    Raises DataError like `list_parquet_row_groups`.
    """
    arrow = _import_pyarrow(file.path)
    with _open_columnar_file(file.path, _open_arrow) as table:
        _require_text_column(table.schema, column, file.path)
        if isinstance(table, arrow.ipc.RecordBatchFileReader):
            return _build_weighted_parts(file, [1] * table.num_record_batches)
    return make_unsplittable_file_parts(file)


def _build_weighted_parts(file: SourceFile, sizes: list[int]) -> SourceFileParts:
    """Parts that share the bytes of the file in proportion to `sizes`."""
    if not sizes:
        return SourceFileParts(file, (0, 0), (file.num_bytes,))
    total = max(1, sum(sizes))
    edges = [file.num_bytes * so_far // total for so_far in accumulate(sizes, initial=0)]
    # Where all sizes are 0, too, the parts make up the file.
    edges[-1] = file.num_bytes
    weights = tuple(end - start for start, end in pairwise(edges))
    return SourceFileParts(file, tuple(range(len(sizes) + 1)), weights)


def _import_pyarrow(path: str) -> Any:
    import_optional_dependency("pyarrow", extra="data", needed_for=f"reading {path}")
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    return pyarrow


def _open_columnar_file(path: str, opener: Callable[[str], Any]) -> Any:
    arrow = _import_pyarrow(path)
    opened = path
    try:
        with resolve_regular_file_path(path) as opened:
            return opener(opened)
    except DataError as error:
        error.where = path
        raise
    # Names of columns that are not UTF-8 are no error to Arrow, but to Python.
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        # pyarrow names the file that it was given, which may be a descriptor's.
        why = _first_line(error).replace(opened, path)
        summary = f"not a readable {_format_name(path)} file"
        if isinstance(error, OSError):
            raise build_unreadable_data_error(error, path, summary, why=why) from None
        raise DataError(summary, where=path, why=why) from None


def _first_line(error: Exception) -> str:
    """The first line of an error's text, or its type if it has none."""
    for line in str(error).splitlines():
        return line
    return type(error).__name__


def _format_name(path: str) -> str:
    if path.lower().endswith(".parquet"):
        return "Parquet"
    return "Arrow"


def _open_parquet(path: str) -> Any:
    # With pre_buffer, pyarrow's default, it reads all of a row group ahead.
    return _import_pyarrow(path).parquet.ParquetFile(path, pre_buffer=False)


def _open_arrow(path: str) -> Any:
    """Both formats: the one with an index at its end (.feather) and the stream (what Hugging
    Face datasets write)."""
    arrow = _import_pyarrow(path)
    with open_regular_file(path) as file:
        magic = file.read(6)
    if magic.startswith(b"FEA1"):
        raise DataError(
            "Feather version 1 is not read",
            where=path,
            fix="write it again with pyarrow.feather (V2)",
        )
    memory = arrow.memory_map(path)
    # A file begins with its magic number; a stream has none, and begins with a message.
    if magic == b"ARROW1":
        return arrow.ipc.open_file(memory)
    return arrow.ipc.open_stream(memory)


def _require_text_column(schema: Any, column: str, path: str) -> None:
    arrow = _import_pyarrow(path)
    try:
        names = list(schema.names)
    except UnicodeDecodeError as error:
        summary = f"the {_format_name(path)} file is damaged"
        why = f"the name of a column is not UTF-8: {error}"
        raise DataError(summary, where=path, why=why) from None
    if column not in names:
        raise missing_column_error(column, names, path, "column", "its columns are")
    if names.count(column) > 1:
        summary = f"{names.count(column)} columns are called {column!r}"
        raise DataError(summary, where=path, fix="write it again with other names")
    kind = schema.field(column).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = (
        arrow.types.is_string(kind)
        or arrow.types.is_large_string(kind)
        or arrow.types.is_string_view(kind)
    )
    if not is_text and not arrow.types.is_null(kind):
        texts = [field.name for field in schema if arrow.types.is_string(field.type)]
        raise DataError(
            f"the column {column!r} holds {schema.field(column).type}, not text",
            where=path,
            why=f"columns of text: {', '.join(texts[:MAX_SHOWN_COLUMNS]) or 'none'}",
            fix="choose with --column, or data.column in a job; all files need the same",
        )


def iterate_parquet_rows(
    span: SourceFileSpan, column: str, reading: ReadingPosition
) -> Iterator[tuple[int, str]]:
    """(number of the row in its file, its text)."""
    with _open_columnar_file(span.path, _open_parquet) as parquet:
        sizes = [parquet.metadata.row_group(i).num_rows for i in range(span.end)]
        batches = _iterate_parquet_batches(parquet, column, span, sum(sizes[: span.begin]))
        yield from _iterate_column_rows(batches, column, span, sum(sizes[span.begin :]), reading)


def _iterate_parquet_batches(
    parquet: Any, column: str, span: SourceFileSpan, first: int
) -> Iterator[tuple[int, Any]]:
    """One row group after another: pyarrow holds the pages of all that it is asked for at once."""
    for number in range(span.begin, span.end):
        group = parquet.metadata.row_group(number)
        num_rows = _BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)
        num_rows = max(1, min(_ROWS_PER_BATCH, num_rows))
        # No threads: the workers of a build are the parallelism.
        for batch in parquet.iter_batches(
            num_rows, row_groups=[number], columns=[column], use_threads=False
        ):
            yield first, batch
            first += batch.num_rows


def read_parquet_column_pages(span: SourceFileSpan, column: str) -> Iterator[bytes]:
    """The pages of the column, as they lie in the file."""
    with (
        _open_columnar_file(span.path, _open_parquet) as parquet,
        open_regular_file(span.path, buffering=0) as file,
    ):
        for number in range(span.begin, span.end):
            group = parquet.metadata.row_group(number)
            for i in range(group.num_columns):
                chunk = group.column(i)
                if chunk.path_in_schema != column:
                    continue
                num_left = chunk.total_compressed_size
                # A dictionary lies before the pages that refer to it.
                file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
                while num_left > 0 and (block := file.read(min(num_left, _BATCH_BYTES))):
                    num_left -= len(block)
                    yield block


def iterate_arrow_rows(
    span: SourceFileSpan, column: str, reading: ReadingPosition
) -> Iterator[tuple[int, str]]:
    """(number of the record batch times 2**32, plus that of the row in it; its text)."""
    with _open_columnar_file(span.path, _open_arrow) as table:
        yield from _iterate_column_rows(
            _iterate_arrow_batches(table, span), column, span, None, reading
        )


def _iterate_arrow_batches(table: Any, span: SourceFileSpan) -> Iterator[tuple[int, Any]]:
    if isinstance(table, _import_pyarrow(span.path).ipc.RecordBatchFileReader):
        # By batch: rows of those before this span are not counted, and numbers stay the same.
        return ((i << 32, table.get_batch(i)) for i in range(span.begin, span.end))
    return ((i << 32, batch) for i, batch in enumerate(table))


def read_arrow_column_buffers(span: SourceFileSpan, column: str) -> Iterator[Any]:
    """The column's buffers, as they lie in the file."""
    arrow = _import_pyarrow(span.path)
    with _open_columnar_file(span.path, _open_arrow) as table:
        try:
            for number, batch in _iterate_arrow_batches(table, span):
                values = batch.column(batch.schema.get_field_index(column))
                yield f"{number} {len(values)}".encode()
                buffers = values.buffers()
                if arrow.types.is_dictionary(values.type):
                    buffers += values.dictionary.buffers()
                # A column without nulls has no buffer that marks them.
                for buffer in buffers:
                    if buffer is not None:
                        yield buffer
        except arrow.ArrowException as error:
            raise _build_damaged_file_error(span, "", error) from None


def _iterate_column_rows(
    batches: Iterator[tuple[int, Any]],
    column: str,
    span: SourceFileSpan,
    num_rows: int | None,
    reading: ReadingPosition,
) -> Iterator[tuple[int, str]]:
    arrow = _import_pyarrow(span.path)
    before, num_read, row = reading.read, 0, 0
    try:
        for first, batch in batches:
            row = first
            values = batch.column(batch.schema.get_field_index(column))
            _require_valid_layout(values)
            step = max(1, min(_ROWS_PER_BATCH, _BATCH_BYTES * len(values) // max(1, values.nbytes)))
            _refuse_too_long_cells(values, span, first)
            for start in range(0, len(values), step):
                for text in _values_to_texts(values.slice(start, step)):
                    if text is None:
                        reading.num_null_rows += 1
                    else:
                        yield row, text
                    row += 1
                num_read += step
                if num_rows:
                    reading.read = before + span.weight * min(1.0, num_read / num_rows)
    except arrow.ArrowException as error:
        raise _build_damaged_file_error(span, f": after row {row}", error) from None


def _require_valid_layout(values: Any) -> None:
    """Raise ArrowException for offsets or indices that lead out of a column's buffers: pyarrow
    would follow those of a damaged file to whatever lies there.

    The letters are not looked at, for text that is not UTF-8 is no damage.
    """
    import pyarrow as arrow

    if arrow.types.is_dictionary(values.type):
        values.indices.validate(full=True)
        # Only the length of the dictionary is compared with the indices.
        arrow.DictionaryArray.from_arrays(values.indices, arrow.nulls(len(values.dictionary)))
        values = values.dictionary
    layouts = {
        arrow.string(): arrow.binary(),
        arrow.large_string(): arrow.large_binary(),
        arrow.string_view(): arrow.binary_view(),
    }
    if values.type in layouts:
        values = values.view(layouts[values.type])
    values.validate(full=True)


def _refuse_too_long_cells(values: Any, span: SourceFileSpan, first: int) -> None:
    """Raise DataError for a cell that is too long to be a row, before it is made a string."""
    import pyarrow as arrow
    import pyarrow.compute

    texts = values
    if arrow.types.is_dictionary(values.type):
        texts = values.dictionary
    if not len(texts) or texts.nbytes <= MAX_ROW_BYTES or arrow.types.is_null(texts.type):
        return
    lengths = arrow.compute.binary_length(texts.cast(arrow.large_binary()))
    longest = arrow.compute.max(lengths).as_py() or 0
    if longest > MAX_ROW_BYTES:
        row = first
        # Many rows may share an entry of a dictionary: the batch's first stands for them.
        if texts is values:
            row += arrow.compute.index(lengths, longest).as_py()
        raise row_too_long_error(f"{span.path}: row {row}", f"a cell of {format_bytes(longest)}")


def _build_damaged_file_error(span: SourceFileSpan, where: str, error: Exception) -> DataError:
    return DataError(
        f"the {_format_name(span.path)} file is damaged",
        where=f"{span.path}{where}",
        why=_first_line(error),
    )


def _values_to_texts(values: Any) -> list[str | None]:
    try:
        return cast("list[str | None]", values.to_pylist())
    except UnicodeDecodeError:
        import pyarrow as arrow

        if arrow.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        texts: list[str | None] = []
        for value in values.cast(arrow.large_binary()).to_pylist():
            if value is None:
                texts.append(None)
            else:
                texts.append(value.decode("utf-8", "surrogateescape"))
        return texts
