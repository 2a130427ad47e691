"""What a checkpoint says about itself: one JSON file, written last.

Torch-free; nothing here is ever executed.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from phalanx.checkpoint.chunks import CHUNK_BYTES, StoredFile
from phalanx.checkpoint.facts import (
    LARGEST_COUNT,
    check_facts,
    count,
    degree,
    mapping,
    progress,
    text,
)
from phalanx.checkpoint.folder import STEP_NAME, Folder, LocalFolder, as_folder
from phalanx.checkpoint.os_errors import wrap_os_error
from phalanx.core.digest import canonical_json
from phalanx.core.errors import CheckpointError

FORMAT = 2
MANIFEST = "manifest.json"
OPTIMIZER = "optim/"  # what the names of optimizer state begin with
MAX_DIMS = 64
REDUCTION = "comm/"  # and those of what compressing gradients keeps, which belongs to one layout


@dataclass(frozen=True)
class Piece:
    """One block of a logical tensor: entry `key` of `file`, standing at `offset` in the full
    tensor.

    `xxh3_128` is the digest of its bytes, by which the next save knows it again; empty where nobody
    took it.
    """

    file: str
    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    xxh3_128: str = ""

    def overlap(
        self, offset: tuple[int, ...], size: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(start in the full tensor, size) of what it shares with a box of the tensor; None if
        that is nothing."""
        starts, sizes = [], []
        for own, own_size, other, other_size in zip(
            self.offset, self.size, offset, size, strict=True
        ):
            start, stop = max(own, other), min(own + own_size, other + other_size)
            if stop <= start:
                return None
            starts.append(start)
            sizes.append(stop - start)
        return tuple(starts), tuple(sizes)


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """`facts` is what a TrainState says besides tensors (step, tokens, cursor, seed).

    `epoch` counts the jobs that have had the run before, this one included; 0 where nobody counts.
    """

    step: int
    job_digest: str
    layout: dict[str, int]
    facts: dict[str, Any]
    tensors: dict[str, StoredTensor]
    aliases: dict[str, str]
    files: dict[str, StoredFile]
    epoch: int = 0

    def to_json(self) -> dict[str, Any]:
        """The manifest's text as JSON, with its own checksum."""
        body = {"format": FORMAT, "chunk_bytes": CHUNK_BYTES, **asdict(self)}
        return {**body, "xxh3": body_xxh3(body)}

    def to_bytes(self) -> bytes:
        """What stands in manifest.json."""
        return manifest_bytes(self.to_json())

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    def without_optimizer(self) -> Manifest:
        """What of it is the model."""
        return self.without(OPTIMIZER, REDUCTION)

    def without(self, *prefixes: str) -> Manifest:
        """Without the tensors whose names begin so."""
        return replace(
            self,
            tensors={n: tensor for n, tensor in self.tensors.items() if not n.startswith(prefixes)},
        )


