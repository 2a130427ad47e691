"""Writes the events of a run of 1,000 ranks and 100,000 steps, and measures its page.

    python benchmarks/big_run.py DIR [--ranks 1000] [--steps 100000]

The lines are those of `Envelope.to_line`, which ranks write, as many as `StepDetail` lets a rank
write; their numbers are made up from a seed. Rank 0 has each step. Of the others the first steps
and sums over windows: each window is one step times its length, as 100 million steps would take
hours to make up. A step's line has all phases and seconds by axis and operation, as a trained
rank writes them.

Prints, as JSON: bytes of the events and of the page, seconds (of the wall, of a core) and peak
memory of `phalanx report`, and where chromium is installed the milliseconds from the start of
navigation to the first paint, to the page's load event, and until its scripts are done and it
answers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx.observe import events
from phalanx.observe.bus import build_event_file_path
from phalanx.observe.events import Envelope, Event, MonotonicClockReading
from phalanx.plan.layout import Layout
from phalanx.train.step_detail import StepDetail

ROOT = Path(__file__).parents[1]
START_UNIX_S, STEP_S = 1_790_000_000.0, 1.25
CLOCK = MonotonicClockReading("clock-of-the-benchmark", 1000.0)
SLOW_RANK, SLOW_S = 613, 0.15
LAYOUT = {"pp": 5, "dp_replicate": 1, "dp_shard": 25, "cp": 1, "tp": 8, "ep": 1}
# Of what a rank of this layout waits for and transfers.
SHARE_OF_COLLECTIVE = {
    "dp: all_gather parameters": 0.3,
    "dp: reduce_scatter gradients": 0.4,
    "tp: all_gather sequence": 0.15,
    "tp: reduce_scatter sequence": 0.1,
    "world: all_reduce step facts": 0.05,
}
GIB = 2**30


class RankWriter:
    """Writes one rank's events, at seconds of the run's life."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.rank, self._num_written = rank, 0
        self._file = open(build_event_file_path(run_dir, rank, 0), "w", encoding="utf-8")

    def write(self, event: Event, at_s: float) -> None:
        """Append one line."""
        line = Envelope(
            event, self.rank, 0, START_UNIX_S + at_s, self._num_written, 1000.0 + at_s, CLOCK
        ).to_line()
        self._file.write(line + "\n")
        self._num_written += 1

    def close(self) -> None:
        self._file.close()


def write_run(run_dir: Path, num_ranks: int, num_steps: int) -> None:
    """Write the events, the job and the plan of the run."""
    (run_dir / "events").mkdir(parents=True)
    layout = choose_layout(num_ranks)
    plan = {"layout": layout, "world_size": num_ranks, "device": "cuda", "zero_stage": 3}
    (run_dir / "plan.json").write_text(json.dumps(plan))
    job = {"run": {"name": "big"}, "train": {"steps": num_steps}}
    (run_dir / "job.json").write_text(json.dumps(job))
    for rank in range(num_ranks):
        writer = RankWriter(run_dir, rank)
        if rank == 0:
            start = events.RunStarted("big", "d", num_ranks, 0, num_steps, "cuda", layout, "", 90.0)
            writer.write(start, 90.0)
        writer.write(events.TimeBetweenSteps(0, "startup", 90.0), 90.0)
        for step, event in write_rank(rank, num_ranks, num_steps):
            writer.write(event, 90.0 + step * STEP_S)
            if rank == 0:
                for other in list_rare_events(step):
                    writer.write(other, 90.0 + step * STEP_S + 0.01)
        sizes = {"parameters": 30 * GIB, "activations": 25 * GIB, "peak": 60 * GIB}
        writer.write(events.MemoryMeasured(sizes, sizes, 2 * GIB), 91.0 + num_steps * STEP_S)
        writer.close()
    supervisor = RankWriter(run_dir, -1)
    supervisor.write(events.RanksStarted(list(range(1, num_ranks + 1)), 60.0), 60.0)
    end_s = 95.0 + num_steps * STEP_S
    supervisor.write(events.RunFinished("finished", 0, num_steps, end_s), end_s)
    supervisor.close()


def choose_layout(num_ranks: int) -> dict[str, int]:
    """Degrees along the axes of a run of so many ranks."""
    if num_ranks == 1000:
        return LAYOUT
    return dict.fromkeys(LAYOUT, 1) | {"dp_shard": num_ranks}


def write_rank(rank: int, num_ranks: int, num_steps: int) -> Iterator[tuple[int, Event]]:
    """The events of one rank's steps: each, or the first ones and windows."""
    if rank == 0:
        yield from write_steps(rank, range(1, num_steps + 1))
        return
    detail = StepDetail(rank, Layout(**choose_layout(num_ranks)), 0, num_steps)
    num_first = min(detail.num_first_steps, num_steps)
    yield from write_steps(rank, range(1, num_first + 1))
    lasts = range(num_first + detail.window_steps, num_steps + 1, detail.window_steps)
    for last, event in write_steps(rank, lasts):
        yield last, sum_window(event, detail.window_steps)


