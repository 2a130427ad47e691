"""`phalanx` as a user runs it: real processes, a tiny job, and what a run directory says
afterwards."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import warm
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run, read_manifest
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.core.launchers import (
    LAUNCHER_VARIABLE_PREFIXES,
    SUPERVISED_VARIABLE,
    TORCHRUN_VARIABLES,
)
from phalanx.observe.events import Envelope, Event, parse_event_line

PHALANX = [
    sys.executable,
    warm.__file__,
]  # as the next, but it and its ranks start in a moment
COLD = [sys.executable, "-m", "phalanx"]  # as a user starts it
# A command with one of them is a rank itself and imports torch.
RANK_VARIABLES = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
DEADLINE_S = 300.0  # a hang is for ever; this is for slow machines
SLACK = 3.0  # the machine that runs the tests is busy

TINY = (
    "model.num_layers=1",
    "model.dim=32",
    "model.num_heads=2",
    "data.seq_len=32",
    "train.global_batch_size=8",
    "train.steps=20",
    "eval.tokens=0",
    "train.sample_tokens=0",
    "optim.warmup_steps=4",
    "observe.sinks=[]",
)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    wall_s: float

    @property
    def problem(self) -> str:
        """The one line on standard error.

        AssertionError if there is a traceback, or more or less than one line.
        """
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("phalanx: "), self.err
        return lines[0]


_nursery_pids: list[int] = []


@functools.cache
def nursery(kind: str = "ranks") -> warm.Nursery:
    """The one of these tests: of ranks, which has imported torch, or of commands."""
    found = warm.Nursery(kind)
    _nursery_pids.append(found.pid)
    atexit.register(found.end)
    return found


def read_processor_seconds() -> float:
    """Processor seconds that this process has taken so far, the nurseries, and what they started:
    of processes that nobody waits for, as long as they live."""
    seconds = 0.0
    for root in (os.getpid(), *_nursery_pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (each := psutil.Process(root), *each.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    seconds += sum(process.cpu_times()[:4])
    return seconds


def environment(**more: str | None) -> dict[str, str]:
    """Ours without what a launcher or an earlier test may have left; None removes a variable."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in (*TORCHRUN_VARIABLES, "PHALANX_ATTEMPT", SUPERVISED_VARIABLE)
        and not name.startswith(LAUNCHER_VARIABLE_PREFIXES)
    }
    kept |= nursery().variables()
    for name, value in more.items():
        kept.pop(name, None)
        if value is not None:
            kept[name] = value
    return kept


def start(
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = PHALANX,
    **options: Any,
) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, its output in pipes."""
    options = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    } | options
    options |= {"cwd": cwd, "process_group": 0}
    if command == PHALANX:
        env = env or environment()
        # `nursery("ranks")` would be another one than `nursery()`.
        place = nursery() if RANK_VARIABLES & env.keys() else nursery("commands")
        return warm.fork_command(place, arguments, env, **options)
    return subprocess.Popen([*command, *arguments], env=env or environment(), text=True, **options)


def finish(process: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> Done:
    """Wait for a command; it is killed with its group if it takes longer."""
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"not done within {deadline_s} s\n{out}\n{err}") from None
    return Done(process.returncode, out, err, time.monotonic() - began)


def run(*arguments: str, cwd: Path, deadline_s: float = DEADLINE_S, **options: Any) -> Done:
    """Run `phalanx ARGUMENTS` to its end."""
    began = time.monotonic()
    done = finish(start(*arguments, cwd=cwd, **options), deadline_s)
    return Done(done.code, done.out, done.err, time.monotonic() - began)


def run_all(commands: Sequence[Sequence[str]], cwd: Path) -> list[Done]:
    """Several commands side by side: where one waits for its ranks another works."""
    processes = [start(*arguments, cwd=cwd) for arguments in commands]
    return [finish(process) for process in processes]


def write_text(folder: Path) -> Path:
    """A few small files of the standard library: real text, 50 thousand bytes of it."""
    folder.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("abc", "bisect", "copy", "heapq", "queue"):
        (folder / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    return folder


class Watched:
    """A command whose output is read while it runs.

    (`communicate` would miss what was read ahead.)
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.seen: list[str] = []

    def wait_for(self, words: str) -> str:
        """Read the output up to a line with these words in it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(line)
            if words in line:
                return line
        done = self.finish()
        raise AssertionError(f"{words!r} was never said:\n{done.out}\n{done.err}")

    def finish(self) -> Done:
        """Wait for the end; `out` is all that was said, `wall_s` what this call took."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        began = time.monotonic()
        self.seen += self.process.stdout
        err = self.process.stderr.read()
        return Done(self.process.wait(), "".join(self.seen), err, time.monotonic() - began)


@contextlib.contextmanager
def watching(process: subprocess.Popen[str]) -> Iterator[Watched]:
    """Watch a command; it is killed with its group if it outlives the block."""
    try:
        yield Watched(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> float:
    """Seconds until `condition` held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < deadline_s, "timed out"
        time.sleep(0.005)
    return time.monotonic() - began


def events(run_dir: Path, kind: type[Event] | None = None) -> list[Envelope]:
    """All events of all processes of a run; AssertionError for a line that is none."""
    found = []
    for path in sorted((run_dir / "events").iterdir()):
        for line in path.read_text(encoding="utf-8").splitlines():
            envelope = parse_event_line(line)
            assert envelope is not None, f"{path}: {line}"
            if kind is None or isinstance(envelope.event, kind):
                found.append(envelope)
    return sorted(found, key=lambda envelope: envelope.time_unix_s)


def loss_curve(run_dir: Path) -> dict[int, float]:
    """Loss by step.

    Steps that were done again after a restart, and all ranks, must say the same to the last bit.
    """
    curve: dict[int, set[str]] = {}
    for path in sorted((run_dir / "events").glob("rank-*")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(
                ValueError
            ):  # the last line of a rank that was killed may be torn
                event = json.loads(line)
                if event["event"] == "step_finished":
                    curve.setdefault(event["step"], set()).add(
                        json.dumps([event["loss"], event["grad_norm"]])
                    )
    for step, values in curve.items():
        assert len(values) == 1, f"step {step} has several losses: {values}"
    return {step: json.loads(min(values))[0] for step, values in sorted(curve.items())}


def weights(run_dir: Path, step: int | None = None) -> dict[str, str]:
    """Checksum by file of the newest checkpoint (or that of `step`), each verified against its
    bytes."""
    saved = list_checkpoint_paths_of_run(run_dir)
    directory = saved[-1] if step is None else run_dir / "checkpoints" / f"step-{step}"
    assert find_checkpoint_problems(directory) == []
    return {name: stored.chunks_xxh3 for name, stored in read_manifest(directory).files.items()}


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """What lies below a folder: size and time of change by relative name."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def descendants() -> list[psutil.Process]:
    """Processes that live below this one or below the nurseries."""
    ours = (os.getpid(), nursery().pid, nursery("commands").pid)
    found = [child for pid in ours for child in psutil.Process(pid).children(recursive=True)]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """Inside the block every descendant of this process and of the nurseries stands still: the
    cores are free."""
    processes = descendants()
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def survivors(run_dir: Path) -> list[str]:
    """Command lines of processes that still hold something open below a run, or name it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            opened = [file.path for file in process.open_files()]
            if process.pid != os.getpid() and any(
                str(run_dir.resolve()) in text for text in (*words, *opened)
            ):
                found.append(f"{process.pid}: {' '.join(words)}")
    return found
