"""The files that rank 0 opens through Python while layouts are judged: modules, configurations, and
weights and data read by `open`, wherever they lie. Rows of a stopped command hold for these alone.

A library that opens a file without Python's `open`, as safetensors does, is not seen.

Torch-free.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import source_from_cache
from pathlib import Path

from phalanx.core.files import read_json, write_json_atomically

READ_FILES_NAME = "read-files.json"
# Installed packages have versions, and phalanx's own files are looked at by `stopped_work`.
_IGNORED_PATHS = (
    *("/proc/", "/sys/", "/dev/"),
    *(
        os.path.join(sysconfig.get_path(name), "")
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ),
    os.path.join(Path(__file__).parents[1], ""),
)

FileState = tuple[int, int]
"""Size in bytes, and time of the last change in ns."""


@dataclass
class ReadFileRecorder:
    """Keeps the state of each file when it is first opened to be read, but for those below
    `directory`, where ranks write."""

    directory: Path
    _states: dict[str, FileState] = field(default_factory=dict)
    _written_paths: set[str] = field(default_factory=set)
    _is_active: bool = True

    def on_audit_event(self, event: str, args: tuple[object, ...]) -> None:
        """A hook for `sys.addaudithook`: whatever it raises, the open file would raise."""
        if event == "open" and self._is_active:
            with suppress(OSError, ValueError, TypeError, NotImplementedError):
                path, _, flags = args
                self._record(path, flags)

    def _record(self, path: object, flags: object) -> None:
        # A number is a descriptor that somebody opened by its name before.
        if not isinstance(path, str | bytes | os.PathLike) or not isinstance(flags, int):
            return
        name = os.path.abspath(os.fsdecode(path))
        ignored = *_IGNORED_PATHS, os.path.join(self.directory, "")
        # Somebody may have put weights or data into memory.
        if name.startswith(ignored) and not name.startswith("/dev/shm/"):
            return
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self._written_paths.add(name)
            return
        # An import opens what was compiled, and the source is what a person changes.
        if name.endswith(".pyc"):
            name = source_from_cache(name)
        if name not in self._states and (state := _find_file_state(name)) is not None:
            self._states[name] = state

    def write(self) -> None:
        """Write the states to `directory`, beside those that are there: each file has the state in
        which it was first read."""
        known = _read_states(self.directory) or {}
        for name, state in list(self._states.items()):
            # Not what this process made itself, nor what came and went.
            if name not in self._written_paths and os.path.exists(name):
                known.setdefault(name, state)
        # A command that is cut off needs it, and a machine that is need not.
        write_json_atomically(self.directory / READ_FILES_NAME, known, durable=False)

    def stop(self) -> None:
        self._is_active = False


@contextmanager
def recording_read_files(directory: Path) -> Iterator[ReadFileRecorder]:
    """Inside, each file that this process opens to read is recorded."""
    recorder = ReadFileRecorder(directory)
    # A hook stays for as long as the process does.
    sys.addaudithook(recorder.on_audit_event)
    try:
        yield recorder
    finally:
        recorder.stop()


def are_read_files_unchanged(directory: Path) -> bool:
    """True if ranks have written down which files they read, and each is as it was then."""
    states = _read_states(directory)
    if states is None:
        return False
    return all(_find_file_state(name) == state for name, state in states.items())


def _read_states(directory: Path) -> dict[str, FileState] | None:
    try:
        body = read_json(directory / READ_FILES_NAME)
        return {str(name): (int(size), int(changed)) for name, (size, changed) in body.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _find_file_state(name: str) -> FileState | None:
    """The state of a regular file; None for anything else."""
    try:
        status = os.stat(name)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size, status.st_mtime_ns
