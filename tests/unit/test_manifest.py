"""The manifest: read back as written, refused when it is not, and listed in order of steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.chunks import FileSizeAndChecksums
from phalanx.checkpoint.manifest import (
    MANIFEST_FILE_NAME,
    Manifest,
    StoredPiece,
    StoredTensorPieces,
    build_checkpoint_path,
    compute_manifest_checksum,
    encode_canonical_manifest,
    list_checkpoint_paths_of_run,
    read_manifest,
)
from phalanx.core.errors import CheckpointError, ExitCode

ONE = Manifest(
    step=7,
    job_digest="abc",
    layout={"dp_shard": 2},
    facts={"seed": 3, "note": "é"},
    tensors={
        "w": StoredTensorPieces(
            (4, 2), "float32", (StoredPiece("a.safetensors", "w#0", (0, 0), (4, 2)),)
        )
    },
    aliases={"head.weight": "w"},
    files={"a.safetensors": FileSizeAndChecksums(100, "00ff00ff00ff00ff")},
)


def write(directory: Path, body: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST_FILE_NAME).write_bytes(encode_canonical_manifest(body))
    return directory


def test_it_comes_back(tmp_path: Path) -> None:
    assert read_manifest(write(tmp_path, ONE.to_json())) == ONE
    assert ONE.num_bytes == 100


def test_the_step_of_name_manifest_and_state_is_one(tmp_path: Path) -> None:
    assert read_manifest(write(tmp_path / "step-7", ONE.to_json())) == ONE
    with pytest.raises(CheckpointError, match="step-9 holds step 7"):
        read_manifest(write(tmp_path / "step-9", ONE.to_json()))
    other = replace(ONE, facts={"step": 9})
    with pytest.raises(
        CheckpointError, match="the manifest is of step 7, and the state in it of step 9"
    ):
        read_manifest(write(tmp_path / "step-7", other.to_json()))


WHOLE = ONE.to_bytes()
OTHER_WAYS = {
    "spacing": json.dumps(ONE.to_json(), sort_keys=True, ensure_ascii=False).encode(),
    "order": json.dumps(
        dict(reversed(ONE.to_json().items())), indent=1, ensure_ascii=False
    ).encode()
    + b"\n",
    "escapes": json.dumps(ONE.to_json(), indent=1, sort_keys=True).encode() + b"\n",
    "a number": WHOLE.replace(b'"step": 7', b'"step": 7e0'),
    "a key that is there twice": WHOLE.replace(b'"step": 7', b'"step": 8,\n "step": 7'),
    "a space after it": WHOLE + b" ",
    "a line before it": b"\n" + WHOLE,
    "no end of line": WHOLE[:-1],
}


def test_why_it_cannot_be_read_is_said_in_words(tmp_path: Path) -> None:
    for content, why in (
        (b"[" * 100_000, r"it is nested too deeply"),
        (b'{"step": "\xff"}', r"it is not UTF-8 text \(byte 10\)"),
    ):
        (tmp_path / MANIFEST_FILE_NAME).write_bytes(content)
        with pytest.raises(CheckpointError, match=why):
            read_manifest(tmp_path)


@pytest.mark.parametrize("way", list(OTHER_WAYS))
def test_what_means_the_same_and_was_not_written_so_is_damage(tmp_path: Path, way: str) -> None:
    (tmp_path / MANIFEST_FILE_NAME).write_bytes(OTHER_WAYS[way])
    with pytest.raises(CheckpointError, match="the manifest is not what was written"):
        read_manifest(tmp_path)


def test_a_manifest_of_any_facts_is_written_as_it_is_read(tmp_path: Path) -> None:
    facts = {
        "é\u2028\x7f\n": [1e16, 1e-7, -0.0, 0.1, 2**70, None, True, {"b": [], "a": {}}],
        "10": 1,
        "9": 2,
    }
    manifest = replace(ONE, facts=facts)
    (tmp_path / MANIFEST_FILE_NAME).write_bytes(manifest.to_bytes())
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 200_000, '{"format": 2, "step": 1e999}', '{"format": 2, "a": NaN}']
)
def test_what_is_no_json_of_ours_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_FILE_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_manifest(tmp_path)


def every_flip(text: bytes) -> list[bytes]:
    return [text[:at] + bytes([text[at] ^ 2]) + text[at + 1 :] for at in range(len(text))]


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    for flipped in every_flip(WHOLE):
        (tmp_path / MANIFEST_FILE_NAME).write_bytes(flipped)
        with pytest.raises(CheckpointError) as caught:
            read_manifest(tmp_path)
        assert caught.value.exit_code == ExitCode.CHECKPOINT
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../a", "/etc/passwd", "a/b", ".hidden", "", "a\n", "..", "x" * 129, 5, None]
)
def test_a_file_name_cannot_leave_the_directory(tmp_path: Path, name: Any) -> None:
    body = json.loads(json.dumps(ONE.to_json()))
    body["tensors"]["w"]["pieces"][0]["file"] = name
    body["files"][name] = body["files"]["a.safetensors"]
    body = json.loads(json.dumps(body))
    body["xxh3"] = compute_manifest_checksum(body)
    with pytest.raises(CheckpointError, match="bad file name"):
        read_manifest(write(tmp_path, body))


@pytest.mark.parametrize(
    "key", ["step", "job_digest", "layout", "facts", "tensors", "aliases", "files"]
)
@pytest.mark.parametrize("value", [None, "x", 3, [1], "absent"])
def test_a_part_of_the_wrong_kind_is_damage(tmp_path: Path, key: str, value: Any) -> None:
    """Nothing but CheckpointError, whatever stands there; strings and numbers may be what they
    should be."""
    body = ONE.to_json()
    del body[key]
    if value != "absent":
        body[key] = value
    body["xxh3"] = compute_manifest_checksum(body)
    if (key, value) in (("step", 3), ("job_digest", "x")):
        assert read_manifest(write(tmp_path, body)).step in (3, 7)
        return
    with pytest.raises(CheckpointError, match="damaged"):
        read_manifest(write(tmp_path, body))


@pytest.mark.parametrize(
    "aliases",
    [
        {"a": "nope"},
        {"a": "a"},
        {"a": "b", "b": "a"},
        {"a": "b", "b": "w"},
        {"a": ["w"]},
        {"a": None},
        {"w": "w"},
    ],
)
def test_a_name_that_leads_to_no_tensor_is_damage(tmp_path: Path, aliases: Any) -> None:
    body = ONE.to_json() | {"aliases": aliases}
    body["xxh3"] = compute_manifest_checksum(body)
    with pytest.raises(CheckpointError, match="damaged"):
        read_manifest(write(tmp_path, body))


@pytest.mark.parametrize("degree", [None, [2], "x"])
def test_a_degree_that_is_no_number_is_damage(tmp_path: Path, degree: Any) -> None:
    body = ONE.to_json() | {"layout": {"tp": degree}}
    body["xxh3"] = compute_manifest_checksum(body)
    with pytest.raises(CheckpointError, match="damaged"):
        read_manifest(write(tmp_path, body))


def test_checkpoints_are_listed_in_order_of_steps(tmp_path: Path) -> None:
    assert list_checkpoint_paths_of_run(tmp_path) == []
    for step in (100, 9, 20):
        write(build_checkpoint_path(tmp_path, step), ONE.to_json())
    assert [path.name for path in list_checkpoint_paths_of_run(tmp_path)] == [
        "step-9",
        "step-20",
        "step-100",
    ]
