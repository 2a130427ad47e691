"""What phalanx shows of memory, beside what another process sees: `python
benchmarks/measured_memory.py [--only NAME]`.

Each row is a run of `phalanx train` of a few steps. A sampler, a process of its own for each rank,
reads the rank's /proc/PID/status some thousand times a second and /proc/PID/smaps_rollup now and
then, from the moment the rank is there to its end. Compared are, of the rank where they differ
most, the largest RssAnon + RssShmem on top of what was there when the rank began to count (the
event says how much that was), and the largest Pss in all. Prints markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.core.units import describe_prediction_error

MIB = 2**20
PERIOD_S = 0.0005
SMAPS_EVERY = 200  # of the samples: reading it walks the process's page tables
COMMON = (
    "train.steps=4",
    "train.sample_tokens=16",
    "eval.tokens=4096",
    "observe.sinks=[]",
    "data.seq_len=128",
)
SMALL = ("model.dim=256", "model.num_layers=4", "model.num_heads=4")
LOSSY = ("model.vocab_size=16384", "model.dim=128", "model.num_layers=2", "model.num_heads=4")
WIDE = ("model.dim=512", "model.num_layers=6", "model.num_heads=8", "train.global_batch_size=4")
PIPELINE = (*WIDE, "parallel.pp=2", "train.micro_batch_size=1", "train.global_batch_size=8")
CASES: dict[str, tuple[str, ...]] = {
    "default": (),
    "one rank": ("parallel.ranks=1",),
    "a large vocabulary": LOSSY,
    "a large vocabulary, bf16": (*LOSSY, "precision.compute=bf16"),
    "small chunks": (*LOSSY, "train.loss_chunk_tokens=256"),
    "small chunks, bf16": (*LOSSY, "train.loss_chunk_tokens=256", "precision.compute=bf16"),
    "one chunk of 2,048": (*LOSSY, "train.micro_batch_size=8", "data.seq_len=256"),
    "wide": WIDE,
    "wide, bf16": (*WIDE, "precision.compute=bf16"),
    "zero1": (*WIDE, "parallel.dp_shard=2", "parallel.zero_stage=1"),
    "zero2": (*WIDE, "parallel.dp_shard=2", "parallel.zero_stage=2"),
    "zero3": (*WIDE, "parallel.dp_shard=2", "parallel.zero_stage=3"),
    "zero3, bf16": (
        *WIDE,
        "parallel.dp_shard=2",
        "parallel.zero_stage=3",
        "precision.compute=bf16",
    ),
    "tp": (*WIDE, "parallel.ranks=2", "parallel.tp=2"),
    "tp, a large vocabulary": (*LOSSY, "parallel.ranks=2", "parallel.tp=2"),
    "cp": (
        *SMALL,
        "parallel.ranks=2",
        "parallel.cp=2",
        "data.seq_len=512",
        "train.micro_batch_size=1",
    ),
    "1f1b": PIPELINE,
    "1f1b, bf16": (*PIPELINE, "precision.compute=bf16"),
    "gpipe, bf16": (*PIPELINE, "precision.compute=bf16", "parallel.schedule=gpipe"),
    "zb-v, bf16": (*PIPELINE, "precision.compute=bf16", "parallel.schedule=zb-v"),
    "recompute full": (*SMALL, "train.recompute=full", "data.seq_len=512"),
    "long sequences": (
        *SMALL,
        "data.seq_len=1024",
        "train.micro_batch_size=2",
        "train.global_batch_size=4",
    ),
    "many microbatches": (*SMALL, "train.micro_batch_size=1"),
    "experts": ("model.preset=small-mixtral", "train.global_batch_size=4"),
    "no step but the first": (*SMALL, "train.steps=1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", help="a case; may be repeated")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    parser.add_argument("--sample", nargs=2, metavar=("PID", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample:
        sample(int(options.sample[0]), Path(options.sample[1]))
        return
    if not options.json:
        print(
            "| case | predicted | shown | seen from outside | shown is | the plan was | in all,"
            " shown | seen | moment |"
        )
        print("| --- | ---: | ---: | ---: | --- | --- | ---: | ---: | --- |", flush=True)
    for name in options.only or CASES:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(name, Path(folder))
        print(json.dumps(row) if options.json else as_table_row(row), flush=True)


def measure(name: str, folder: Path) -> dict[str, Any]:
    """The row of one run, of the rank whose numbers differ most."""
    run_dir = folder / "run"
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "train",
        f"run.dir={run_dir}",
        *COMMON,
        *CASES[name],
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        pids = rank_pids(run_dir, process)
        samplers = [
            subprocess.Popen(
                [sys.executable, __file__, "--sample", str(pid), str(folder / f"{rank}.json")]
            )
            for rank, pid in enumerate(pids)
        ]
        output, _ = process.communicate()
    for sampler in samplers:
        sampler.wait()
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{output}")
    shown = {
        event["rank"]: event for event in events(run_dir) if event.get("event") == "memory_measured"
    }
    rows = [
        compare(shown[rank], json.loads((folder / f"{rank}.json").read_text()))
        for rank in range(len(pids))
    ]
    return {"case": name} | max(rows, key=lambda row: abs(row["shown"] - row["seen"]))


def compare(event: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    moment = f"step {event['peak_step']}, {event['peak_phase']}"
    return {
        "predicted": event["predicted_bytes"]["peak"],
        "shown": event["measured_bytes"]["peak"],
        "seen": seen["most"] - event["start_bytes"],
        "in_all": event["runtime_bytes"] + event["measured_bytes"]["peak"],
        "seen_in_all": seen["most_in_all"],
        "samples": seen["samples"],
        "moment": moment,
    }


def as_table_row(row: dict[str, Any]) -> str:
    sizes = [
        f"{row[key] / MIB:,.1f} MiB"
        for key in ("predicted", "shown", "seen", "in_all", "seen_in_all")
    ]
    errors = [
        describe_prediction_error(row["shown"], row["seen"]),
        describe_prediction_error(row["predicted"], row["shown"]),
    ]
    return "| " + " | ".join([row["case"], *sizes[:3], *errors, *sizes[3:], row["moment"]]) + " |"


def rank_pids(run_dir: Path, process: subprocess.Popen[str]) -> list[int]:
    while process.poll() is None:
        for event in events(run_dir):
            if event.get("event") == "ranks_started":
                pids: list[int] = event["pids"]
                return pids
        time.sleep(0.002)
    sys.exit(f"no rank started: {process.communicate()[0]}")


def events(run_dir: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(run_dir.rglob("events/*.jsonl")):
        yield from (json.loads(line) for line in path.read_text().splitlines())


def sample(pid: int, to: Path) -> None:
    """Until the process is gone: the largest RssAnon + RssShmem, and the largest Pss in all.

    Pss is read seldom; between two readings it is what is resident less what was shared at the
    last.
    """
    status = os.open(f"/proc/{pid}/status", os.O_RDONLY)
    rollup = os.open(f"/proc/{pid}/smaps_rollup", os.O_RDONLY)
    most = most_in_all = elsewhere = samples = 0
    while True:
        try:
            text = os.pread(status, 4096, 0)
            if b"RssAnon:" not in text:  # a zombie
                break
            resident = field(text, b"VmRSS:")
            if samples % SMAPS_EVERY == 0:
                elsewhere = resident - field(os.pread(rollup, 4096, 0), b"\nPss:")
                resident = field(os.pread(status, 4096, 0), b"VmRSS:")
        except (OSError, ValueError):
            break
        most = max(most, field(text, b"RssAnon:") + field(text, b"RssShmem:"))
        most_in_all = max(most_in_all, resident - elsewhere)
        samples += 1
        time.sleep(PERIOD_S)
    to.write_text(json.dumps({"most": most, "most_in_all": most_in_all, "samples": samples}))


def field(text: bytes, name: bytes) -> int:
    begin = text.index(name) + len(name)
    return int(text[begin : text.index(b"kB", begin)]) * 1024


if __name__ == "__main__":
    main()
