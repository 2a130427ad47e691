"""How fast the directory of checkpoints takes and gives bytes: one large file, and many small ones.

Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.core.disk_errors import SCRATCH_DIRECTORY_PREFIX, build_path_resource_error
from phalanx.core.errors import ResourceError
from phalanx.core.units import format_bytes
from phalanx.plan.profiles import TimedOperation

MIB = 2**20
LARGE_BYTES, QUICK_BYTES, BLOCK_BYTES = 256 * MIB, 16 * MIB, 4 * MIB
SMALL_BYTES, NUM_SMALL, NUM_QUICK = 16 * 1024, 200, 20
NUM_LARGE_FILES = 3


def measure_storage(
    directory: Path,
    *,
    limit_s: float,
    is_quick: bool,
    on_progress: Callable[[float], None] = lambda share: None,
) -> tuple[TimedOperation, ...]:
    """Write, sync and read files under `directory`, and remove them; stops about `limit_s` seconds
    after it began.

    `on_progress` gets the share that is done. Reads come from the device where the system drops
    its cache for a file (`posix_fadvise`), else from memory. Raises ResourceError where the
    directory refuses, or has not twice the room.
    """
    large_bytes, num_small = (QUICK_BYTES, NUM_QUICK) if is_quick else (LARGE_BYTES, NUM_SMALL)
    with _open_scratch_folder(directory, 2 * large_bytes) as folder:
        try:
            return _measure_files_in(folder, large_bytes, num_small, limit_s, on_progress)
        except OSError as error:
            raise build_path_resource_error(error, "measuring storage", folder) from None


@contextlib.contextmanager
def _open_scratch_folder(directory: Path, needed_bytes: int) -> Iterator[Path]:
    """A folder in `directory`, which is made if it is not there; both go at the end."""
    missing_folders = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(directory).free
        if free_bytes < needed_bytes:
            raise ResourceError(
                f"measuring storage needs {format_bytes(needed_bytes)} for a while",
                where=str(directory),
                why=f"{format_bytes(free_bytes)} are free",
                fix="choose another --directory",
            )
        folder = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_DIRECTORY_PREFIX}bench-", dir=directory))
    except OSError as error:
        raise build_path_resource_error(error, "making a directory", directory) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for each in missing_folders:
            # Somebody else may have put files there meanwhile.
            with contextlib.suppress(OSError):
                each.rmdir()


def _measure_files_in(
    folder: Path,
    large_bytes: int,
    num_small: int,
    limit_s: float,
    on_progress: Callable[[float], None],
) -> tuple[TimedOperation, ...]:
    deadline = time.monotonic() + limit_s
    block = os.urandom(BLOCK_BYTES)
    times: dict[str, list[float]] = {"write": [], "sync": [], "read": []}
    for number in range(NUM_LARGE_FILES):
        path = folder / f"large-{number}"
        for name, seconds in _time_large_file(path, block, large_bytes).items():
            times[name].append(seconds)
        path.unlink()
        on_progress(0.75 * (number + 1) / NUM_LARGE_FILES)
        if time.monotonic() > deadline - 0.25 * limit_s:
            break
    rows = [_build_timed_operation(name, large_bytes, seconds) for name, seconds in times.items()]
    small: dict[str, list[float]] = {"small_write": [], "small_read": []}
    for number in range(num_small):
        path = folder / f"small-{number}"
        for name, seconds in _time_small_file(path, block[:SMALL_BYTES]).items():
            small[name].append(seconds)
        on_progress(0.75 + 0.25 * (number + 1) / num_small)
        if time.monotonic() > deadline:
            break
    rows += [_build_timed_operation(name, SMALL_BYTES, seconds) for name, seconds in small.items()]
    return tuple(rows)


def _time_large_file(path: Path, block: bytes, num_bytes: int) -> dict[str, float]:
    """Seconds of writing a file in blocks, of making it durable, and of reading it again."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        began = time.perf_counter()
        for _ in range(num_bytes // len(block)):
            _write_fully(descriptor, block)
        written = time.perf_counter()
        os.fsync(descriptor)
        synced = time.perf_counter()
        _drop_page_cache(descriptor)
        os.lseek(descriptor, 0, os.SEEK_SET)
        began_reading = time.perf_counter()
        while os.read(descriptor, len(block)):
            pass
        read = time.perf_counter()
    finally:
        os.close(descriptor)
    return {"write": written - began, "sync": synced - written, "read": read - began_reading}


def _write_fully(descriptor: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]


def _time_small_file(path: Path, content: bytes) -> dict[str, float]:
    """Seconds of making one small durable file, and of opening and reading it."""
    began = time.perf_counter()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _write_fully(descriptor, content)
        os.fsync(descriptor)
        written = time.perf_counter()
        _drop_page_cache(descriptor)
    finally:
        os.close(descriptor)
    began_reading = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.read(descriptor, len(content))
    finally:
        os.close(descriptor)
    return {"small_write": written - began, "small_read": time.perf_counter() - began_reading}


def _drop_page_cache(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _build_timed_operation(kind: str, num_bytes: int, times: list[float]) -> TimedOperation:
    low, high = min(times), max(times)
    return TimedOperation(
        kind=kind,
        mode="",
        dtype="",
        size=(num_bytes,),
        num_ranks=1,
        num_threads=1,
        seconds=statistics.median(times),
        low_s=low,
        high_s=high,
        slowest_s=high,
        cpu_s=0.0,
        num_repeats=len(times),
        num_bytes=float(num_bytes),
    )
