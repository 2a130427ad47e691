"""A shard is whole or absent, says what is in it, and tells where a bit was flipped."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import DataError
from phalanx.data.shard_writer import ShardWriter
from phalanx.data.shards import (
    CHUNK_BYTES,
    PAYLOAD_OFFSET,
    Shard,
    ShardFacts,
    open_shard,
    verify_shard,
)

VOCAB = 50_000
DIGEST = "0123456789abcdef"


def write(
    path: Path, documents: list[list[int]], dtype: str = "<u2", vocab_size: int = VOCAB
) -> ShardFacts:
    with ShardWriter(path, dtype, vocab_size, DIGEST) as writer:
        for key, document in enumerate(documents):
            writer.begin_document(key + 7)
            writer.write(np.array(document[: len(document) // 2], np.int64))
            writer.write(np.array(document[len(document) // 2 :], np.int64))
        return writer.commit()


def documents_of(shard: Shard) -> list[list[int]]:
    starts = [0, *shard.ends[:-1].tolist()]
    return [shard.tokens[a:b].tolist() for a, b in zip(starts, shard.ends.tolist(), strict=True)]


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many chunks of checksums: tokens first, the boundaries in the last."""
    path = tmp_path_factory.mktemp("big") / "shard-00000.tokens"
    ids = np.random.default_rng(0).integers(0, VOCAB, 5_000_000)
    with ShardWriter(path, "<u2", VOCAB, DIGEST) as writer:
        for key, part in enumerate(np.split(ids, 1000)):
            writer.begin_document(key)
            writer.write(part)
        writer.commit()
    return path


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.integers(0, VOCAB - 1), max_size=9), min_size=1, max_size=9
    ).filter(any),
    dtype=st.sampled_from(["<u2", "<u4"]),
)
def test_what_is_written_is_what_is_read(
    tmp_path_factory, documents: list[list[int]], dtype: str
) -> None:
    path = tmp_path_factory.mktemp("shard") / "s.tokens"
    facts = write(path, documents, dtype)
    shard = open_shard(path)
    kept = [(key + 7, document) for key, document in enumerate(documents) if document]
    assert documents_of(shard) == [document for _, document in kept]
    assert shard.keys.tolist() == [key for key, _ in kept]
    assert shard.tokens.dtype == np.dtype(dtype)
    assert shard.facts == facts
    assert facts.max_token_id == max(max(document) for _, document in kept)
    assert facts.num_bytes == path.stat().st_size
    assert verify_shard(path) == []


def test_documents_may_be_written_many_at_once(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s.tokens", "<u2", VOCAB, DIGEST) as writer:
        writer.begin_document(7)
        writer.write_documents(np.array([1, 2]), np.zeros(0, np.int64), [])
        writer.write_documents(np.array([3, 4, 5]), np.array([1, 2]), [8, 9])
        writer.begin_document(10)  # no token of it ever comes: it is none
        writer.write_documents(np.array([6, 7]), np.array([0]), [11])
        writer.begin_document(12)
        writer.write_documents(np.array([8, 9]), np.array([1]), [13])
        writer.commit()
    shard = open_shard(tmp_path / "s.tokens")
    assert documents_of(shard) == [[1, 2, 3], [4], [5], [6, 7], [8], [9]]
    assert shard.keys.tolist() == [7, 8, 9, 11, 12, 13]


def test_a_shard_can_be_read_with_numpy_alone(tmp_path: Path) -> None:
    """The layout as documented; nothing of ours reads it here."""
    write(tmp_path / "s.tokens", [[1, 2, 3], [4, 5]])
    raw = (tmp_path / "s.tokens").read_bytes()
    assert raw[:8] == b"PHXSHARD"
    assert np.frombuffer(raw, "<u2", 5, 4096).tolist() == [1, 2, 3, 4, 5]
    assert np.frombuffer(raw, "<u8", 2, 4096 + 16).tolist() == [3, 5]
    assert np.frombuffer(raw, "<u8", 2, 4096 + 32).tolist() == [7, 8]
    assert np.frombuffer(raw, "<u8", 1, 4096 + 48)[0] == xxhash.xxh3_64_intdigest(
        raw[4096 : 4096 + 48]
    )


def test_the_same_tokens_make_the_same_bytes(tmp_path: Path) -> None:
    documents = [[3, 1], [4]]
    assert (
        write(tmp_path / "a.tokens", documents).xxh3 == write(tmp_path / "b.tokens", documents).xxh3
    )
    assert (tmp_path / "a.tokens").read_bytes() == (tmp_path / "b.tokens").read_bytes()
    other = dataclasses.replace(write(tmp_path / "b.tokens", [[3, 1], [5]]), file="a.tokens")
    assert other.xxh3 != write(tmp_path / "a.tokens", documents).xxh3


def test_leaving_without_a_commit_leaves_nothing(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s.tokens", "<u2", VOCAB, DIGEST) as writer:
        writer.begin_document(1)
        writer.write(np.array([1, 2]))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_never_written(tmp_path: Path, token: int) -> None:
    with pytest.raises(DataError, match=f"token {token} does not fit a vocabulary of {VOCAB}"):
        write(tmp_path / "s.tokens", [[1, 2], [3, token]])
    assert os.listdir(tmp_path) == []


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 8]))


