"""What readers of rows share: where they stand, and what they say of a column that is not there.
Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import DataError, format_nearest_word_hint

MAX_SHOWN_COLUMNS = 20  # of columns or fields, in a message


@dataclass
class ReadingPosition:
    """The position of a reader: what progress and the summary need. `read` is in the units of
    Span.weight.
    """

    read: float = 0.0
    num_null_rows: int = 0


def missing_column_error(
    column: str, known: list[str], where: str, noun: str, they: str
) -> DataError:
    """Names what is there, and the nearest of it."""
    why = f"{they} none"
    if known:
        why = f"{they}: {', '.join(known[:MAX_SHOWN_COLUMNS])}"
    if len(known) > MAX_SHOWN_COLUMNS:
        why += f" and {len(known) - MAX_SHOWN_COLUMNS} more"
    suggestion = format_nearest_word_hint(column, known)
    return DataError(
        f"there is no {noun} {column!r}",
        where=where,
        why=why,
        fix=suggestion or "choose with --column, or data.column in a job",
    )
