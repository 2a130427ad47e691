"""Whether the ledger of seconds adds up, in every layout that `verify --layouts all` judges.

    python benchmarks/ledger_sums.py [--ranks 4] [--layouts NAME,...] [--out FILE.jsonl]

Trains a small decoder (for the layouts of experts one with experts) as `phalanx train` does, with
evaluations, saves, and a rank that is killed and started again, and reads the ledger of each rank.
In one layout of each family rank 0 also stands still for half a second in each of four phases of
one step. Prints of each layout the wall, the unattributed share of the rank with most, what was
counted twice, and of each pause what was found: what its step has more in that phase than the
median of the steps.

A row goes to `--out` (default: build/ledger-sums.jsonl) as it comes; the same command takes over
those that are there, so Ctrl-C ends it and it goes on later. Exit 1 if a layout fails, if it
leaves more than 2 % of a rank's wall unattributed, counts twice, or finds a pause with an error of
more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.core.units import format_seconds
from phalanx.job.load import load_job
from phalanx.observe.events import StepFinished
from phalanx.observe.tail import read_recorded_events
from phalanx.report.ledger import MAX_UNATTRIBUTED_SHARE
from phalanx.report.reduce import collect_run_facts
from phalanx.verify.cases import TRAINER_ROW_PREFIX, list_all_layouts
from phalanx.verify.choose import select_layout_cases

NUM_STEPS, KILLED_AT = 20, 16
RUN = (
    f"train.steps={NUM_STEPS}",
    "eval.every_steps=10",
    "eval.tokens=1024",
    "train.sample_tokens=0",
    "checkpoint.every_steps=10",
    "observe.sinks=[]",
    "data.source=text",
)
MODEL = ("model.dim=64", "model.num_layers=8", "model.num_heads=4")
EXPERTS = ("model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_dim=64")
PAUSE_S, MAX_PAUSE_ERROR = 0.5, 0.05
PAUSED_PHASES = ("data", "forward", "backward", "optimizer")
PAUSES = f"""
import time


def pause():
    time.sleep({PAUSE_S})
"""
# Before the first save, so that no restart does them again.
FIRST_PAUSED_STEP = 5
# One of each family, on four ranks.
PAUSED_LAYOUTS = {
    *("ddp", "zero1", "zero2", "zero3", "hsdp2x2-zero3", "tp4", "ddp-tp2", "cp4", "tp2-cp2"),
    *("pp4-1f1b", "pp2-ddp-zb-v", "ddp-ep2", "ddp-int8"),
}
TIMEOUT_S = 300


def list_layouts(num_ranks: int) -> Iterator[tuple[str, list[str]]]:
    """The overrides of each layout of `num_ranks` ranks that fits the models, by its name."""
    dense = dict(list_all_layouts(num_ranks, experts=False))
    experts = [name for name, _ in list_all_layouts(num_ranks, experts=True) if name not in dense]
    for model, names in ((MODEL, ["all"]), ((*MODEL, *EXPERTS), experts)):
        job = load_job(None, list(model))
        selection = select_layout_cases(job, names, ranks=num_ranks, steps=1, shrink=False)
        for case in selection.planned:
            # The rest of "all" are no layouts: rows of the trainer, and those of one process.
            if case.plan is None or not case.parallel or case.name.startswith(TRAINER_ROW_PREFIX):
                continue
            batch = selection.job.train.global_batch_size
            overrides = {
                "parallel.ranks": num_ranks,
                "train.global_batch_size": batch,
                "train.micro_batch_size": case.plan.micro_batch_size,
                "data.seq_len": selection.job.data.seq_len,
            }
            for key, value in case.parallel.items():
                overrides[key if "." in key else f"parallel.{key}"] = value
            yield case.name, [*model, *map(_format_override, overrides.items())]


def _format_override(item: tuple[str, Any]) -> str:
    key, value = item
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layouts", help="names, with commas; else all")
    parser.add_argument("--out", type=Path, default=Path("build/ledger-sums.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = _read_rows(options.out)
    layouts = dict(list_layouts(options.ranks))
    if options.layouts:
        layouts = {name: layouts[name] for name in options.layouts.split(",")}
    pauses = ", ".join(f"{name} {PAUSE_S:.2f}" for name in PAUSED_PHASES)
    print(f"| layout | wall, s | most unattributed | counted twice, s | found of {pauses} s |")
    print("|---|---:|---:|---:|---|")
    began, num_left = time.monotonic(), sum(name not in rows for name in layouts)
    num_trained = 0
    for name, overrides in layouts.items():
        if name not in rows:
            rows[name] = {"layout": name} | train_and_read_ledgers(name, overrides)
            with options.out.open("a") as file:
                file.write(json.dumps(rows[name]) + "\n")
            num_trained += 1
            left_s = (time.monotonic() - began) / num_trained * (num_left - num_trained)
            progress = f"{num_trained} of {num_left}, {format_seconds(left_s)} left"
            print(progress, file=sys.stderr, flush=True)
        print(_format_row(rows[name]), flush=True)
    return _summarise([rows[name] for name in layouts])


def _read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of layouts that did not fail, by name."""
    rows = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "failure" not in row:
                rows[row["layout"]] = row
    return rows


