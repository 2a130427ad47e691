"""Whether the ledger of seconds adds up: one run in each layout, and what no part of it claims.

`python benchmarks/ledger_sums.py [--ranks 4] [--steps 30]`. Trains a small decoder as `phalanx
train` does, with an evaluation, a save, four pauses in rank 0 and a rank that is killed and started
again, and prints of each layout the wall, the unattributed share of the rank with most, what was
counted twice, and of each pause what was injected beside what was found: what the step of the pause
has more in that phase than the median of the steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from phalanx.observe.events import StepFinished
from phalanx.observe.tail import read_recorded_events

JOB = (
    "eval.every_steps=15",
    "eval.tokens=2048",
    "train.sample_tokens=0",
    "checkpoint.every_steps=10",
    "observe.sinks=[]",
)
PAUSE_S = 0.5
PAUSED_PHASES = ("data", "forward", "backward", "optimizer")
PAUSES = f"""
import time


def pause():
    time.sleep({PAUSE_S})
"""
# Before the first save, so that no restart does them again.
FIRST_PAUSED_STEP = 5
INJECTED = [
    *(
        f"pauses:pause:rank=0,step={FIRST_PAUSED_STEP + at},phase={name}"
        for at, name in enumerate(PAUSED_PHASES)
    ),
    "kill:rank=1,step=18",
]
MIXTURE = ("model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_dim=128")
TIMEOUT_S = 600


def list_layouts(ranks: int) -> dict[str, tuple[str, ...]]:
    """Settings of each layout of an even number of ranks, by name."""
    half = ranks // 2
    return {
        "ddp": (f"parallel.dp_replicate={ranks}",),
        "zero1": (f"parallel.dp_shard={ranks}", "parallel.zero_stage=1"),
        "zero2": (f"parallel.dp_shard={ranks}", "parallel.zero_stage=2"),
        "zero3": (f"parallel.dp_shard={ranks}", "parallel.zero_stage=3"),
        "hsdp": ("parallel.dp_replicate=2", f"parallel.dp_shard={half}", "parallel.zero_stage=3"),
        "tp": (f"parallel.tp={ranks}",),
        "tp2 x ddp": ("parallel.tp=2", f"parallel.dp_replicate={half}"),
        "pp 1f1b": (f"parallel.pp={ranks}", "parallel.schedule=1f1b"),
        "pp2 zb-v x ddp": (
            "parallel.pp=2",
            "parallel.schedule=zb-v",
            f"parallel.dp_replicate={half}",
        ),
        "cp": (f"parallel.cp={ranks}",),
        "cp2 x tp2": ("parallel.cp=2", "parallel.tp=2"),
        "ep2 x ddp": (*MIXTURE, "parallel.ep=2"),
        "compressed ddp": (f"parallel.dp_replicate={ranks}", "parallel.compress=int8"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    injected = ", ".join(f"{name} {PAUSE_S:.2f}" for name in PAUSED_PHASES)
    print(f"| layout | wall, s | most unattributed | counted twice, s | found of {injected} s |")
    print("|---|---:|---:|---:|---|")
    worst = 0.0
    for name, settings in list_layouts(options.ranks).items():
        outcome = train_and_read_ledgers(settings, options.ranks, options.steps)
        if isinstance(outcome, str):
            print(f"| {name} | – | {outcome} | – | – |", flush=True)
            continue
        ledgers, pauses_s = outcome
        share = max(each["unattributed_s"] / each["wall_s"] for each in ledgers)
        twice_s = max(each["counted_twice_s"] for each in ledgers)
        worst = max(worst, share)
        cells = [f"{ledgers[0]['wall_s']:.1f}", f"{share:.1%}", f"{twice_s:.2f}"]
        cells.append(", ".join(f"{each:.2f}" for each in pauses_s))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\nat most {worst:.1%} of a rank's wall is unattributed", file=sys.stderr)
    return 0


def find_pauses(run_dir: Path) -> list[float]:
    """Seconds of each paused phase of rank 0 in the step of its pause, beyond the median of its
    steps: what the ledger adds up."""
    envelopes = read_recorded_events(run_dir, StepFinished, rank=0)
    phases_by_step = {each.event.step: each.event.phases_s for each in envelopes}
    return [
        phases_by_step[FIRST_PAUSED_STEP + at][name]
        - median(phases_s.get(name, 0.0) for phases_s in phases_by_step.values())
        for at, name in enumerate(PAUSED_PHASES)
    ]


def train_and_read_ledgers(
    settings: tuple[str, ...], ranks: int, steps: int
) -> tuple[list[dict[str, float]], list[float]] | str:
    """The ledgers of all ranks and what was found of the pauses, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="ledger-") as folder:
        run_dir = Path(folder) / "run"
        (Path(folder) / "pauses.py").write_text(PAUSES)
        inject = f"resilience.inject={json.dumps(INJECTED)}"
        command = [sys.executable, "-m", "phalanx"]
        done = subprocess.run(
            [
                *(*command, "train", *JOB, *settings, inject, f"parallel.ranks={ranks}"),
                *(f"train.steps={steps}", f"run.dir={run_dir}"),
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=folder,
            check=False,
        )
        if done.returncode != 0:
            return done.stderr.strip().splitlines()[0]
        report = subprocess.run(
            [*command, "report", str(run_dir), "--json"], capture_output=True, text=True, check=True
        )
        return list(json.loads(report.stdout)["ledger"]), find_pauses(run_dir)


if __name__ == "__main__":
    sys.exit(main())
