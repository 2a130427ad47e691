"""`phalanx verify` on the device: its rows beside the reference, which the CPU computes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from gpu_check.cases import Case
from gpu_check.systems.same_results import Found
from gpu_check.training import Say

TYPES = "float64,float32,bf16"


def measure(case: Case, say: Say) -> None:
    keys = ["--model=small", "--shrink", "--ranks=1", "--layouts=one", f"--types={TYPES}"]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "verify", *keys, f"--device={case.device}", "--json"],
        capture_output=True,
        text=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise RuntimeError(f"verify ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    found = {f"verify, {row['dtype']}": describe_row(row).to_row() for row in rows}
    say({"parity": found, "agrees": all(row["agrees"] for row in found.values())})


def describe_row(row: Mapping[str, Any]) -> Found:
    """The largest error of a row beside what it allows; an infinite one of a row that is not
    equal."""
    if row["ok"] is None or row["crashed"]:
        return Found(math.inf, 0.0, str(row["refused"] or row["crashed"])[:160])
    worst = max(row["errors"], key=row["errors"].__getitem__)
    if not row["ok"]:
        return Found(math.inf, row["tolerance"], worst)
    error = row["errors"][worst]
    # In bf16 each tensor has a band of its own, and the row's is the median one.
    return Found(error, max(error, row["tolerance"]), worst)
