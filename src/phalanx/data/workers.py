"""Processes that read ahead for one rank, in order; one that dies or freezes is replaced and its steps done again.

Worker w does the steps that leave w when divided by the number of workers. Nothing here runs unless the step loop asks:
no thread, no signal handler. A worker that is gone is noticed where its answer is missed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import phalanx
from phalanx.core.errors import DataError
from phalanx.data.user_dataset import UserFacts
from phalanx.data.worker import Arrays, Message, error_of, receive, send, unpack
from phalanx.data.worker_log import WorkerLog
from phalanx.observe.events import Event, LoaderWorkerReplaced

STEPS_AHEAD = 2  # of each worker
MAX_REPLACEMENTS = 3  # for one step
START_S = 30.0  # to import what a dataset needs, on top of the time for an answer
PROBE_TIMEOUT_S = 600.0
_CLOSE_S = 2.0


@dataclass
class _Worker:
    """One process, the connection to it, what it prints, and the steps it owes us, oldest first."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    log: WorkerLog
    owed: deque[int] = field(default_factory=deque)
    heard_s: float = field(default_factory=lambda: time.monotonic() + START_S)


class WorkerPool:
    """Steps built by `num_workers` processes from a SampleSpec; `indices_of(step)` are the samples of a step.

    Worker w prints to the file `logs` followed by "-worker-w.log"; without `logs`, in the end to our standard error.
    """

    def __init__(
        self,
        spec: Message,
        num_workers: int,
        *,
        indices_of: Callable[[int], NDArray[np.int64]],
        timeout_s: float,
        emit: Callable[[Event], None],
        logs: Path | None = None,
    ) -> None:
        self._logs = logs
        self._spec, self._num_workers, self._timeout_s = spec, num_workers, timeout_s
        self._indices_of, self._emit = indices_of, emit
        self._workers: list[_Worker] = []
        self._ready: dict[int, Arrays | Exception] = {}
        self._replacements: dict[int, int] = {}
        self._next_step = -1  # the first that nobody was asked for

    def get(self, step: int) -> Arrays:
        """The arrays of a step. Steps in a row are read ahead; a jump starts anew.

        Raises DataError for what a user's dataset raised, and if workers die of a step again and again.
        """
        if not (self._workers and step in self._asked()):
            self.close()
            self._workers = [self._start(number) for number in range(self._num_workers)]
            self._next_step = step
        while self._next_step < step + STEPS_AHEAD * self._num_workers:
            self._ask(self._next_step)
            self._next_step += 1
        while step not in self._ready:
            self._hear(step % self._num_workers)
        self._replacements.pop(step, None)
        answer = self._ready.pop(step)
        self._ready = {later: found for later, found in self._ready.items() if later > step}
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        for worker in self._workers:
            _stop(worker)
        self._workers, self._ready = [], {}

    def _asked(self) -> set[int]:
        return {*self._ready, *(step for worker in self._workers for step in worker.owed), self._next_step}

    def _ask(self, step: int) -> None:
        number = step % self._num_workers
        self._workers[number].owed.append(step)
        try:
            self._send_step(self._workers[number], step)
        except OSError as error:  # gone, or so stuck that its socket is full
            self._replace(number, is_silent=isinstance(error, TimeoutError))

    def _send_step(self, worker: _Worker, step: int) -> None:
        worker.link.settimeout(self._timeout_s)
        if len(worker.owed) == 1:
            worker.heard_s = max(worker.heard_s, time.monotonic())  # it owed nothing until now
        send(worker.link, {"step": step, "indices": self._indices_of(step).ravel().tolist()})

    def _hear(self, number: int) -> None:
        """Take the next answer of a worker, or replace it."""
        worker = self._workers[number]
        worker.link.settimeout(max(0.001, worker.heard_s + self._timeout_s - time.monotonic()))
        try:
            received = receive(worker.link)
        except OSError as error:
            self._replace(number, is_silent=isinstance(error, TimeoutError))
            return
        if received is None:
            self._replace(number)
            return
        message, fd = received
        worker.heard_s = time.monotonic()
        if "error" in message:
            told = error_of(message["error"])
            if message["step"] is None:  # the samples could not be opened: that will not change
                raise told
            self._ready[worker.owed.popleft()] = told
        else:
            assert fd is not None
            assert message["step"] == worker.owed.popleft(), "answers come in the order of the questions"
            self._ready[message["step"]] = unpack(message["arrays"], fd)

    def _replace(self, number: int, *, is_silent: bool = False) -> None:
        """Kill what is left of a worker and give its steps to a new one."""
        worker = self._workers[number]
        ended, last_words = _stop(worker, at_once=is_silent, aloud=True)
        ended = f"silent for {self._timeout_s:g} s" if is_silent else ended
        why = f"worker {number} {ended}" + (f"; it said last: {last_words}" if last_words else "")
        step = worker.owed[0]
        self._replacements[step] = self._replacements.get(step, 0) + 1
        self._emit(LoaderWorkerReplaced(step, why))
        if self._replacements[step] >= MAX_REPLACEMENTS:
            del self._workers[number]
            self.close()
            raise DataError(
                f"workers end at step {step} again and again",
                where=f"loader worker {number} of {self._num_workers}",
                why=why.removeprefix(f"worker {number} ")
                + (f"; all of it: {worker.log.path}" if worker.log.path else ""),
                fix="see it happen in the rank with data.workers=0; if it is only slow, raise data.worker_timeout_s",
            )
        fresh = self._workers[number] = self._start(number)
        for owed in worker.owed:
            fresh.owed.append(owed)
            with contextlib.suppress(OSError):  # noticed when its answer is missed
                self._send_step(fresh, owed)

    def _start(self, number: int) -> _Worker:
        path = self._logs and self._logs.with_name(f"{self._logs.name}-worker-{number}.log")
        worker = _spawn(WorkerLog(f"loader worker {number}", path))
        with contextlib.suppress(OSError):
            send(worker.link, {"open": self._spec, "sys_path": sys.path})
        return worker


