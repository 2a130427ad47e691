"""How each contender is started for a case, where its ranks are found, and where it leaves its
times."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from phalanx.core.errors import EnvironmentProblem
from phalanx.observe.bus import build_event_file_path
from phalanx.observe.events import Event, RanksStarted, StepFinished, parse_event_line
from throughput.cases import BARE, CEILING, NO_SINKS, NUM_RANKS, PHALANX, WHOLE_LOGITS, Case

BARE_LOOP = Path(__file__).parents[1] / "bare_ddp.py"
BARE_FLAGS = {BARE: (), CEILING: ("--alone",), WHOLE_LOGITS: ("--whole-logits",)}
PHALANX_OVERRIDES = {PHALANX: (), NO_SINKS: ("observe.sinks=[]",)}
LEARNING_RATE = 3e-3
BUCKET_MB = 25  # tuned for the bare loop: see docs/benchmarks.md


@dataclass(frozen=True)
class RankTimes:
    """What one rank says of itself: unix time at the end of each step, and the loss of each
    step."""

    ended_unix_s: list[float]
    losses: list[float]


def command_of(contender: str, case: Case, *, data: Path, out: Path, steps: int) -> list[str]:
    """The command line that trains `case` for `steps` steps and writes below `out`."""
    if contender in PHALANX_OVERRIDES:
        return [
            sys.executable,
            "-m",
            "phalanx",
            "train",
            *_job(case, data, out, steps),
            *PHALANX_OVERRIDES[contender],
        ]
    if not BARE_LOOP.is_file():
        raise EnvironmentProblem(
            "the bare loop is not there",
            where="benchmarks/bare_ddp.py",
            fix="run the benchmark from a checkout",
        )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={NUM_RANKS}",
    ]
    options = {
        "data": data,
        "out": out,
        "precision": case.precision,
        "dim": case.dim,
        "layers": case.num_layers,
        "heads": case.num_heads,
        "vocab": case.vocab_size,
        "seq-len": case.seq_len,
        "micro-batch": case.micro_batch_size,
        "microbatches": case.num_microbatches,
        "steps": steps,
        "bucket-mb": BUCKET_MB,
    }
    return [
        *torchrun,
        str(BARE_LOOP),
        *(f"--{key}={value}" for key, value in options.items()),
        *BARE_FLAGS[contender],
    ]


def _job(case: Case, data: Path, out: Path, steps: int) -> list[str]:
    keys = {
        "run.dir": out / "run",
        "data.source": data,
        "data.seq_len": case.seq_len,
        "model.dim": case.dim,
        "model.num_layers": case.num_layers,
        "model.num_heads": case.num_heads,
        "model.vocab_size": case.vocab_size,
        "precision.compute": case.precision,
        "parallel.ranks": NUM_RANKS,
        "parallel.dp_replicate": NUM_RANKS,
        "cluster.device": "cpu",
        "train.steps": steps,
        "train.global_batch_size": case.global_batch_size,
        "train.micro_batch_size": case.micro_batch_size,
        "eval.tokens": 0,
        "train.sample_tokens": 0,
        "optim.lr": LEARNING_RATE,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
        "checkpoint.at_end": "false",
    }
    return [f"{key}={value}" for key, value in keys.items()]


def find_rank_pids(contender: str, launcher_pid: int, out: Path) -> list[int]:
    """The processes of the ranks, in rank order; empty while not all of them are there."""
    if contender in PHALANX_OVERRIDES:
        started = [event for event, _ in _events(out, rank=-1) if isinstance(event, RanksStarted)]
        return started[-1].pids if started else []
    try:
        children = psutil.Process(launcher_pid).children()
        ranks = [child.pid for child in children if str(BARE_LOOP) in child.cmdline()]
    except psutil.Error:
        return []
    return sorted(ranks) if len(ranks) == NUM_RANKS else []


def read_times(contender: str, out: Path) -> list[RankTimes]:
    """One entry for each rank.

    Raises OSError or ValueError where a rank left nothing or nonsense.
    """
    return [
        _phalanx_times(out, rank) if contender in PHALANX_OVERRIDES else _bare_times(out, rank)
        for rank in range(NUM_RANKS)
    ]


def _phalanx_times(out: Path, rank: int) -> RankTimes:
    steps = [(event, when) for event, when in _events(out, rank) if isinstance(event, StepFinished)]
    return RankTimes([when for _, when in steps], [event.loss for event, _ in steps])


def _bare_times(out: Path, rank: int) -> RankTimes:
    return RankTimes(**json.loads((out / f"rank-{rank}.json").read_text()))


def _events(out: Path, rank: int) -> Sequence[tuple[Event, float]]:
    try:
        text = build_event_file_path(out / "run", rank, 0).read_text()
    except FileNotFoundError:
        return []
    envelopes = (parse_event_line(line) for line in text.splitlines())
    return [(found.event, found.time_unix_s) for found in envelopes if found is not None]
