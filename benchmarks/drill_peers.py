"""The same kill and the same freeze in phalanx, in a plain torchrun script of the same model, and
in one of torchft where it is installed.

    python benchmarks/drill_peers.py [--trials 3] [--out ROWS.jsonl]

Two ranks, data parallel over gloo, a checkpoint every 10 steps; rank 1 is struck in step 25. All
sides are measured from the moment that the rank writes down right before it is struck: to the first
line of a failure, a rank's or a launcher's, by one pattern for torchrun and torchft; to the line by
which a launcher acts on it (it ends the other ranks, or names one that failed); and to the end of
the first step that was never done before. Of phalanx the launcher's first event of the failure is
taken; lines that its ranks print before it are not looked at. torchrun gets what a careful user
gives it: restarts, a checkpoint to go on from, and a timeout of 5 s for collectives (its default is
30 minutes, and nothing else notices a freeze).
How torchft is measured, which trains on without a replica: drill_torchft.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from drill_torchft import (
    AGENT_SAYS,
    FailureLines,
    find_reason_against,
    measure_torchft,
    train_replica,
)

RANKS, STEPS, SAVED_EACH, RANK, STEP = 2, 60, 10, 1, 25
TIMEOUT_S, LIMIT_S = 5, 180.0
VOCAB, DIM, LAYERS, HEADS, SEQ_LEN, BATCH = 256, 64, 2, 2, 64, 4
NAMED = re.compile(r"local_rank: (\d+)")


# --- the script that torchrun starts, and its model -----------------------------------------------


def build_peer_model() -> tuple[Any, Any]:
    """(the decoder with weights of seed 0, its objective): those of phalanx's drill."""
    import torch
    from torch import nn

    from phalanx.job.shapes.decoder import DecoderShape, default_ffn_dim
    from phalanx.nn.models.decoder import Decoder
    from phalanx.nn.objective import causal_cross_entropy

    head_dim, ffn_dim = DIM // HEADS, default_ffn_dim(DIM)
    torch.manual_seed(0)
    with torch.device("meta"):
        decoder = Decoder(DecoderShape(LAYERS, DIM, HEADS, HEADS, head_dim, ffn_dim, VOCAB, True))
    for weight in decoder.to_empty(device="cpu").parameters():
        nn.init.normal_(weight, std=0.02) if weight.ndim >= 2 else nn.init.ones_(weight)
    return decoder, causal_cross_entropy(2048)


def draw_batch(step: int, rank: int) -> Any:
    """The tokens of a rank's step, (BATCH, SEQ_LEN + 1)."""
    import torch

    generator = torch.Generator().manual_seed(step * RANKS + rank)
    return torch.randint(VOCAB, (BATCH, SEQ_LEN + 1), generator=generator)


