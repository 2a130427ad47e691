"""Bottlenecks put into real runs, and what `phalanx report` says of them.

`python benchmarks/bottlenecks.py [--seed 1] [--only PATTERN] [--page docs/bottlenecks.md]
[--json]`. Each trial trains the same job twice, without its cause and with it, one right after the
other. Which rank, how much and how it waits are drawn from the seed. The verdict comes from
`phalanx report RUN --json` in a process of its own that is told nothing but the run directory. The
gain it predicts is held beside what taking the cause away gave: the ratio of the two runs' step
times. Delays are shares of the step without them, which is trained before and after. Rows are kept
in build/bottlenecks.jsonl: after Ctrl-C the same command goes on.

A slow link needs root, `ip` and `tc` (two network namespaces of its own); without them those trials
are left out, and it says so. Whether memory bounds a long update is said where this machine has a
profile (`phalanx bench gemm`, while nothing else runs): both verdicts name the update.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import slow_links  # noqa: E402
from bottleneck_rows import Campaign, Row, ToldVerdict, format_page, say  # noqa: E402
from bottleneck_trials import Trial, draw_trials  # noqa: E402

NUM_STEPS = 30
TIMEOUT_S = 900
PORT = 29519
UNLIMITED_MBIT = 20_000


def run_trial(trial: Trial, seed: int) -> Row:
    """Train without the cause, with it, and without again; ask for the verdict, compare."""
    with tempfile.TemporaryDirectory(prefix="bottleneck-") as name:
        folder = Path(name)
        # A link of its own without a limit, where the cause is one with it.
        mbit = UNLIMITED_MBIT if trial.mbit else 0
        baseline = _train(trial, (*trial.base, *trial.without), folder / "before", mbit)
        healthy = [_ask_verdict(baseline).step_seconds]
        settings = [*trial.base, *trial.cause, *trial.list_delay_settings(healthy[0])]
        judged = baseline
        if not trial.is_healthy:
            judged = _train(trial, settings, folder / "with", trial.mbit)
            # Again: a machine gets faster and slower.
            again = _train(trial, (*trial.base, *trial.without), folder / "after", mbit)
            healthy.append(_ask_verdict(again).step_seconds)
        verdict = _ask_verdict(judged)
    return Row.compare(trial, seed, verdict, statistics.mean(healthy), healthy[0])


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


def _ask_verdict(run_dir: Path) -> ToldVerdict:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "report", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    verdict = json.loads(done.stdout)["bottleneck"]
    if not verdict:
        raise RuntimeError(f"no step was recorded in {run_dir}")
    return ToldVerdict(verdict)


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
            except slow_links.NoSlowLinksError as why:
                left_out.append(f"{trial.about} ({why})")
                continue
            campaign.add(row)
            num_done += 1
            left = (time.monotonic() - began) / num_done * (len(trials) - number - 1)
            print(
                f"{number + 1}/{len(trials)} {row.name}: {row.about}\n   -> {row.sentence}\n"
                f"   {say(row.is_right)}; predicted {row.predicted:.2f}, gained {row.gained:.2f};"
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
