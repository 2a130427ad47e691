"""Files of a checkpoint: safetensors to everybody else, ranges verified in memory, damage named."""

from __future__ import annotations

import json
import os
import random
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from phalanx.checkpoint.chunks import CHUNK_BYTES, FileSizeAndChecksums
from phalanx.checkpoint.manifest import (
    MANIFEST_FILE_NAME,
    Manifest,
    StoredPiece,
    StoredTensorPieces,
    compute_manifest_checksum,
    encode_canonical_manifest,
)
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.shard_file import TensorToWrite, VerifiedSafetensorsFile, write_safetensors
from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.core.errors import CheckpointError

RANDOM = np.random.default_rng(0)
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "scalar#0": np.full((), 2.5, np.float32),
    "empty#0": np.zeros((0, 3), np.int64),
    "flags#0": RANDOM.random(17) < 0.5,
    "half#0": RANDOM.standard_normal((5, 3)).astype(np.float16),
    "cube#0": RANDOM.standard_normal((7, 6, 5)),
    "large#0": RANDOM.standard_normal((1500, 1000)).astype(np.float32),  # 6 MB: over a chunk's edge
}


def source(key: str, array: np.ndarray[Any, Any]) -> TensorToWrite:
    return TensorToWrite(
        key,
        str(array.dtype),
        array.shape,
        lambda: np.ascontiguousarray(array).reshape(-1).view(np.uint8),
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FileSizeAndChecksums]:
    directory = tmp_path_factory.mktemp("file")
    return directory, write_safetensors(
        directory / "a.safetensors", [source(*item) for item in ARRAYS.items()]
    )


def test_the_safetensors_library_reads_what_we_write(
    written: tuple[Path, FileSizeAndChecksums],
) -> None:
    found = load_file(written[0] / "a.safetensors")
    assert set(found) == set(ARRAYS)
    for key, array in ARRAYS.items():
        assert found[key].dtype == array.dtype
        assert np.array_equal(found[key], array)


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "b.safetensors", metadata={"format": "np"})
    with VerifiedSafetensorsFile(
        tmp_path,
        "b.safetensors",
        FileSizeAndChecksums.compute_from_file(tmp_path / "b.safetensors"),
    ) as file:
        for key, array in ARRAYS.items():
            found = file.read_box_of_entry(file.entries[key], (0,) * array.ndim, array.shape)
            assert np.array_equal(found.view(array.dtype).reshape(array.shape), array)


def test_checksums_of_the_stream_are_those_of_the_file(
    written: tuple[Path, FileSizeAndChecksums],
) -> None:
    assert FileSizeAndChecksums.compute_from_file(written[0] / "a.safetensors") == written[1]
    assert written[1].num_chunks == 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_block_is_read_as_numpy_slices_it(
    written: tuple[Path, FileSizeAndChecksums], data: st.DataObject
) -> None:
    key = data.draw(st.sampled_from(list(ARRAYS)))
    array = ARRAYS[key]
    start = tuple(data.draw(st.integers(0, n)) for n in array.shape)
    size = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(array.shape, start, strict=True))
    sizes = BlockSizes(checkpoint_read_bytes=data.draw(st.sampled_from([16, 600, 9000, 32 << 20])))
    with use_block_sizes(sizes):
        with VerifiedSafetensorsFile(written[0], "a.safetensors", written[1]) as file:
            found = file.read_box_of_entry(file.entries[key], start, size)
    expected = array[tuple(slice(o, o + n) for o, n in zip(start, size, strict=True))]
    assert np.array_equal(found.view(array.dtype).reshape(size), expected)


