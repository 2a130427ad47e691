"""Run one contender on one case and look at it from outside: times it leaves behind, peak memory
from /proc."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from phalanx.core.launchers import LAUNCHER_VARIABLE_PREFIXES, TORCHRUN_VARIABLES
from phalanx.core.process_memory import ProcessMemoryReader
from throughput.cases import NUM_RANKS, Row
from throughput.contenders import RankTimes, command_of, find_rank_pids, read_times

SAMPLE_S = 0.05
SHARES_S = 2.0  # of the pages that ranks share
ROW_TIMEOUT_S = 600.0
STOP_S = 15.0
NUM_DATA_TOKENS = 400_000


class RowError(Exception):
    """A contender failed: its exit code or what is missing, and its last words."""


@dataclass(frozen=True)
class Measurement:
    """One row. Times in seconds, over ranks the slowest; `step_s` without the warm-up steps."""

    step_s: list[float]
    median_step_s: float
    tokens_per_s: float
    first_step_s: float
    peak_bytes: list[int]  # shared pages by their share: phalanx.core.process_memory
    losses: list[float]
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def write_data(path: Path, vocab_size: int) -> None:
    """Random token ids, small ones more often, so that there is something to learn."""
    ids = vocab_size * np.random.default_rng(0).random(NUM_DATA_TOKENS) ** 4
    np.save(path, ids.astype(np.uint16))


def measure(row: Row, *, data: Path, out: Path, steps: int, warmup: int) -> Measurement:
    """Start the row's contender in `out` (made and removed here), wait for its end.

    Raises RowError.
    """
    out.mkdir(parents=True)
    try:
        command = command_of(row.contender, row.case, data=data, out=out, steps=warmup + steps)
        with open(out / "output.log", "wb") as log:
            started_unix_s = time.time()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ),
            )
            try:
                peaks = _watch(process, row.contender, out)
            finally:
                _stop(process)
        if process.returncode != 0:
            raise RowError(f"exit status {process.returncode}: {_last_words(out)}")
        try:
            times = read_times(row.contender, out)
        except (OSError, ValueError, TypeError) as error:
            raise RowError(f"no times: {error}; {_last_words(out)}") from None
        if len(peaks) != NUM_RANKS:
            raise RowError("the ranks were gone before their memory could be read")
        return summarise(
            times,
            peaks,
            started_unix_s=started_unix_s,
            ended_unix_s=time.time(),
            steps=steps,
            warmup=warmup,
            tokens_per_step=row.case.tokens_per_step,
        )
    finally:
        shutil.rmtree(out, ignore_errors=True)


def summarise(
    ranks: list[RankTimes],
    peak_bytes: list[int],
    *,
    started_unix_s: float,
    ended_unix_s: float,
    steps: int,
    warmup: int,
    tokens_per_step: int,
) -> Measurement:
    """A step lasts from the end of the step before to its own end, whatever happens between; the
    slowest rank counts.

    Raises RowError if a rank has another number of steps.
    """
    for rank, times in enumerate(ranks):
        if len(times.ended_unix_s) != warmup + steps:
            raise RowError(
                f"rank {rank} has {len(times.ended_unix_s)} steps instead of {warmup + steps}"
            )
    ends = np.array([times.ended_unix_s for times in ranks])  # [ranks, steps]
    step_s = np.diff(ends, axis=1).max(axis=0)[warmup - 1 :]
    median_step_s = float(np.median(step_s))
    return Measurement(
        step_s=[round(float(value), 5) for value in step_s],
        median_step_s=median_step_s,
        tokens_per_s=tokens_per_step / median_step_s,
        first_step_s=float(ends[:, 0].max()) - started_unix_s,
        peak_bytes=peak_bytes,
        losses=np.mean([times.losses for times in ranks], axis=0).tolist(),
        wall_s=ended_unix_s - started_unix_s,
    )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The same for every contender: one thread for each rank, and gloo on the loopback
    interface."""
    # What a launcher around us may have set would be taken for a rank's place.
    kept = {
        name: value
        for name, value in environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(LAUNCHER_VARIABLE_PREFIXES)
    }
    loopback = "lo" if Path("/sys/class/net/lo").exists() else "lo0"
    return {"GLOO_SOCKET_IFNAME": loopback} | kept | {"OMP_NUM_THREADS": "1"}


def _watch(process: subprocess.Popen[bytes], contender: str, out: Path) -> list[int]:
    """Wait for the end of `process`; the last peak seen of each rank, bytes.

    Raises RowError on a timeout.
    """
    peaks: dict[int, int] = {}
    elsewhere: dict[int, int] = {}
    memories: list[ProcessMemoryReader] = []
    next_s = began = time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if now > began + ROW_TIMEOUT_S:
            raise RowError(f"not done after {ROW_TIMEOUT_S:g} s: {_last_words(out)}")
        if not memories:
            memories = [
                ProcessMemoryReader(pid) for pid in find_rank_pids(contender, process.pid, out)
            ]
        for rank, memory in enumerate(memories):
            if (
                now >= next_s
            ):  # seldom: it takes a while, of which the rank's own page faults would wait
                others = memory.measure_bytes_of_others()
                if others is not None and others.all_bytes:
                    elsewhere[rank] = others.all_bytes
            if (found := memory.read()) is not None:
                peaks[rank] = max(peaks.get(rank, 0), found.peak_bytes - elsewhere.get(rank, 0))
        if memories and now >= next_s:
            next_s = now + SHARES_S
        time.sleep(SAMPLE_S)
    for memory in memories:
        memory.close()
    return [peaks[rank] for rank in sorted(peaks)]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Nothing that was started outlives its row."""
    if process.poll() is not None:
        return
    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        below = []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in below:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass


def _last_words(out: Path, num_lines: int = 6) -> str:
    """The end of what the ranks said, without what torchrun has to say about it."""
    lines = [
        line.strip()
        for line in (out / "output.log").read_text(errors="replace").splitlines()
        if line.strip()
    ]
    own = (
        list(itertools.takewhile(lambda line: "torch/distributed/elastic" not in line, lines))
        or lines
    )
    return " | ".join(own[-num_lines:]) or "it said nothing"
