"""Which error of data an OSError is: its disk fails (exit 7), or it is not there or not what is
wanted (exit 4)."""

from __future__ import annotations

from pathlib import Path

from phalanx.core.disk_errors import READ_FAILURE_ERRNOS, suggest_fix_for_path_error
from phalanx.core.errors import DataError, DataStorageError


def build_unreadable_data_error(
    error: OSError,
    where: Path | str,
    summary: str = "cannot be read",
    *,
    why: str = "",
    fix: str | None = None,
) -> DataError:
    """The DataError that says that `where` cannot be read because of `error`; a DataStorageError
    if its disk fails."""
    why = why or error.strerror or str(error)
    if error.errno not in READ_FAILURE_ERRNOS:
        return DataError(summary, where=str(where), why=why, fix=fix)
    return DataStorageError(
        summary,
        where=str(where),
        why=why,
        fix=suggest_fix_for_path_error(error, where, place="place for the data"),
    )
