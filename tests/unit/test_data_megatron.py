"""Megatron's .bin and .idx, written here by their published layout, are read as they are, or
refused in one line."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from phalanx.core.errors import DataError
from phalanx.data.corpus import Corpus, verify_corpus_checksums
from phalanx.data.megatron import megatron_paths
from phalanx.data.prepare import prepare_corpus
from phalanx.job.schema import Data

CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}
DOCUMENTS = [
    [[1, 2, 3], [4]],
    [[5, 6, 7, 8]],
    [],
    [[9], [10, 11], [12]],
]  # documents of sequences of tokens


def write(
    folder: Path,
    documents: list[list[list[int]]],
    dtype: str = "<i4",
    modes: bool = False,
    **changed: object,
) -> str:
    """A dataset named "corpus"; `changed` replaces a part of the index."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    parts = {
        "magic": b"MMIDIDX\x00\x00",
        "version": struct.pack("<Q", 1),
        "code": struct.pack("<B", CODES[dtype]),
        "num_sequences": struct.pack("<Q", len(sequences)),
        "num_boundaries": struct.pack("<Q", len(documents) + 1),
        "lengths": lengths.tobytes(),
        "pointers": ((np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize)
        .astype("<i8")
        .tobytes(),
        "boundaries": np.cumsum([0, *(len(document) for document in documents)])
        .astype("<i8")
        .tobytes(),
        "modes": bytes(len(sequences)) if modes else b"",
    }
    tokens = np.array([token for sequence in sequences for token in sequence], dtype)
    (folder / "corpus.bin").write_bytes(changed.pop("bin", tokens.tobytes()))
    (folder / "corpus.idx").write_bytes(b"".join((parts | changed).values()))
    return str(folder / "corpus")


def prepare(source: str, out_dir: Path, **keys: object) -> Corpus:
    return prepare_corpus(
        Data(source=source, **{"seq_len": 4, "held_out_fraction": 0.0} | keys),
        out_dir,
        vocab_size=None,
    )


@pytest.mark.parametrize("dtype", list(CODES))
@pytest.mark.parametrize("modes", [False, True])
def test_tokens_and_documents_are_read_as_they_are(tmp_path: Path, dtype: str, modes: bool) -> None:
    prefix = write(tmp_path, DOCUMENTS, dtype, modes)
    corpus = prepare(prefix, tmp_path / "data")
    (sequence,) = corpus.sequences("train")
    assert sequence[:].tolist() == list(range(1, 13))
    assert sequence.document_ends().tolist() == [4, 8, 12]  # a document without tokens is none
    assert (corpus.vocab_size, corpus.components[0].kind) == (13, "megatron")
    assert set(corpus.components[0].files) == {"corpus.bin", "corpus.idx"}


def test_the_prefix_and_both_files_name_it(tmp_path: Path) -> None:
    prefix = write(tmp_path, DOCUMENTS)
    pair = (Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
    assert [megatron_paths(name) for name in (prefix, *map(str, pair))] == [pair] * 3
    assert megatron_paths(str(tmp_path / "other")) is None


def test_documents_are_held_out_whole_and_can_be_masked(tmp_path: Path) -> None:
    documents = [[[number] * 5] for number in range(100)]
    corpus = prepare(
        write(tmp_path, documents), tmp_path / "data", held_out_fraction=0.3, document_masks=True
    )
    sides = [set(corpus.sequences(split)[0][:].tolist()) for split in ("train", "held_out")]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == set(range(100))
    assert 15 < len(sides[1]) < 45


def _bytes(dtype: str, *values: int) -> bytes:
    return np.array(values, dtype).tobytes()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"magic": b"GARBAGE\x00\x00"}, "it begins with"),
        ({"magic": b"TNTIDX\x00\x00\x00"}, "older format"),
        ({"version": struct.pack("<Q", 2)}, "it has version 2, not 1"),
        ({"code": b"\x06"}, "type 6 is not one of token ids"),
        ({"num_sequences": struct.pack("<Q", 0)}, "it describes no document"),
        ({"num_sequences": struct.pack("<Q", 2**60)}, "sequences need"),
        ({"boundaries": _bytes("<i8", 0, 2, 3, 3)}, "sequences need"),
        (
            {"lengths": _bytes("<i4", 3, 1, 4, 1, 2, 2)},
            "it has 48 bytes, and its index describes 52",
        ),
        ({"lengths": _bytes("<i4", 3, -1, 4, 1, 2, 1)}, "hold no tokens"),
        ({"pointers": _bytes("<i8", 0, 12, 20, 32, 36, 44)}, "do not follow one another"),
        ({"boundaries": _bytes("<i8", 0, 2, 3, 3, 5)}, "do not cover its 6 sequences"),
        ({"boundaries": _bytes("<i8", 0, 3, 2, 3, 6)}, "do not cover its 6 sequences"),
        ({"boundaries": _bytes("<i8", 0, 2, 9, 9, 6)}, "do not cover its 6 sequences"),
        ({"bin": b""}, "it has 0 bytes"),
    ],
)
def test_what_does_not_add_up_is_refused(
    tmp_path: Path, changed: dict[str, bytes], said: str
) -> None:
    source = write(tmp_path, DOCUMENTS, **changed)
    with pytest.raises(DataError) as caught:
        prepare(source, tmp_path / "data")
    assert said in str(caught.value)
    assert "corpus." in str(caught.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("missing", ["bin", "idx"])
def test_both_files_are_needed(tmp_path: Path, missing: str) -> None:
    prefix = write(tmp_path, DOCUMENTS)
    Path(f"{prefix}.{missing}").unlink()
    there = {"bin": "idx", "idx": "bin"}[missing]
    with pytest.raises(DataError, match=r"a \.bin with its \.idx"):
        prepare(f"{prefix}.{there}", tmp_path / "data")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("part", ["bin", "idx"])
@pytest.mark.parametrize("damage", [_truncate, Path.unlink])
def test_files_that_changed_since_the_run_began_are_named(
    tmp_path: Path, part: str, damage: Callable[[Path], None]
) -> None:
    prefix = write(tmp_path, DOCUMENTS)
    corpus = prepare(prefix, tmp_path / "data")
    damage(Path(f"{prefix}.{part}"))
    with pytest.raises(
        DataError, match=rf"corpus\.{part}: the corpus has changed since the run began"
    ):
        corpus.sequences("train")


def test_a_flipped_bit_is_found_before_a_run_goes_on(tmp_path: Path) -> None:
    prefix = write(tmp_path, DOCUMENTS)
    corpus = prepare(prefix, tmp_path / "data")
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[4] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"corpus\.bin: the corpus has changed .*checksum"):
        verify_corpus_checksums(corpus)


def test_negative_ids_are_refused_by_their_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus\.bin: position 1: token id -7 is negative"):
        prepare(write(tmp_path, [[[1, -7, 2, 3, 4, 5]]]), tmp_path / "data")


@pytest.mark.parametrize("source", [".", "/", ""])
def test_a_folder_without_a_name_means_no_pair(source: str) -> None:
    assert megatron_paths(source) is None
