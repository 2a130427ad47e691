"""The tests on machines that are not at hand: other instruction sets, one core, busy cores.

`make test-elsewhere`.

Each variant runs the tests that assert bits or deadlines, as far as it can change them, and a
seeded tenth of the rest. What passed is on record (.venv/elsewhere) by the digest of sources and
tests: a run that was stopped, or whose time was over, goes on where it was. As a pytest plugin this
file selects the tests of one variant and writes the record.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

import marks

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / ".venv" / "elsewhere"
SETTINGS = "PHALANX_TESTS_ELSEWHERE"
LIMIT_S = 45 * 60.0
BUSY = "import os\nhere = os.getppid()\nwhile os.getppid() == here: sum(range(10**5))"
NO_TESTS = 5  # pytest's exit code where nothing was left to run


@dataclass(frozen=True)
class Variant:
    """One kind of machine.

    `marks`: what it may change; `capability`: what torch must say, or the variant fails.
    """

    name: str
    marks: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    needs_flag: str = ""
    capability: str = ""
    one_core: bool = False
    num_busy: int = 0


VARIANTS = (
    Variant("aten-default", ("bits",), {"ATEN_CPU_CAPABILITY": "default"}, capability="DEFAULT"),
    Variant(
        "aten-avx2",
        ("bits",),
        {"ATEN_CPU_CAPABILITY": "avx2"},
        needs_flag="avx2",
        capability="AVX2",
    ),
    Variant(
        "aten-avx512",
        ("bits",),
        {"ATEN_CPU_CAPABILITY": "avx512"},
        needs_flag="avx512f",
        capability="AVX512",
    ),
    Variant("onednn-avx2", ("bits",), {"ONEDNN_MAX_CPU_ISA": "AVX2"}, needs_flag="avx2"),
    Variant("onednn-best", ("bits",), {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}),
    Variant("one-core", ("bits", "deadline"), one_core=True),
    Variant("busy", ("bits", "deadline"), num_busy=8),
)


@dataclass(frozen=True)
class Outcome:
    """What one variant showed. `skipped`: why this machine cannot be that one."""

    variant: str
    passed: int = 0
    failed: tuple[str, ...] = ()
    not_run: int = 0
    wall_s: float = 0.0
    skipped: str = ""
    problem: str = ""

    @property
    def is_good(self) -> bool:
        return bool(self.skipped) or not (self.failed or self.not_run or self.problem)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the variants and print a table.

    Exit code 0 if every test of every variant that can run here passed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "variants", nargs="*", help=f"which: {', '.join(v.name for v in VARIANTS)}; all by default"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the tenth")
    parser.add_argument("--fresh", action="store_true", help="forget what passed before")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.variants) - {variant.name for variant in VARIANTS}
    if unknown:
        parser.error(f"no such variant: {', '.join(sorted(unknown))}")
    variants = [
        variant for variant in VARIANTS if not chosen.variants or variant.name in chosen.variants
    ]
    folder = RECORDS / f"{digest_of_tests()}-seed-{chosen.seed}"
    if chosen.fresh:
        for record in folder.glob("*.jsonl"):
            record.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = run_variants(variants, folder, chosen.seed, time.monotonic() + chosen.limit_s)
    print_table(outcomes)
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def digest_of_tests() -> str:
    """Changes with any source or test: what passed before such a change has to pass again."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def run_variants(
    variants: Sequence[Variant], folder: Path, seed: int, until: float
) -> list[Outcome]:
    """Variants that only change bits run two at a time; what depends on the machine's speed runs
    alone."""
    cores = sorted(os.sched_getaffinity(0))
    beside = [variant for variant in variants if "deadline" not in variant.marks]
    alone = [variant for variant in variants if "deadline" in variant.marks]
    # What is left of the time is shared by the rounds that are left; what one does not need, the
    # next ones have.
    count_interleaved_rounds = -(-len(beside) // 2) + len(alone)
    outcomes = []
    for start in range(0, len(beside), 2):
        share = (until - time.monotonic()) / count_interleaved_rounds
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(run_variant, v, folder, seed, share, cores)
                for v in beside[start : start + 2]
            ]
            outcomes += [job.result() for job in jobs]
        count_interleaved_rounds -= 1
    for variant in alone:
        outcomes.append(
            run_variant(
                variant, folder, seed, (until - time.monotonic()) / count_interleaved_rounds, cores
            )
        )
        count_interleaved_rounds -= 1
    return outcomes


