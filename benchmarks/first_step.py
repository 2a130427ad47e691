"""Seconds from the start of `phalanx train` to the end of its first step, beside the time that
`import torch` takes.

    python benchmarks/first_step.py [--rounds 5] [--src OTHER/src ...]

In turns, in one run: importing torch, then a small and a larger decoder on two ranks, from each
source tree. Medians, and what is on top of the import of the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from phalanx.observe.events import StepFinished
from phalanx.observe.tail import parse_valid_event_line

OWN_SOURCE = Path(__file__).parents[1] / "src"
MODELS = {
    "small": ("model.dim=256", "model.num_layers=6", "model.vocab_size=4096"),
    "large": ("model.dim=512", "model.num_layers=8", "model.vocab_size=32000"),
}
KEYS = (
    "parallel.ranks=2",
    "model.num_heads=8",
    "data.seq_len=256",
    "train.global_batch_size=4",
    "train.steps=1",
    "eval.tokens=0",
    "train.sample_tokens=0",
    "checkpoint.every_steps=none",
    "checkpoint.at_end=false",
)


def measure_import_s() -> float:
    """Wall seconds of a process that imports torch."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def measure_first_step_s(source: Path, model: tuple[str, ...]) -> float:
    """Seconds from the start of the command to when its slowest rank had done the first step."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        began_s = time.time()
        command = [sys.executable, "-m", "phalanx", "train", *KEYS, *model, f"run.dir={run_dir}"]
        subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": str(source)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        ends = [
            envelope.time_unix_s
            for path in (run_dir / "events").glob("rank-*")
            for line in path.read_bytes().splitlines()
            if (envelope := parse_valid_event_line(line)) is not None
            and isinstance(envelope.event, StepFinished)
        ]
    return max(ends) - began_s


def main() -> None:
    """Measure in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--src", type=Path, nargs="*", default=[OWN_SOURCE])
    options = parser.parse_args()
    imports: list[float] = []
    seconds: dict[tuple[Path, str], list[float]] = {}
    for _ in range(options.rounds):
        imports.append(measure_import_s())
        for source in options.src:
            for name, model in MODELS.items():
                taken = measure_first_step_s(source.resolve(), model)
                seconds.setdefault((source, name), []).append(taken)
    print(f"import torch  {statistics.median(imports):.2f} s")
    for (source, name), values in seconds.items():
        on_top = statistics.median(taken - own for taken, own in zip(values, imports, strict=True))
        print(
            f"{name}  {statistics.median(values):.2f} s"
            f" ({min(values):.2f} to {max(values):.2f}), {on_top:+.2f} s  {source}"
        )


if __name__ == "__main__":
    main()