def place_of(error: DataError) -> tuple[int, int]:
    words = error.what.split()
    assert words[0] == "bytes", error
    return int(words[1]), int(words[3])


@pytest.mark.parametrize("part", [0.0, 0.1, 0.49, 0.7, 0.97])
def test_a_flipped_bit_is_named_by_shard_bytes_and_tokens(big: Path, part: float) -> None:
    at = PAYLOAD_OFFSET + int(part * 10_000_000)
    flip(big, at)
    try:
        (error,) = verify_shard(big)
    finally:
        flip(big, at)
    assert error.where == str(big)
    begin, end = place_of(error)
    assert begin <= at < end <= begin + CHUNK_BYTES
    tokens = [int(word) for word in str(error.why).replace(",", "").split() if word.isdigit()]
    assert tokens[0] <= (at - PAYLOAD_OFFSET) // 2 <= tokens[1]
    assert verify_shard(big) == []


def test_neighbouring_damage_is_one_problem_and_distant_damage_several(big: Path) -> None:
    places = [PAYLOAD_OFFSET + chunk * CHUNK_BYTES + 5 for chunk in (3, 4, 5, 90)]
    for at in places:
        flip(big, at)
    try:
        errors = verify_shard(big)
    finally:
        for at in places:
            flip(big, at)
    ranges = [
        (PAYLOAD_OFFSET + a * CHUNK_BYTES, PAYLOAD_OFFSET + b * CHUNK_BYTES)
        for a, b in ((3, 6), (90, 91))
    ]
    assert [place_of(error) for error in errors] == ranges


def test_a_flipped_bit_in_the_boundaries_is_named(big: Path) -> None:
    at = PAYLOAD_OFFSET + 10_000_000 + 100
    flip(big, at)
    try:
        (error,) = verify_shard(big)
    finally:
        flip(big, at)
    begin, end = place_of(error)
    assert begin <= at < end
    assert "where documents end" in str(error)


def test_a_flipped_bit_in_the_checksums_is_said(big: Path) -> None:
    at = big.stat().st_size - 3
    flip(big, at)
    try:
        (error,) = verify_shard(big)
    finally:
        flip(big, at)
    assert "checksums are not what was written" in str(error)


@pytest.mark.parametrize("at", [9, 14, 20, 40, 3000])
def test_a_flipped_bit_in_the_header_is_found_when_it_is_opened(tmp_path: Path, at: int) -> None:
    write(tmp_path / "s.tokens", [[1, 2, 3]])
    flip(tmp_path / "s.tokens", at)
    with pytest.raises(
        DataError, match=r"s\.tokens: (the shard's header is not what was written|format)"
    ):
        open_shard(tmp_path / "s.tokens")


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (0, "the shard is empty"),
        (5, "not a token shard"),
        (100, "header has 100"),
        (4096, "cut off"),
        (4107, "cut off"),
    ],
)
def test_a_truncated_shard(tmp_path: Path, length: int, said: str) -> None:
    write(tmp_path / "s.tokens", [[1, 2, 3]])
    os.truncate(tmp_path / "s.tokens", length)
    with pytest.raises(DataError, match=said):
        open_shard(tmp_path / "s.tokens")


def test_bytes_after_the_end(tmp_path: Path) -> None:
    write(tmp_path / "s.tokens", [[1, 2, 3]])
    with open(tmp_path / "s.tokens", "ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="bytes after its end"):
        open_shard(tmp_path / "s.tokens")


def test_what_is_not_a_shard(tmp_path: Path) -> None:
    (tmp_path / "s.tokens").write_text("once upon a time" * 1000)
    with pytest.raises(DataError, match="not a token shard"):
        open_shard(tmp_path / "s.tokens")
    with pytest.raises(DataError, match="missing"):
        open_shard(tmp_path / "t.tokens")
