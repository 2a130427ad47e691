"""Dry runs of several kinds of rank, each in a process of its own, two at a time. Torch-free."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import LayoutError, PhalanxError
from phalanx.core.places import open_unnamed_temporary_file
from phalanx.job.module_probe import find_last_line
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.verify.dry_run.messages import (
    AT,
    REFUSAL,
    RESULT,
    encode_dry_run_request,
    rebuild_worker_error,
)
from phalanx.verify.dry_run.rank_kinds import RankKind
from phalanx.verify.dry_run.report import RankKindReport

WORKER = "phalanx.verify.dry_run.worker"
AT_ONCE = 2
"""Processes at a time: each takes one core, and 0.3 to 0.6 GiB."""

Tell = Callable[[str], None]


@dataclass
class _RunningDryRun:
    """A dry run under way. `errors`: the file of what it says besides."""

    kind: RankKind
    process: subprocess.Popen[bytes]
    errors: Any
    pending: bytes = b""
    report: RankKindReport | None = None


class DryRunProcesses:
    """Starts processes and ends those that are left when it is closed."""

    def __init__(self, job: Job, plan: Plan, tell: Tell, *, at_once: int = AT_ONCE) -> None:
        self._job, self._plan, self._tell, self._at_once = job, plan, tell, at_once
        self._running: dict[int, _RunningDryRun] = {}
        self._selector = selectors.DefaultSelector()
        self._stack = ExitStack()

    def __enter__(self) -> DryRunProcesses:
        self._stack.enter_context(self._selector)
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running.values():
            # The whole session: the user's module may have started something.
            os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()
        self._stack.close()

    def run(
        self, kinds: Sequence[RankKind], boundary: Mapping[str, Any] | None
    ) -> Iterator[tuple[RankKind, RankKindReport]]:
        """Yield the report of each of `kinds`, as they end.

        Raises the refusal of the first that refuses.
        """
        waiting = list(kinds)
        while waiting or self._running:
            while waiting and len(self._running) < self._at_once:
                self._start_worker(waiting.pop(0), boundary)
            for key, _ in self._selector.select():
                running = self._running[key.fd]
                if not self._read_worker_output(running):
                    yield running.kind, self._finish_worker(running)

    def _start_worker(self, kind: RankKind, boundary: Mapping[str, Any] | None) -> None:
        errors = self._stack.enter_context(open_unnamed_temporary_file())
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_build_worker_environment(),
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._running[process.stdout.fileno()] = _RunningDryRun(kind, process, errors)
        self._selector.register(process.stdout, selectors.EVENT_READ)
        try:
            process.stdin.write(
                encode_dry_run_request(self._job, self._plan, kind, boundary).encode()
            )
            process.stdin.close()
        except BrokenPipeError:  # it ended at once, and its errors say why
            pass
        self._tell(f"{kind.name}: start")

    def _read_worker_output(self, running: _RunningDryRun) -> bool:
        """Take what a process has said; False if that was all."""
        assert running.process.stdout is not None
        data = os.read(running.process.stdout.fileno(), 1 << 16)
        *lines, running.pending = (running.pending + data).split(b"\n")
        for line in lines:
            self._handle_worker_message(running, json.loads(line))
        return bool(data)

    def _handle_worker_message(self, running: _RunningDryRun, message: Mapping[str, Any]) -> None:
        if AT in message:
            self._tell(f"{running.kind.name}: {message[AT]}")
        elif RESULT in message:
            running.report = RankKindReport.from_json(message[RESULT])
        elif REFUSAL in message:
            raise rebuild_worker_error(message[REFUSAL])

    def _finish_worker(self, running: _RunningDryRun) -> RankKindReport:
        stdout = running.process.stdout
        assert stdout is not None
        self._selector.unregister(stdout)
        code = running.process.wait()
        del self._running[stdout.fileno()]
        stdout.close()
        if running.report is not None:
            return running.report
        running.errors.seek(0)
        words = find_last_line(running.errors.read().decode(errors="replace"))
        if code < 0:
            raise PhalanxError(
                f"the dry run of {running.kind.name} was ended by signal {-code}",
                why=words or None,
                fix="a process of a dry run takes 0.3 to 0.6 GiB of memory: look if there was so"
                " much",
            )
        raise LayoutError(
            f"the dry run of {running.kind.name} ended early", why=words or f"exit code {code}"
        )


def _build_worker_environment() -> dict[str, str]:
    """Our own, with our sys.path ("" in it is the current directory) and one thread."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
