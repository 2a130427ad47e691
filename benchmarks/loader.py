"""What loading costs, and what workers save: samples per second with 0, 1 and 2 of them, as ratios.

    python benchmarks/loader.py [--steps N] [--repeats N] [--step-ms M]

Two datasets: tokens (memory-mapped shards, 1,024 to a sample) and a user's own, whose samples cost
real work in Python and numpy (a random crop, flip and blur of a picture). `alone` asks for one step
after another; `beside a step` works M ms between two requests, as a model would, on the same cores.
`wait` is the part of the time spent waiting for data. Reading ahead can only save time that another
core has: on one core, or where steps use all of them, expect 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.data.loader import RankBatchShare, TrainBatches
from phalanx.data.prepare import prepare_corpus
from phalanx.data.samples import SampleSpec
from phalanx.job.schema import Data

SEQ_LEN, BATCH = 1024, 32
WORKERS = (0, 1, 2)

PICTURES = '''
import numpy as np


class Pictures:
    """Random crops of random pictures, flipped and blurred: about a millisecond of numpy each."""

    def __init__(self):
        self.pictures = np.random.default_rng(0).integers(0, 256, (64, 96, 96, 3), np.uint8)

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        top, left = np.random.randint(0, 32, 2)
        picture = self.pictures[index % 64][top : top + 64, left : left + 64]
        picture = picture.astype(np.float32) / 255
        if np.random.rand() < 0.5:
            picture = picture[:, ::-1]
        for _ in range(4):
            picture = (picture + np.roll(picture, 1, 0) + np.roll(picture, 1, 1)) / 3
        return {"inputs": picture.transpose(2, 0, 1), "targets": index % 10}


def pictures(split):
    return Pictures() if split == "train" else None
'''


@dataclass(frozen=True)
class Speed:
    """Medians over repeats."""

    samples_per_s: float
    wait: float


def measure(spec: SampleSpec, workers: int, steps: int, repeats: int, step_s: float) -> Speed:
    """Read `steps` steps after two of warm-up, `repeats` times."""
    rates, waits = [], []
    for _ in range(repeats):
        batches = TrainBatches(spec, RankBatchShare(BATCH, BATCH), workers=workers)
        for step in (1, 2):
            batches.step_microbatches(step)
        began, waited_s = time.perf_counter(), 0.0
        for step in range(3, steps + 3):
            asked = time.perf_counter()
            batches.step_microbatches(step)
            waited_s += time.perf_counter() - asked
            work(step_s)
        wall_s = time.perf_counter() - began
        batches.close()
        rates.append(steps * BATCH / wall_s)
        waits.append(waited_s / wall_s)
    return Speed(statistics.median(rates), statistics.median(waits))


def work(seconds: float) -> None:
    """Compute without the interpreter's lock, as a forward pass does."""
    matrix = np.ones((256, 256), np.float32)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        matrix @ matrix


def prepare(folder: Path) -> dict[str, SampleSpec]:
    """The two corpora."""
    (folder / "bench_pictures.py").write_text(PICTURES)
    sys.path.insert(0, str(folder))
    np.save(
        folder / "ids.npy",
        np.random.default_rng(0).integers(0, 50_000, 50_000_000).astype(np.uint16),
    )
    sources = {"tokens": str(folder / "ids.npy"), "own dataset": "bench_pictures:pictures"}
    for name, source in sources.items():
        prepare_corpus(Data(source=source, seq_len=SEQ_LEN), folder / name, vocab_size=None)
    return {name: SampleSpec(str(folder / name), SEQ_LEN, 0) for name in sources}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=30.0)
    args = parser.parse_args()
    print(
        f"{'dataset':<13}{'':<15}{'workers':>8}{'samples/s':>11}{'wait':>7}{'over 0 workers':>16}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in prepare(Path(folder)).items():
            for mode, step_s in (("alone", 0.0), ("beside a step", args.step_ms / 1000)):
                speeds = {
                    workers: measure(spec, workers, args.steps, args.repeats, step_s)
                    for workers in WORKERS
                }
                for workers, speed in speeds.items():
                    ratio = speed.samples_per_s / speeds[0].samples_per_s
                    numbers = (
                        f"{workers:>8}{speed.samples_per_s:>11,.0f}{speed.wait:>7.0%}{ratio:>16.2f}"
                    )
                    print(f"{name:<13}{mode:<15}{numbers}", flush=True)


if __name__ == "__main__":
    main()
