"""One system in a process of its own: killed at its deadline, with what it had found by then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_check.cases import Case, System

MEASURED, PARTIAL, FAILED, LATE, MISSING, REFUSED, NO_TIME = (
    *(
        "measured",
        "measured in part",
        "failed",
        "over its deadline",
        "not installed",
        "refused",
        "no time left",
    ),
)
Row = dict[str, Any]


def run_system(
    system: System, case: Case, *, deadline_s: float, folder: Path, environ: Mapping[str, str]
) -> tuple[Row, str]:
    """(its row, what it printed). The row has at least "system", "status", "why" and "wall_s"."""
    found, log = folder / f"{system.file}.jsonl", folder / f"{system.file}.log"
    entry = Path(__file__).parent / "child.py"
    command = [sys.executable, str(entry), system.module, case.to_json(), str(found)]
    began = time.monotonic()
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
        is_late = False
        try:
            child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            _end(child)
    said = log.read_text(errors="replace")
    row = read_row(found) | {"system": system.name, "wall_s": round(time.monotonic() - began, 1)}
    status, why = _outcome(row, said, child.returncode, deadline_s if is_late else None)
    row.pop("end", None)
    return {**row, "status": status, "why": why}, said


def read_row(path: Path) -> Row:
    """All that a child has written, later lines over earlier ones; a last line may be half
    written."""
    row: Row = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row |= json.loads(line)
        except ValueError:
            break
    return row


def _outcome(row: Row, said: str, code: int, deadline_s: float | None) -> tuple[str, str]:
    end = row.get("end")
    if end is not None:
        return end["status"], end["why"]
    why = f"{deadline_s:.0f} s" if deadline_s is not None else f"{_ended(code)}; {last_line(said)}"
    if "tokens_per_s" in row or "parity" in row:
        return PARTIAL, why
    return (LATE if deadline_s is not None else FAILED), why


def _ended(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _end(child: subprocess.Popen[bytes]) -> None:
    """It and all that it has started: compilers have workers."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
