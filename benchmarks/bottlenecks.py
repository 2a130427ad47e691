"""Bottlenecks put into real runs, and what `phalanx report` says of them.

`python benchmarks/bottlenecks.py [--seed 1] [--only PATTERN] [--page docs/bottlenecks.md]
[--json]`. Each trial trains the same job twice, without its cause and with it, one right after the
other. Which rank, how much and how it waits are drawn from the seed. The verdict comes from
`phalanx report RUN --json` in a process of its own that is told nothing but the run directory. The
gain it predicts is held beside what taking the cause away gave: the ratio of the two runs' step
times. Delays are shares of the step without them, which is trained before and after. Rows are kept
in build/bottlenecks.jsonl: after Ctrl-C the same command goes on.

A slow link needs root, `ip` and `tc` (two network namespaces of its own), memory bandwidth a
profile of this machine (`phalanx bench gemm`, while nothing else runs); without them those trials
are left out, and it says so.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import slow_links  # noqa: E402
from phalanx.plan.memory_rates import find_memory_rates  # noqa: E402

KEPT = HERE.parent / "build" / "bottlenecks.jsonl"
NUM_STEPS = 30
TIMEOUT_S = 900
PORT = 29519
UNLIMITED_MBIT = 20_000
BATCH_OF_RANK = 4
OWN_JOB = (
    "model.kind=bottleneck_models:build",
    "model.vocab_size=512",
    "data.source=bottleneck_models:dataset",
    f"train.global_batch_size={2 * BATCH_OF_RANK}",
)
# Few tokens and layers: the table's update is a third of a step, and more.
WIDE_TABLE_JOB = (*OWN_JOB, "model.args.num_layers=2", "train.global_batch_size=2")
PRESET_JOB = ("train.global_batch_size=16",)
LAYOUTS = {"ddp": "none", "zero3": "3"}
TOLERANCE, MIN_TOLERANCE = 0.20, 0.05


class NoMemoryRatesError(Exception):
    """Nobody has measured this machine's copies."""


@dataclass(frozen=True)
class Trial:
    """One cause: `expected` are the kinds that a right verdict has, `rank` the rank it names (None:
    it names none). `without` and `cause` are settings of the job; `delays` are settings in seconds,
    as shares of a step without the cause. `about` has {name} for the milliseconds of each.
    `setting`: the one whose gain is judged, where it is not that of the whole cause; steps with
    it train `tokens_factor` times the tokens."""

    name: str
    expected: tuple[str, ...]
    base: tuple[str, ...]
    cause: tuple[str, ...]
    rank: int | None = None
    without: tuple[str, ...] = ()
    mbit: float = 0.0
    about: str = ""
    delays: Mapping[str, float] = field(default_factory=dict)
    setting: str = ""
    tokens_factor: int = 1

    @property
    def is_healthy(self) -> bool:
        return not (self.cause or self.delays or self.mbit)

    def list_delay_settings(self, step_s: float) -> list[str]:
        return [f"{key}={share * step_s:.5f}" for key, share in self.delays.items()]

    def describe(self, step_s: float) -> str:
        return self.about.format(
            model=f"{1e3 * step_s * self.delays.get('model.args.seconds', 0):.0f}",
            data=f"{1e3 * step_s * BATCH_OF_RANK * self.delays.get('data.args.seconds', 0):.0f}",
        )


@dataclass
class Row:
    """What came of a trial; `seconds_*` are the mean of a step, `predicted` and `gained` speed-ups
    (0: the verdict named another cause)."""

    name: str
    about: str
    expected: list[str]
    rank: int | None
    named: list[str]
    named_rank: int | None
    is_right: bool
    predicted: float
    is_upper_bound: bool
    gained: float
    seconds_with: float
    seconds_without: float
    sentence: str
    seed: int = 0
    is_lower_bound: bool = False

    @property
    def is_gain_right(self) -> bool:
        """Within a fifth of the gain, or 0.05; an upper bound must not be below it, nor a lower
        one above."""
        allowed = max(TOLERANCE * (self.gained - 1), MIN_TOLERANCE)
        if self.is_upper_bound:
            return self.predicted >= self.gained - allowed
        if self.is_lower_bound:
            return self.predicted <= self.gained + allowed
        return abs(self.predicted - self.gained) <= allowed

    @property
    def is_gain_right_on_both_sides(self) -> bool:
        """The same where bounds, too, must not be further from it."""
        allowed = max(TOLERANCE * (self.gained - 1), MIN_TOLERANCE)
        return abs(self.predicted - self.gained) <= allowed


