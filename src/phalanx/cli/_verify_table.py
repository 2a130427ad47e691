"""Prints the rows of `phalanx verify` as they come."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli._json import print_json
from phalanx.cli._progress import ProgressLine
from phalanx.core.units import format_seconds, plural
from phalanx.verify.choose import Selection
from phalanx.verify.progress import VerifyProgress
from phalanx.verify.result import VerifyResult
from phalanx.verify.row import DEFAULT_DTYPES, Row

# In this order.
ERROR_COLUMNS = (
    "loss",
    "norm",
    "gradient",
    "sent",
    "weight",
    "buffer",
    "evaluation",
    "update",
)


# Rows are printed as they come: where nobody redraws, a line now and then says when the last will.
VERIFY_PROGRESS_INTERVAL_S = 30.0
# Of the layouts that do not judge something: the line is about that, and --json has all of them.
MAX_NAMED_LAYOUTS = 3


def show_row_progress(line: ProgressLine, progress: VerifyProgress) -> None:
    """Show which row is judged, how many there are, and how long the rest may take."""
    words = [f"{progress.num_done:,}/{progress.num_rows:,} rows"]
    if progress.running:
        words.append(f"now {progress.running}")
    if progress.left_s is not None and progress.num_done < progress.num_rows:
        words.append(f"eta {format_seconds(progress.left_s)}")
    line.update(progress.num_done, progress.num_rows, instead="  ".join(words))


def describe_stopped_comparison(result: VerifyResult) -> str:
    """A line for a comparison that was stopped: what was not judged, and how to go on."""
    so_far = "none was"
    if result.summary:
        so_far = f"so far {result.summary}"
    sentence = f"stopped {plural(result.num_missing, 'row')} not judged; {so_far}"
    if not result.can_resume:
        return sentence
    return f"{sentence}. The same command goes on from here"


class VerifyRowPrinter:
    """Prints a line for each row that was compared, and at the end what was not judged: layouts
    that the ranks refused, and parts of rows."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._changes: tuple[str, ...] = ()
        self._shared_notes: tuple[str, ...] = ()
        self._shared_not_judged: tuple[str, ...] = ()
        self._refused: list[Row] = []
        self._compared: list[Row] = []
        self._settings_printed: tuple[str, ...] = ()
        self._already_printed: set[tuple[str, str]] = set()

    def print_changes(self, changes: Sequence[str]) -> None:
        """Print what is judged otherwise than a run had it; as JSON it is a note of each row."""
        self._changes = tuple(f"changed {change}" for change in changes)
        if not self._as_json:
            for line in self._changes:
                print(line)

    def print_selection(self, selection: Selection) -> None:
        self._shared_notes = (*self._changes, *selection.notes, *selection.not_judged)
        self._shared_not_judged = tuple(
            line.removeprefix("not judged: ") for line in selection.not_judged
        )
        self._settings_printed = selection.left_out
        self._already_printed = {(row.layout, row.dtype) for row in selection.refused_rows}
        if not self._as_json:
            refusals = describe_refused_rows(selection.refused_rows)
            for line in [*selection.notes, *selection.not_judged, *refusals]:
                print(line)

    def print_row(self, row: Row) -> None:
        if self._as_json:
            shared = () if row.ok is None else self._shared_not_judged
            lists = {
                "notes": [*row.notes, *self._shared_notes],
                "not_judged": list(dict.fromkeys((*row.not_judged, *shared))),
            }
            print_json("verify-row", row.to_json() | lists)
        elif row.ok is None:
            # Those of the selection are printed with it.
            if (row.layout, row.dtype) not in self._already_printed:
                self._refused.append(row)
        else:
            self._compared.append(row)
            for line in format_verified_row(row):
                print(line)

    def print_omissions(self) -> None:
        """Print the rows that ranks refused, a line for each reason, and what the others did not
        judge."""
        for line in describe_refused_rows(self._refused):
            print(line)
        for line in describe_not_judged(self._compared, self._settings_printed):
            print(line)


def describe_not_judged(rows: Sequence[Row], settings: Sequence[str] = ()) -> list[str]:
    """A line for each part that rows have and did not judge, with the layouts of these rows;
    without `settings` of the job, which have been printed."""
    layouts_of: dict[str, dict[str, None]] = {}
    for row in rows:
        for part in row.not_judged:
            if part not in settings:
                layouts_of.setdefault(part, {})[row.layout] = None
    return [
        f"not judged in {_shorten_names(list(layouts))}: {part}"
        for part, layouts in layouts_of.items()
    ]


def _shorten_names(names: Sequence[str]) -> str:
    """The first names, and how many follow."""
    if len(names) <= MAX_NAMED_LAYOUTS:
        return ", ".join(names)
    return f"{', '.join(names[:MAX_NAMED_LAYOUTS])} and {len(names) - MAX_NAMED_LAYOUTS} more"


def describe_refused_rows(rows: Sequence[Row]) -> list[str]:
    """A line for each reason, with the layouts that it refuses; and the types, where it is not
    all of them."""
    dtypes: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        dtypes.setdefault((row.refused, row.layout), []).append(row.dtype)
    names: dict[str, list[str]] = {}
    for (reason, layout), refused_dtypes in dtypes.items():
        # "" stands for a layout that was refused before any type came into play.
        if refused_dtypes != [""] and set(refused_dtypes) != set(DEFAULT_DTYPES):
            layout = f"{layout} ({', '.join(refused_dtypes)})"
        names.setdefault(reason, []).append(layout)
    return [f"refused {', '.join(layouts)}: {reason}" for reason, layouts in names.items()]


def format_verified_row(row: Row) -> list[str]:
    """A line for a row that was compared, and where it differs lines that say what, where and
    why."""
    if row.crashed:
        crash = ["        " + line for line in row.crashed.split("\n")]
        return [f"CRASHED {row.layout:<34} {row.dtype}", *crash]
    errors = "  ".join(
        f"{name} {row.errors[name]:.0e}" for name in ERROR_COLUMNS if name in row.errors
    )
    allowed = f"{row.tolerance:.0e}"
    extent = ""
    if row.extent:
        extent = f"{row.extent}  "
    lines = [
        f"{_format_verdict(row)} {row.layout:<34} {row.dtype}  {extent}{errors}"
        f"  (allowed {allowed}, {row.wall_s:.1f} s)"
    ]
    if row.first:
        lines += [f"        first   {row.first}", f"        perhaps {row.first.cause}"]
    if row.flips:
        flip = f"        flip    {row.flips[0]}"
        if len(row.flips) > 1:
            flip += f"; and {len(row.flips) - 1} more"
        lines.append(flip)
        lines.append(
            "        note    routing flips are near-ties: judged beside one process that routes as"
            " the layout does"
        )
    return lines + [f"        note    {note}" for note in row.notes]


def _format_verdict(row: Row) -> str:
    if not row.ok:
        return "DIFFERS"
    if row.compress != "none":
        return "lossy  "
    if row.flips:
        return "flipped"
    return "equal  "
