"""What a search for a layout answers, beside every layout of its space planned exactly.

    python benchmarks/search_truth.py [--seed 1] [--spaces 30] [--max-layouts 1500] [--json FILE]

Spaces are drawn from the seed: a model, GPUs, a batch, some keys that the job fixes, and the
memory of a GPU, such that only a part of the layouts fits and many are near the edge. A search
screens them by estimates and plans few; here every one is planned. Regret is how much longer the
step of the answer is than that of the fastest layout that fits, both by the planner's own model of
time. Layouts within a few per cent count as equal in a search, and the simplest wins.

Torch-free. Exit 1 where a search says that nothing fits and something does.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from phalanx.core.errors import JobError, LayoutError
from phalanx.job.load import load_job
from phalanx.plan.search.finalists import FinalistPlanner, list_job_keys_of_row
from phalanx.plan.search.result import RankedLayout
from phalanx.plan.search.screening import estimate_row_bytes
from phalanx.plan.search.search import search_layouts
from phalanx.plan.search.space import LayoutRows, enumerate_layouts
from phalanx.plan.search.task import SearchTask, build_search_task

GIB = 2**30
# (preset, lengths of sequences)
MODELS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("gpt2-xl", (512, 1024)),
    ("llama3.2-1b", (2048, 8192, 32768)),
    ("llama3-8b", (2048, 8192, 32768)),
    ("llama2-13b", (2048, 4096)),
    ("qwen3-32b", (4096, 16384)),
    ("llama3-70b", (4096, 8192)),
    ("gemma-2b", (2048, 8192)),
    ("mixtral-8x7b", (2048, 8192)),
    ("qwen3-30b-a3b", (2048, 4096)),
    ("deepseek-moe-16b", (2048, 4096)),
    ("deepseek-v2-lite", (2048, 4096)),
)
GPUS = ("h100-sxm", "a100-sxm", "l40s", "b200-sxm", "v100-sxm")
NUMBERS_OF_RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
# Keys that make a space smaller, in the order in which they are tried, with their values.
FIXED_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("parallel.accumulate", ("unsharded", "sharded")),
    ("train.micro_batch_size", ("1", "2", "4")),
    ("parallel.zero_stage", ("1", "2", "3")),
    ("parallel.pp", ("1", "2", "4")),
    ("parallel.tp", ("1", "2", "4")),
    ("parallel.cp", ("1", "2")),
    ("parallel.schedule", ("1f1b", "interleaved", "gpipe", "zb-v")),
    ("train.recompute", ("none", "selective", "full")),
)


@dataclass(frozen=True)
class Space:
    """One question: the overrides of its job, and the search task that they make."""

    overrides: tuple[str, ...]
    task: SearchTask
    rows: LayoutRows


@dataclass(frozen=True)
class Finding:
    """What a search answered, and the best there is."""

    command: str
    num_layouts: int
    num_fitting: int
    answer: str
    answer_s: float | None
    best: str
    best_s: float | None
    regret: float
    """0 where both are the same, inf where the answer is that nothing fits and something does."""
    best_estimate: float
    """Estimated bytes of the fastest layout, of those that its plan needs."""
    errors: dict[str, list[float]]
    """Estimated bytes of each layout of those that its plan needs, by axes."""
    search_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spaces", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="leave out the ones before")
    parser.add_argument("--max-layouts", type=int, default=1500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    findings = []
    spaces = draw_spaces(args.seed, args.spaces, args.max_layouts)
    for number, space in enumerate(spaces):
        if number < args.first:
            continue
        finding = examine_space(space)
        findings.append(finding)
        print(describe_finding(number, finding), flush=True)
    print_summary(findings)
    if args.json:
        bodies = [asdict(finding) for finding in findings]
        args.json.write_text(json.dumps(bodies, indent=1) + "\n")
    sys.exit(int(any(math.isinf(finding.regret) for finding in findings)))


def draw_spaces(seed: int, number: int, max_layouts: int) -> Iterator[Space]:
    """`number` spaces that have layouts; nothing of them depends on what a search answers."""
    rng = random.Random(seed)
    drawn = 0
    while drawn < number:
        space = _draw_space(rng, max_layouts)
        if space is not None:
            drawn += 1
            yield space


def _draw_space(rng: random.Random, max_layouts: int) -> Space | None:
    """A space of at most `max_layouts` in which a part of the layouts fits; None where what was
    drawn has no layout."""
    preset, lengths = rng.choice(MODELS)
    ranks = rng.choice(NUMBERS_OF_RANKS)
    length = rng.choice(lengths)
    batch = ranks * rng.choice((1, 2, 4, 6, 8, 16, 32))
    overrides = [
        f"model.preset={preset}",
        f"cluster.gpu={rng.choice(GPUS)}",
        f"parallel.ranks={ranks}",
        f"data.seq_len={length}",
        f"train.global_batch_size={batch}",
    ]
    if rng.random() < 0.15:
        overrides.append("precision.compute=fp32")
    if rng.random() < 0.15:
        overrides.append("train.compile=true")
    if rng.random() < 0.1:
        overrides.append("parallel.offload=optimizer")
    keys = list(FIXED_KEYS)
    rng.shuffle(keys)
    for name, values in [("", ("",)), *keys]:
        tried = [*overrides, f"{name}={rng.choice(values)}"] if name else overrides
        try:
            task, rows = _enumerate_space(tried)
        except (JobError, LayoutError):
            continue  # the keys contradict each other: without the last
        overrides = tried
        if 0 < len(rows) <= max_layouts:
            break
    else:
        return None
    # A rank's memory: what one of a few layouts takes, and a little more or less.
    planner = FinalistPlanner(task.job, task.shape, task.cluster, task.vocab_size)
    some = [rng.randrange(len(rows)) for _ in range(rng.choice((1, 3, 10, 30)))]
    sizes = filter(None, (plan_row(planner, task, rows, row)[1] for row in some))
    needed_bytes = min(sizes, default=0) * rng.uniform(0.98, 1.05)
    if not needed_bytes:
        return None
    overrides = [*overrides, f"cluster.memory_gib={(needed_bytes / GIB + 1.5) / 0.9:.2f}"]
    return Space(tuple(overrides), *_enumerate_space(overrides))


def _enumerate_space(overrides: Sequence[str]) -> tuple[SearchTask, LayoutRows]:
    """The search task of a job, and every layout that it leaves open."""
    task = build_search_task(load_job(None, list(overrides)))
    rows = enumerate_layouts(task.job, task.shape, task.cluster, task.num_ranks, task.open_keys)
    return task, rows


def examine_space(space: Space) -> Finding:
    """Search a space, and plan all of it."""
    task, rows = space.task, space.rows
    began_s = time.process_time()
    result = search_layouts(task)
    search_s = time.process_time() - began_s
    estimates = estimate_row_bytes(task, rows)
    planner = FinalistPlanner(task.job, task.shape, task.cluster, task.vocab_size)
    errors: dict[str, list[float]] = {}
    best: RankedLayout | None = None
    best_row, num_fitting = 0, 0
    for row in range(len(rows)):
        ranked, needed_bytes = plan_row(planner, task, rows, row)
        if needed_bytes:
            errors.setdefault(name_axes(rows, row), []).append(estimates[row] / needed_bytes)
        if ranked is None:
            continue
        num_fitting += 1
        if best is None or get_step_s(ranked) < get_step_s(best):
            best, best_row = ranked, row
    regret, ratio = 0.0, 1.0
    if best is not None:
        ratio = estimates[best_row] / best.memory.total_bytes
        regret = math.inf
        if result.winner is not None:
            regret = get_step_s(result.winner) / get_step_s(best) - 1
    return Finding(
        " ".join(space.overrides),
        len(rows),
        num_fitting,
        describe_layout(result.winner),
        None if result.winner is None else result.winner.step_s,
        describe_layout(best),
        None if best is None else best.step_s,
        regret,
        ratio,
        errors,
        search_s,
    )


def plan_row(
    planner: FinalistPlanner, task: SearchTask, rows: LayoutRows, row: int
) -> tuple[RankedLayout | None, int]:
    """(the planned layout or None, bytes of a rank that its plan needs, 0 where no plan says)."""
    planner.smallest_shortage = None
    ranked = planner.plan_layout(list_job_keys_of_row(task.job, rows, row))
    if ranked is not None:
        return ranked, ranked.memory.total_bytes
    if planner.smallest_shortage is not None:
        return None, planner.smallest_shortage.needed_bytes
    return None, 0


def get_step_s(ranked: RankedLayout) -> float:
    """Predicted seconds of a step; 0 where nothing is predicted."""
    return ranked.step_s or 0.0


def name_axes(rows: LayoutRows, row: int) -> str:
    """The axes of a row that decide which formulas count its memory."""
    words = [name for name in ("pp", "tp", "cp", "ep") if getattr(rows, name)[row] > 1]
    return " ".join((*words, f"zero{rows.zero_stage[row]}"))


def describe_layout(ranked: RankedLayout | None) -> str:
    """The keys of a layout in one line."""
    if ranked is None:
        return "nothing fits"
    keys = (f"{key.partition('.')[2]}={value}" for key, value in ranked.job_keys.items())
    return f"{ranked.family}: {' '.join(keys)}"


def describe_finding(number: int, finding: Finding) -> str:
    """One line of a finding, and two more where the answer is not the fastest."""
    text = f"{number:3} {finding.num_layouts:5} layouts, {finding.num_fitting:5} fit,"
    text += f" regret {100 * finding.regret:5.1f} %, search {finding.search_s:.2f} s"
    if finding.regret > 0.001:
        text += f"\n    {finding.command}\n    answer {finding.answer_s} {finding.answer}"
        text += f"\n    best   {finding.best_s} {finding.best}"
        text += f" (estimate {finding.best_estimate:.3f} of its plan)"
    return text


def print_summary(findings: Sequence[Finding]) -> None:
    """Regrets of all spaces, and how far estimates are from plans, by axes."""
    regrets = [finding.regret for finding in findings]
    finite = [regret for regret in regrets if math.isfinite(regret)]
    print(f"{len(findings)} spaces, {sum(f.num_layouts for f in findings)} layouts planned")
    print(f"said to fit nothing, and something does: {len(regrets) - len(finite)}")
    for bar in (0.001, 0.03, 0.0609):
        print(f"regret above {bar:.1%}: {sum(regret > bar for regret in finite)}")
    if finite:
        print(f"regret: median {statistics.median(finite):.2%}, largest {max(finite):.2%}")
    by_axes: dict[str, list[float]] = {}
    for finding in findings:
        for axes, errors in finding.errors.items():
            by_axes.setdefault(axes, []).extend(errors)
    print(
        f"{'estimate over plan':24} {'n':>6} {'min':>6} {'p5':>6} {'p50':>6} {'p95':>6} {'max':>6}"
    )
    for axes, errors in sorted(by_axes.items()):
        shares = np.percentile(errors, [0, 5, 50, 95, 100])
        print(f"{axes:24} {len(errors):6} " + " ".join(f"{share:6.3f}" for share in shares))


if __name__ == "__main__":
    main()
