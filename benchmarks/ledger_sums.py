"""Whether the ledger of seconds adds up: one run in each layout, and what no part of it claims.

`python benchmarks/ledger_sums.py [--ranks 4] [--steps 30]`. Trains a small decoder as `phalanx
train` does, with an evaluation, a save and a rank that is killed and started again, and prints of
each layout the wall, the unattributed share of the rank with most, and what was counted twice.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = (
    "eval.every_steps=15",
    "eval.tokens=2048",
    "train.sample_tokens=0",
    "checkpoint.every_steps=10",
    "observe.sinks=[]",
    'resilience.inject=["kill:rank=1,step=18"]',
)
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
    print("| layout | wall, s | most unattributed | counted twice, s |\n|---|---:|---:|---:|")
    worst = 0.0
    for name, settings in list_layouts(options.ranks).items():
        ledgers = train_and_read_ledgers(settings, options.ranks, options.steps)
        if isinstance(ledgers, str):
            print(f"| {name} | – | {ledgers} | – |", flush=True)
            continue
        share = max(each["unattributed_s"] / each["wall_s"] for each in ledgers)
        twice_s = max(each["counted_twice_s"] for each in ledgers)
        worst = max(worst, share)
        print(f"| {name} | {ledgers[0]['wall_s']:.1f} | {share:.1%} | {twice_s:.2f} |", flush=True)
    print(f"\nat most {worst:.1%} of a rank's wall is unattributed", file=sys.stderr)
    return 0


def train_and_read_ledgers(
    settings: tuple[str, ...], ranks: int, steps: int
) -> list[dict[str, float]] | str:
    """The ledgers of all ranks, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="ledger-") as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "phalanx"]
        done = subprocess.run(
            [
                *(*command, "train", *JOB, *settings, f"parallel.ranks={ranks}"),
                *(f"train.steps={steps}", f"run.dir={run_dir}"),
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            return done.stderr.strip().splitlines()[0]
        report = subprocess.run(
            [*command, "report", str(run_dir), "--json"], capture_output=True, text=True, check=True
        )
    return list(json.loads(report.stdout)["ledger"])


if __name__ == "__main__":
    sys.exit(main())