def sum_window(event: events.StepFinished, count: int) -> events.StepsSummed:
    """A window of `count` steps that ends with `event` and has only such ones."""
    return events.StepsSummed(
        first_step=event.step - count + 1,
        last_step=event.step,
        num_steps=count,
        step_s=round(event.step_s * count, 6),
        longest_s=event.step_s,
        longest_step=event.step,
        phases_s={name: round(each * count, 6) for name, each in event.phases_s.items()},
        communication_s={
            name: round(each * count, 6) for name, each in event.communication_s.items()
        },
        unaccounted_s=round(event.unaccounted_s * count, 6),
        cpu_s=round(event.cpu_s * count, 6),
        rss_bytes=event.rss_bytes,
        peak_bytes=event.peak_bytes,
        own_bytes=event.own_bytes,
    )


def write_steps(rank: int, steps: range) -> Iterator[tuple[int, events.StepFinished]]:
    """These steps of one rank."""
    rng = random.Random(rank)
    for step in steps:
        own_s = 1.0 + rng.gauss(0.0, 0.01)
        if rank == SLOW_RANK:
            own_s += SLOW_S
        phases_s = {
            "data": 0.004,
            "prepare": 0.003,
            "record": 0.002,
            "forward": round(0.3 * own_s, 6),
            "backward": round(0.6 * own_s, 6),
            "collective": round(STEP_S - own_s, 6),
            "optimizer": round(0.08 * own_s, 6),
        }
        communication_s = {
            name: round(share * phases_s["collective"], 6)
            for name, share in SHARE_OF_COLLECTIVE.items()
        }
        loss = 2.0 + 8.0 / math.sqrt(step) + rng.gauss(0.0, 0.02)
        if rng.random() < 2e-4:
            loss += 1.5
        yield step, events.StepFinished(
            step, loss, 4_194_304, 4_194_304 * step, 3e-4 * min(step / 2000, 1.0),
            1.0 + rng.random(), STEP_S + rng.gauss(0.0, 0.01), 4_194_304 / STEP_S, phases_s,
            STEP_S - sum(phases_s.values()), 9 * GIB, 3 * GIB, 0.0, GIB, 61 * GIB, 70 * GIB,
            0, 0, 2**28, 1.2, communication_s, 6 * GIB,
        )  # fmt: skip


def list_rare_events(step: int) -> Iterator[Event]:
    """What happens besides steps: saves, evaluations, skipped steps."""
    if step % 500 == 0:
        yield events.CheckpointSaved(step, f"checkpoints/step-{step}", 900 * GIB, 40.0, 0.8)
    if step % 1000 == 0:
        loss = 2.0 + 8.0 / math.sqrt(step)
        yield events.EvalFinished(step, loss, 10**7, 20.0, {}, step, loss)
    if step % 2777 == 0:
        yield events.StepSkipped(step, "nonfinite_gradients", math.nan, step * 1024, 1024)


def measure_report(run_dir: Path) -> dict[str, float]:
    """Seconds, peak MiB and bytes of the page that `phalanx report` makes."""
    began_s = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "report", str(run_dir)], env=environment
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit("phalanx report failed")
    return {
        "report_s": round(time.monotonic() - began_s, 2),
        "report_cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "report_peak_mib": usage.ru_maxrss // 1024,
        "page_bytes": (run_dir / "report.html").stat().st_size,
    }


def measure_opening(page: Path) -> dict[str, float]:
    """Milliseconds of a real browser, the middle one of five; nothing without chromium."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from browser import find_chromium, open_browser

    if find_chromium() is None:
        return {}
    measured = []
    with open_browser() as browser:
        for _ in range(5):
            browser.open("about:blank")
            browser.open(page.as_uri())
            measured.append(
                browser.evaluate(
                    "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done({"
                    "paint_ms: performance.getEntriesByName('first-contentful-paint')[0].startTime,"
                    "load_ms: performance.timing.loadEventEnd - performance.timing.navigationStart,"
                    "answer_ms: performance.now()}))))"
                )
            )
    middle = {}
    for name in measured[0]:
        middle[name] = round(sorted(each[name] for each in measured)[2], 1)
    return middle


def main() -> None:
    """Write the run where there is none, then measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    if not (options.run_dir / "events").exists():
        write_run(options.run_dir, options.ranks, options.steps)
    event_bytes = sum(path.stat().st_size for path in (options.run_dir / "events").iterdir())
    result: dict[str, float] = {"event_bytes": event_bytes, **measure_report(options.run_dir)}
    result |= measure_opening(options.run_dir / "report.html")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