def draw_trials(seed: int) -> list[Trial]:
    """Twenty-nine trials, healthy ones among them; the same for the same seed."""
    rng = random.Random(seed)
    trials: list[Trial] = []
    for number in range(7):
        where = ("backward", "forward")[number % 2]
        layout = tuple(LAYOUTS)[number // 2 % 2]
        trials.append(_draw_straggler(rng, f"late-{where}-{number}", where, layout))
    for number in range(2):
        trials.append(_draw_loader(rng, f"late-loader-{number}", rank=rng.randrange(2)))
    for number in range(2):
        trials.append(_draw_loader(rng, f"slow-loaders-{number}", rank=-1))
    for number in range(2):
        trials.append(_draw_link(rng, f"slow-link-{number}"))
    trials.append(
        Trial(
            "many-checkpoints",
            ("checkpoint",),
            (*OWN_JOB, "model.args.dim=384", "checkpoint.asynchronous=false"),
            ("checkpoint.every_steps=1",),
            about="a save after every step, not beside training",
        )
    )
    for number in range(2):
        trials.append(_draw_bubble(rng, f"bubble-{number}"))
    trials.append(_draw_evaluations(rng, "many-evaluations"))
    trials.append(_draw_small_microbatches(rng, "small-microbatches"))
    for number in range(2):
        trials.append(_draw_two_causes(rng, f"two-causes-{number}"))
    for number in range(5):
        trials.append(
            Trial(
                f"healthy-{number}",
                ("compute", "communication"),
                (*OWN_JOB, f"parallel.zero_stage={tuple(LAYOUTS.values())[number % 2]}"),
                (),
                about=f"nothing, {tuple(LAYOUTS)[number % 2]}",
            )
        )
    for number in range(2):
        trials.append(_draw_wide_table(rng, f"wide-table-{number}"))
    trials.append(_draw_shared_update(rng, "wide-table-shared"))
    trials.append(
        Trial(
            "healthy-products",
            ("compute", "communication"),
            (*OWN_JOB, "model.args.dim=384", "train.global_batch_size=32"),
            (),
            about="nothing: wide layers and a large batch, ddp",
        )
    )
    return trials


def _draw_straggler(rng: random.Random, name: str, where: str, layout: str) -> Trial:
    """Late by a quarter of a step to a whole one: a fifth to a half of the step with it."""
    rank, share, is_busy = rng.randrange(2), rng.uniform(0.25, 1.0), rng.random() < 0.5
    how = "spins" if is_busy else "sleeps"
    return Trial(
        name,
        ("straggler",),
        (*OWN_JOB, f"parallel.zero_stage={LAYOUTS[layout]}"),
        (
            f"model.args.where={where}",
            f"model.args.rank={rank}",
            f"model.args.is_busy={str(is_busy).lower()}",
        ),
        rank=rank,
        about=f"rank {rank} {how} {{model}} ms in its {where}, {layout}",
        delays={"model.args.seconds": share},
    )


def _draw_loader(rng: random.Random, name: str, rank: int) -> Trial:
    """Reading a batch takes longer than the step beside which it is read."""
    per_batch = rng.uniform(1.3, 2.2)
    who = "all ranks" if rank < 0 else f"rank {rank}"
    return Trial(
        name,
        ("data",) if rank < 0 else ("straggler",),
        OWN_JOB,
        (f"data.args.rank={rank}",),
        rank=None if rank < 0 else rank,
        about=f"{who}: reading a batch takes {{data}} ms",
        delays={"data.args.seconds": per_batch / BATCH_OF_RANK},
    )


def _draw_link(rng: random.Random, name: str) -> Trial:
    mbit = round(rng.uniform(150, 500))
    return Trial(
        name,
        ("communication",),
        (*OWN_JOB, "parallel.zero_stage=none"),
        (),
        mbit=mbit,
        about=f"a link of {mbit} Mbit/s between two machines, ddp",
    )


def _draw_bubble(rng: random.Random, name: str) -> Trial:
    """Wide enough that a microbatch of 2 costs no more a token than a larger one."""
    batch = rng.choice((12, 16))
    return Trial(
        name,
        ("bubble",),
        ("parallel.pp=2", "model.dim=256", f"train.global_batch_size={batch}"),
        (f"train.micro_batch_size={batch // 2}",),
        without=("train.micro_batch_size=2",),
        about=f"two stages and two microbatches of {batch // 2} (without: of 2)",
    )


def _draw_evaluations(rng: random.Random, name: str) -> Trial:
    every = rng.choice((5, 8))
    return Trial(
        name,
        ("evaluation",),
        (*PRESET_JOB,),
        (f"eval.every_steps={every}", "eval.tokens=16384"),
        about=f"an evaluation every {every} steps",
    )


def _draw_small_microbatches(rng: random.Random, name: str) -> Trial:
    batch = rng.choice((16, 24))
    return Trial(
        name,
        ("host overhead",),
        ("model.dim=64", "data.seq_len=64", f"train.global_batch_size={batch}"),
        ("train.micro_batch_size=1",),
        about=f"{batch // 2} microbatches of one sequence of 64 tokens (without: one of all)",
    )


def _draw_wide_table(rng: random.Random, name: str) -> Trial:
    """The table has nearly all parameters, and a step few tokens."""
    rows, factor = rng.choice((65_536, 98_304)), rng.choice((2, 4))
    larger_batch = f"train.global_batch_size={factor * 2}"
    return Trial(
        name,
        ("memory bandwidth",),
        (*WIDE_TABLE_JOB, f"model.args.num_rows={rows}"),
        ("train.global_batch_size=2",),
        without=(larger_batch,),
        about=f"a table of {rows:,} rows and few tokens a step (without: {factor} times as many)",
        setting=larger_batch,
        tokens_factor=factor,
    )


def _draw_shared_update(rng: random.Random, name: str) -> Trial:
    rows = rng.choice((65_536, 98_304))
    return Trial(
        name,
        ("memory bandwidth",),
        (*WIDE_TABLE_JOB, f"model.args.num_rows={rows}"),
        ("parallel.zero_stage=0",),
        without=("parallel.zero_stage=1",),
        about=f"a table of {rows:,} rows, each rank updates all (without: zero1)",
        setting="parallel.zero_stage=1",
    )


def _draw_two_causes(rng: random.Random, name: str) -> Trial:
    """Reading takes longer than the late step beside which it is read."""
    rank, share = rng.randrange(2), rng.uniform(0.5, 1.0)
    per_batch = rng.uniform(1.5, 2.0) + share
    return Trial(
        name,
        ("straggler", "data"),
        OWN_JOB,
        ("model.args.where=backward", f"model.args.rank={rank}", "data.args.rank=-1"),
        rank=rank,
        about=f"rank {rank} spins {{model}} ms in its backward; all read for {{data}} ms a batch",
        delays={"model.args.seconds": share, "data.args.seconds": per_batch / BATCH_OF_RANK},
    )


# Runs


def run_trial(trial: Trial, seed: int) -> Row:
    """Train without the cause, with it, and without again; ask for the verdict, compare."""
    if "memory bandwidth" in trial.expected and find_memory_rates("cpu", 2) is None:
        raise NoMemoryRatesError("phalanx bench gemm has not measured this machine")
    with tempfile.TemporaryDirectory(prefix="bottleneck-") as name:
        folder = Path(name)
        # A link of its own without a limit, where the cause is one with it.
        mbit = UNLIMITED_MBIT if trial.mbit else 0
        baseline = _train(trial, (*trial.base, *trial.without), folder / "before", mbit)
        healthy = [_step_seconds(_ask_verdict(baseline))]
        settings = [*trial.base, *trial.cause, *trial.list_delay_settings(healthy[0])]
        judged = baseline
        if not trial.is_healthy:
            judged = _train(trial, settings, folder / "with", trial.mbit)
            # Again: a machine gets faster and slower.
            again = _train(trial, (*trial.base, *trial.without), folder / "after", mbit)
            healthy.append(_step_seconds(_ask_verdict(again)))
        verdict, sentence = _ask_verdict(judged), _read_sentence(judged)
    named = [cause["kind"] for cause in verdict["causes"]]
    ranks = [cause["rank"] for cause in verdict["causes"] if cause["rank"] is not None]
    named_rank = ranks[0] if ranks else None
    predicted, limit = _read_prediction(trial, verdict)
    seconds_with, seconds_without = _step_seconds(verdict), statistics.mean(healthy)
    return Row(
        trial.name,
        trial.describe(healthy[0]),
        list(trial.expected),
        trial.rank,
        named,
        named_rank,
        _is_right(trial, named, named_rank),
        predicted,
        limit == "at most",
        trial.tokens_factor * seconds_with / seconds_without,
        seconds_with,
        seconds_without,
        sentence,
        seed=seed,
        is_lower_bound=limit == "at least",
    )


def _read_prediction(trial: Trial, verdict: dict[str, Any]) -> tuple[float, str]:
    """The gain of the trial's setting, or of its causes together; "at most", "at least", or
    neither."""
    saved_share, is_upper_bound = 0.0, False
    for cause in verdict["causes"]:
        if cause["kind"] not in trial.expected:
            continue
        for gain in cause["gains"]:
            if gain["setting"] == trial.setting:
                return gain["speedup"], gain["limit"]
        saved_share += 1 - 1 / cause["speedup"]
        is_upper_bound |= cause["is_upper_bound"]
    return 1 / max(1 - saved_share, 0.01), "at most" if is_upper_bound else ""


def _step_seconds(verdict: dict[str, Any]) -> float:
    """Of a step with what stands between steps: evaluations."""
    seconds = float(verdict["mean_step_s"])
    for cause in verdict["causes"]:
        if cause["kind"] == "evaluation":
            seconds /= 1 - cause["share"]
    return seconds


def _is_right(trial: Trial, named: Sequence[str], rank: int | None) -> bool:
    if not named:
        return False
    if trial.name.startswith("healthy"):
        return named[0] in trial.expected and rank is None
    if len(trial.expected) > 1:
        return set(trial.expected) <= set(named) and rank == trial.rank
    return named[0] == trial.expected[0] and (trial.rank is None or rank == trial.rank)


def _train(trial: Trial, settings: Sequence[str], run_dir: Path, mbit: float) -> Path:
    command = [
        *(sys.executable, "-m", "phalanx", "train", *settings),
        *("parallel.ranks=2", f"train.steps={NUM_STEPS}", "checkpoint.at_end=false"),
        f"run.dir={run_dir}",
    ]
    if mbit:
        slow_links.require_slow_links()
        with slow_links._open_namespaces() as spaces:
            for space, link in spaces:
                slow_links._shape(space, link, mbit)
            _run_in_namespaces(command, spaces)
        return run_dir
    done = subprocess.run(
        command, cwd=HERE, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{trial.name}: {(done.stderr or done.stdout).strip()[-400:]}")
    return run_dir


def _run_in_namespaces(command: list[str], spaces: Sequence[tuple[str, str]]) -> None:
    processes = []
    try:
        for rank, (space, link) in enumerate(spaces):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.213.0.1",
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": link,
                # Two machines here are one: its cores are shared.
                "OMP_NUM_THREADS": "1",
            }
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", space, *command],
                    env=environment,
                    cwd=HERE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(outputs[0].strip()[-400:])


def _ask_verdict(run_dir: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "report", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    verdict = json.loads(done.stdout)["bottleneck"]
    if not verdict:
        raise RuntimeError(f"no step was recorded in {run_dir}")
    return dict(verdict)


def _read_sentence(run_dir: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "report", str(run_dir)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[0]


# Rows and the page


@dataclass
class Campaign:
    """The rows of a seed so far."""

    seed: int
    rows: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def load(cls, seed: int) -> Campaign:
        campaign = cls(seed)
        if KEPT.exists():
            for line in KEPT.read_text().splitlines():
                body = json.loads(line)
                if body["seed"] == seed:
                    campaign.rows[body["name"]] = Row(**body)
        return campaign

    def add(self, row: Row) -> None:
        self.rows[row.name] = row
        KEPT.parent.mkdir(exist_ok=True)
        with KEPT.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def format_page(rows: Sequence[Row], seed: int, left_out: Sequence[str]) -> str:
    """The rows as a page of docs."""
    num_right = sum(row.is_right for row in rows)
    judged = [row for row in rows if row.is_right and not row.name.startswith("healthy")]
    num_gains = sum(row.is_gain_right for row in judged)
    num_strict = sum(row.is_gain_right_on_both_sides for row in judged)
    lines = [
        "# What bounds a run: verdicts beside causes that were put in",
        "",
        "Each row is a real run of two ranks with a cause inside, drawn by a seed; `phalanx report`"
        " was told nothing but its directory. “Gained” is the step time with the cause over that"
        " without it, the mean of a run before and one after (of a larger batch: the ratio of their"
        " tokens a second); “predicted” is what the verdict says of the run with the cause alone."
        " Predicted is right within a fifth of the gain or 0.05;"
        " where it is an upper bound (≤), if it is not below by more, and where it is a lower one"
        " (≥), if it is not above by more.",
        "",
        f"Written by `python benchmarks/bottlenecks.py --seed {seed} --page docs/bottlenecks.md` on"
        f" {date.today()} (two cores, CPU).",
        "",
        f"**{num_right} of {len(rows)} named right** (cause and rank), the gain right in"
        f" {num_gains} of {len(judged)} of those that have one; in {num_strict} of {len(judged)}"
        " if bounds must not be further from it, either.",
        "",
        "| cause put in | named | rank | right | predicted | gained | gain right |",
        "|---|---|---|---|---:|---:|---|",
    ]
    for row in rows:
        limit = "≤ " if row.is_upper_bound else "≥ " if row.is_lower_bound else ""
        is_healthy = row.name.startswith("healthy")
        gains = [f"{limit}{row.predicted:.2f}", f"{row.gained:.2f}", _say(row.is_gain_right)]
        if is_healthy or not row.is_right:
            gains = ["–", f"{row.gained:.2f}", "–"]
        named_rank = "–" if row.named_rank is None else str(row.named_rank)
        cells = [row.about, ", ".join(row.named), named_rank, _say(row.is_right), *gains]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *[f"Left out: {text}." for text in left_out]]
    return "\n".join(lines).rstrip() + "\n"


def _say(value: bool) -> str:
    return "yes" if value else "no"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="*", help="trials whose name matches")
    parser.add_argument("--page", type=Path, help="write the table there")
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines")
    options = parser.parse_args(arguments)
    campaign, left_out = Campaign.load(options.seed), []
    trials = [
        trial
        for trial in draw_trials(options.seed)
        if fnmatch.fnmatchcase(trial.name, options.only)
    ]
    began, num_done = time.monotonic(), 0
    try:
        for number, trial in enumerate(trials):
            if trial.name in campaign.rows:
                continue
            try:
                row = run_trial(trial, options.seed)
            except (slow_links.NoSlowLinksError, NoMemoryRatesError) as why:
                left_out.append(f"{trial.about} ({why})")
                continue
            campaign.add(row)
            num_done += 1
            left = (time.monotonic() - began) / num_done * (len(trials) - number - 1)
            print(
                f"{number + 1}/{len(trials)} {row.name}: {row.about}\n   -> {row.sentence}\n"
                f"   {_say(row.is_right)}; predicted {row.predicted:.2f}, gained {row.gained:.2f};"
                f" eta {left:.0f} s",
                file=sys.stderr,
            )
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        return 130
    rows = [campaign.rows[trial.name] for trial in trials if trial.name in campaign.rows]
    if options.json:
        for row in rows:
            print(json.dumps(asdict(row)))
    if options.page:
        options.page.write_text(format_page(rows, options.seed, left_out), encoding="utf-8")
    right = sum(row.is_right for row in rows)
    errors = [abs(row.predicted - row.gained) for row in rows if row.is_right]
    print(
        f"{right} of {len(rows)} right; the gain is off by"
        f" {statistics.median(errors) if errors else 0:.2f} in the median",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
