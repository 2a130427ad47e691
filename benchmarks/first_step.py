"""Seconds from the start of `phalanx train` to the end of its first step, beside the time that
`import torch` takes.

    python benchmarks/first_step.py [--rounds 5] [--src OTHER/src ...] [--models small] [--compile]

In turns, in one run: importing torch, then a small and a larger decoder on two ranks, from each
source tree. Medians, and what is on top of the import of the same round; processor seconds of all
processes. With --compile each once more with train.compile: with nothing compiled before on this
machine (cold), with what it needs of the compiler but no code (new code), and again (warm).
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

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


class Taken(NamedTuple):
    """Seconds from the start of the command to when its slowest rank had done the first step, those
    of that step alone, and processor seconds of all processes of the run."""

    wall_s: float
    step_s: float
    processor_s: float


def measure_first_step(source: Path, keys: tuple[str, ...], cache: Path | None = None) -> Taken:
    """Run one step; what is compiled is kept in `cache`."""
    variables = {"PYTHONPATH": str(source)}
    if cache is not None:
        # Torch keeps headers, and code that nobody puts elsewhere, in the temporary directory.
        variables |= {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(cache)}
    processor_s = measure_processor_s()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        began_s = time.time()
        command = [sys.executable, "-m", "phalanx", "train", *KEYS, *keys, f"run.dir={run_dir}"]
        subprocess.run(
            command,
            env=os.environ | variables,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        steps = [
            (envelope.time_unix_s, envelope.event.step_s)
            for path in (run_dir / "events").glob("rank-*")
            for line in path.read_bytes().splitlines()
            if (envelope := parse_valid_event_line(line)) is not None
            and isinstance(envelope.event, StepFinished)
        ]
    end_s, step_s = max(steps)
    return Taken(end_s - began_s, step_s, measure_processor_s() - processor_s)


def measure_processor_s() -> float:
    """Processor seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_compiled(source: Path, keys: tuple[str, ...]) -> dict[str, Taken]:
    """The first step with compiled blocks, by what was compiled before."""
    keys = (*keys, "train.compile=true")
    taken = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        taken["cold"] = measure_first_step(source, keys, cache)
        taken["warm"] = measure_first_step(source, keys, cache)
        code = [
            path
            for path in cache.glob("phalanx/compiled/code-*")
            if not path.name.startswith("code-toolchain-")
        ]
        if code:
            for path in code:
                path.unlink()
            taken["new code"] = measure_first_step(source, keys, cache)
    return taken


def main() -> None:
    """Measure in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--src", type=Path, nargs="*", default=[OWN_SOURCE])
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    imports: list[float] = []
    rows: dict[tuple[Path, str], list[Taken]] = {}
    for _ in range(options.rounds):
        imports.append(measure_import_s())
        for source in options.src:
            for name in options.models:
                keys = MODELS[name]
                rows.setdefault((source, name), []).append(
                    measure_first_step(source.resolve(), keys)
                )
                if not options.compile:
                    continue
                for state, taken in measure_compiled(source.resolve(), keys).items():
                    rows.setdefault((source, f"{name}, {state}"), []).append(taken)
    print(f"import torch  {statistics.median(imports):.2f} s")
    for (source, name), each in rows.items():
        walls = [taken.wall_s for taken in each]
        on_top = statistics.median(wall - own for wall, own in zip(walls, imports, strict=True))
        print(
            f"{name}  {statistics.median(walls):.2f} s ({min(walls):.2f} to {max(walls):.2f}),"
            f" {on_top:+.2f} s; the step {statistics.median(taken.step_s for taken in each):.2f} s;"
            f" {statistics.median(taken.processor_s for taken in each):.1f} processor seconds"
            f"  {source}",
            flush=True,
        )


if __name__ == "__main__":
    main()
