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
from phalanx.core.errors import DataError, DataSourceError
from phalanx.core.output import print_waiting_notice
from phalanx.data.user_dataset import UserDatasetFacts
from phalanx.data.whereabouts import WorkerActivity, WorkerStatus, create_worker_status
from phalanx.data.worker import (
    Arrays,
    Message,
    decode_worker_error,
    map_arrays_of_memory_file,
    receive_message_with_file,
    send_message_with_file,
)
from phalanx.data.worker_log import WorkerLog
from phalanx.observe.events import Event, LoaderWorkerReplaced

PREFETCHED_STEPS_PER_WORKER = 2  # of each worker: one is read while the other waits
MAX_REPLACEMENTS_PER_STEP = 3  # for one step: what fails so often will not succeed
# To import what a dataset needs, on top of the time for an answer.
WORKER_START_TIMEOUT_S = 30.0
# At least, for each split of a user's dataset: a first time may download what it reads.
MIN_DATASET_OPEN_TIMEOUT_S = 300.0
FIRST_WAIT_NOTICE_S = 5.0  # of waiting; then each time that it is three times as long
_CLOSE_TIMEOUT_S = 2.0
_POLL_MS = 200


@dataclass
class _DatasetWorker:
    """One process, the connection to it, what it prints, and the steps it owes us, oldest first."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    log: WorkerLog
    whereabouts: WorkerStatus
    owed: deque[int] = field(default_factory=deque)
    heard_s: float = field(default_factory=lambda: time.monotonic() + WORKER_START_TIMEOUT_S)


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
        self._of_rank = ""
        if rank is not None:
            self._of_rank = f" of rank {rank}"
        self._spec, self._num_workers, self._timeout_s = spec, num_workers, timeout_s
        self._indices_of, self._emit = indices_of, emit
        self._workers: list[_DatasetWorker] = []
        self._ready: dict[int, Arrays | Exception] = {}
        self._replacements: dict[int, int] = {}
        self._next_step = -1  # the first that nobody was asked for

    def get_step(self, step: int) -> Arrays:
        """The arrays of a step. Steps in a row are read ahead; a jump starts anew.

        Raises DataSourceError for what a user's dataset raised, and if workers die of a step again
        and again; DataError for samples that are no batch.
        """
        if not (self._workers and step in self._list_pending_steps()):
            self.close()
            self._workers = [self._start_worker(number) for number in range(self._num_workers)]
            self._next_step = step
        while self._next_step < step + PREFETCHED_STEPS_PER_WORKER * self._num_workers:
            self._request_steps(self._next_step)
            self._next_step += 1
        while step not in self._ready:
            self._receive_answer(step % self._num_workers)
        self._replacements.pop(step, None)
        answer = self._ready.pop(step)
        # A jump forward leaves steps behind that are never asked for.
        self._ready = {later: batch for later, batch in self._ready.items() if later > step}
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        for worker in self._workers:
            _stop_worker(worker)
        self._workers, self._ready = [], {}

    def _list_pending_steps(self) -> set[int]:
        """The steps that come without a new start: ready, owed by a worker, or the next to ask
        for."""
        steps = {*self._ready, self._next_step}
        for worker in self._workers:
            steps.update(worker.owed)
        return steps

    def _request_steps(self, step: int) -> None:
        number = step % self._num_workers
        self._workers[number].owed.append(step)
        try:
            self._request_step_of_worker(self._workers[number], step)
        except OSError as error:  # gone, or so stuck that its socket is full
            self._replace_worker(number, is_silent=isinstance(error, TimeoutError))

    def _request_step_of_worker(self, worker: _DatasetWorker, step: int) -> None:
        worker.link.settimeout(self._timeout_s)
        if len(worker.owed) == 1:
            # It owed nothing until now.
            worker.heard_s = max(worker.heard_s, time.monotonic())
        send_message_with_file(
            worker.link, {"step": step, "indices": self._indices_of(step).ravel().tolist()}
        )

    def _receive_answer(self, number: int) -> None:
        """Take the next answer of a worker, or replace it."""
        worker = self._workers[number]
        # 0 would mean not to wait at all.
        worker.link.settimeout(max(0.001, worker.heard_s + self._timeout_s - time.monotonic()))
        try:
            received = receive_message_with_file(worker.link)
        except OSError as error:
            self._replace_worker(number, is_silent=isinstance(error, TimeoutError))
            return
        if received is None:
            self._replace_worker(number)
            return
        message, fd = received
        worker.heard_s = time.monotonic()
        if "error" in message:
            reported = decode_worker_error(message["error"])
            # The samples could not be opened.
            if message["step"] is None:
                raise reported
            self._ready[worker.owed.popleft()] = reported
        else:
            assert fd is not None
            assert message["step"] == worker.owed.popleft(), (
                "answers come in the order of the questions"
            )
            self._ready[message["step"]] = map_arrays_of_memory_file(message["arrays"], fd)

    def _replace_worker(self, number: int, *, is_silent: bool = False) -> None:
        """Kill what is left of a worker and give its steps to a new one."""
        worker = self._workers[number]
        # Before it is stopped, which closes the memory that says so.
        sample = worker.whereabouts.read().sample
        why, last_words = _stop_worker(worker, at_once=is_silent, aloud=True)
        if is_silent:
            why = f"silent for {self._timeout_s:g} s"
        if sample is not None:
            why += f" at sample {sample}"
        if last_words:
            why += f"; it said last: {last_words}"
        step = worker.owed[0]
        self._replacements[step] = self._replacements.get(step, 0) + 1
        self._emit(LoaderWorkerReplaced(step, f"worker {number}{self._of_rank} {why}"))
        if self._replacements[step] >= MAX_REPLACEMENTS_PER_STEP:
            del self._workers[number]
            self.close()
            raise self._repeated_death_error(number, step, why, worker.log.path)
        fresh = self._workers[number] = self._start_worker(number)
        for owed in worker.owed:
            fresh.owed.append(owed)
            # A new worker that is gone, too, is noticed when its answer is missed.
            with contextlib.suppress(OSError):
                self._request_step_of_worker(fresh, owed)

    def _repeated_death_error(
        self, number: int, step: int, why: str, log: Path | None
    ) -> DataSourceError:
        if log is not None:
            why += f"; all of it: {log}"
        return DataSourceError(
            f"workers end at step {step} again and again",
            where=f"loader worker {number}{self._of_rank}, one of {self._num_workers}",
            why=why,
            fix=(
                "see it happen in the rank with data.workers=0; if it is only slow, raise"
                " data.worker_timeout_s"
            ),
        )

    def _start_worker(self, number: int) -> _DatasetWorker:
        path = self._logs and self._logs.with_name(f"{self._logs.name}-worker-{number}.log")
        name = f"worker {number}{self._of_rank}"
        worker = _spawn_worker(WorkerLog(f"loader {name}", path), name)
        # A worker that is gone already is noticed when its answer is missed.
        with contextlib.suppress(OSError):
            send_message_with_file(worker.link, {"open": self._spec, "sys_path": sys.path})
        return worker


def _spawn_worker(log: WorkerLog, name: str) -> _DatasetWorker:
    parent_end, child_end = socket.socketpair()
    whereabouts = create_worker_status()
    numbers = [str(number) for number in (child_end.fileno(), os.getpid(), whereabouts.fd)]
    # First on the path, so that a worker runs the same phalanx as its rank.
    root = str(Path(phalanx.__file__).resolve().parents[1])
    python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # One core each: the workers are the parallelism. Unbuffered: what a user's code prints must
    # be there when it is killed.
    settings = {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # -P: what lies in the current folder must not be imported instead of a library; the user's
    # module paths come with the first message.
    command = [sys.executable, "-P", "-m", "phalanx.data.worker", *numbers, name.replace(" ", "-")]
    # Closed here once the worker has it: else the end of its connection would never be seen.
    with child_end:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log.file,
            stderr=log.file,
            pass_fds=[child_end.fileno(), whereabouts.fd],
            env=os.environ | settings,
        )
    return _DatasetWorker(process, parent_end, log, whereabouts)


def _stop_worker(
    worker: _DatasetWorker, *, at_once: bool = False, aloud: bool = False
) -> tuple[str, str]:
    """End a worker.

    Returns how it ended, and the last line it wrote; with `aloud`, all of it is said here, too.
    """
    # The worker ends by itself when its link is closed.
    worker.link.close()
    worker.whereabouts.close()
    if not at_once:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_CLOSE_TIMEOUT_S)
    worker.process.kill()  # nothing, if it has ended
    code = worker.process.wait()
    why = f"ended with exit code {code}"
    if code < 0:
        why = f"killed by {signal.Signals(-code).name}"
    return why, worker.log.close(aloud=aloud)


def probe_user_dataset(
    source: str, args: Mapping[str, Any], timeout_s: float = 60.0
) -> UserDatasetFacts:
    """Open a user's dataset in a process of its own and take some samples, each within `timeout_s`.

    Raises what opening raises: LayoutError for a name that does not exist, DataError for a dataset
    that cannot be used.
    """
    worker = _spawn_worker(WorkerLog("data.source", None), "probe")
    # Here already, so that the time to import what it needs counts as opening.
    worker.whereabouts.mark_opening_dataset("train")
    limits_s = (timeout_s, max(timeout_s, MIN_DATASET_OPEN_TIMEOUT_S))
    is_late, received = False, None
    try:
        send_message_with_file(
            worker.link, {"probe": {"source": source, "args": dict(args)}, "sys_path": sys.path}
        )
        is_late = not _wait_for_probe_answer(worker, source, *limits_s)
        if not is_late:
            received = receive_message_with_file(worker.link)
    except OSError:
        is_late = False
    except BaseException:  # Ctrl-C, SIGTERM
        _stop_probe_quietly(worker, at_once=True)
        raise
    position = worker.whereabouts.read()
    why, last_words = _stop_probe_quietly(worker, at_once=is_late)
    if received is None:
        if is_late:
            why = ""
        raise _build_no_answer_error(source, position, why, last_words, *limits_s)
    message = received[0]
    if "error" in message:
        raise decode_worker_error(message["error"])
    return UserDatasetFacts(source, dict(args), **message["facts"])


def _wait_for_probe_answer(
    worker: _DatasetWorker, source: str, sample_s: float, opening_s: float
) -> bool:
    """Wait for an answer, or the end of the process, and say what for; False if the user's code
    takes too long."""
    poll = select.poll()
    poll.register(worker.link.fileno(), select.POLLIN)
    since_s, next_said_s = 0.0, FIRST_WAIT_NOTICE_S
    while not poll.poll(_POLL_MS):
        position = worker.whereabouts.read()
        if position.since_s != since_s:
            since_s, next_said_s = position.since_s, FIRST_WAIT_NOTICE_S
        limit_s = opening_s if position.sample is None else sample_s
        waited_s = time.monotonic() - since_s
        if waited_s > limit_s:
            return False
        if waited_s >= next_said_s:
            print_waiting_notice(
                f"phalanx: {source}: waiting for {position} ({waited_s:.0f} s of {limit_s:g} s)"
            )
            next_said_s *= 3
    return True


def _build_no_answer_error(
    source: str,
    position: WorkerActivity,
    ended: str,
    last_words: str,
    sample_s: float,
    opening_s: float,
) -> DataError:
    """The error of a probe that gave no answer; `ended` is how its process did, empty if it took
    too long."""
    where = f"data.source {source}"
    reasons = []
    if ended:
        reasons.append(ended)
    if last_words:
        reasons.append(f"it said last: {last_words}")
    why = "; ".join(reasons)
    if ended and position.sample is not None:
        return DataError(f"the process that read {position} ended", where=where, why=why)
    if ended:
        return DataError("the dataset cannot be opened", where=where, why=why)
    limit_s = opening_s if position.sample is None else sample_s
    if position.opening is None:
        summary = f"{position} did not come within {limit_s:g} s"
    else:
        summary = f"split {position.opening!r} did not open within {limit_s:g} s"
    fix = "if it is only slow, raise data.worker_timeout_s"
    return DataError(summary, where=where, why=why or None, fix=fix)


def _stop_probe_quietly(worker: _DatasetWorker, *, at_once: bool) -> tuple[str, str]:
    """Stop a probe without its output, which is the user's own: an error is reported in one
    line."""
    with contextlib.redirect_stderr(open(os.devnull, "w")) as nowhere:
        ended = _stop_worker(worker, at_once=at_once)
    nowhere.close()
    return ended
