"""The side of torchft in benchmarks/drill_peers.py: two replica groups of one rank each.

torchft keeps the survivor training while the other replica is away: a step then has one rank's
samples. So two moments are measured: the first step that is committed after the strike, and the
first in which both take part again. Each replica group has a torchrun of its own that starts it
again, as torchft's documentation does it; the lighthouse and the timeouts have 5 s, as torchrun has
in the same script.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TextIO

TIMEOUT_S = 5
WHOLE_STEPS = 5
"""A replica is back when both took part in so many steps."""
LIMIT_AFTER_STRIKE_S = 90.0
AGENT_SAYS = "failed (exitcode"
# What a rank or a launcher says of a failure, on whatever side; and what a launcher says once it
# acts on one: it ends the other ranks, or tells which one failed.
_FAILURE_LINE = re.compile(
    r"failed \(exitcode|closing signal|Traceback \(most recent call|Timed out waiting"
    r"|got exception|quorum.*(?:failed|timeout)",
    re.IGNORECASE,
)
_LAUNCHER_ACTS = re.compile(r"failed \(exitcode|closing signal")


@dataclass
class FailureLines:
    """When (monotonic seconds) the first line of a failure was read, whoever wrote it, and the
    first by which a launcher acts on it; NaN before."""

    first_s: float = math.nan
    acted_s: float = math.nan

    def read(self, text: str, now_s: float) -> None:
        """Read lines that are there at `now_s`, also such that were read before."""
        if math.isnan(self.first_s) and _FAILURE_LINE.search(text):
            self.first_s = now_s
        if math.isnan(self.acted_s) and _LAUNCHER_ACTS.search(text):
            self.acted_s = now_s


def find_reason_against() -> str:
    """Why torchft cannot run here; "" if it can."""
    if importlib.util.find_spec("torchft") is None or not shutil.which("torchft_lighthouse"):
        return "torchft is not installed (pip install torchft)"
    return ""


def train_replica(folder: Path, fault: str, replica: int, struck: tuple[int, int]) -> None:
    """A data-parallel loop of torchft until the driver ends it.

    `struck`: (replica, how many steps it has taken part in): the replicas do not start at once, and
    the first begins alone.
    """
    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from drill_peers import build_peer_model, draw_batch

    torch.set_num_threads(1)
    decoder, objective = build_peer_model()
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)

    def load(state: dict[str, Any]) -> None:
        decoder.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    limit = timedelta(seconds=TIMEOUT_S)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": decoder.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{replica}",
        timeout=limit,
    )
    model, guarded = DistributedDataParallel(manager, decoder), Optimizer(manager, optimizer)
    with open(folder / f"steps-{replica}.jsonl", "a", buffering=1) as steps:
        for num_own in count(1):
            step = manager.current_step() + 1
            guarded.zero_grad()
            tokens = draw_batch(step, replica)
            loss, num_targets = objective(model(tokens[:, :-1]), {"targets": tokens[:, 1:]})
            if (replica, num_own) == struck and not (folder / "struck").exists():
                (folder / "struck").write_text(f"{time.monotonic()} {step}")
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            (loss / num_targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            guarded.step()
            if manager.current_step() == step:
                line = [step, manager.num_participants(), time.monotonic()]
                steps.write(json.dumps(line) + "\n")


def measure_torchft(fault: str, folder: Path, struck: tuple[int, int]) -> dict[str, Any]:
    """One trial. The driver ends the replicas when both are back, or 90 s after the strike."""
    began_s = time.monotonic()
    port = _find_free_port()
    lighthouse = subprocess.Popen(
        [
            *("torchft_lighthouse", "--min_replicas", "1", "--bind", f"[::]:{port}"),
            *("--join_timeout_ms", "1000", "--heartbeat_timeout_ms", str(1000 * TIMEOUT_S)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    logs = [(folder / f"replica-{replica}.log").open("w") for replica in (0, 1)]
    agents = [
        _start_replica(replica, fault, folder, environment, log) for replica, log in enumerate(logs)
    ]
    try:
        struck_s, struck_step, lines = math.nan, math.inf, FailureLines()
        survivor = 1 - struck[0]
        while not _is_over(folder, survivor, struck_s, struck_step):
            time.sleep(0.01)
            if math.isnan(struck_s):
                struck_s, struck_step = _read_strike(folder / "struck")
            elif math.isnan(lines.acted_s):
                for replica in (0, 1):
                    text = (folder / f"replica-{replica}.log").read_text()
                    lines.read(text, time.monotonic())
            if math.isnan(struck_s) and time.monotonic() - began_s > LIMIT_AFTER_STRIKE_S:
                break
    finally:
        _end([lighthouse, *agents], folder)
        for log in logs:
            log.close()
    if math.isnan(struck_s):
        raise RuntimeError(f"torchft did not reach the strike: see {folder}")
    said = (folder / f"replica-{struck[0]}.log").read_text()
    later = _read_steps(folder, survivor, struck_step)
    whole = [moment_s for _, participants, moment_s in later if participants == 2]
    is_whole = len(whole) >= WHOLE_STEPS
    return {
        "side": "torchft",
        "fault": fault,
        "first_line_s": _round(lines.first_s - struck_s),
        "acted_s": _round(lines.acted_s - struck_s),
        # By the agent that started it: the survivor says only that a peer is gone.
        "named": struck[0] if AGENT_SAYS in said else None,
        "trained_again_s": _round(min((line[2] for line in later), default=math.nan) - struck_s),
        "all_again_s": _round(whole[0] - struck_s) if is_whole else None,
        "lost_steps": None,  # what the struck replica had begun is not counted
        "exit_code": 0 if is_whole else 1,
        "wall_s": _round(time.monotonic() - began_s),
        "why": "" if is_whole else "the replica that was struck did not come back",
    }


def _start_replica(
    replica: int, fault: str, folder: Path, environment: dict[str, str], log: TextIO
) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("drill_peers.py")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "1", "--max-restarts", "3"),
            *(str(script), "--worker", str(folder), "--fault", fault, "--replica", str(replica)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
        env=environment,
        start_new_session=True,
    )


def _is_over(folder: Path, survivor: int, struck_s: float, struck_step: float) -> bool:
    if math.isnan(struck_s):
        return False
    if time.monotonic() - struck_s > LIMIT_AFTER_STRIKE_S:
        return True
    later = _read_steps(folder, survivor, struck_step)
    return sum(participants == 2 for _, participants, _ in later) >= WHOLE_STEPS


def _read_steps(folder: Path, replica: int, from_step: float) -> list[list[float]]:
    """The steps that a replica has committed from one on: (step, participants, moment)."""
    try:
        lines = (folder / f"steps-{replica}.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [step for step in map(json.loads, lines) if step[0] >= from_step]


def _read_strike(path: Path) -> tuple[float, float]:
    """(moment, step) of the strike; (NaN, inf) before it."""
    try:
        moment_s, step = path.read_text().split()
    except (FileNotFoundError, ValueError):
        return math.nan, math.inf
    return float(moment_s), float(step)


def _end(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Kill the agents and what they started: their workers are in sessions of their own."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if ["--worker", str(folder)] == cmdline.read_text().split("\0")[-7:-5]:
                os.kill(int(cmdline.parent.name), signal.SIGKILL)


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def _round(seconds: float) -> float | None:
    return round(seconds, 3) if math.isfinite(seconds) else None
