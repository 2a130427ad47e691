"""Processes that read ahead for one rank, in order; one that dies or freezes is replaced and its
steps done again.

Worker w does the steps that leave w when divided by the number of workers. Nothing here runs unless
the step loop asks: no thread, no signal handler. A worker that is gone is noticed where its answer
is missed.
"""

from __future__ import annotations

import contextlib
import os
import select
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
from phalanx.data.whereabouts import Whereabouts, WorkerPosition, new_whereabouts
from phalanx.data.worker import Arrays, Message, error_of, receive, send, unpack
from phalanx.data.worker_log import WorkerLog
from phalanx.observe.events import Event, LoaderWorkerReplaced

STEPS_AHEAD = 2  # of each worker
MAX_REPLACEMENTS = 3  # for one step
START_S = 30.0  # to import what a dataset needs, on top of the time for an answer
OPENING_S = (
    300.0  # at least, for each split of a user's dataset: a first time may download what it reads
)
SAID_AFTER_S = 5.0  # of waiting; then each time that it is three times as long
_CLOSE_S = 2.0
_POLL_MS = 200


@dataclass
class _Worker:
    """One process, the connection to it, what it prints, and the steps it owes us, oldest first."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    log: WorkerLog
    place: Whereabouts
    owed: deque[int] = field(default_factory=deque)
    heard_s: float = field(default_factory=lambda: time.monotonic() + START_S)


class WorkerPool:
    """Steps built by `num_workers` processes from a SampleSpec; `indices_of(step)` are the samples
    of a step.

    Worker w prints to the file `logs` followed by "-worker-w.log"; without `logs`, in the end to
    our standard error.
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
        rank: int | None = None,
    ) -> None:
        self._logs = logs
        self._of_rank = "" if rank is None else f" of rank {rank}"
        self._spec, self._num_workers, self._timeout_s = spec, num_workers, timeout_s
        self._indices_of, self._emit = indices_of, emit
        self._workers: list[_Worker] = []
        self._ready: dict[int, Arrays | Exception] = {}
        self._replacements: dict[int, int] = {}
        self._next_step = -1  # the first that nobody was asked for

    def get(self, step: int) -> Arrays:
        """The arrays of a step. Steps in a row are read ahead; a jump starts anew.

        Raises DataError for what a user's dataset raised, and if workers die of a step again and
        again.
        """
        if not (self._workers and step in self._find_requested()):
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
        self._ready = {later: batch for later, batch in self._ready.items() if later > step}
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        for worker in self._workers:
            _stop(worker)
        self._workers, self._ready = [], {}

    def _find_requested(self) -> set[int]:
        return {
            *self._ready,
            *(step for worker in self._workers for step in worker.owed),
            self._next_step,
        }

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
            reported = error_of(message["error"])
            if message["step"] is None:  # the samples could not be opened: that will not change
                raise reported
            self._ready[worker.owed.popleft()] = reported
        else:
            assert fd is not None
            assert message["step"] == worker.owed.popleft(), (
                "answers come in the order of the questions"
            )
            self._ready[message["step"]] = unpack(message["arrays"], fd)

    def _replace(self, number: int, *, is_silent: bool = False) -> None:
        """Kill what is left of a worker and give its steps to a new one."""
        worker = self._workers[number]
        sample = worker.place.read().sample
        ended, last_words = _stop(worker, at_once=is_silent, aloud=True)
        ended = f"silent for {self._timeout_s:g} s" if is_silent else ended
        ended += f" at sample {sample}" if sample is not None else ""
        name = f"worker {number}{self._of_rank}"
        why = f"{name} {ended}" + (f"; it said last: {last_words}" if last_words else "")
        step = worker.owed[0]
        self._replacements[step] = self._replacements.get(step, 0) + 1
        self._emit(LoaderWorkerReplaced(step, why))
        if self._replacements[step] >= MAX_REPLACEMENTS:
            del self._workers[number]
            self.close()
            raise DataError(
                f"workers end at step {step} again and again",
                where=f"loader {name}, one of {self._num_workers}",
                why=why.removeprefix(f"{name} ")
                + (f"; all of it: {worker.log.path}" if worker.log.path else ""),
                fix=(
                    "see it happen in the rank with data.workers=0; if it is only slow, raise"
                    " data.worker_timeout_s"
                ),
            )
        fresh = self._workers[number] = self._start(number)
        for owed in worker.owed:
            fresh.owed.append(owed)
            with contextlib.suppress(OSError):  # noticed when its answer is missed
                self._send_step(fresh, owed)

    def _start(self, number: int) -> _Worker:
        path = self._logs and self._logs.with_name(f"{self._logs.name}-worker-{number}.log")
        name = f"worker {number}{self._of_rank}"
        worker = _spawn(WorkerLog(f"loader {name}", path), name)
        with contextlib.suppress(OSError):
            send(worker.link, {"open": self._spec, "sys_path": sys.path})
        return worker


