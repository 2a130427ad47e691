"""Processor seconds of whole `phalanx plan` commands, interpreter start and imports among them.

    python benchmarks/plan_speed.py [--rounds 5] [--src OTHER/src ...]

In turns, each command from each source tree, with bytecode that is there already. Medians of user
and system time: wall-clock time says little on a machine that does other work.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

OWN_SOURCE = Path(__file__).parents[1] / "src"
# (preset, nodes of 8 GPUs, tokens of a sequence, sequences of a step)
COMMANDS = (
    ("llama3-70b", 128, 8192, 1024),
    ("llama3-70b", 2048, 8192, 16384),
    ("llama3-405b", 128, 8192, 1024),
    ("llama3-405b", 2048, 8192, 2048),
    ("mixtral-8x7b", 128, 4096, 1024),
    ("mixtral-8x7b", 2048, 4096, 16384),
    ("deepseek-v3", 128, 4096, 1024),
    ("deepseek-v3", 2048, 4096, 16384),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--src", type=Path, nargs="+", default=[OWN_SOURCE])
    given = parser.parse_args()
    for preset, nodes, seq_len, batch in COMMANDS:
        options = [f"--model={preset}", "--gpu=h100-sxm", f"--nodes={nodes}"]
        options += [f"--seq-len={seq_len}", f"--global-batch={batch}"]
        seconds: dict[Path, list[float]] = {source: [] for source in given.src}
        # The first round writes bytecode, and is not counted.
        for number in range(given.rounds + 1):
            for source in given.src:
                processor_s = measure_processor_s(source, options)
                if number:
                    seconds[source].append(processor_s)
        medians = [f"{statistics.median(seconds[source]):.2f} s" for source in given.src]
        print(f"{preset:13} {8 * nodes:6} GPUs  {'  '.join(medians)}", flush=True)


def measure_processor_s(source: Path, options: list[str]) -> float:
    """User and system seconds of one command of the phalanx in `source`."""
    environment = os.environ | {"PYTHONPATH": str(source.absolute())}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "phalanx", "plan", *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