def train_and_read_ledgers(name: str, overrides: list[str]) -> dict[str, Any]:
    """The row of a layout; `failure` where it did not train."""
    injected = [f"kill:rank=1,step={KILLED_AT}"]
    if name in PAUSED_LAYOUTS:
        injected += [
            f"pauses:pause:rank=0,step={FIRST_PAUSED_STEP + at},phase={phase}"
            for at, phase in enumerate(PAUSED_PHASES)
        ]
    with tempfile.TemporaryDirectory(prefix="ledger-") as folder:
        run_dir = Path(folder) / "run"
        (Path(folder) / "pauses.py").write_text(PAUSES)
        (Path(folder) / "text").write_text("what goes around comes around, more or less\n" * 2000)
        command = [sys.executable, "-m", "phalanx", "train", *RUN, *overrides]
        command += [f"run.dir={run_dir}", f"resilience.inject={json.dumps(injected)}"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder, check=False
        )
        if done.returncode != 0:
            return {"failure": (done.stderr.strip() or "no word").splitlines()[0]}
        facts = collect_run_facts(run_dir)
        ledgers = facts.rank_ledgers
        row: dict[str, Any] = {
            "date": date.today().isoformat(),
            "load": os.getloadavg()[0],
            "wall_s": ledgers[0].wall_s,
            "unattributed": [each.unattributed_s / each.wall_s for each in ledgers],
            "counted_twice_s": [each.counted_twice_s for each in ledgers],
            "num_restarts": facts.num_restarts,
        }
        if name in PAUSED_LAYOUTS:
            row["pauses_s"] = find_pauses(run_dir)
        return row


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


def _format_row(row: Mapping[str, Any]) -> str:
    if "failure" in row:
        return f"| {row['layout']} | – | {row['failure']} | – | – |"
    cells = [
        row["layout"],
        f"{row['wall_s']:.1f}",
        f"{max(row['unattributed']):.2%}",
        f"{max(row['counted_twice_s']):.2f}",
        ", ".join(f"{seconds:.3f}" for seconds in row.get("pauses_s", ())) or "–",
    ]
    return f"| {' | '.join(cells)} |"


def _summarise(rows: list[Mapping[str, Any]]) -> int:
    failed = [row["layout"] for row in rows if "failure" in row]
    trained = [row for row in rows if "failure" not in row]
    shares = {row["layout"]: max(row["unattributed"]) for row in trained}
    above = [name for name, share in shares.items() if share > MAX_UNATTRIBUTED_SHARE]
    twice = [row["layout"] for row in trained if max(row["counted_twice_s"]) > 0]
    errors = [abs(seconds / PAUSE_S - 1) for row in trained for seconds in row.get("pauses_s", ())]
    print(
        f"\n{len(trained)} layouts, {sum(row['num_restarts'] for row in trained)} restarts:"
        f" at most {max(shares.values(), default=0):.2%} of a rank's wall is unattributed"
        f" ({max(shares, key=shares.__getitem__, default='')}), in the median"
        f" {median(shares.values()) if shares else 0:.2%};"
        f" pauses are found with an error of at most {max(errors, default=0):.1%}"
    )
    for words, names in (
        ("more than 2 % unattributed", above),
        ("seconds counted twice", twice),
        ("failed", failed),
    ):
        if names:
            print(f"{words}: {', '.join(names)}")
    return int(bool(above or twice or failed) or max(errors, default=0) > MAX_PAUSE_ERROR)


if __name__ == "__main__":
    sys.exit(main())
