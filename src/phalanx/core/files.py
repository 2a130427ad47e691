"""Files that are either whole or absent, and names that stay where they belong."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import ResourceError, UsageError

# How large a file of each kind may be before it is read into memory: ten times what anybody has
# seen, and no more.
# What a run keeps of itself: job.json, plan.json, config.json and the like.
MAX_JSON_FILE_BYTES = 64 * 2**20
# Manifests of checkpoints and datasets: some 2 million pieces or shards.
MAX_MANIFEST_FILE_BYTES = 512 * 2**20
MAX_TOKENIZER_FILE_BYTES = 256 * 2**20
# One event.
MAX_LINE_BYTES = 16 * 2**20

CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
APPEND_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW

SAFE_NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")


def require_file_name(name: str, kind: str) -> str:
    """Return `name` if it can be a file name; raise UsageError otherwise."""
    if not SAFE_NAME_PATTERN.fullmatch(name) or name in (".", ".."):
        raise UsageError(
            f"{kind} {name!r} is not a usable name", fix="use letters, digits, '.', '_' and '-'"
        )
    return name


def fsync_directory(directory: Path) -> None:
    """Make a rename inside `directory` durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write `data` beside `path`, then rename: a reader sees the old file or the new one, never a
    part.

    Raises OSError; nothing is left beside `path` then.
    """
    # In the same directory: a rename is atomic only within one file system.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with create_regular_file(partial) as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        # After the bytes are durable: a crash must not leave the new name with an empty file.
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(path.parent)


def write_json_atomically(path: Path, value: Any, *, durable: bool = True) -> None:
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    write_bytes_atomically(path, text.encode(), durable=durable)


def open_regular_file(path: Path | str, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading.

    Raises OSError for anything else under its name, without waiting for it.

    A pipe nobody writes to would be waited for without end, a device may have no end. What is
    looked at is the open file: what the name leads to may be another file a moment later.
    """
    return open(open_regular_file_descriptor(path, os.O_RDONLY), "rb", buffering=buffering)


def open_regular_file_for_append(path: Path | str) -> BinaryIO:
    """Open a regular file to write at its end; it is made where there is none.

    Raises OSError as `open_regular_file` does, so that a pipe under the name of a log does not stop
    whoever continues a run; nor is a link followed: what it leads to is no log of ours.
    """
    # O_APPEND: several processes may write to one log, and none over another's lines.
    return open(open_regular_file_descriptor(path, APPEND_FLAGS), "a+b")


def open_lines_for_append(path: Path | str) -> BinaryIO:
    """Open a file of lines as `open_regular_file_for_append` does.

    A last line that was torn gets its end, so that what is added is a line of its own.
    """
    file = open_regular_file_for_append(path)
    try:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes and os.pread(file.fileno(), 1, num_bytes - 1) != b"\n":
            file.write(b"\n")
            file.flush()
    except BaseException:
        file.close()
        raise
    return file