def _spawn(log: WorkerLog) -> _Worker:
    ours, theirs = socket.socketpair()
    root = str(Path(phalanx.__file__).resolve().parents[1])
    python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.data.worker", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log.file,
            stderr=log.file,
            pass_fds=[theirs.fileno()],
            # Unbuffered: what a user's code prints must be there when it is killed.
            env=os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
    return _Worker(process, ours, log)


def _stop(worker: _Worker, *, at_once: bool = False, aloud: bool = False) -> tuple[str, str]:
    """End a worker. Returns how it ended, and the last line it wrote; with `aloud`, all of it is said here, too."""
    worker.link.close()
    if not at_once:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_CLOSE_S)
    worker.process.kill()  # nothing, if it has ended
    code = worker.process.wait()
    why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return why, worker.log.close(aloud=aloud)


def probe_user_dataset(source: str, args: Mapping[str, Any]) -> UserFacts:
    """Open a user's dataset in a process of its own and take its first sample.

    Raises what opening raises: LayoutError for a name that does not exist, DataError for a dataset that cannot be used.
    """
    worker = _spawn(WorkerLog("data.source", None))
    worker.link.settimeout(PROBE_TIMEOUT_S)
    try:
        send(worker.link, {"probe": {"source": source, "args": dict(args)}, "sys_path": sys.path})
        received = receive(worker.link)
    except OSError:
        received = None
    why, last_words = _stop_quietly(worker)
    if received is None:
        raise DataError("the dataset cannot be opened", where=f"data.source {source}", why=last_words or why)
    message = received[0]
    if "error" in message:
        raise error_of(message["error"])
    return UserFacts(source, dict(args), **message["facts"])


def _stop_quietly(worker: _Worker) -> tuple[str, str]:
    """What a probe printed is the user's own; an error is said in one line instead."""
    with contextlib.redirect_stderr(open(os.devnull, "w")) as nowhere:
        ended = _stop(worker)
    nowhere.close()
    return ended
