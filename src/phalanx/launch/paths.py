"""Paths of the files of an attempt inside RUN, and the number of the next attempt."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.core.errors import ResourceError
from phalanx.core.files import read_json, write_json_atomically
from phalanx.core.logs import overwrite_secrets_in_file
from phalanx.core.secrets import find_secret_values_by_variable
from phalanx.observe.trace_part import TRACES

LOGS, EVENTS, BLACK_BOXES = "logs", "events", "blackbox"
# Among the logs: how many bytes of each were searched.
REDACTED_LOG_SIZES_FILE_NAME = ".blanked-out.json"
_ATTEMPT_FILE_PATTERN = re.compile(r"rank-\d+-attempt-(\d+)\.")


def rank_log_path(run_dir: Path, rank: int, attempt: int) -> Path:
    return run_dir / LOGS / f"rank-{rank:04d}-attempt-{attempt:02d}.log"


def error_report_path(run_dir: Path, rank: int, attempt: int) -> Path:
    return run_dir / LOGS / f"rank-{rank:04d}-attempt-{attempt:02d}.error.json"


def server_log_path(run_dir: Path) -> Path:
    return run_dir / LOGS / "server.log"


def black_box_path(run_dir: Path, rank: int) -> Path:
    return run_dir / BLACK_BOXES / f"rank-{rank:04d}"


def call_board_path(run_dir: Path, rank: int) -> Path:
    return run_dir / BLACK_BOXES / f"calls-{rank:04d}"


def next_attempt_number(run_dir: Path) -> int:
    """One more than any attempt that left a file, so that a resumed run never writes over
    earlier ones."""
    newest = -1
    for folder in (EVENTS, LOGS):
        for path in (run_dir / folder).glob("rank-*-attempt-*"):
            if match := _ATTEMPT_FILE_PATTERN.match(path.name):
                newest = max(newest, int(match[1]))
    return newest + 1


def refuse_symlinked_run_folders(run_dir: Path, *, more: Sequence[str] = ()) -> None:
    """Raise ResourceError for a link in place of a folder in which a job removes and rewrites files
    of its own.

    A run may come from anywhere, and a link in it may lead to anybody's files. RUN and
    RUN/checkpoints may be links. `more`: other folders of the run that are about to be filled.
    """
    for name in (LOGS, EVENTS, BLACK_BOXES, TRACES, *more):
        folder = run_dir / name
        if os.path.islink(folder):
            raise ResourceError(
                f"it is a link to {os.readlink(folder)}",
                where=str(folder),
                why="a job removes and writes files there",
                fix="put a folder in its place (RUN itself and RUN/checkpoints may be links)",
            )


def clear_black_boxes(run_dir: Path) -> None:
    """Remove the last places of the ranks of an earlier attempt."""
    for path in (run_dir / BLACK_BOXES).glob("rank-*"):
        # No place can be read from it.
        with contextlib.suppress(IsADirectoryError):
            path.unlink(missing_ok=True)


def redact_secrets_in_logs(
    run_dir: Path, environ: Mapping[str, str], *, only_attempt: int | None = None
) -> None:
    """Overwrite secrets of `environ` in the logs of processes that have ended: C code and child
    processes print too.

    Bytes that were searched before, by this process or an earlier one, are not searched again: a
    restart waits for this. `only_attempt`: only the logs of its ranks are searched, and nothing
    else is touched: the other files are another job's.
    """
    secrets = sorted(
        set(itertools.chain.from_iterable(find_secret_values_by_variable(environ).values()))
    )
    num_searched = _read_redacted_log_sizes(run_dir)
    pattern = "*.log"
    if only_attempt is not None:
        pattern = f"rank-*-attempt-{only_attempt:02d}.log"
    for path in (run_dir / LOGS).glob(pattern):
        try:
            # The size before: what is written meanwhile is searched the next time.
            size = path.stat().st_size
            overwrite_secrets_in_file(path, secrets, done_bytes=num_searched.get(path.name, 0))
            num_searched[path.name] = size
        except OSError:
            # A log that is gone or cannot be written holds nothing that could be mended here.
            pass
    if only_attempt is None:
        # It only saves time.
        with contextlib.suppress(OSError):
            write_json_atomically(
                run_dir / LOGS / REDACTED_LOG_SIZES_FILE_NAME, num_searched, durable=False
            )


def _read_redacted_log_sizes(run_dir: Path) -> dict[str, int]:
    """Bytes of each log that were searched for secrets already, by file name."""
    try:
        sizes = read_json(run_dir / LOGS / REDACTED_LOG_SIZES_FILE_NAME)
        return {str(name): int(size) for name, size in sizes.items() if int(size) >= 0}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return {}