def train_under_torchrun(folder: Path, fault: str) -> None:
    """A data-parallel loop as people write it: resume, train, save."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    decoder, objective = build_peer_model()
    model = DistributedDataParallel(decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first, saved = 0, folder / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved)
        first = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    with open(folder / f"steps-{rank}.jsonl", "a", buffering=1) as steps:
        for step in range(first + 1, STEPS + 1):
            tokens = draw_batch(step, rank)
            loss, num_targets = objective(model(tokens[:, :-1]), {"targets": tokens[:, 1:]})
            if (rank, step) == (RANK, STEP) and not (folder / "struck").exists():
                (folder / "struck").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            (loss / num_targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % SAVED_EACH == 0 and rank == 0:
                state = {"step": step, "model": model.state_dict()}
                torch.save(state | {"optimizer": optimizer.state_dict()}, folder / "new.pt")
                (folder / "new.pt").rename(saved)
            steps.write(json.dumps([step, attempt, time.monotonic()]) + "\n")
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort a finished rank in the interpreter's teardown


# --- both sides, measured -------------------------------------------------------------------------


def measure_torchrun(fault: str, folder: Path) -> dict:
    """One trial under torchrun."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(RANKS), "--max-restarts", "3"),
        *(__file__, "--worker", str(folder), "--fault", fault),
    ]
    began_s = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    lines, named, said = FailureLines(), None, []
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    try:
        while process.poll() is None and time.monotonic() - began_s < LIMIT_S:
            line = process.stderr.readline()
            if not line:
                time.sleep(0.01)
                continue
            said.append(line)
            lines.read(line, time.monotonic())
            if named is None and AGENT_SAYS in line:
                named = int(NAMED.search(line)[1])
    finally:
        # The agent's workers are in sessions of their own: they end with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    struck_s = float((folder / "struck").read_text())
    rows = [
        json.loads(line)
        for path in folder.glob("steps-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    last = max(step for step, attempt, _ in rows if attempt == 0)
    again = [at_s for step, attempt, at_s in rows if attempt > 0 and step > last]
    return {
        "side": "torchrun",
        "fault": fault,
        "first_line_s": _round(lines.first_s - struck_s),
        "acted_s": _round(lines.acted_s - struck_s),
        "named": named,
        "trained_again_s": _round(min(again, default=math.nan) - struck_s),
        "all_again_s": _round(min(again, default=math.nan) - struck_s),
        "lost_steps": last - last // SAVED_EACH * SAVED_EACH,
        "exit_code": code,
        "wall_s": _round(time.monotonic() - began_s),
        "why": next((line.strip() for line in reversed(said) if "RuntimeError: " in line), "")
        if code
        else "",
    }


def measure_phalanx(faults: list[str], folder: Path, trial: int) -> list[dict]:
    """One trial of each fault in phalanx, by the code of `phalanx drill`."""
    from phalanx.drills.job import load_drilled_job, measure_job
    from phalanx.drills.run_trial import TrialRunner
    from phalanx.drills.trials import Trial, TrialPlace

    job = load_drilled_job(
        None, [f"train.steps={STEPS}", f"checkpoint.every_steps={SAVED_EACH}"], num_steps=STEPS
    )
    runner = TrialRunner(job, measure_job(job.job), folder)
    undisturbed = runner.run_undisturbed()
    rows = []
    for fault in faults:
        place = TrialPlace(RANK, STEP, "backward")
        text = f"{fault}:rank={RANK},step={STEP},phase=backward"
        found = runner.run_trial(Trial(fault, 0, trial, place, (text,)), undisturbed).measured
        rows.append(
            {
                "side": "phalanx",
                "fault": fault,
                "first_line_s": None,
                "acted_s": found.detected_s,
                "named": found.ranks[0] if found.ranks else None,
                "trained_again_s": found.trained_again_s,
                "all_again_s": found.trained_again_s,
                "lost_steps": found.lost_steps,
                "exit_code": found.exit_codes[0],
                "wall_s": found.wall_s,
            }
        )
    return rows


def _format_most_lost(lost: Sequence[int | None]) -> str:
    """The most steps that a trial lost; a dash where nobody counted them."""
    counted = [number for number in lost if number is not None]
    return str(max(counted)) if counted else "–"


def _round(seconds: float) -> float | None:
    return round(seconds, 3) if math.isfinite(seconds) else None


def print_table(rows: list[dict]) -> None:
    heads = ("fault", "side", "n", "first line after", "launcher acts after", "named")
    heads += ("training again after", "all ranks again after", "lost", "finished")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for fault in ("kill", "freeze"):
        for side in ("phalanx", "torchrun", "torchft"):
            of = [row for row in rows if (row["fault"], row["side"]) == (fault, side)]
            if of:
                named = sum(row["named"] == RANK for row in of)
                cells = [
                    *(fault, side, str(len(of)), _spread(of, "first_line_s", none="–")),
                    *(_spread(of, "acted_s"), f"{named}/{len(of)}"),
                    _spread(of, "trained_again_s"),
                    _spread(of, "all_again_s"),
                    _format_most_lost([row["lost_steps"] for row in of]),
                    f"{sum(row['exit_code'] == 0 for row in of)}/{len(of)}",
                ]
                print(f"| {' | '.join(cells)} |")


def _spread(rows: list[dict], key: str, none: str = "never") -> str:
    known = sorted(row[key] for row in rows if row[key] is not None)
    if not known:
        return none
    text = f"{statistics.median(known):.2f} s ({known[0]:.2f} to {known[-1]:.2f})"
    return text if len(known) == len(rows) else f"{text}, {len(rows) - len(known)} never"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--fault", default="kill")
    parser.add_argument("--replica", type=int)
    arguments = parser.parse_args()
    if arguments.replica is not None:
        train_replica(arguments.worker, arguments.fault, arguments.replica, (RANK, STEP))
    if arguments.worker is not None:
        train_under_torchrun(arguments.worker, arguments.fault)
        return
    if why_not := find_reason_against():
        print(f"without torchft: {why_not}", file=sys.stderr)
    rows: list[dict] = []
    num_told = 0
    # In turn, so that a busy minute of the machine meets both sides.
    for trial in range(arguments.trials):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure_phalanx(["kill", "freeze"], Path(folder), trial)
        for fault in ("kill", "freeze"):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measure_torchrun(fault, Path(folder)))
            if not why_not:
                with tempfile.TemporaryDirectory() as folder:
                    rows.append(measure_torchft(fault, Path(folder), (RANK, STEP)))
        for row in rows[num_told:]:
            print(json.dumps(row), file=sys.stderr, flush=True)
        num_told = len(rows)
    if arguments.out is not None:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_table(rows)


if __name__ == "__main__":
    main()
