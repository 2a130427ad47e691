"""Sources of token ids that are used where they lie: dataset directories, .npy arrays, Megatron
files.

Torch-free.

Opening is cheap: headers and sizes. `collect_source_facts` reads what a source says of itself, and
all ids of those that say nothing (.npy, Megatron); `find_source_damage` reads all and compares.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from phalanx.core.errors import DataError, DataStorageError
from phalanx.core.files import open_regular_file, resolve_regular_file_path
from phalanx.core.printable import describe_foreign_error, printable
from phalanx.data.dataset import (
    DATASET_FILE_NAME,
    TokenizerFacts,
    is_dataset,
    open_dataset,
    read_dataset_manifest,
)
from phalanx.data.megatron import megatron_paths, open_megatron
from phalanx.data.shards import verify_shard
from phalanx.data.tokens import (
    CHUNK_TOKENS,
    SingleDocumentTokenArray,
    TokenArray,
    Tokens,
    find_token_outside_vocabulary,
)
from phalanx.data.unreadable import build_unreadable_data_error

TokenSourceKind = Literal["dataset", "npy", "megatron"]
NO_TOKENIZER_FACTS = TokenizerFacts("none", "")
MAX_VOCAB_SIZE = 2**32
CHANGED, PUT_BACK = (
    "the corpus has changed since the run began",
    "put it back as it was, or start a new run",
)


@dataclass(frozen=True)
class FileFacts:
    """`xxh3` stands for the whole content: of a shard it is the checksum of its header, which
    covers the rest."""

    num_bytes: int
    xxh3: str


@dataclass(frozen=True)
class OpenTokenSource:
    """The arrays of a source, and the file that each of them is in."""

    arrays: tuple[TokenArray, ...]
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class SourceDescription:
    """The facts of a source.

    `files`: facts by name relative to the folder of `path`, or to `path` if it is one.
    """

    kind: TokenSourceKind
    path: Path
    tokenizer: TokenizerFacts
    vocab_size: int
    end_of_document: int | None
    files: dict[str, FileFacts]
    source_bytes: int
    num_skipped_files: int


def find_token_source_kind(source: str) -> tuple[TokenSourceKind, Path] | None:
    """The kind of a source of token ids, and the directory or file it is; None if it is text, or
    nothing."""
    path = Path(os.path.expanduser(source))
    # Shards without their dataset.json, too: opening them says so. Paths are resolved, for a
    # resumed run may be started from another folder.
    if is_dataset(path) or _has_shard_files(path):
        return "dataset", path.resolve()
    is_pattern = glob.has_magic(source) and not os.path.exists(path)
    if (
        source.lower().endswith(".npy")
        and not is_pattern
        and not os.path.isdir(path)
        and os.path.exists(path)
    ):
        return "npy", path.resolve()
    pair = megatron_paths(source)
    if pair is None:
        return None
    return "megatron", pair[0].resolve()


def _has_shard_files(path: Path) -> bool:
    """A build that was not finished, or lost its dataset.json: the rest of the folder is no text
    to train on."""
    return os.path.isdir(path) and any(path.glob("shard-*.tokens"))


def map_token_arrays(kind: TokenSourceKind, path: Path) -> OpenTokenSource:
    """Map the tokens. Raises DataError."""
    if kind == "dataset":
        dataset = open_dataset(path)
        return OpenTokenSource(dataset.shards, tuple(shard.path for shard in dataset.shards))
    if kind == "npy":
        return OpenTokenSource((SingleDocumentTokenArray.from_tokens(_open_npy(path)),), (path,))
    return OpenTokenSource((open_megatron(path, path.with_suffix(".idx")),), (path,))


def collect_source_facts(
    kind: TokenSourceKind, path: Path, *, with_checksums: bool = True
) -> SourceDescription:
    """The facts of the source at `path`; checksums, which would show a change, only if asked for.

    Raises DataError for a source that cannot be used, or whose ids are none.
    """
    if kind == "dataset":
        return _collect_dataset_facts(path)
    array = map_token_arrays(kind, path).arrays[0]
    paths = [path]
    if kind == "megatron":
        paths.append(path.with_suffix(".idx"))
    files = {}
    for file in paths:
        num_bytes, checksum = file.stat().st_size, ""
        if with_checksums:
            checksum = _hash_file_content(file)
        files[file.name] = FileFacts(num_bytes, checksum)
    return SourceDescription(
        kind=kind,
        path=path,
        tokenizer=NO_TOKENIZER_FACTS,
        vocab_size=_find_largest_id(array.tokens, path) + 1,
        end_of_document=None,
        files=files,
        source_bytes=path.stat().st_size,
        num_skipped_files=0,
    )


def _collect_dataset_facts(path: Path) -> SourceDescription:
    dataset = open_dataset(path)
    files = {
        DATASET_FILE_NAME: FileFacts(
            (path / DATASET_FILE_NAME).stat().st_size, _hash_file_content(path / DATASET_FILE_NAME)
        )
    }
    for shard in dataset.shards:
        files[shard.facts.file] = FileFacts(shard.facts.num_bytes, shard.facts.xxh3)
    # Raises unless it is the one of the shards.
    dataset.load_tokenizer()
    return SourceDescription(
        kind="dataset",
        path=path,
        tokenizer=dataset.tokenizer,
        vocab_size=dataset.vocab_size,
        end_of_document=dataset.end_of_document,
        files=files,
        source_bytes=dataset.source_bytes,
        num_skipped_files=dataset.num_skipped_files,
    )


def require_source_unchanged(
    kind: TokenSourceKind, path: Path, files: Mapping[str, FileFacts]
) -> None:
    """Raise DataError, naming the file, unless what is there now looks like what
    `collect_source_facts` found.

    Reads headers.
    """
    folder = path if kind == "dataset" else path.parent
    if kind == "dataset":
        _require_same_manifest_shards(path, files)
    for name, facts in files.items():
        try:
            num_bytes = (folder / name).stat().st_size
        except OSError as error:
            raise build_unreadable_data_error(error, folder / name, CHANGED, fix=PUT_BACK) from None
        if num_bytes != facts.num_bytes:
            raise _changed_source_error(
                folder / name, f"it has {num_bytes} bytes instead of {facts.num_bytes}"
            )


def _require_same_manifest_shards(path: Path, files: Mapping[str, FileFacts]) -> None:
    """Raise DataError, naming the first shard that is another one, if dataset.json is not what
    it was."""
    try:
        if _hash_file_content(path / DATASET_FILE_NAME) == files[DATASET_FILE_NAME].xxh3:
            return
        manifest, _ = read_dataset_manifest(path)
    except DataStorageError:
        # A disk that fails says nothing about the content.
        raise
    except DataError as error:
        raise _changed_source_error(path / DATASET_FILE_NAME, error.why or error.what) from None
    now = {shard.file: FileFacts(shard.num_bytes, shard.xxh3) for shard in manifest.shards}
    different = DATASET_FILE_NAME
    for name, facts in files.items():
        if name != DATASET_FILE_NAME and now.get(name) != facts:
            different = name
            break
    raise _changed_source_error(path / different, "dataset.json describes another one now")


def find_source_damage(
    kind: TokenSourceKind, path: Path, files: Mapping[str, FileFacts]
) -> Iterator[DataError]:
    """Read everything and compare it with `collect_source_facts`'s checksums; what is wrong, as it
    is found."""
    if kind == "dataset":
        for name in files:
            if name != DATASET_FILE_NAME:
                yield from verify_shard(path / name)
        return
    for name, facts in files.items():
        if _hash_file_content(path.parent / name) != facts.xxh3:
            yield _changed_source_error(path.parent / name, "its checksum is another one")


def require_token_ids_below(opened: OpenTokenSource, vocab_size: int) -> None:
    """Raise DataError at the first id that is not below `vocab_size`, with its file and the
    token's place in it."""
    for array, path in zip(opened.arrays, opened.paths, strict=True):
        # A shard knows its largest id, so that nothing of it needs to be read.
        facts = getattr(array, "facts", None)
        if facts is not None and facts.max_token_id < vocab_size:
            continue
        bad_token = find_token_outside_vocabulary(array.tokens, vocab_size)
        if bad_token is not None:
            raise id_out_of_range_error(
                bad_token[1], vocab_size, f"{path}: position {bad_token[0]}"
            )


