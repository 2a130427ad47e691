"""One safetensors file of a checkpoint: written as a stream, read by ranges, every byte under a
checksum.

Torch-free.

The format is safetensors' own (8 bytes of length, a JSON header, the tensors one after the other),
so that other programs can read it. Checksums are XXH3-64 of each 4 MiB of the file, kept in the
manifest: a range is verified by reading the chunks it touches, and nothing is handed out that was
not verified in memory first.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.checkpoint.chunks import CHUNK_BYTES, ChunkChecksumStream, FileSizeAndChecksums
from phalanx.checkpoint.folder import CheckpointFolder, FileRangeReader, convert_path_to_folder
from phalanx.checkpoint.os_errors import convert_os_error
from phalanx.core.block_sizes import get_block_sizes
from phalanx.core.disk import Disk, DiskFile
from phalanx.core.errors import CheckpointError
from phalanx.core.files import parse_json

# safetensors pads its header with spaces, so that tensors begin at a multiple of 8 bytes.
_HEADER_ALIGNMENT = 8
# safetensors' own limit.
_MAX_HEADER_BYTES = 100 << 20

# torch's name of a type -> safetensors' name and bytes per element
SAFETENSORS_DTYPE_OF_TORCH_DTYPE: Mapping[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class SafetensorsHeaderEntry:
    """One tensor in a file: `start` and `stop` are bytes from the start of the file."""

    key: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def item_bytes(self) -> int:
        return (self.stop - self.start) // max(1, math.prod(self.shape))


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to write.

    `load` returns its bytes (C order) when its turn comes, so that one copy exists at a time.
    """

    key: str
    dtype: str  # torch's name
    shape: tuple[int, ...]
    load: Callable[[], Bytes]


def write_safetensors(path: Path, sources: Iterable[TensorToWrite]) -> FileSizeAndChecksums:
    """Write a safetensors file on this machine and make it durable. Raises OSError."""
    file = Disk().create(path)
    try:
        stored = write_safetensors_stream(file, sources)
        file.sync()
    finally:
        file.close()
    return stored


def write_safetensors_stream(
    file: DiskFile, sources: Iterable[TensorToWrite], *, metadata: Mapping[str, str] | None = None
) -> FileSizeAndChecksums:
    """Write a safetensors file into `file`, which the caller syncs and closes. Raises OSError."""
    sources = list(sources)
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    position = 0
    for source in sources:
        dtype, item_bytes = SAFETENSORS_DTYPE_OF_TORCH_DTYPE[source.dtype]
        num_bytes = math.prod(source.shape) * item_bytes
        offsets = [position, position + num_bytes]
        header[source.key] = {"dtype": dtype, "shape": list(source.shape), "data_offsets": offsets}
        position += num_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    digests = ChunkChecksumStream()

    def write(data: bytes | memoryview) -> None:
        digests.add_bytes(data)
        file.write(data)

    # A safetensors file: 8 bytes of length, the header, then the tensors without gaps.
    write(struct.pack("<Q", len(text)) + text)
    for source in sources:
        write(np.ascontiguousarray(source.load()).data.cast("B"))
    return digests.finish()