def read_manifest(place: Folder | Path) -> Manifest:
    """Read and check the manifest of one checkpoint.

    Raises CheckpointError naming what is wrong.
    """
    folder = as_folder(place)
    path = folder.where(MANIFEST)
    try:
        text = folder.read(MANIFEST)
        body = json.loads(text.decode())
        found_xxh3 = (
            body_xxh3(body) if isinstance(body, dict) else ""
        )  # ValueError for numbers that are none
        written = manifest_bytes(body) if isinstance(body, dict) else b""  # and for half a letter
    except FileNotFoundError:
        raise _without_manifest(folder) from None
    except OSError as error:
        raise wrap_os_error(error, "the manifest cannot be read", path) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError("the manifest cannot be read", where=path, why=str(error)) from None
    if (
        not isinstance(body, dict)
        or type(body.get("format")) is not int
        or body["format"] != FORMAT
    ):
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise CheckpointError(
            f"format {found!r} is not {FORMAT}", where=path, fix="use the release that wrote it"
        )
    if body.get("xxh3") != found_xxh3:
        raise CheckpointError(
            "the manifest is not what was written", where=path, why="its checksum differs"
        )
    if (
        text != written
    ):  # a space more, a key that is there twice: the checksum is of what was parsed
        raise CheckpointError(
            "the manifest is not what was written", where=path, why="it is written another way"
        )
    try:
        manifest = _parse(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = str(error) if type(error) is ValueError else repr(error)
        raise CheckpointError("the manifest is damaged", where=path, why=why) from None
    _require_own_step(folder, manifest)
    return manifest


def _without_manifest(folder: Folder) -> CheckpointError:
    """A directory is renamed into place whole; an object store's folder may be an upload that
    never ended."""
    if isinstance(folder, LocalFolder):
        return CheckpointError("it is damaged", where=folder.url, why=f"{MANIFEST} is missing")
    return CheckpointError("incomplete: it was never committed", where=folder.url)


def _require_own_step(folder: Folder, manifest: Manifest) -> None:
    """A copy under another step's name would be continued from as that step.

    Other names say nothing of a step.
    """
    if folder.step not in (-1, manifest.step):
        raise CheckpointError(
            f"{folder.name} holds step {manifest.step}",
            where=folder.url,
            fix=(
                "a copy can be removed; a checkpoint that was renamed is called"
                f" step-{manifest.step} again"
            ),
        )
    told = manifest.facts.get("step", manifest.step)
    if told != manifest.step:
        raise CheckpointError(
            f"the manifest is of step {manifest.step}, and the state in it of step {told!r}",
            where=folder.url,
        )


def body_xxh3(body: Mapping[str, Any]) -> str:
    """XXH3-64 of a manifest's content, whatever its spacing and order."""
    return xxhash.xxh3_64_hexdigest(
        canonical_json({key: body[key] for key in body if key != "xxh3"}).encode()
    )


def manifest_bytes(body: Mapping[str, Any]) -> bytes:
    """The one way in which a manifest is written, so that its content, which has a checksum,
    decides every byte."""
    return (json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def check_aliases(aliases: Mapping[str, Any], tensors: Container[str]) -> dict[str, str]:
    """`aliases` if each leads from a name that no tensor has to a tensor; ValueError if not."""
    for name, stored_as in aliases.items():
        if name in tensors:
            raise ValueError(f"{name!r} is a tensor of its own, and tied to {stored_as!r}")
        if not isinstance(stored_as, str) or stored_as not in tensors:
            raise ValueError(f"{name!r} is tied to {stored_as!r}, which is no tensor")
    return dict(aliases)


def _parse(body: Mapping[str, Any]) -> Manifest:
    tensors = {
        name: StoredTensor(
            tuple(map(count, t["shape"])),
            text(t["dtype"]),
            tuple(
                Piece(
                    _file_name(p["file"]),
                    text(p["key"]),
                    tuple(map(count, p["offset"])),
                    tuple(map(count, p["size"])),
                    text(p.get("xxh3_128", "")),
                )
                for p in t["pieces"]
            ),
        )
        for name, t in mapping(body["tensors"]).items()
    }
    if count(body["chunk_bytes"]) != CHUNK_BYTES:
        raise ValueError(f"chunks of {body['chunk_bytes']} bytes")
    files = {
        _file_name(name): _stored_file(name, facts)
        for name, facts in mapping(body["files"]).items()
    }
    for name, tensor in tensors.items():
        if len(tensor.shape) > MAX_DIMS or math.prod(tensor.shape) > LARGEST_COUNT:
            raise ValueError(
                f"{name} is of {len(tensor.shape)} dimensions and {math.prod(tensor.shape)}"
                " elements"
            )
        for piece in tensor.pieces:
            if piece.file not in files:
                raise ValueError(f"{name} is in {piece.file}, which is not listed")
            for offset, size, length in zip(piece.offset, piece.size, tensor.shape, strict=True):
                if not 0 <= offset <= offset + size <= length:
                    raise ValueError(f"{name} has a piece outside its shape {list(tensor.shape)}")
    return Manifest(
        progress(body["step"]),
        text(body["job_digest"]),
        {axis: degree(number) for axis, number in mapping(body["layout"]).items()},
        check_facts(body["facts"]),
        tensors,
        check_aliases(mapping(body["aliases"]), tensors),
        files,
        count(body.get("epoch", 0)),
    )


def _stored_file(name: str, facts: Mapping[str, Any]) -> StoredFile:
    stored = StoredFile(count(facts["num_bytes"]), str(facts["chunks_xxh3"]))
    if (
        not re.fullmatch(r"([0-9a-f]{16})*", stored.chunks_xxh3)
        or len(stored.chunks_xxh3) != 16 * stored.num_chunks
    ):
        raise ValueError(
            f"{name} has {len(stored.chunks_xxh3)} digits of checksums for {stored.num_bytes} bytes"
        )
    return stored


def _file_name(name: Any) -> str:
    """A plain file name: a manifest cannot point outside its directory."""
    if (
        not isinstance(name, str)
        or not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", name)
        or name.startswith(".")
    ):
        raise ValueError(f"bad file name {name!r}")
    return name


def checkpoint_directory(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step}"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints under a run's own directory, oldest first.

    Uncommitted directories have other names.
    """
    return list_folders(run_dir / "checkpoints")


def list_folders(root: Path) -> list[Path]:
    """Checkpoints in a directory, oldest first; none if it is not there.

    A `step-N` was renamed into place as a whole, so that one without a manifest is damaged, and not
    unfinished: also a file, a pipe or a link of that name, of which nobody knows what it was. Every
    verb takes these for the checkpoints of a run. Raises CheckpointError where it cannot be seen
    what is there: that is not the same as nothing.
    """
    found = []
    try:
        for name in os.listdir(root):
            match = STEP_NAME.fullmatch(name)
            if match and _is_there(root / name):
                found.append((int(match[1]), root / name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise wrap_os_error(
            error, "checkpoints cannot be looked for", str(error.filename or root)
        ) from None
    return [entry for _, entry in sorted(found)]


def _is_there(path: Path) -> bool:
    """Also a link that leads to nothing; not what is removed this moment.

    Raises OSError unless that is known.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True