def test_only_the_chunks_of_a_range_are_read(tmp_path: Path) -> None:
    big = np.arange(12 * CHUNK_BYTES // 4, dtype=np.int32).reshape(12 * 1024, -1)
    stored = write_safetensors(tmp_path / "big.safetensors", [source("big#0", big)])
    with VerifiedSafetensorsFile(tmp_path, "big.safetensors", stored) as file:
        found = file.read_box_of_entry(file.entries["big#0"], (6 * 1024, 0), (1024, big.shape[1]))
        assert np.array_equal(found.view(np.int32).reshape(1024, -1), big[6 * 1024 : 7 * 1024])
        assert (
            file.num_bytes_read <= 3 * CHUNK_BYTES
        )  # the header's chunk and the two that the rows lie in


# A whole checkpoint, torch-free


def checkpoint(directory: Path) -> Path:
    """Two files with pieces of two tensors and a manifest."""
    directory.mkdir()
    w, m = ARRAYS["large#0"], ARRAYS["cube#0"]
    parts = {
        "rank-0000.safetensors": {"w#0": w[:700], "m#0": m[:, :2]},
        "rank-0001.safetensors": {"w#0": w[700:], "m#0": m[:, 2:]},
    }
    stored = {
        n: write_safetensors(directory / n, [source(*item) for item in p.items()])
        for n, p in parts.items()
    }
    first, second = parts
    tensors = {
        "w": StoredTensorPieces(
            w.shape,
            "float32",
            (
                StoredPiece(first, "w#0", (0, 0), (700, 1000)),
                StoredPiece(second, "w#0", (700, 0), (800, 1000)),
            ),
        ),
        "m": StoredTensorPieces(
            m.shape,
            "float64",
            (
                StoredPiece(first, "m#0", (0, 0, 0), (7, 2, 5)),
                StoredPiece(second, "m#0", (0, 2, 0), (7, 4, 5)),
            ),
        ),
    }
    manifest = Manifest(3, "", {}, {"step": 3}, tensors, {}, stored)
    (directory / MANIFEST_FILE_NAME).write_bytes(manifest.to_bytes())
    return directory


def test_an_undamaged_one_verifies_and_reports_its_bytes(tmp_path: Path) -> None:
    passed: list[int] = []
    directory = checkpoint(tmp_path / "c")
    assert find_checkpoint_problems(directory, passed.append) == []
    assert sum(passed) == sum(file.stat().st_size for file in directory.glob("*.safetensors"))


MIB = 1 << 20
PARTS: dict[
    str, dict[str, int]
] = {  # bytes of each tensor; of the first file's three chunks the middle one has one
    "rank-0000.safetensors": {
        "lookup.weight": 3 * MIB,
        "blocks.0.weight": 6 * MIB,
        "norm.weight": 1024,
    },
    "rank-0001.safetensors": {"out.weight": MIB, "steps": 8},
}


def several_chunks(directory: Path) -> Path:
    directory.mkdir()
    stored, tensors = {}, {}
    for file, sizes in PARTS.items():
        arrays = {name: RANDOM.integers(0, 2**60, size // 8) for name, size in sizes.items()}
        stored[file] = write_safetensors(
            directory / file, [source(f"{name}#0", array) for name, array in arrays.items()]
        )
        tensors |= {
            name: StoredTensorPieces(
                array.shape, "int64", (StoredPiece(file, f"{name}#0", (0,), array.shape),)
            )
            for name, array in arrays.items()
        }
    (directory / MANIFEST_FILE_NAME).write_bytes(
        Manifest(3, "", {}, {}, tensors, {}, stored).to_bytes()
    )
    return directory


def in_the_chunk_of(data: bytes, at: int) -> list[str]:
    """The header, if it is there, and the tensors of which a chunk of the file has bytes, found
    by the format alone."""
    (length,) = struct.unpack("<Q", data[:8])
    begin = at // (4 * MIB) * 4 * MIB
    found = ["the file's header"] if begin == 0 else []
    for key, entry in json.loads(data[8 : 8 + length]).items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        if start < begin + 4 * MIB and begin < stop:
            found.append(key.removesuffix("#0"))
    return found


def test_a_thousand_flipped_bits_are_all_found_and_named(tmp_path: Path) -> None:
    """Anywhere in any file: file and chunk are named, and the tensors in it, that of the flipped
    bit among them."""
    directory = several_chunks(tmp_path / "c")
    originals = {path: path.read_bytes() for path in sorted(directory.iterdir())}
    manifest, *_ = originals
    dice = random.Random(7)
    struck = set()
    for _ in range(1000):
        path = dice.choices(list(originals), (1, 6, 3))[0]
        data = originals[path]
        at = (
            dice.randrange(len(data))
            if dice.random() < 0.8
            else dice.randrange(min(len(data), 300))
        )
        flipped = bytes([data[at] ^ (1 << dice.randrange(8))])
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(flipped)
        errors = find_checkpoint_problems(directory)
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(data[at : at + 1])
        (error,) = errors
        if path == manifest:
            continue
        assert path.name in str(error)
        (length,) = struct.unpack("<Q", data[:8])
        named = in_the_chunk_of(data, at)
        struck.add((path.name, at // (4 * MIB)))
        if at >= 8 + length:
            assert (
                f"written: {', '.join(named)} (xxh3 of bytes {at // (4 * MIB) * 4 * MIB} to "
                in str(error)
            ), at
        else:
            assert "written: the file's header" in str(error), at
    assert len(struck) == 4
    assert find_checkpoint_problems(directory) == []


def test_the_damaged_tensor_is_named(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "c")
    path = directory / "rank-0001.safetensors"
    with open(path, "r+b") as file:
        file.seek(-3, 2)
        file.write(b"\xff")
    (error,) = find_checkpoint_problems(directory)
    assert "rank-0001.safetensors" in str(error)
    assert "written: the file's header, w, m (xxh3" in str(error)


def edited(directory: Path, change: Any) -> list[CheckpointError]:
    body = json.loads((directory / MANIFEST_FILE_NAME).read_text())
    change(body)
    body["xxh3"] = compute_manifest_checksum(body)
    (directory / MANIFEST_FILE_NAME).write_bytes(encode_canonical_manifest(body))
    return find_checkpoint_problems(directory)


def pieces(body: dict[str, Any]) -> Any:
    return body["tensors"]["w"]["pieces"]


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("do not make", lambda b: pieces(b).pop()),
        ("do not make", lambda b: pieces(b)[1].update(offset=[600, 0])),
        ("not the block of w", lambda b: pieces(b)[0].update(key="m#0")),
        ("not the block of w", lambda b: pieces(b)[0].update(key="nowhere")),
        ("which no release writes", lambda b: b["tensors"]["w"].update(dtype="object")),
        ("was written by nobody|no save wrote", lambda b: b["files"].pop("rank-0001.safetensors")),
    ],
)
def test_a_manifest_that_was_edited_and_signed_again_is_found(
    tmp_path: Path, what: str, change: Any
) -> None:
    directory = checkpoint(tmp_path / "c")
    if "nobody|" in what:

        def both(body: dict[str, Any]) -> None:
            change(body)
            for tensor in body["tensors"].values():
                tensor["pieces"] = [p for p in tensor["pieces"] if p["file"] in body["files"]]

        errors = edited(directory, both)
    else:
        errors = edited(directory, change)
    assert any(part in str(error) for error in errors for part in what.split("|")), errors


def test_missing_extra_and_truncated_files_are_all_said_at_once(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "c")
    (directory / "rank-0000.safetensors").unlink()
    data = (directory / "rank-0001.safetensors").read_bytes()
    (directory / "rank-0001.safetensors").write_bytes(data[:-5])
    messages = [str(error) for error in find_checkpoint_problems(directory)]
    assert any("rank-0000.safetensors is missing" in m and "holds m, w" in m for m in messages)
    assert any("rank-0001.safetensors" in m and f"{len(data) - 5} bytes" in m for m in messages)


@pytest.mark.parametrize("name", ["rank-0000.safetensors", MANIFEST_FILE_NAME])
def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    directory = checkpoint(tmp_path / "c")
    (directory / name).unlink()
    os.mkfifo(directory / name)
    assert any("not a regular file" in str(error) for error in find_checkpoint_problems(directory))


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "OBJ", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 8]}}',
        b"[" * 5000,
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + b"12345678")
    with (
        pytest.raises(CheckpointError),
        VerifiedSafetensorsFile(
            tmp_path, "a", FileSizeAndChecksums.compute_from_file(tmp_path / "a")
        ),
    ):
        pass


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with (
        pytest.raises(CheckpointError, match="longer than the file"),
        VerifiedSafetensorsFile(
            tmp_path, "a", FileSizeAndChecksums.compute_from_file(tmp_path / "a")
        ),
    ):
        pass


def test_a_wrong_size_is_said_before_anything_is_read(
    written: tuple[Path, FileSizeAndChecksums],
) -> None:
    directory, stored = written
    with (
        pytest.raises(CheckpointError, match="that were written"),
        VerifiedSafetensorsFile(
            directory, "a.safetensors", replace(stored, num_bytes=stored.num_bytes + 1)
        ) as file,
    ):
        assert file.num_bytes_read == 0


def test_a_stored_file_is_plain_json(written: tuple[Path, FileSizeAndChecksums]) -> None:
    assert FileSizeAndChecksums(**json.loads(json.dumps(asdict(written[1])))) == written[1]
