"""How soon a rank that is a little slower is named, and how often a healthy one is: `python
benchmarks/slow_ranks.py [RUN ...] [--factor 1.3] [--trials N] [--steps N] [--json]`.

The judge of `launch.slow_ranks` goes through the steps of each RUN as its ranks have recorded them,
and then through parts of them in which the own work of a drawn rank takes `--factor` times as long
from a drawn step on, and what it wants for a processor as long as ever. Without RUN it goes through
series that are drawn: ranks differ by noise of a given size in each step, and one step in a hundred
takes 2 to 10 times as long. A row says what the noise is: of one step beside the same step of the
other ranks, and of the mean of a window of 16, without seconds in which ranks had no processor.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, pstdev

from phalanx.launch.own_step import OwnStep, read_own_step
from phalanx.launch.slow_ranks import WINDOW, SlowRankJudge
from phalanx.observe.events import RankSlow, StepFinished
from phalanx.observe.tail import read_recorded_events

# Of each rank, in one step: its own work, and for how long of it it had no processor.
OwnSeconds = dict[int, tuple[float, float]]
NUM_STEPS_BEFORE, NUM_STEPS_AFTER = 600, 200
# The design's bar is so many steps. Where they are short it is missed, and this is what is counted:
# so many seconds.
MOST_STEPS, MOST_S = 20, 7.0
NOISES = (0.02, 0.05, 0.1, 0.15)


@dataclass(frozen=True)
class SlowRanksRow:
    """`num_called_slow`: verdicts in `num_healthy_steps`; `num_named`: of `num_trials` with a slow
    rank, those in which it was named within 20 steps, or 7 s if these are more."""

    series: str
    num_ranks: int
    step_noise: float
    window_noise: float
    num_healthy_steps: int
    num_called_slow: int
    factor: float
    num_trials: int
    num_named: int


def read_recorded_steps(run_dir: Path) -> list[OwnSeconds]:
    """Seconds of own work by rank, of the steps that all ranks of a run have recorded."""
    seconds_of: dict[int, OwnSeconds] = {}
    num_ranks = len({path.name[:9] for path in (run_dir / "events").glob("rank-*")})
    for rank in range(num_ranks):
        for envelope in read_recorded_events(run_dir, StepFinished, rank=rank):
            assert isinstance(envelope.event, StepFinished)
            own = read_own_step(envelope.event)
            if own is not None:
                seconds_of.setdefault(envelope.event.step, {})[rank] = (own.self_s, own.queued_s)
    return [row for _, row in sorted(seconds_of.items()) if len(row) == num_ranks]


def draw_steps(num_ranks: int, num_steps: int, noise: float, seed: int) -> list[OwnSeconds]:
    dice = random.Random(seed)
    rows = []
    for _ in range(num_steps):
        row = {}
        for rank in range(num_ranks):
            seconds = 0.1 * math.exp(dice.gauss(0.0, noise))
            if dice.random() < 0.01:
                seconds *= dice.uniform(2.0, 10.0)
            row[rank] = (seconds, 0.0)
        rows.append(row)
    return rows


def find_slowest_s(row: OwnSeconds) -> float:
    return max(seconds for seconds, _ in row.values())


def find_slow_ranks(rows: Sequence[OwnSeconds]) -> list[RankSlow]:
    """The verdicts of the judge, whose step is the number of the row from 0."""
    judge = SlowRankJudge(len(rows[0]))
    found = []
    for number, row in enumerate(rows):
        slowest_s = find_slowest_s(row)
        steps = {
            rank: OwnStep({"backward": seconds}, slowest_s - seconds, slowest_s, 0.0, queued_s)
            for rank, (seconds, queued_s) in row.items()
        }
        found += [event for event in judge.add_step(number, steps) if isinstance(event, RankSlow)]
    return found


def measure_noise(rows: Sequence[OwnSeconds]) -> tuple[float, float]:
    """Standard deviations of the logarithm by which rank 0 differs from its peers: of a step (as a
    median tells it, without accidents), and of the trimmed mean of a window."""
    ratios = []
    for row in rows:
        active_s = {
            rank: max(seconds - queued_s, 1e-6) for rank, (seconds, queued_s) in row.items()
        }
        others = median(seconds for rank, seconds in active_s.items() if rank)
        ratios.append(math.log(active_s[0] / others))
    middle = median(ratios)
    of_step = 1.4826 * median(abs(ratio - middle) for ratio in ratios)
    means = []
    for first in range(0, len(ratios) - WINDOW, WINDOW // 2):
        means.append(mean(sorted(ratios[first : first + WINDOW])[3:-3]))
    return of_step, pstdev(means)


def judge_series(
    series: str, rows: Sequence[OwnSeconds], factor: float, num_trials: int
) -> SlowRanksRow:
    num_ranks = len(rows[0])
    dice = random.Random(f"{series} {factor}")
    num_named = 0
    for _ in range(num_trials):
        rank = dice.randrange(num_ranks)
        begin = dice.randrange(len(rows) - NUM_STEPS_BEFORE - NUM_STEPS_AFTER)
        part = [dict(row) for row in rows[begin : begin + NUM_STEPS_BEFORE + NUM_STEPS_AFTER]]
        for row in part[NUM_STEPS_BEFORE:]:
            seconds, queued_s = row[rank]
            row[rank] = (seconds + (factor - 1.0) * max(seconds - queued_s, 0.0), queued_s)
        verdicts = [each for each in find_slow_ranks(part) if each.step >= NUM_STEPS_BEFORE]
        if verdicts and verdicts[0].slow_rank == rank:
            slow_rows = part[NUM_STEPS_BEFORE : verdicts[0].step + 1]
            elapsed_s = sum(find_slowest_s(row) for row in slow_rows)
            num_named += len(slow_rows) <= MOST_STEPS or elapsed_s <= MOST_S
    return SlowRanksRow(
        series,
        num_ranks,
        *measure_noise(rows),
        len(rows),
        len(find_slow_ranks(rows)),
        factor,
        num_trials,
        num_named,
    )


def print_row(row: SlowRanksRow) -> None:
    print(
        f"{row.series}: {row.num_ranks} ranks, noise of a step {100 * row.step_noise:.1f} %, of a"
        f" window {100 * row.window_noise:.1f} %; {row.num_healthy_steps:,} steps as they are:"
        f" {row.num_called_slow} called slow; {row.factor:g} times as long: {row.num_named} of"
        f" {row.num_trials} named within {MOST_STEPS} steps or {MOST_S:g} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--factor", type=float, default=1.3)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10_000, help="of each series that is drawn")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    series: list[tuple[str, list[OwnSeconds]]] = []
    for run_dir in arguments.runs:
        series.append((str(run_dir), read_recorded_steps(run_dir)))
    if not arguments.runs:
        for num_ranks in (2, 4):
            for seed, noise in enumerate(NOISES):
                name = f"drawn, {100 * noise:g} % a rank"
                series.append((name, draw_steps(num_ranks, arguments.steps, noise, seed)))
    for name, rows in series:
        row = judge_series(name, rows, arguments.factor, arguments.trials)
        if arguments.json:
            print(json.dumps(asdict(row)), flush=True)
        else:
            print_row(row)


if __name__ == "__main__":
    main()
