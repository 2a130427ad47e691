"""Which part of which file goes into which shard: a pure function of the inputs and the options.
Torch-free.

The number of worker processes and what they were doing when one was killed play no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from phalanx.core.digest import digest
from phalanx.core.units import MIB
from phalanx.data.sources import Format, SourceFile

LEAST_SHARD_BYTES, MOST_SHARD_BYTES = 4 * MIB, 64 * MIB
# Enough for many workers; so few that all can be mapped.
USUAL_SHARDS, MAX_SHARDS = 64, 1024
# A file is never cut so that less than this fraction of a shard stands alone.
_MAX_SHARD_DIVISOR = 4


@dataclass(frozen=True)
class SourceFileSpan:
    """A part of a file, in its own units: bytes of text and JSONL, row groups of Parquet, record
    batches of Arrow.
    """

    name: str
    path: str
    format: Format
    file_bytes: int
    modified_ns: int
    begin: int
    end: int
    # About how many bytes of the file it is: row groups and batches say nothing of their own.
    weight: int

    @property
    def is_whole(self) -> bool:
        return self.begin == 0 and self.weight >= self.file_bytes


@dataclass(frozen=True)
class ShardTask:
    """The input that becomes one shard."""

    number: int
    spans: tuple[SourceFileSpan, ...]

    @property
    def file(self) -> str:
        return f"shard-{self.number:05d}.tokens"

    @property
    def weight(self) -> int:
        return sum(span.weight for span in self.spans)

    @property
    def digest(self) -> str:
        """Equal if the same bytes of the same files go into this shard."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ShardTask:
        return cls(value["number"], tuple(SourceFileSpan(**span) for span in value["spans"]))


@dataclass(frozen=True)
class SourceFileParts:
    """The parts that a file can be cut into: `weights[i]` bytes for part i of its units; one part
    if it cannot be cut."""

    file: SourceFile
    units: tuple[int, ...]  # boundaries: part i is units[i] to units[i + 1]
    weights: tuple[int, ...]


def choose_default_shard_bytes(total_bytes: int) -> int:
    """By the size of the inputs alone: there must be work for several workers, whatever their
    number is.
    """
    # A power of two, so that inputs that grow a little keep their shards.
    usual = 1 << max(0, (total_bytes // USUAL_SHARDS).bit_length() - 1)
    least = 1
    if total_bytes:
        least = 1 << (-(-total_bytes // MAX_SHARDS) - 1).bit_length()
    # The number of shards is limited, whatever their size: each is mapped.
    return max(min(max(usual, LEAST_SHARD_BYTES), MOST_SHARD_BYTES), least)


def plan_shard_tasks(files: Sequence[SourceFileParts], shard_bytes: int) -> list[ShardTask]:
    """Fill one shard after another with about `shard_bytes` of input each, in the order of the
    files.
    """
    tasks: list[ShardTask] = []
    spans: list[SourceFileSpan] = []
    weight = 0
    for span in _split_large_files(files, shard_bytes):
        # A little more than a shard is better than a small one at its end.
        if spans and weight + span.weight > shard_bytes + shard_bytes // _MAX_SHARD_DIVISOR:
            tasks.append(ShardTask(len(tasks), tuple(spans)))
            spans, weight = [], 0
        spans.append(span)
        weight += span.weight
        if weight >= shard_bytes:
            tasks.append(ShardTask(len(tasks), tuple(spans)))
            spans, weight = [], 0
    if spans:
        tasks.append(ShardTask(len(tasks), tuple(spans)))
    return tasks


def _split_large_files(
    files: Sequence[SourceFileParts], shard_bytes: int
) -> Iterator[SourceFileSpan]:
    """The files, those larger than a shard cut into pieces of about its size."""
    for parts in files:
        first, weight, num_left = 0, 0, sum(parts.weights)
        for number, part in enumerate(parts.weights):
            weight += part
            num_left -= part
            is_last = number == len(parts.weights) - 1
            if is_last or (weight >= shard_bytes and num_left >= shard_bytes // _MAX_SHARD_DIVISOR):
                yield _build_span(parts, first, number + 1, weight)
                first, weight = number + 1, 0


def _build_span(parts: SourceFileParts, first: int, beyond: int, weight: int) -> SourceFileSpan:
    file = parts.file
    start, end = parts.units[first], parts.units[beyond]
    return SourceFileSpan(
        file.name, file.path, file.format, file.num_bytes, file.modified_ns, start, end, weight
    )


def split_file_at_any_byte(file: SourceFile, step_bytes: int) -> SourceFileParts:
    """A file that can be cut at any byte (whoever reads it finds the next line)."""
    starts = range(0, file.num_bytes, step_bytes) or [0]
    units = [*starts, file.num_bytes]
    return SourceFileParts(file, tuple(units), tuple(end - start for start, end in pairwise(units)))


def make_unsplittable_file_parts(file: SourceFile) -> SourceFileParts:
    return SourceFileParts(file, (0, file.num_bytes), (file.num_bytes,))
