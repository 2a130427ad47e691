"""A campaign: trials that have run, one JSON line each, in a file that grows over days.

A trial that is in the file is not run again.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import phalanx
from phalanx.core.cores import count_allowed_cores
from phalanx.core.digest import encode_canonical_json
from phalanx.core.errors import UsageError
from phalanx.core.files import (
    open_lines_for_append,
    open_regular_file,
    open_regular_file_for_append,
    parse_json,
    read_bounded_lines,
)
from phalanx.core.typed_json import JsonRecord, TypedJsonError
from phalanx.drills.judge import Bars, Check, Measured, judge_trial
from phalanx.drills.run_trial import FinishedTrial
from phalanx.drills.trials import Trial, TrialPlace

TRIAL_SCHEMA = "phalanx.drill-trial/1"


@dataclass(frozen=True)
class Circumstances(JsonRecord):
    """Version, commit ("" where there is none), day, machine and job of trials. `code`: digest of
    the source that the answer to the fault comes from ("": nobody took it)."""

    version: str
    commit: str
    date: str
    machine: str
    job: str
    code: str = ""

    @classmethod
    def now(cls, job_digest: str) -> Circumstances:
        """The circumstances of this moment."""
        cores = count_allowed_cores()
        machine = f"{platform.system()} {platform.machine()}, {cores} cores"
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        return cls(phalanx.__version__, read_commit(), day, machine, job_digest)


@dataclass(frozen=True)
class TrialRow(JsonRecord):
    """One line of a campaign. A trial that cannot run here has `skipped`, the reason, and nothing
    measured.

    `sharing`: the trials that its run had, itself among them. Exit code, final bits, goodput and
    what was left behind are of the run.
    """

    fault: str
    seed: int
    repeat: int
    place: TrialPlace
    inject: tuple[str, ...]
    circumstances: Circumstances
    bars: Bars | None = None
    measured: Measured | None = None
    skipped: str = ""
    sharing: int = 1

    @property
    def checks(self) -> list[Check]:
        if self.measured is None or self.bars is None:
            return []
        return judge_trial(self.measured, self.bars)

    @property
    def is_passed(self) -> bool:
        return not self.skipped and all(check.ok for check in self.checks)

    @property
    def key(self) -> tuple[str, int, int]:
        return (self.fault, self.seed, self.repeat)

    def to_line(self) -> str:
        """One line of JSON, with the checks for those who only read."""
        body: dict[str, Any] = {"schema": TRIAL_SCHEMA, **self.to_json()}
        body["checks"] = [asdict(check) for check in self.checks]
        body["passed"] = None if self.skipped else self.is_passed
        return json.dumps(body, separators=(",", ":"), allow_nan=False)


def build_row(
    finished: FinishedTrial, circumstances: Circumstances, *, sharing: int = 1
) -> TrialRow:
    """The line of a trial that has run, in a run that had `sharing` of them."""
    trial = finished.trial
    return TrialRow(
        trial.fault,
        trial.seed,
        trial.repeat,
        trial.place,
        trial.inject,
        circumstances,
        finished.bars,
        finished.measured,
        sharing=sharing,
    )


def build_skipped_row(trial: Trial, why_not: str, circumstances: Circumstances) -> TrialRow:
    """The line of a trial that cannot run here."""
    return TrialRow(
        trial.fault,
        trial.seed,
        trial.repeat,
        trial.place,
        trial.inject,
        circumstances,
        skipped=why_not,
    )


def read_campaign(path: Path) -> list[TrialRow]:
    """The trials of a file, in its order; none if there is no file. A torn line is left out: its
    trial runs again.

    Raises UsageError for a file that is no campaign.
    """
    try:
        with open_regular_file(path) as file:
            lines = list(read_bounded_lines(file))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{path} cannot be read", why=error.strerror) from None
    rows = list(_parse_lines(lines))
    if lines and not rows:
        raise UsageError(f"{path} is no campaign of drills", fix="give a new file to --campaign")
    return rows


def select_newest_rows(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Of each trial of each job the row that came last, in the order of the first ones."""
    newest = {(row.key, row.circumstances.job): row for row in rows}
    return list(newest.values())


def _parse_lines(lines: Sequence[bytes]) -> Iterator[TrialRow]:
    for line in lines:
        try:
            body = parse_json(line)
            if not isinstance(body, dict) or body.pop("schema") != TRIAL_SCHEMA:
                continue
            for derived in ("checks", "passed"):
                body.pop(derived, None)
            # Of NaN and infinity it makes ValueError: with such a bar any trial would pass.
            encode_canonical_json(body)
            row = TrialRow.from_json(body)
            if row.skipped or (row.measured is not None and row.bars is not None):
                yield row
        except (ValueError, KeyError, TypedJsonError):
            continue


def require_campaign_can_grow(path: Path) -> None:
    """Raises UsageError where no trial can be added to the file: better before a run than after."""
    is_new = not path.exists()
    try:
        open_regular_file_for_append(path).close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{path} cannot be written", why=error.strerror) from None


def append_row(path: Path, row: TrialRow) -> None:
    """Add one trial to a campaign, in one write. Raises UsageError where it cannot be written."""
    try:
        with open_lines_for_append(path) as file:
            file.write(row.to_line().encode() + b"\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written", why=error.strerror) from None


def read_commit() -> str:
    """The commit of this package's checkout; "" where it is installed otherwise."""
    folder = Path(phalanx.__file__).parent
    try:
        completed = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=10", "HEAD"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""