def _spawn(log: WorkerLog, name: str) -> _Worker:
    parent_end, child_end = socket.socketpair()
    whereabouts = new_whereabouts()
    numbers = [str(number) for number in (child_end.fileno(), os.getpid(), whereabouts.fd)]
    root = str(Path(phalanx.__file__).resolve().parents[1])
    python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with child_end:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.data.worker", *numbers, name.replace(" ", "-")],
            stdin=subprocess.DEVNULL,
            stdout=log.file,
            stderr=log.file,
            pass_fds=[child_end.fileno(), whereabouts.fd],
            # Unbuffered: what a user's code prints must be there when it is killed.
            env=os.environ
            | {
                "PYTHONPATH": python_path,
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
            },
        )
    return _Worker(process, parent_end, log, whereabouts)


def _stop(worker: _Worker, *, at_once: bool = False, aloud: bool = False) -> tuple[str, str]:
    """End a worker.

    Returns how it ended, and the last line it wrote; with `aloud`, all of it is said here, too.
    """
    worker.link.close()
    worker.place.close()
    if not at_once:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_CLOSE_S)
    worker.process.kill()  # nothing, if it has ended
    code = worker.process.wait()
    why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return why, worker.log.close(aloud=aloud)


def probe_user_dataset(source: str, args: Mapping[str, Any], timeout_s: float = 60.0) -> UserFacts:
    """Open a user's dataset in a process of its own and take some samples, each within `timeout_s`.

    Raises what opening raises: LayoutError for a name that does not exist, DataError for a dataset
    that cannot be used.
    """
    worker = _spawn(WorkerLog("data.source", None), "probe")
    worker.place.opens("train")
    limits_s = (timeout_s, max(timeout_s, OPENING_S))
    try:
        send(worker.link, {"probe": {"source": source, "args": dict(args)}, "sys_path": sys.path})
        is_late = not _comes(worker, source, *limits_s)
        received = None if is_late else receive(worker.link)
    except OSError:
        is_late, received = False, None
    except BaseException:  # Ctrl-C, SIGTERM
        _stop_quietly(worker, at_once=True)
        raise
    last_place = worker.place.read()
    why, last_words = _stop_quietly(worker, at_once=is_late)
    if received is None:
        raise _no_facts(source, last_place, "" if is_late else why, last_words, *limits_s)
    message = received[0]
    if "error" in message:
        raise error_of(message["error"])
    return UserFacts(source, dict(args), **message["facts"])


def _comes(worker: _Worker, source: str, sample_s: float, opening_s: float) -> bool:
    """Wait for an answer, or the end of the process, and say what for; False if the user's code
    takes too long."""
    poll = select.poll()
    poll.register(worker.link.fileno(), select.POLLIN)
    since_s, next_said_s = 0.0, SAID_AFTER_S
    while not poll.poll(_POLL_MS):
        last_place = worker.place.read()
        if last_place.since_s != since_s:
            since_s, next_said_s = last_place.since_s, SAID_AFTER_S
        limit_s = opening_s if last_place.sample is None else sample_s
        waited_s = time.monotonic() - since_s
        if waited_s > limit_s:
            return False
        if waited_s >= next_said_s:
            print(
                f"phalanx: {source}: waiting for {last_place} ({waited_s:.0f} s of {limit_s:g} s)",
                file=sys.stderr,
            )
            next_said_s *= 3
    return True


def _no_facts(
    source: str,
    place: WorkerPosition,
    ended: str,
    last_words: str,
    sample_s: float,
    opening_s: float,
) -> DataError:
    """Why a probe gave no answer; `ended` is how its process did, empty if it took too long."""
    last_line = f"it said last: {last_words}" if last_words else ""
    if ended:
        summary = (
            f"the process that read {place} ended"
            if place.sample is not None
            else "the dataset cannot be opened"
        )
        return DataError(
            summary, where=f"data.source {source}", why="; ".join(filter(None, (ended, last_line)))
        )
    limit_s = opening_s if place.sample is None else sample_s
    summary = f"{place} did not come within {limit_s:g} s".replace(
        "to open did not come", "did not open"
    )
    fix = "if it is only slow, raise data.worker_timeout_s"
    return DataError(summary, where=f"data.source {source}", why=last_line or None, fix=fix)


def _stop_quietly(worker: _Worker, *, at_once: bool) -> tuple[str, str]:
    """Stop a probe without its output, which is the user's own: an error is reported in one
    line."""
    with contextlib.redirect_stderr(open(os.devnull, "w")) as nowhere:
        ended = _stop(worker, at_once=at_once)
    nowhere.close()
    return ended
