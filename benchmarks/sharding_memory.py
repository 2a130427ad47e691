"""Memory of one rank in each way of sharding, as planned and as measured: `python
benchmarks/sharding_memory.py`.

Each row is a run of `phalanx train` whose states are most of its memory (few tokens per step).
Measured is the peak on top of interpreter and torch (docs/memory.md), of the rank with the most.
Prints a table in markdown; `--json` what it is made of.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.core.units import describe_prediction_error

MIB = 2**20
CHOICES: dict[str, tuple[str, ...]] = {
    "ddp": ("parallel.dp_replicate={ranks}",),
    "zero1": ("parallel.dp_shard={ranks}", "parallel.zero_stage=1"),
    "zero2": ("parallel.dp_shard={ranks}", "parallel.zero_stage=2"),
    "zero3": ("parallel.dp_shard={ranks}", "parallel.zero_stage=3"),
}
OF_SHARDED: dict[str, tuple[str, ...]] = {
    "zero3, accumulate=sharded": ("parallel.accumulate=sharded",),
    "zero3, blocks_per_unit=4": ("parallel.blocks_per_unit=4",),
    "zero3, blocks_per_unit=all": ("parallel.blocks_per_unit=all",),
    "zero3, prefetch=2": ("parallel.prefetch=2",),
}
CHOICES |= {name: (*CHOICES["zero3"], *more) for name, more in OF_SHARDED.items()}
CHOICES |= {
    "zero1, offload=optimizer": (*CHOICES["zero1"], "parallel.offload=optimizer"),
    "zero3, two copies": ("parallel.dp_replicate=2", "parallel.zero_stage=3"),
    "tp": ("parallel.tp={ranks}",),
}
MODEL = (
    "model.dim=512",
    "model.num_layers=12",
    "model.num_heads=8",
    "model.vocab_size=8192",
    "data.seq_len=64",
    "train.micro_batch_size=1",
    "train.sample_tokens=0",
    "eval.tokens=0",
    "checkpoint.at_end=false",
    "observe.sinks=[]",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", default=list(CHOICES), choices=list(CHOICES), metavar="CHOICE"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for ranks in args.ranks:
        for microbatches in args.microbatches:
            for name in args.only:
                rows.append(measure(name, ranks, microbatches, args.steps))
                print(f"{ranks} ranks, {microbatches} microbatches, {name}", file=sys.stderr)
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print("\n".join(table(rows)))


def measure(name: str, ranks: int, microbatches: int, steps: int) -> dict[str, Any]:
    """The row of one run: bytes by category, predicted and measured, of the rank that used most."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        keys = [key.format(ranks=ranks) for key in CHOICES[name]]
        keys += [
            f"parallel.ranks={ranks}",
            f"train.global_batch_size={ranks * microbatches}",
            f"train.steps={steps}",
        ]
        command = [sys.executable, "-m", "phalanx", "train", *MODEL, *keys, f"run.dir={run_dir}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        found = [event for event in events(run_dir) if event.get("event") == "memory_measured"]
    assert len(found) == ranks, f"{len(found)} of {ranks} ranks measured"
    most = max(found, key=lambda event: event["measured_bytes"]["peak"])
    row = {
        "choice": name,
        "ranks": ranks,
        "microbatches": microbatches,
        "runtime": most["runtime_bytes"],
    }
    return row | {"predicted": most["predicted_bytes"], "measured": most["measured_bytes"]}


def events(run_dir: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(run_dir.rglob("events/*.jsonl")):
        yield from (json.loads(line) for line in path.read_text().splitlines())


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "| choice | ranks | microbatches | states predicted | states held | predicted | measured |"
        " the plan was |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        states = [
            sum(of[k] for k in ("parameters", "gradients", "optimizer")) / MIB
            for of in (predicted, measured)
        ]
        peaks = [of["peak"] / MIB for of in (predicted, measured)]
        numbers = [*states, *peaks]
        cells = [
            row["choice"],
            str(row["ranks"]),
            str(row["microbatches"]),
            *(f"{n:,.0f} MiB" for n in numbers),
        ]
        yield "| " + " | ".join([*cells, describe_prediction_error(*peaks)]) + " |"


if __name__ == "__main__":
    main()