class VerifiedSafetensorsFile:
    """Reads verified ranges of a file.

    A context manager; raises CheckpointError that names the file and the damaged tensors.
    """

    def __init__(
        self, folder: CheckpointFolder | Path, name: str, stored: FileSizeAndChecksums
    ) -> None:
        self._folder, self._name, self._stored = convert_path_to_folder(folder), name, stored
        self.where = self._folder.where(name)
        self._reader: FileRangeReader | None = None
        # One buffer for all chunks: reading in the file's order verifies each of them once.
        self._chunk = np.empty(min(CHUNK_BYTES, max(1, stored.num_bytes)), np.uint8)
        self._chunk_number = -1
        self.num_bytes_read = 0
        self.entries: dict[str, SafetensorsHeaderEntry] = {}

    def __enter__(self) -> VerifiedSafetensorsFile:
        try:
            self._reader = self._folder.open(self._name)
            num_bytes = self._reader.num_bytes
            if num_bytes != self._stored.num_bytes:
                raise CheckpointError(
                    f"{num_bytes} bytes, not the {self._stored.num_bytes} that were written",
                    where=self.where,
                )
            self.entries = self._read_header()
        except OSError as error:
            self.__exit__()
            raise self._unreadable_file_error(error) from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def read(self, start: int, stop: int) -> Bytes:
        """Bytes [start, stop) of the file, verified."""
        out = np.empty(stop - start, np.uint8)
        position = start
        while position < stop:
            number = position // CHUNK_BYTES
            self._load_verified_chunk(number)
            chunk_start = number * CHUNK_BYTES
            end = min(stop, chunk_start + CHUNK_BYTES)
            in_chunk = slice(position - chunk_start, end - chunk_start)
            out[position - start : end - start] = self._chunk[in_chunk]
            position = end
        return out

    def read_box_of_entry(
        self, entry: SafetensorsHeaderEntry, start: tuple[int, ...], size: tuple[int, ...]
    ) -> Bytes:
        """The elements [start, start + size) of a tensor in C order, as bytes."""
        item = entry.item_bytes
        # Whole elements, so that a block is copied by numpy, and not byte by byte.
        out = np.empty(math.prod(size), _choose_dtype_of_item_bytes(item))
        if out.size:
            self._read_box_in_spans(out.reshape(size), entry.start, entry.shape, item, start)
        return out.view(np.uint8)

    def verify_chunks(self) -> Iterator[int]:
        """Verify the whole file chunk by chunk; yields bytes done.

        Raises CheckpointError at the first bad chunk.
        """
        for number in range(self._stored.num_chunks):
            self._load_verified_chunk(number)
            yield min(self._stored.num_bytes, (number + 1) * CHUNK_BYTES)

    def _read_box_in_spans(
        self,
        out: NDArray[Any],
        base: int,
        shape: tuple[int, ...],
        item: int,
        start: tuple[int, ...],
    ) -> None:
        """Fill `out` from the tensor of `shape` that begins at byte `base`.

        Rows are read in spans with their gaps.
        """
        if not shape:
            out[...] = self.read(base, base + item).view(out.dtype)[0]
            return
        # Bytes from one index of a dimension to the next; of the first one, bytes of a row.
        strides = tuple(math.prod(shape[dim + 1 :]) * item for dim in range(len(shape)))
        row = strides[0]
        # In a row: where its first wanted element begins, and its last one.
        inner = last = 0
        for offset, size, stride in zip(start[1:], out.shape[1:], strides[1:], strict=True):
            inner += offset * stride
            last += (offset + size - 1) * stride
        # Bytes of one row from its first wanted element to its last.
        span = last + item - inner
        has_gaps = span != math.prod(out.shape[1:]) * item
        max_bytes = get_block_sizes().checkpoint_read_bytes
        # Row by row where one row is too much at once, or its gaps may hold whole chunks.
        if len(shape) > 1 and (span > max_bytes or (has_gaps and span > CHUNK_BYTES)):
            for index in range(out.shape[0]):
                self._read_box_in_spans(
                    out[index], base + (start[0] + index) * row, shape[1:], item, start[1:]
                )
            return
        rows_at_once = max(1, max_bytes // max(row, 1))
        # A gap as long as a chunk may hold chunks of which nothing is wanted: those are not read.
        if row - span >= CHUNK_BYTES:
            rows_at_once = 1
        for first in range(0, out.shape[0], rows_at_once):
            count = min(rows_at_once, out.shape[0] - first)
            data_start = base + (start[0] + first) * row + inner
            data_stop = data_start + (count - 1) * row + span
            # Rows with their gaps as one view: numpy copies the wanted elements in one go.
            data = self.read(data_start, data_stop).view(out.dtype)
            block = np.lib.stride_tricks.as_strided(
                data, (count, *out.shape[1:]), strides, writeable=False
            )
            out[first : first + count] = block

    def _load_verified_chunk(self, number: int) -> None:
        if number == self._chunk_number:
            return
        start = number * CHUNK_BYTES
        length = min(CHUNK_BYTES, self._stored.num_bytes - start)
        # The buffer is not a chunk until it has verified: an error below must not leave it as one.
        self._chunk_number = -1
        assert self._reader is not None, "the file is not open"
        try:
            self._reader.fill_buffer_from(self._chunk.data[:length], start)
        except EOFError:
            raise CheckpointError("it became shorter while it was read", where=self.where) from None
        except OSError as error:
            raise self._unreadable_file_error(error) from None
        self.num_bytes_read += length
        digest = xxhash.xxh3_64_hexdigest(self._chunk.data[:length])
        stored_digest = self._stored.checksum_of_chunk(number)
        if digest != stored_digest:
            stop = start + length
            content = self._describe_tensors_in_range(start, stop)
            raise CheckpointError(
                f"its bytes are not those that were written: {content}",
                where=self.where,
                why=f"xxh3 of bytes {start} to {stop - 1} is {digest}, not {stored_digest}",
            )
        self._chunk_number = number

    def _describe_tensors_in_range(self, start: int, stop: int) -> str:
        """The tensors in a range of the file, in words."""
        entries = self.entries or self._read_unverified_entries()
        parts = []
        if start == 0:
            parts.append("the file's header")
        for entry in entries.values():
            name = entry.key.rpartition("#")[0]
            if start < entry.stop and entry.start < stop and name not in parts:
                parts.append(name)
        if len(parts) > 4:
            return f"{', '.join(parts[:4])} and {len(parts) - 4} more tensors"
        return ", ".join(parts)

    def _read_unverified_entries(self) -> dict[str, SafetensorsHeaderEntry]:
        """The entries of a header that did not verify, for the message of what may be damaged;
        never to read by."""
        length = int.from_bytes(self._chunk[:8].tobytes(), "little")
        try:
            base = 8 + length
            return dict(
                parse_safetensors_header(
                    self._chunk[8:base].tobytes(), base, self._stored.num_bytes
                )
            )
        except ValueError:
            return {}

    def _read_header(self) -> dict[str, SafetensorsHeaderEntry]:
        if self._stored.num_bytes < 8:
            raise CheckpointError("it is too short to be a safetensors file", where=self.where)
        (length,) = struct.unpack("<Q", self.read(0, 8).tobytes())
        # Before memory is taken for it: the number may be anything.
        if length > min(_MAX_HEADER_BYTES, self._stored.num_bytes - 8):
            raise CheckpointError("its header is longer than the file", where=self.where)
        base = 8 + length
        try:
            return dict(
                parse_safetensors_header(self.read(8, base).tobytes(), base, self._stored.num_bytes)
            )
        except ValueError as error:
            raise CheckpointError(
                "its header is not one of safetensors", where=self.where, why=str(error)
            ) from None

    def _unreadable_file_error(self, error: OSError) -> CheckpointError:
        return convert_os_error(error, "a file of the checkpoint cannot be read", self.where)


def parse_safetensors_header(
    text: bytes, base: int, num_bytes: int
) -> Iterator[tuple[str, SafetensorsHeaderEntry]]:
    """Yield the entries of a safetensors header; tensors begin at byte `base`.

    Raises ValueError for entries that do not add up.
    """
    try:
        entries = parse_json(text, unique_keys=True)
    except json.JSONDecodeError as error:
        raise ValueError(f"its header is no JSON at byte {error.pos}") from None
    if not isinstance(entries, dict):
        raise ValueError("its header is no object of JSON")
    for key, facts in entries.items():
        if key != "__metadata__":
            yield key, _parse_header_entry(key, facts, base, num_bytes)


def _parse_header_entry(key: str, facts: Any, base: int, num_bytes: int) -> SafetensorsHeaderEntry:
    if not isinstance(facts, dict):
        raise ValueError(f"{key} has no type, shape and place")
    shape, offsets, dtype = (facts.get(name) for name in ("shape", "data_offsets", "dtype"))
    if not _is_list_of_whole_numbers(shape):
        raise ValueError(f"the shape of {key} is no list of whole numbers")
    if not _is_list_of_whole_numbers(offsets) or len(offsets) != 2:
        raise ValueError(f"the data_offsets of {key} are not two whole numbers")
    item_bytes = dict(SAFETENSORS_DTYPE_OF_TORCH_DTYPE.values()).get(str(dtype))
    if item_bytes is None:
        raise ValueError(f"the type of {key} is {json.dumps(dtype):.60}, which is none of numbers")
    start, stop = (base + offset for offset in offsets)
    # Two negative lengths would have the right product.
    if not base <= start <= stop <= num_bytes or any(length < 0 for length in shape):
        raise ValueError(f"{key} lies outside the file")
    if stop - start != math.prod(shape) * item_bytes:
        raise ValueError(f"{key} is {dtype} {shape} in {stop - start} bytes")
    return SafetensorsHeaderEntry(key, str(dtype), tuple(shape), start, stop)


def _is_list_of_whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _choose_dtype_of_item_bytes(item_bytes: int) -> np.dtype[Any]:
    """A numpy type of `item_bytes` bytes, for moving elements without reading them."""
    if item_bytes in (1, 2, 4, 8):
        return np.dtype(f"u{item_bytes}")
    return np.dtype(f"V{item_bytes}")
