"""The command line from end to end: ranks forked by the server, trained, saved, resumed, sampled;
against one run that was never interrupted."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_check.cases import Case
from gpu_check.systems.same_results import SAME, SMALL, Found
from gpu_check.training import Say

KEYS = (*SMALL, "optim.schedule=constant", "observe.sinks=[]", "eval.tokens=0", "parallel.ranks=1")
FIRST, LAST = 3, 6


def measure(case: Case, say: Say) -> None:
    keys = [key for key in KEYS if not key.startswith(("model.vocab_size", "train.sample_tokens"))]
    keys += [f"cluster.device={case.device}", "train.sample_tokens=8"]
    with tempfile.TemporaryDirectory(prefix="gpu-check-runs-") as folder:
        straight, resumed = Path(folder) / "straight", Path(folder) / "resumed"
        run_phalanx("train", *keys, f"train.steps={LAST}", f"run.dir={straight}")
        run_phalanx("train", *keys, f"train.steps={FIRST}", f"run.dir={resumed}")
        run_phalanx("train", "--resume", str(resumed), f"train.steps={LAST}")
        wanted, found = read_losses(straight), read_losses(resumed)
    error = max(abs(found[step] / wanted[step] - 1) for step in range(1, LAST + 1))
    row = Found(error, SAME, "losses").to_row()
    say({"parity": {"a run that was resumed": row}, "agrees": row["agrees"]})


def run_phalanx(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"phalanx {arguments[0]} ended with {done.returncode}: {done.stderr.strip()[-400:]}"
        )


def read_losses(run_dir: Path) -> dict[int, float]:
    """By step, of what rank 0 has said."""
    found: dict[int, float] = {}
    for path in sorted((run_dir / "events").glob("rank-0000-attempt-*.jsonl")):
        for line in path.read_text().splitlines():
            fact = json.loads(line)
            if fact["event"] == "step_finished":
                found[fact["step"]] = fact["loss"]
    return found