def create_regular_file(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a new file to write.

    What has its name is removed: a pipe would be waited for, and a link followed.

    Raises OSError.
    """
    with suppress(FileNotFoundError):
        # The open below makes a new file then: other names of the old one keep its content.
        os.unlink(path)
    return open(open_regular_file_descriptor(path, CREATE_FLAGS), "wb", buffering=buffering)


def open_regular_file_descriptor(path: Path | str, flags: int) -> int:
    """The descriptor of a regular file, which whoever asks closes.

    Raises OSError as `open_regular_file` does.
    """
    try:
        # O_NONBLOCK: to open a pipe would wait for its other end.
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except OSError as error:
        # ENXIO would read as a disk that is gone, and ELOOP as a circle of links.
        if error.errno == errno.ENXIO:
            raise OSError(errno.EINVAL, "it is a socket, not a regular file", str(path)) from None
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.EINVAL, "it is a link, not a regular file", str(path)) from None
        raise
    try:
        require_regular_file_mode(os.fstat(fd).st_mode, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_whole_regular_file(path: Path | str, most_bytes: int = MAX_JSON_FILE_BYTES) -> bytes:
    """All of a regular file. Raises OSError for anything else, and for more than `most_bytes`."""
    with open_regular_file(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes <= most_bytes:
            # One buffer of the file's size, not of `most_bytes`; a byte more shows that it grew.
            content = file.read(num_bytes + 1)
            # It has grown meanwhile.
            if len(content) > num_bytes:
                content += file.read(max(0, most_bytes + 1 - len(content)))
            if len(content) <= most_bytes:
                return content
    raise OSError(errno.EINVAL, f"a file of its kind has at most {most_bytes:,} bytes", str(path))


# What stands for a line that is longer than an event can be. No JSON begins with it.
OVERLONG_LINE_MARKER = b"\0"


def read_bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines from where `file` stands.

    In place of one that is longer than an event can be comes `OVERLONG_LINE_MARKER`, with its
    newline if it has one: whoever reads counts it as what no event is, and goes on behind it. A
    line without an end (a file may be any size) is given up: nothing more is read.
    """
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            if not skip_to_next_line(file):
                yield OVERLONG_LINE_MARKER
                return
            line = OVERLONG_LINE_MARKER + b"\n"
        yield line


def skip_to_next_line(file: BinaryIO) -> bool:
    """Go behind the next newline, a bounded piece at a time.

    Returns False where there is none in the next 256 MiB.
    """
    # 256 pieces of 1 MiB: a file without any newline ends the search.
    for _ in range(256):
        piece = file.readline(2**20)
        if piece.endswith(b"\n"):
            return True
        if not piece:
            return False
    return False


@contextmanager
def resolve_regular_file_path(path: Path | str) -> Iterator[str]:
    """A name under which a library opens exactly the regular file that was looked at.

    Raises OSError.
    """
    with open_regular_file(path) as file:
        opened = f"/proc/self/fd/{file.fileno()}"
        # Where there is no /proc, the name itself: another file may have it by now.
        if not os.path.exists(opened):
            opened = str(path)
        yield opened


def require_regular_file_mode(mode: int, path: Path | str) -> None:
    """Raise OSError that says what `mode` of an open file is, if that is not a regular file."""
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "it is a directory, not a regular file", str(path))
    kinds = {
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    kind = kinds.get(stat.S_IFMT(mode), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def read_json(
    path: Path,
    most_bytes: int = MAX_JSON_FILE_BYTES,
    *,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
    unique_keys: bool = False,
) -> Any:
    """The value in a regular file of JSON; `object_hook` and `unique_keys` as of `parse_json`.

    Raises OSError for what cannot be read, ValueError for what is no JSON.
    """
    return parse_json(
        read_whole_regular_file(path, most_bytes), object_hook=object_hook, unique_keys=unique_keys
    )


class RepeatedKeyError(ValueError):
    """An object of JSON has a key twice."""


def parse_json(
    text: bytes | str,
    *,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
    unique_keys: bool = False,
) -> Any:
    """Parse JSON as `json.loads` does, but raise ValueError also for nesting that is too deep, and
    in words that name no Python.

    With `unique_keys` RepeatedKeyError for an object that has a key twice, of which Python would
    take the last, and other readers the first.
    """

    def build_object(pairs: list[tuple[str, Any]]) -> Any:
        value = dict(pairs)
        if len(value) < len(pairs):
            raise RepeatedKeyError(f"the key {_find_repeated_key(pairs)!r} is there twice")
        return value if object_hook is None else object_hook(value)

    try:
        # Python's parser calls itself for each level of nesting.
        return json.loads(
            text,
            object_hook=object_hook,
            object_pairs_hook=build_object if unique_keys else None,
        )
    except RepeatedKeyError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        # Zeros are taken for UTF-32, whose places say nothing.
        place = f" (byte {error.start})" if error.encoding == "utf-8" else ""
        raise ValueError(f"it is not UTF-8 text{place}") from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        # int() refuses more than 4,300 digits.
        raise ValueError("a whole number in it has thousands of digits") from None


def _find_repeated_key(pairs: list[tuple[str, Any]]) -> str:
    """The first key that is in `pairs` again, cut if it is long."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key[:100]
        seen.add(key)
    raise LookupError("no key is there twice")


def create_writable_run_directory(directory: Path, *, needed_bytes: int = 0) -> Path:
    """Create `directory` and prove that it can be written and has room; raise ResourceError
    otherwise."""
    import shutil

    probe = directory / f".writable.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with create_regular_file(probe) as file:
            # A whole page: an empty file is made even on a disk without room for data.
            file.write(b"x" * 4096)
        probe.unlink()
        free_bytes = shutil.disk_usage(directory).free
    except OSError as error:
        try:
            probe.unlink(missing_ok=True)
        except OSError:
            pass
        raise build_path_resource_error(error, "opening the run directory", directory) from None
    if free_bytes < needed_bytes:
        from phalanx.core.units import format_bytes

        raise ResourceError(
            f"the run needs about {format_bytes(needed_bytes)} and {format_bytes(free_bytes)} are"
            " free",
            where=str(directory),
            fix="free space there or choose another run.dir",
        )
    return directory
