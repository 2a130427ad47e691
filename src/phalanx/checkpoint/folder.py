"""One checkpoint as a flat folder of files that can be read by ranges, wherever it lies.

Torch-free.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.core.files import (
    MAX_MANIFEST_FILE_BYTES,
    open_regular_file_descriptor,
    read_whole_regular_file,
)

# As a save writes it: "step-06" is a copy by hand.
STEP_FOLDER_PATTERN = re.compile(r"step-(0|[1-9][0-9]{0,17})")


class FileRangeReader(Protocol):
    """An open file of a checkpoint. Raises OSError."""

    @property
    def num_bytes(self) -> int: ...

    def fill_buffer_from(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset`; EOFError if the file ends before."""

    def close(self) -> None: ...


class CheckpointFolder(Protocol):
    """A checkpoint's files.

    Every method raises OSError (FileNotFoundError for what is not there).
    """

    @property
    def name(self) -> str:
        """The last part of its path or URL: "step-400"."""

    @property
    def url(self) -> str:
        """The path or URL of the folder, for people and for opening it again.

        Holds no credentials.
        """

    @property
    def step(self) -> int:
        """The step in its name; -1 for a folder that is named otherwise."""

    def file_sizes(self) -> dict[str, int]:
        """The bytes of every file in it, whether a manifest lists it or not.

        Of a link what it leads to, as `open` reads that; one that leads nowhere is no file.
        """

    def where(self, name: str) -> str:
        """The path or URL of a file in it, for an error message."""

    def read(self, name: str) -> bytes:
        """A whole (small) file."""

    def open(self, name: str) -> FileRangeReader: ...

    def written_unix_s(self) -> float:
        """Unix seconds at which its manifest was written."""


@dataclass(frozen=True)
class LocalCheckpointFolder:
    """A directory."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def url(self) -> str:
        return str(self.path)

    @property
    def step(self) -> int:
        match = STEP_FOLDER_PATTERN.fullmatch(self.path.name)
        if match is None:
            return -1
        return int(match[1])

    def file_sizes(self) -> dict[str, int]:
        sizes = {}
        for entry in os.scandir(self.path):
            try:
                sizes[entry.name] = entry.stat().st_size
            except OSError:
                if not entry.is_symlink():
                    raise
        return sizes

    def where(self, name: str) -> str:
        return str(self.path / name)

    def read(self, name: str) -> bytes:
        return read_whole_regular_file(self.path / name, MAX_MANIFEST_FILE_BYTES)

    def open(self, name: str) -> FileRangeReader:
        return _LocalRangeReader(self.path / name)

    def written_unix_s(self) -> float:
        return os.stat(self.path / "manifest.json").st_mtime


class _LocalRangeReader:
    def __init__(self, path: Path) -> None:
        self._fd = open_regular_file_descriptor(path, os.O_RDONLY)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def fill_buffer_from(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            # It may read less than asked for: 2 GiB at most on Linux.
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                raise EOFError
            done += count

    def close(self) -> None:
        os.close(self._fd)


def convert_path_to_folder(folder: CheckpointFolder | Path) -> CheckpointFolder:
    """`folder` as a CheckpointFolder: a path is a directory on this machine."""
    if isinstance(folder, Path):
        return LocalCheckpointFolder(folder)
    return folder


def format_place_in_run(folder: CheckpointFolder, run_dir: Path) -> str:
    """The place of a checkpoint as a run's files record it: relative to the run directory, or the
    URL of one elsewhere."""
    if isinstance(folder, LocalCheckpointFolder) and folder.path.is_relative_to(run_dir):
        return str(folder.path.relative_to(run_dir))
    return folder.url


def resolve_place_in_run(run_dir: Path, recorded: str) -> str:
    """The full path or URL of a checkpoint whose `format_place_in_run` is `recorded`."""
    if "://" in recorded:
        return recorded
    return str(run_dir / recorded)
