"""The result of comparing layouts with one process: rows, exit code, summary. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import ExitCode
from phalanx.core.units import plural
from phalanx.verify.row import Row


@dataclass(frozen=True)
class VerifyResult:
    """The rows of a comparison, one for each layout and type.

    `notes` and `not_judged` are lines for a person: what was compared, and what of the job was not.
    `required`: layouts whose refusal is a failure. `stop_code` is the exit code of a stop by a
    person or a scheduler; None if the comparison came to its end. `num_missing`: rows that a stop
    has left out; with `can_resume` the same call has to judge only these. `left_out`: settings of
    the job that no row judges.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    not_judged: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    stop_code: int | None = None
    num_missing: int = 0
    can_resume: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """True if it came to its end and no layout differs, crashed, or was refused although it
        was named."""
        return self.exit_code == ExitCode.OK

    @property
    def exit_code(self) -> int:
        """The exit code of `phalanx verify`.

        0; 11 if a layout differs; 3 if one is refused that was named, or all are; the stop's after
        a stop.
        """
        if self.stop_code is not None:
            return self.stop_code
        if any(row.ok is False for row in self.rows):
            return ExitCode.VERIFICATION
        # In some type: not every module has a float64.
        equal = {row.layout for row in self.rows if row.ok}
        refused = {row.layout for row in self.rows} - equal
        is_refused = bool(refused & self.required) or bool(refused and not equal)
        if is_refused:
            return ExitCode.JOB
        return ExitCode.OK

    @property
    def summary(self) -> str:
        """One line that counts the rows that equal the reference and the layouts that were
        refused, and names settings of the job that nobody judged."""
        judged = [row for row in self.rows if row.ok is not None]
        exact = [row for row in judged if row.compress == "none"]
        rounded = [row for row in judged if row.compress != "none"]
        parts = []
        if exact:
            parts.append(f"{_count_equal_rows(exact)} of {len(exact)} rows equal the reference")
        num_flipped = sum(bool(row.ok and row.flips) for row in judged)
        if num_flipped:
            parts.append(f"{num_flipped} of them routed alike, since a near-tie flipped")
        if rounded:
            parts.append(
                f"{_count_equal_rows(rounded)} of {len(rounded)} with compressed gradients do what"
                " they should"
            )
        num_refused = len({row.layout for row in self.rows if row.ok is None})
        if num_refused:
            parts.append(f"{plural(num_refused, 'layout')} refused")
        if judged:
            parts += [f"not judged: {setting.partition(':')[0]}" for setting in self.left_out]
        return ", ".join(parts)


def _count_equal_rows(rows: list[Row]) -> int:
    return sum(bool(row.ok) for row in rows)