def run_variant(
    variant: Variant,
    folder: Path,
    seed: int,
    limit_s: float,
    cores: Sequence[int],
    tests: Path = ROOT / "tests",
) -> Outcome:
    """Run one variant for at most `limit_s` seconds, going on from its record in `folder`."""
    if variant.needs_flag and variant.needs_flag not in cpu_flags():
        return _tell(Outcome(variant.name, skipped=f"this CPU has no {variant.needs_flag}"))
    record = folder / f"{variant.name}.jsonl"
    settings = {"variant": asdict(variant), "record": str(record), "seed": seed, "limit_s": limit_s}
    env = os.environ | variant.env | {SETTINGS: json.dumps(settings)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "not long",
        "-p",
        "elsewhere",
        "--tb=short",
        str(tests),
    ]
    env["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "tests" / "support"), *filter(None, [env.get("PYTHONPATH")])]
    )
    before = {entry["id"] for entry in read_complete_record(record) if entry["outcome"] != "failed"}
    began = time.monotonic()
    log = record.with_suffix(".log")
    if variant.one_core:
        command = ["taskset", "-c", str(cores[0]), *command]
    with busy_processes(variant.num_busy), open(log, "w", encoding="utf-8") as out:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
    is_over = done.returncode in (0, 1, 2, NO_TESTS)  # passed, failed, stopped by us, nothing left
    last = {entry["id"]: entry["outcome"] for entry in read_complete_record(record)}
    failed = tuple(sorted(name for name, outcome in last.items() if outcome == "failed"))
    planned = read_plan(record)
    outcome = Outcome(
        variant.name,
        passed=sum(outcome == "passed" for outcome in last.values()),
        failed=failed,
        not_run=len(set(planned) - set(last)),
        wall_s=time.monotonic() - began,
        problem="" if is_over and planned else f"pytest ended with {done.returncode}: {log}",
    )
    return _tell(outcome, resumed=len(before))


def _tell(outcome: Outcome, resumed: int = 0) -> Outcome:
    print(describe(outcome) + (f" ({resumed} of an earlier run)" if resumed else ""), flush=True)
    return outcome


def describe(outcome: Outcome) -> str:
    """One line about a variant."""
    if outcome.skipped:
        return f"{outcome.variant:14} skipped: {outcome.skipped}"
    words = (
        f"{outcome.variant:14} {outcome.passed} passed, {len(outcome.failed)} failed,"
        f" {outcome.wall_s / 60:.1f} min"
    )
    if outcome.not_run:
        words += (
            f", {outcome.not_run} not run: the time was over; the same command goes on from here"
        )
    return words + (f", {outcome.problem}" if outcome.problem else "")


def print_table(outcomes: Sequence[Outcome]) -> None:
    print()
    for outcome in outcomes:
        print(describe(outcome))
        for name in outcome.failed:
            print(f"  failed {name}")


def cpu_flags() -> set[str]:
    """Instruction sets of this machine, as Linux names them; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {
        flag
        for line in lines
        if line.startswith("flags")
        for flag in line.partition(":")[2].split()
    }


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Processes that use every cycle they get, while the block runs.

    They end with this process at the latest.
    """
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# The record: one line when tests are chosen, and one for each that ran.


def read_complete_record(record: Path) -> list[dict[str, Any]]:
    """Tests that ran, in order. A line that was cut by the end of the process is none."""
    return [entry for entry in _lines(record) if "id" in entry]


def read_plan(record: Path) -> list[str]:
    """Every test of the variant, those that ran before included."""
    plans = [entry["planned"] for entry in _lines(record) if "planned" in entry]
    return plans[-1] if plans else []


def _lines(record: Path) -> list[dict[str, Any]]:
    entries = []
    with contextlib.suppress(FileNotFoundError):
        for line in record.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                entries.append(json.loads(line))
    return entries


def is_in_tenth(test_id: str, seed: int) -> bool:
    """A tenth of all tests, the same for a seed on every machine."""
    return hashlib.sha256(f"{seed} {test_id}".encode()).digest()[0] < 256 / 10


# The plugin: pytest loads this file by `-p elsewhere` in the process that runs one variant.


class Selection:
    """Runs the tests of a variant that have not passed yet, writes each outcome down, and stops
    when time is over."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._marks = set(settings["variant"]["marks"])
        self._capability = settings["variant"]["capability"]
        self._record, self._seed = Path(settings["record"]), int(settings["seed"])
        self._until = time.monotonic() + float(settings["limit_s"])

    def _write(self, entry: Mapping[str, Any]) -> None:
        with open(self._record, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        import torch

        capability = torch.backends.cpu.get_cpu_capability()
        if self._capability and capability != self._capability:
            raise pytest.UsageError(
                f"torch computes with {capability}, and this variant is of {self._capability}"
            )
        wanted = [item for item in items if self._is_wanted(item)]
        self._write({"planned": [item.nodeid for item in wanted]})
        last = {entry["id"]: entry["outcome"] for entry in read_complete_record(self._record)}
        items[:] = [item for item in wanted if last.get(item.nodeid, "failed") == "failed"]

    def _is_wanted(self, item: pytest.Item) -> bool:
        function = getattr(item, "originalname", None) or item.name
        own = marks.marks_of_tests(item.path).get(function, set())
        return bool(own & self._marks) or is_in_tenth(item.nodeid, self._seed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        says_how_it_went = (
            report.when == "call" or report.failed or (report.when == "setup" and report.skipped)
        )
        if says_how_it_went:
            self._write(
                {
                    "id": report.nodeid,
                    "outcome": report.outcome,
                    "when": report.when,
                    "s": round(report.duration, 2),
                }
            )

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if time.monotonic() > self._until:
            item.session.shouldstop = "the time of this variant is over"


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest for plugins only: this file is one where the settings are in the
    environment."""
    if SETTINGS in os.environ:
        config.pluginmanager.register(
            Selection(json.loads(os.environ[SETTINGS])), "elsewhere-selection"
        )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
