"""A dataset directory: dataset.json, written last, and the shards it lists. Torch-free."""

from __future__ import annotations

import hashlib
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.core.digest import digest
from phalanx.core.errors import DataError, DataStorageError
from phalanx.core.files import (
    MAX_MANIFEST_FILE_BYTES,
    parse_json,
    read_whole_regular_file,
    require_file_name,
)
from phalanx.data.shards import TOKEN_DTYPES, Progress, Shard, ShardFacts, open_shard, verify_shard
from phalanx.data.tokenizer import BYTE_TOKENIZER_KIND, TOKENIZER_FILE, Tokenizer, load_tokenizer
from phalanx.data.unreadable import build_unreadable_data_error

DATASET_FORMAT_VERSION = 1
DATASET_FILE_NAME = "dataset.json"

_SPARE_OPEN_FILES = 512  # that a process may want to open besides
_MAX_SHOWN_BAD_SHARDS = 8  # bad shards that one error names


@dataclass(frozen=True)
class TokenizerFacts:
    """`kind` is "bytes", "tokenizer.json" (a copy lies in the directory) or "none" (token ids
    without a text).
    """

    kind: str
    digest: str


@dataclass(frozen=True)
class DatasetManifest:
    """The contents of dataset.json."""

    tokenizer: TokenizerFacts
    vocab_size: int
    dtype: str
    end_of_document: int | None
    column: str
    shard_bytes: int
    source_bytes: int  # of the text, as UTF-8
    num_skipped_files: int
    num_skipped_rows: int
    num_not_utf8: int
    inputs: tuple[dict[str, Any], ...]
    shards: tuple[ShardFacts, ...]
    num_skipped_folders: int = 0  # datasets that lay in an input
    num_repeated_files: int = 0  # given more than once, read once
    num_not_files: int = 0  # broken links, linked folders, pipes and the like in an input
    num_empty_files: int = 0
    num_json_as_text: int = 0  # .json files without an object per line
    num_ends_in_text: int = 0  # the tokenizer itself gave end_of_document for something in a text
    contents: tuple[str, ...] = ()
    """A digest of the content of each part of the inputs, in their order."""

    def to_json(self) -> dict[str, Any]:
        return add_manifest_checksum({"format": DATASET_FORMAT_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, value: Any, where: Path) -> DatasetManifest:
        """Raises DataError if `value` is not what `to_json` gives."""
        try:
            fields = _require_manifest_checksum(value)
            if (
                fields.pop("format") != DATASET_FORMAT_VERSION
                or fields["dtype"] not in TOKEN_DTYPES
            ):
                raise ValueError("another release wrote it")
            fields["tokenizer"] = TokenizerFacts(**fields["tokenizer"])
            fields["inputs"] = tuple(fields["inputs"])
            fields["contents"] = tuple(fields.get("contents", ()))
            fields["shards"] = tuple(ShardFacts(**shard) for shard in fields["shards"])
            for shard in fields["shards"]:
                require_file_name(shard.file, "shard")
            if not fields["shards"]:
                raise ValueError("it lists no shard")
            manifest = cls(**fields)
            manifest._require_manifest_types()
            return manifest
        except KeyError as error:
            raise _unusable_dataset_error(where, f"{error} is missing") from None
        except Exception as error:
            # Values of wrong types fail wherever they are used first: all of it means the same.
            raise _unusable_dataset_error(where, str(error)) from None

    def _require_manifest_types(self) -> None:
        """Raises ValueError for a value that `to_json` never gives, named."""
        counts: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name.startswith("num_") or name.endswith("_bytes"):
                counts[name] = value
        for number, facts in enumerate(self.inputs):
            for name in ("num_files", "num_bytes"):
                counts[f"inputs.{number}.{name}"] = facts[name]
            _require_valid_value(
                isinstance(facts["source"], str), f"inputs.{number}.source", facts["source"]
            )
        for shard in self.shards:
            for name, value in vars(shard).items():
                if name.startswith("num_"):
                    counts[f"{shard.file}.{name}"] = value
        counts["vocab_size"] = self.vocab_size
        for name, value in counts.items():
            # Not isinstance: True is an int, too.
            _require_valid_value(type(value) is int and value >= 0, name, value)
        end = self.end_of_document
        _require_valid_value(
            end is None or (type(end) is int and 0 <= end < self.vocab_size), "end_of_document", end
        )
        for name, text in {"column": self.column, **vars(self.tokenizer)}.items():
            _require_valid_value(isinstance(text, str), name, text)


def add_manifest_checksum(body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` as dataset.json holds it: what is said of the shards is covered as the shards are."""
    return {**body, "checksum": digest(body)}


def _require_manifest_checksum(value: Any) -> dict[str, Any]:
    """The body that was given to `add_manifest_checksum`. Raises ValueError if the checksum
    is missing or wrong.
    """
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    fields = dict(value)
    if "checksum" not in fields:
        raise ValueError("it has no checksum")
    checksum = fields.pop("checksum")
    if checksum != digest(fields):
        raise ValueError(
            f"it was changed: its checksum is {digest(fields)}, and it says {checksum!r}"
        )
    return fields


def _require_valid_value(is_good: bool, name: str, value: object) -> None:
    if not is_good:
        raise ValueError(f"{name} is {value!r}")


@dataclass(frozen=True)
class Dataset:
    """An open dataset: every shard mapped, none of it read. `digest` is that of dataset.json's
    bytes.
    """

    directory: Path
    manifest: DatasetManifest
    shards: tuple[Shard, ...]
    digest: str

    @property
    def tokenizer(self) -> TokenizerFacts:
        return self.manifest.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def dtype(self) -> str:
        return self.manifest.dtype

    @property
    def end_of_document(self) -> int | None:
        return self.manifest.end_of_document

    @property
    def source_bytes(self) -> int:
        return self.manifest.source_bytes

    @property
    def num_skipped_files(self) -> int:
        return self.manifest.num_skipped_files

    @cached_property
    def num_tokens(self) -> int:
        return sum(shard.facts.num_tokens for shard in self.shards)

    @property
    def num_token_bytes(self) -> int:
        """The size of the token ids of all shards, without their headers."""
        return self.num_tokens * int(self.dtype[-1])

    @cached_property
    def num_documents(self) -> int:
        """A document that goes on in the next shard counts once."""
        return sum(shard.facts.num_documents - shard.facts.continues for shard in self.shards)

    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer its text went through; None where it was given as ids. DataError if it is
        not the one.
        """
        if self.tokenizer.kind == "none":
            return None
        name = BYTE_TOKENIZER_KIND
        if self.tokenizer.kind != BYTE_TOKENIZER_KIND:
            name = str(self.directory / TOKENIZER_FILE)
        tokenizer = load_tokenizer(name)
        if tokenizer.digest != self.tokenizer.digest:
            raise DataError(
                "the tokenizer is not the one of its shards",
                where=name,
                why=f"digest {tokenizer.digest}, the shards were made with {self.tokenizer.digest}",
                fix="put the original tokenizer.json back, or build the dataset again",
            )
        return tokenizer


def is_dataset(path: Path | str) -> bool:
    """True if `path` is a directory that `phalanx data build` finished."""
    return os.path.isfile(os.path.join(path, DATASET_FILE_NAME))


def open_dataset(directory: Path) -> Dataset:
    """Open every shard of a dataset.

    Raises DataError (exit 4); all bad shards are named at once.
    """
    manifest, manifest_digest = read_dataset_manifest(directory)
    _raise_open_file_limit(len(manifest.shards))
    shards: list[Shard] = []
    problems: list[DataError] = []
    for facts in manifest.shards:
        try:
            shards.append(_open_listed_shard(directory, manifest, facts))
        except DataError as error:
            problems.append(error)
    if problems:
        raise _merge_shard_errors(directory, manifest, problems)
    return Dataset(directory, manifest, tuple(shards), manifest_digest)


def _merge_shard_errors(
    directory: Path, manifest: DatasetManifest, problems: Sequence[DataError]
) -> DataError:
    """The error to raise for the `problems` of all shards together."""
    for problem in problems:
        # A failing disk (exit 7) comes first: on another one all shards may be good.
        if isinstance(problem, DataStorageError):
            return problem
    if len(problems) == 1:
        return problems[0]
    return _merge_shard_problems_into_error(directory, manifest, problems)


def _raise_open_file_limit(num_shards: int) -> None:
    """Raise this process's own limit where the shards would not fit, as far as it may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Python keeps a descriptor for each map, see `_map_shard`.
    needed = num_shards + _SPARE_OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY:
            needed = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))


def read_dataset_manifest(directory: Path) -> tuple[DatasetManifest, str]:
    """dataset.json and the digest of its bytes. Raises DataError."""
    path = directory / DATASET_FILE_NAME
    try:
        content = read_whole_regular_file(path, MAX_MANIFEST_FILE_BYTES)
        value = parse_json(content)
    except FileNotFoundError:
        if not directory.is_dir():
            raise DataError("no such folder", where=str(directory)) from None
        why = "dataset.json is written last, and is not there"
        raise DataError(
            "no finished dataset", where=str(directory), why=why, fix="run phalanx data build"
        ) from None
    except NotADirectoryError:
        fix = "phalanx data build makes one"
        raise DataError("is no folder of token shards", where=str(directory), fix=fix) from None
    except OSError as error:
        raise build_unreadable_data_error(
            error, path, "dataset.json cannot be used", fix="build the dataset again"
        ) from None
    except ValueError as error:
        raise _unusable_dataset_error(path, f"not JSON: {error}") from None
    return DatasetManifest.from_json(value, path), hashlib.sha256(content).hexdigest()[:16]


def verify_dataset(directory: Path, progress: Progress | None = None) -> Iterator[DataError]:
    """Everything that is wrong with a dataset, as it is found: each shard is read whole and
    compared.
    """
    try:
        manifest, manifest_digest = read_dataset_manifest(directory)
    except DataError as error:
        yield error
        return
    for facts in manifest.shards:
        try:
            _open_listed_shard(directory, manifest, facts)
        except DataError as error:
            yield error
            continue
        yield from verify_shard(directory / facts.file, progress)
    try:
        # The shards are not needed for it, and may be damaged.
        Dataset(directory, manifest, (), manifest_digest).load_tokenizer()
    except DataError as error:
        yield error


def _open_listed_shard(directory: Path, manifest: DatasetManifest, facts: ShardFacts) -> Shard:
    """Open a shard and hold it to what dataset.json says of it."""
    shard = open_shard(directory / facts.file)
    # What tells most comes first: the checksum differs for any of these reasons.
    if shard.tokenizer_digest != manifest.tokenizer.digest:
        raise _swapped_shard_error(
            shard,
            f"made with tokenizer {shard.tokenizer_digest}, the dataset with"
            f" {manifest.tokenizer.digest}",
        )
    if shard.facts.max_token_id >= manifest.vocab_size:
        raise _swapped_shard_error(
            shard,
            f"token {shard.facts.max_token_id}, the dataset's vocabulary has {manifest.vocab_size}",
        )
    if (
        shard.facts != facts
        or shard.dtype != manifest.dtype
        or shard.vocab_size != manifest.vocab_size
    ):
        raise _swapped_shard_error(shard, _describe_first_shard_difference(shard, manifest, facts))
    return shard


def _describe_first_shard_difference(
    shard: Shard, manifest: DatasetManifest, facts: ShardFacts
) -> str:
    """The first of what tells two shards apart, their checksum above all."""
    observed = {
        "checksum": shard.facts.xxh3,
        **vars(shard.facts),
        "dtype": shard.dtype,
        "vocab_size": shard.vocab_size,
    }
    listed = {
        "checksum": facts.xxh3,
        **vars(facts),
        "dtype": manifest.dtype,
        "vocab_size": manifest.vocab_size,
    }
    name = next(name for name in observed if observed[name] != listed[name])
    return f"{name} {observed[name]}, dataset.json says {listed[name]}"


def _swapped_shard_error(shard: Shard, why: str) -> DataError:
    fix = "put the shard of this dataset back, or build it again"
    return DataError("the shard is not of this dataset", where=str(shard.path), why=why, fix=fix)


def _merge_shard_problems_into_error(
    directory: Path, manifest: DatasetManifest, problems: Sequence[DataError]
) -> DataError:
    """One error that names the first shards of many that cannot be used."""
    reasons = []
    for problem in problems[:_MAX_SHOWN_BAD_SHARDS]:
        name = Path(str(problem.where)).name
        reasons.append(f"{name}: {problem.what} ({problem.why})")
    if len(problems) > _MAX_SHOWN_BAD_SHARDS:
        reasons.append(f"and {len(problems) - _MAX_SHOWN_BAD_SHARDS} more")
    return DataError(
        f"{len(problems)} of {len(manifest.shards)} shards cannot be used",
        where=str(directory),
        why="; ".join(reasons),
        fix="phalanx data verify says more; build the dataset again",
    )


def _unusable_dataset_error(path: Path, why: str) -> DataError:
    return DataError(
        "dataset.json cannot be used", where=str(path), why=why, fix="build the dataset again"
    )
