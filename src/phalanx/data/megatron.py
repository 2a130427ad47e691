"""Megatron's `.bin` and `.idx` (MMapIndexedDataset, version 1), read where they lie. Torch-free.

The `.bin` holds the tokens of all sequences, one after another. The `.idx`, little-endian:

    magic "MMIDIDX" and two zero bytes | version uint64 | code of the type uint8
    number of sequences S uint64 | number of document boundaries D uint64
    lengths int32 [S], in tokens | pointers int64 [S], in bytes into the .bin
    boundaries int64 [D], in sequences
    modes int8 [S], only in datasets of several modalities

Document d is the sequences from boundary d to boundary d + 1.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError
from phalanx.core.files import open_regular_file
from phalanx.data.tokens import Int64s, Tokens, Uint64s, hash_document_numbers
from phalanx.data.unreadable import build_unreadable_data_error

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
_TNT_INDEX_MAGIC = b"TNTIDX\x00\x00"  # the formats before memory-mapping
_INDEX_HEADER = struct.Struct("<9sQBQQ")
# Megatron's codes of integer types; 6 and 7 are floating point, and no token ids.
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class MegatronFile:
    """An open dataset: tokens memory-mapped, and the documents in them. Documents have numbers, no
    names.
    """

    bin_path: Path
    tokens: Tokens
    ends: Uint64s
    keys: Uint64s


def megatron_paths(source: str) -> tuple[Path, Path] | None:
    """The .bin and the .idx that `source` means: either of them, or what both begin with. None if
    it means neither.
    """
    path = Path(os.path.expanduser(source))
    if not path.name:  # "." or "/"
        return None
    prefix = path
    if path.suffix in (".bin", ".idx"):
        prefix = path.with_suffix("")
    pair = prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")
    named = path.suffix in (".bin", ".idx") and os.path.isfile(path)
    if named or all(map(os.path.isfile, pair)):
        return pair
    return None


def open_megatron(bin_path: Path, idx_path: Path) -> MegatronFile:
    """Map both files after checking that one describes the other. Raises DataError (exit 4)."""
    try:
        index, tokens = _map_file_bytes(idx_path), _map_file_bytes(bin_path)
    except OSError as error:
        fix = "a Megatron dataset is a .bin with its .idx"
        raise build_unreadable_data_error(error, error.filename or idx_path, fix=fix) from None
    dtype, lengths, pointers, boundaries = _parse_megatron_index(index, idx_path)
    itemsize = np.dtype(dtype).itemsize
    ends = np.cumsum(lengths)
    # Pointers could lead anywhere; one view of the whole .bin needs them in a row.
    if not np.array_equal(pointers, (ends - lengths) * itemsize):
        raise _unusable_megatron_error(
            idx_path, "its sequences do not follow one another in the .bin"
        )
    expected = int(ends[-1]) * itemsize
    if len(tokens) != expected:
        raise _unusable_megatron_error(
            bin_path, f"it has {len(tokens)} bytes, and its index describes {expected}"
        )
    if boundaries[0] != 0 or boundaries[-1] != len(lengths) or (np.diff(boundaries) < 0).any():
        raise _unusable_megatron_error(
            idx_path, f"its documents do not cover its {len(lengths)} sequences in order"
        )
    document_ends = np.concatenate([np.zeros(1, np.int64), ends])[boundaries[1:]]
    return MegatronFile(
        bin_path=bin_path,
        tokens=tokens.view(dtype),
        ends=document_ends.astype(np.uint64),
        keys=hash_document_numbers(np.arange(len(document_ends))),
    )


def _map_file_bytes(path: Path) -> NDArray[np.uint8]:
    """The bytes of a regular file, memory-mapped. Raises OSError."""
    with open_regular_file(path) as file:
        # An empty file cannot be mapped.
        if not os.fstat(file.fileno()).st_size:
            return np.zeros(0, np.uint8)
        return np.memmap(file, np.uint8, "r")


def _parse_megatron_index(
    index: NDArray[np.uint8], path: Path
) -> tuple[str, Int64s, Int64s, Int64s]:
    """Type of the tokens, then lengths, pointers and boundaries."""
    head = bytes(index[: _INDEX_HEADER.size])
    if head.startswith(_TNT_INDEX_MAGIC):
        fix = "write it again with the mmap implementation"
        raise DataError(
            "an index of Megatron's older format, which cannot be read", where=str(path), fix=fix
        )
    if len(head) < _INDEX_HEADER.size or not head.startswith(MAGIC):
        raise _unusable_megatron_error(path, f"it begins with {head[:9]!r}, not with {MAGIC!r}")
    _, version, code, num_sequences, num_boundaries = _INDEX_HEADER.unpack(head)
    if version != VERSION:
        raise _unusable_megatron_error(path, f"it has version {version}, not {VERSION}")
    if code not in MEGATRON_DTYPES:
        raise _unusable_megatron_error(path, f"type {code} is not one of token ids")
    if num_sequences == 0 or num_boundaries < 2:
        raise _unusable_megatron_error(path, "it describes no document")
    columns = (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_boundaries))
    expected = _INDEX_HEADER.size + sum(
        np.dtype(dtype).itemsize * count for dtype, count in columns
    )
    # With modes, one byte more for each sequence.
    if len(index) not in (expected, expected + num_sequences):
        raise _unusable_megatron_error(
            path, f"it has {len(index)} bytes, and {num_sequences} sequences need {expected}"
        )
    sections, at = [], _INDEX_HEADER.size
    for dtype, count in columns:
        size = np.dtype(dtype).itemsize * count
        # Copied: behind a head of 34 bytes no column is aligned.
        sections.append(np.frombuffer(index[at : at + size].tobytes(), dtype).astype(np.int64))
        at += size
    lengths, pointers, boundaries = sections
    if (lengths < 0).any() or not lengths.any():
        raise _unusable_megatron_error(path, "its sequences hold no tokens")
    if (boundaries < 0).any() or (boundaries > num_sequences).any():
        raise _unusable_megatron_error(
            path, f"its documents do not cover its {num_sequences} sequences in order"
        )
    return MEGATRON_DTYPES[code], lengths, pointers, boundaries


def _unusable_megatron_error(path: Path, why: str) -> DataError:
    return DataError("not a usable Megatron dataset", where=str(path), why=why)
