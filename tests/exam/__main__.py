"""`make exam`: every plant sits the exam, two at a time; docs/exam.md says what was found.

What was done is kept in build/exam (or --results FILE) and not done again while the code is the same:
after Ctrl-C the same command goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from exam.clean import CleanRun, CleanScore, plan_clean_runs, run_clean
from exam.curves import plan_short_runs, score_curves, train_short_run
from exam.generate import generate_variants
from exam.page import (
    Curves,
    Sat,
    describe_asked,
    format_blocks,
    format_ladder,
    format_narrow,
    replace_blocks,
)
from exam.plant import Plant, find_stale, list_plants
from exam.results import Results, digest_sources
from exam.score import ALL_LAYOUTS, OWN_LAYOUTS, Score
from exam.sit import PROBE_TIMEOUT_S, ClosedError, Processes, sit
from phalanx.verify.number_types import is_narrow_dtype, resolve_dtype_names

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "build" / "exam" / "results.jsonl", ROOT / "docs" / "exam.md"
SCHEMA = "phalanx.exam/1"


@dataclass(frozen=True)
class Work:
    """Something that takes a while, and the key of its result."""

    name: str
    key: str
    run: Callable[[], dict[str, Any]]
    guess_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # Ended by a scheduler, or in the background of a shell, it ends what runs as after Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    plants = [plant for plant in list_plants() if fnmatchcase(plant.name, options.only)]
    if options.plants:
        plants = choose_plants(plants, options.plants.read_text(encoding="utf-8").split())
    stale = [line for plant in plants for line in find_stale(plant)]
    if stale:
        print("\n".join(stale), file=sys.stderr)
        return 1
    if options.sample:
        plants = random.Random(options.seed).sample(plants, min(options.sample, len(plants)))
    variants = [
        plant
        for plant in generate_variants(options.seed, repeats=options.generated)
        if fnmatchcase(plant.name, options.only)
    ]
    runs = list(plan_clean_runs(options.clean))
    results, processes = Results(options.results), Processes(timeout_s=options.timeout)
    code = digest_sources()
    asked = ALL_LAYOUTS if options.natural else OWN_LAYOUTS
    works = list_sittings((*plants, *variants), code, processes, options.types, asked)
    works += list_runs(runs, code, processes)
    if options.curves:
        works += list_short_runs(plants, code, processes)
    try:
        do_all(works, results, processes, num_at_once=options.jobs, is_quiet=options.json)
    except KeyboardInterrupt:
        print("\nstopped: the same command goes on from here", file=sys.stderr)
        return 130
    bodies = {work.name: results.find(work.key) or {} for work in works}
    sat = [(plant, Score.from_json(bodies[plant.name])) for plant in plants]
    generated = [(plant, Score.from_json(bodies[plant.name])) for plant in variants]
    clean = [CleanScore.from_json(bodies[run.name]) for run in runs]
    if options.json:
        for body in bodies.values():
            print(json.dumps({"schema": SCHEMA, **body}))
    curves = {}
    for plant in plants:
        curve = score_curves(plant, lambda key: results.find(f"{code}/{key}"))
        if curve is not None:
            curves[plant.name] = curve
    seconds = sum(body.get("seconds", 0.0) for body in bodies.values())
    blocks = choose_blocks(
        options.types, sat, generated, clean, curves, seconds=seconds, asked=asked
    )
    # What some of the plants are found as does not replace what all of them were.
    if options.only == "*" and not options.sample and not options.plants:
        PAGE.write_text(replace_blocks(PAGE.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    elif "narrow" in blocks:
        print(blocks["narrow"], file=sys.stderr)
    num_found = sum(score.is_found for _, score in sat)
    num_alarms = sum(len(run.alarms) for run in clean)
    num_alarms += sum(len(score.false_alarms) for _, score in sat)
    print(f"{num_found} of {len(sat)} plants found, {num_alarms} false alarms", file=sys.stderr)
    return 0


def choose_blocks(
    types: str,
    sat: Sat,
    generated: Sat,
    clean: Sequence[CleanScore],
    curves: Curves,
    *,
    seconds: float,
    asked: str,
) -> dict[str, str]:
    """The blocks of the page that these results are for: of a run in the types that were asked for
    those of types, and never the totals, which are of the types that verify takes by itself."""
    about = describe_machine()
    if not types:
        return format_blocks(
            sat,
            generated,
            clean,
            curves=curves,
            about=about,
            seconds=seconds,
            num_plants=len(sat),
            asked=asked,
        )
    about = f"{about}, {describe_asked(asked)}"
    blocks = {}
    if any(map(is_narrow_dtype, resolve_dtype_names(types, "fp32"))):
        blocks["narrow"] = format_narrow(sat, num_plants=len(list_plants()), about=about)
    if generated:
        blocks["ladder"] = format_ladder(generated, about=about)
    return blocks


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make exam", description=__doc__)
    parser.add_argument("--only", default="*", help="plants whose name matches this pattern")
    parser.add_argument(
        "--plants", type=Path, help="a file with names of plants, in the order in which they sit"
    )
    parser.add_argument("--sample", type=int, default=0, help="so many plants, drawn by the seed")
    parser.add_argument(
        "--generated", type=int, default=1, help="variants for each seam and size (0: none)"
    )
    parser.add_argument("--clean", type=int, default=1000, help="rows of the unchanged code")
    parser.add_argument(
        "--curves",
        action="store_true",
        help="train 20 steps with each plant, too, as others compare",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    parser.add_argument("--timeout", type=float, default=PROBE_TIMEOUT_S, help="seconds for each")
    parser.add_argument(
        "--natural",
        action="store_true",
        help="judge each plant in all layouts of its job, and not in those that it names",
    )
    parser.add_argument("--types", default="", help="of verify: float64,bf16,fp16, say")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="where results are kept, and taken from while the code is the same",
    )
    parser.add_argument("--json", action="store_true", help="one object for each result")
    return parser.parse_args(arguments)


def choose_plants(plants: Sequence[Plant], names: Sequence[str]) -> list[Plant]:
    """The plants of these names, in this order. Raises SystemExit for a name that no plant has."""
    by_name = {plant.name: plant for plant in plants}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SystemExit(f"no such plants: {', '.join(unknown)}")
    return [by_name[name] for name in names]


def list_sittings(
    plants: Sequence[Plant],
    code: str,
    processes: Processes,
    types: str,
    asked: str = OWN_LAYOUTS,
) -> list[Work]:
    """The sitting of each plant in `types`, with the layouts `asked`, as `sit` has them."""
    works = []
    suffix = f"/{types}" if types else ""
    guess_s = 20.0
    if asked == ALL_LAYOUTS:
        suffix, guess_s = f"{suffix}/{ALL_LAYOUTS}", 1000.0
    for plant in plants:

        def run(plant: Plant = plant) -> dict[str, Any]:
            return sit(plant, processes, types=types, asked=asked).to_json()

        works.append(Work(plant.name, f"{code}/{plant.digest}{suffix}", run, guess_s))
    return works


def list_runs(runs: Sequence[CleanRun], code: str, processes: Processes) -> list[Work]:
    works = []
    for clean in runs:

        def run(clean: CleanRun = clean) -> dict[str, Any]:
            began = time.monotonic()
            body = run_clean(clean, processes).to_json()
            return body | {"seconds": round(time.monotonic() - began, 1)}

        works.append(Work(clean.name, f"{code}/{clean}", run, 220.0))
    return works


def list_short_runs(plants: Sequence[Plant], code: str, processes: Processes) -> list[Work]:
    return [
        Work(
            short_run.name,
            f"{code}/{short_run.key}",
            partial(train_short_run, short_run, processes),
            13.0,
        )
        for short_run in plan_short_runs(plants)
    ]


def do_all(
    works: Sequence[Work],
    results: Results,
    processes: Processes,
    *,
    num_at_once: int,
    is_quiet: bool = False,
) -> None:
    """Do what has no result yet, and say how far it is. On Ctrl-C all that runs is ended."""
    due = [work for work in works if results.find(work.key) is None]
    progress = Progress(len(works) - len(due), due, is_quiet=is_quiet)

    def do(work: Work) -> None:
        body = work.run()
        results.add(work.key, body)
        progress.tell(work, body)

    with ThreadPoolExecutor(num_at_once) as pool:
        futures: set[Future[None]] = {pool.submit(do, work) for work in due}
        try:
            while futures:
                done, futures = wait(futures, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            processes.close()
            raise_only_after_threads(futures)
            raise


def raise_only_after_threads(futures: set[Future[None]]) -> None:
    """Wait for the threads, whose commands were ended."""
    for future in futures:
        if not future.cancelled():
            try:
                future.result()
            except ClosedError:
                continue


class Progress:
    """Says each result, and about when all are there."""

    def __init__(self, num_done: int, due: Sequence[Work], *, is_quiet: bool) -> None:
        self._num_done, self._num_all = num_done, num_done + len(due)
        self._due_s, self._began, self._is_quiet = (
            sum(w.guess_s for w in due),
            time.monotonic(),
            is_quiet,
        )
        self._done_s, self._lock = 0.0, threading.Lock()
        if num_done and not is_quiet:
            print(f"{num_done} of {self._num_all} are done already", file=sys.stderr)

    def tell(self, work: Work, body: dict[str, Any]) -> None:
        with self._lock:
            self._num_done += 1
            self._done_s += work.guess_s
            if self._is_quiet:
                return
            passed = time.monotonic() - self._began
            left_min = passed / self._done_s * (self._due_s - self._done_s) / 60
            outcome = (
                body.get("outcome") or f"{body['num_rows']} rows, {len(body['alarms'])} alarms"
            )
            print(
                f"{self._num_done:4} of {self._num_all}  {work.name:48} {outcome:10}"
                f" {body.get('seconds', 0.0):5.0f} s   about {left_min:.0f} min left",
                file=sys.stderr,
                flush=True,
            )


def describe_machine() -> str:
    """The day, the versions, and the commit that was examined, where git knows it."""
    import torch

    words = [
        time.strftime("%Y-%m-%d"),
        f"torch {torch.__version__}",
        f"Python {platform.python_version()}",
    ]
    asked = ("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    with contextlib.suppress(OSError):
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            words.append(f"commit {done.stdout.strip()}")
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
