"""Runs the tasks of a build: in this process, or in workers that take one task after another.
Torch-free.

Workers are fresh interpreters with a pipe each way, one line of JSON per message. A worker whose
parent is gone reads the end of its pipe and goes too.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from phalanx.core import errors
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import DataError, PhalanxError, ResourceError
from phalanx.data.encode import EncodingCounts, ShardOutcome, build_shard
from phalanx.data.spans import ShardTask
from phalanx.data.tokenizer import Tokenizer

_PACKAGE_PARENT_DIR = str(Path(__file__).parents[2])

OnProgress = Callable[[int, EncodingCounts], None]
OnShardDone = Callable[[ShardTask, ShardOutcome], None]


def build_all_shard_tasks(
    tasks: list[ShardTask],
    out: Path,
    encoder: Tokenizer,
    tokenizer: str,
    column: str,
    num_workers: int,
    running: OnProgress,
    done: OnShardDone,
) -> None:
    """Build every task. The first error stops the others and is raised."""
    if num_workers > 1 and len(tasks) > 1:
        hello = {"out": str(out.resolve()), "tokenizer": tokenizer, "column": column}
        _build_in_workers(tasks, hello, num_workers, running, done)
        return
    for task in tasks:
        done(task, build_shard(task, out, encoder, column, partial(running, task.number)))


@dataclass
class _BuildWorker:
    process: subprocess.Popen[bytes]
    task: ShardTask | None = None
    unread: bytearray = field(default_factory=bytearray)

    def send(self, message: dict[str, Any]) -> None:
        stdin = cast(IO[bytes], self.process.stdin)
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self.build_worker_death_error() from None

    def send_task(self, task: ShardTask) -> None:
        self.task = task
        self.send({"task": task.to_json()})

    def messages(self) -> Iterator[dict[str, Any]]:
        """The messages that have arrived. Raises ResourceError if the worker is gone."""
        # os.read gives what is there; the buffered stream would wait for all 64 KiB.
        data = os.read(cast(IO[bytes], self.process.stdout).fileno(), 1 << 16)
        if not data:
            raise self.build_worker_death_error()
        self.unread += data
        # What follows the last line's end is the beginning of the next message.
        *lines, rest = bytes(self.unread).split(b"\n")
        self.unread[:] = rest
        for line in lines:
            yield json.loads(line)

    def build_worker_death_error(self) -> PhalanxError:
        """The error that says how the worker ended."""
        code = self.process.wait()
        if code < 0:
            why = f"signal {signal.Signals(-code).name}"
            fix = "memory may have run out: try fewer --workers; the same command goes on from here"
        else:
            why, fix = f"exit code {code}", "what it said is above"
        summary = "a worker died"
        if self.task is not None:
            summary += f" while building {self.task.file}"
        return ResourceError(summary, why=why, fix=fix)


def _build_in_workers(
    tasks: list[ShardTask],
    hello: dict[str, Any],
    num_workers: int,
    running: OnProgress,
    done: OnShardDone,
) -> None:
    # The last is taken first, so reversed: shards are built in the order of their numbers.
    waiting = list(reversed(tasks))
    with (
        _open_build_workers(min(num_workers, len(tasks)), hello) as workers,
        selectors.DefaultSelector() as selector,
    ):
        for worker in workers:
            selector.register(cast(IO[bytes], worker.process.stdout), selectors.EVENT_READ, worker)
            worker.send_task(waiting.pop())
        num_left = len(tasks)
        while num_left:
            for key, _ in selector.select():
                worker = key.data
                for message in worker.messages():
                    assert worker.task is not None
                    if "error" in message:
                        raise _decode_error_message(message)
                    if "running" in message:
                        running(worker.task.number, EncodingCounts(**message["running"]))
                        continue
                    done(worker.task, ShardOutcome.from_json(message["done"]))
                    num_left -= 1
                    worker.task = None
                    if waiting:
                        worker.send_task(waiting.pop())


@contextmanager
def _open_build_workers(num_workers: int, hello: dict[str, Any]) -> Iterator[list[_BuildWorker]]:
    """Started, told what all tasks have in common, and gone when the block is left, however that
    is.
    """
    # One core each: the workers are the parallelism. A library with threads of its own would only
    # get in their way.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    environment = os.environ | threads | {"TOKENIZERS_PARALLELISM": "false"}
    # -P: what lies in the current folder must not be imported instead of a library.
    # Ours is where this file is.
    command = [sys.executable, "-P", "-m", "phalanx.data.build_worker"]
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [_PACKAGE_PARENT_DIR, os.environ.get("PYTHONPATH")])
    )
    workers: list[_BuildWorker] = []
    try:
        for _ in range(num_workers):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            workers.append(_BuildWorker(process))
        for worker in workers:
            worker.send(hello)
        yield workers
    finally:
        for worker in workers:
            # shards are renamed when they are whole: there is nothing to say goodbye to
            worker.process.kill()
        for worker in workers:
            # Waited for after all were killed: they end side by side.
            worker.process.communicate()
        _remove_partial_shards(Path(hello["out"]))


def _remove_partial_shards(out: Path) -> None:
    for partial_file in out.glob(".shard-*.partial"):
        partial_file.unlink(missing_ok=True)


def encode_error_message(error: PhalanxError | OSError, out: Path) -> dict[str, Any]:
    """An error of a worker as a message; an OSError is one of writing, since readers raise
    DataError.
    """
    if isinstance(error, PhalanxError):
        return error.to_json()
    return build_path_resource_error(
        error, "writing the token shards", out, place="folder"
    ).to_json()


def _decode_error_message(message: dict[str, Any]) -> PhalanxError:
    # By its class, which has the exit code.
    kind = getattr(errors, message["error"], DataError)
    return cast(
        PhalanxError,
        kind(message["what"], where=message["where"], why=message["why"], fix=message["fix"]),
    )