def id_out_of_range_error(token: int, vocab_size: int, where: str) -> DataError:
    if token < 0:
        return DataError(f"token id {token} is negative", where=where)
    if vocab_size >= MAX_VOCAB_SIZE:  # nobody set it
        return DataError(
            f"token id {token} is no token's", where=where, why=f"ids are below {vocab_size}"
        )
    return DataError(
        f"token {token} does not fit a vocabulary of {vocab_size}",
        where=where,
        fix="raise model.vocab_size, or leave it out to take what the data needs "
        "(of a Hugging Face model: raise vocab_size in model.args)",
    )


def _changed_source_error(path: Path, why: str) -> DataError:
    return DataError(CHANGED, where=str(path), why=why, fix=PUT_BACK)


def _find_largest_id(tokens: Tokens, path: Path) -> int:
    """The largest id, all of them read.

    DataError for one that is negative or needs more than 32 bits.
    """
    largest = -1
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = np.asarray(tokens[start : start + CHUNK_TOKENS])
        bad_token = find_token_outside_vocabulary(chunk, MAX_VOCAB_SIZE)
        if bad_token is not None:
            raise id_out_of_range_error(
                bad_token[1], MAX_VOCAB_SIZE, f"{path}: position {start + bad_token[0]}"
            )
        largest = max(largest, int(chunk.max()))
    return largest


def _open_npy(path: Path) -> Tokens:
    """The ids of a .npy, memory-mapped, 1-D [num_tokens].

    Raises DataError unless that is what the file holds.
    """
    try:
        # The sizes of a damaged header may overflow.
        with resolve_regular_file_path(path) as opened, np.errstate(over="ignore"):
            # Unlike np.load it never unpickles.
            ids = np.lib.format.open_memmap(opened, mode="r")
    except OSError as error:
        raise build_unreadable_data_error(error, f"data.source {path}") from None
    # A header is a Python literal: of a damaged one numpy lets through whatever its parser raises.
    except Exception as error:
        raise DataError(
            "not a readable .npy file",
            where=f"data.source {path}",
            why=printable(describe_foreign_error(error), 200),
            fix="write it again with numpy.save",
        ) from None
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        why = f"it is {ids.ndim}-D {ids.dtype}"
        raise DataError("not a 1-D array of integers", where=f"data.source {path}", why=why)
    if ids.size == 0:
        raise DataError(
            "there are no token ids in it", where=f"data.source {path}", why="the array is empty"
        )
    return ids


def _hash_file_content(path: Path) -> str:
    """Hex of XXH3-64 over the file's bytes."""
    checksum = xxhash.xxh3_64()
    try:
        with open_regular_file(path) as file:
            while chunk := file.read(1 << 22):
                checksum.update(chunk)
    except OSError as error:
        raise build_unreadable_data_error(error, path) from None
    return checksum.hexdigest()


def sum_token_source_bytes(files: Mapping[str, FileFacts]) -> int:
    return sum(facts.num_bytes for facts in files.values())
