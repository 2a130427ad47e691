"""Whether files are what they were when something was made of them: by their times, and by content
where times differ.

Torch-free. A file that nobody wrote to since is not read again. A later time alone means nothing:
whoever copies a corpus gives it new ones. And `cp -p` gives another content an old one, so that the
time of the last change of status counts, too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.core.errors import DataError
from phalanx.data.encode import ShardOutcome, hash_task_content
from phalanx.data.sources import SourceListing
from phalanx.data.spans import ShardTask
from phalanx.data.unreadable import build_unreadable_data_error

# Some file systems know whole or even seconds only.
_MTIME_RESOLUTION_NS = 2 * 10**9


def find_latest_change_times(sources: Sequence[SourceListing]) -> dict[str, int]:
    """When each file may have changed last, in nanoseconds, by path."""
    times = {}
    for file in itertools.chain.from_iterable(listing.files for listing in sources):
        times[file.path] = file.changed_ns
    return times


def find_changed_files(
    task: ShardTask, content: str | None, column: str, changed_ns: Mapping[str, int], since: Path
) -> list[str]:
    """Paths of a task's files of which one is not what it was when `since` was written, newest
    first; none if all are.

    `content` is what `hash_task_content` said then. Raises DataError for a file that cannot be
    read.
    """
    since_ns = os.stat(since).st_mtime_ns - _MTIME_RESOLUTION_NS
    paths = [span.path for span in task.spans if changed_ns[span.path] >= since_ns]
    # Reading all of it is the last resort.
    if not paths or hash_task_content(task, column) == content:
        return []
    return sorted(paths, key=lambda path: -changed_ns[path])


def require_inputs_unchanged(
    tasks: Sequence[ShardTask],
    outcomes: Mapping[int, ShardOutcome],
    sources: Sequence[SourceListing],
    column: str,
) -> None:
    """Raise DataError for a file that changed after it was read; dataset.json, written next,
    would be newer than it."""
    touched = set()
    for file in itertools.chain.from_iterable(listing.files for listing in sources):
        try:
            status = os.stat(file.path)
        except OSError as error:
            raise build_unreadable_data_error(error, file.path) from None
        if status.st_size != file.num_bytes:
            raise _changed_file_error(file.path)
        if max(status.st_mtime_ns, status.st_ctime_ns) != file.changed_ns:
            touched.add(file.path)
    for task in tasks:
        paths = [span.path for span in task.spans if span.path in touched]
        if paths and hash_task_content(task, column) != outcomes[task.number].content:
            raise _changed_file_error(paths[0])


def _changed_file_error(path: str) -> DataError:
    return DataError(
        "the file changed after it was read",
        where=path,
        why="its part of the dataset may not fit",
        fix="run it again",
    )
