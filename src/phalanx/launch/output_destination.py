"""Where the standard output of a rank goes that another launcher started: it is the launcher's, and
phalanx leaves it there."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.core.files import read_json, write_json_atomically
from phalanx.launch.paths import LOGS

_FILE_NAME_PATTERN = re.compile(r"rank-\d{1,9}-attempt-\d{1,9}\.output\.json")
_STREAM_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "pipe",
    stat.S_IFCHR: "terminal or device",
}


@dataclass(frozen=True)
class OutputDestination:
    """The destination of a rank's standard output: a "file" (of `path`), a "pipe" to its launcher,
    ...

    `is_of_one_rank` is False where several ranks write to the same file.
    """

    rank: int
    attempt: int
    launcher: str
    host: str
    kind: str
    path: str = ""
    is_of_one_rank: bool = True

    @property
    def readable_log(self) -> Path | None:
        """The file, where it is on this host, this rank's alone and the reader's own."""
        if self.kind != "file" or not self.is_of_one_rank or self.host != socket.gethostname():
            return None
        path = Path(self.path)
        # The record is a file of the run, which may come from anywhere: it must not lead a reader
        # to files of others.
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(path, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                return path
        return None


def build_output_destination_path(run_dir: Path, rank: int, attempt: int) -> Path:
    """The file that says where a rank's output went."""
    return run_dir / LOGS / f"rank-{rank:04d}-attempt-{attempt:02d}.output.json"


def record_output_destination(run_dir: Path, rank: int, attempt: int, launcher: str) -> None:
    """Record where this process's standard output goes. Never raises: it is only a help."""
    with contextlib.suppress(OSError):
        kind = _STREAM_KINDS.get(stat.S_IFMT(os.fstat(1).st_mode), "other")
        path = ""
        if kind == "file":
            path = os.readlink("/proc/self/fd/1")
        destination = OutputDestination(rank, attempt, launcher, socket.gethostname(), kind, path)
        target = build_output_destination_path(run_dir, rank, attempt)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(target, asdict(destination), durable=False)


def list_output_destinations(run_dir: Path) -> list[OutputDestination]:
    """The destinations that ranks of another launcher recorded, by attempt and rank."""
    destinations = []
    try:
        names = os.listdir(run_dir / LOGS)
    except OSError:
        names = []
    for name in names:
        if _FILE_NAME_PATTERN.fullmatch(name):
            destination = _read_destination(run_dir / LOGS / name)
            if destination is not None:
                destinations.append(destination)
    destinations.sort(key=lambda each: (each.attempt, each.rank))
    return _mark_shared_files(destinations)


def _read_destination(path: Path) -> OutputDestination | None:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(value, Mapping):
        return None
    rank, attempt = value.get("rank"), value.get("attempt")
    if type(rank) is not int or type(attempt) is not int:
        return None
    return OutputDestination(
        rank,
        attempt,
        _read_text(value, "launcher"),
        _read_text(value, "host"),
        _read_text(value, "kind"),
        _read_text(value, "path"),
    )


def _read_text(value: Mapping[str, Any], name: str) -> str:
    text = value.get(name)
    if isinstance(text, str):
        return text
    return ""


def _mark_shared_files(destinations: list[OutputDestination]) -> list[OutputDestination]:
    counts: dict[tuple[int, str, str], int] = {}
    for each in destinations:
        key = (each.attempt, each.host, each.path)
        counts[key] = counts.get(key, 0) + 1
    marked = []
    for each in destinations:
        is_of_one_rank = counts[each.attempt, each.host, each.path] == 1
        marked.append(OutputDestination(**{**asdict(each), "is_of_one_rank": is_of_one_rank}))
    return marked
