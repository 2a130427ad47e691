"""All that is wrong with a dataset, as one result: `phalanx data verify`. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import DataError, ExitCode
from phalanx.data.dataset import read_dataset_manifest, verify_dataset


@dataclass(frozen=True)
class DatasetVerification:
    """The contents that dataset.json lists (0 if it cannot be read), and the problems; the dataset
    is good if there are none.
    """

    directory: str
    num_shards: int
    num_bytes: int
    problems: tuple[DataError, ...]

    @property
    def exit_code(self) -> int:
        """4 for wrong data; 7 if a disk cannot be read, because then the rest is not known to be
        wrong.
        """
        return max((problem.exit_code for problem in self.problems), default=ExitCode.OK)

    def to_json(self) -> dict[str, Any]:
        """Facts of `phalanx data verify --json`."""
        return {
            "directory": self.directory,
            "num_shards": self.num_shards,
            "num_bytes": self.num_bytes,
            "problems": [problem.to_json() for problem in self.problems],
        }


def verify_dataset_with_progress(
    directory: str,
    *,
    on_problem: Callable[[DataError], None],
    on_progress: Callable[[int, int, int], None],
) -> DatasetVerification:
    """Read every shard and compare it with its checksums.

    `on_problem` hears of each problem as it is found, `on_progress` of bytes read, of all bytes,
    and of how many problems were found so far.
    """
    num_shards, num_bytes, read_bytes = 0, 0, 0
    with suppress(DataError):  # verification says it
        manifest, _ = read_dataset_manifest(Path(directory))
        num_shards = len(manifest.shards)
        num_bytes = sum(shard.num_bytes for shard in manifest.shards)
    problems: list[DataError] = []

    def add(more_bytes: int) -> None:
        nonlocal read_bytes
        read_bytes += more_bytes
        on_progress(read_bytes, num_bytes, len(problems))

    for problem in verify_dataset(Path(directory), add):
        problems.append(problem)
        on_problem(problem)
    return DatasetVerification(directory, num_shards, num_bytes, tuple(problems))
