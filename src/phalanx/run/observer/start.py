"""Starts the observer of a run, hears what it says, and ends it with the run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.job.schema import Job
from phalanx.observe.bus import Bus
from phalanx.observe.events import Note
from phalanx.run.observer.settings import (
    LAST_ALERTS_TIMEOUT_S,
    MAX_LAST_SCRAPE_WAIT_S,
    ObserverSettings,
    build_observer_settings,
)

OBSERVER_NOTE = "observer"  # code of the notes with what it says
_END_TIMEOUT_S = LAST_ALERTS_TIMEOUT_S + MAX_LAST_SCRAPE_WAIT_S + 10.0


@contextlib.contextmanager
def observing_run(job: Job, run_dir: Path, attempt: int, bus: Bus) -> Iterator[None]:
    """Have the run observed during the body, if its job asks for metrics or alerts; alerts are of
    attempts from `attempt` on. What the observer has to say, `bus` takes.

    It ends by itself soon after the body; a second interrupt does not wait for it. Where it cannot
    be started, that is said, and training goes on.
    """
    if not job.observe.has_observer:
        yield
        return
    process = _start_process(build_observer_settings(job, run_dir, attempt), bus)
    last_words = "it ended"
    try:
        yield
    except BaseException as error:
        last_words = str(error) or type(error).__name__
        raise
    finally:
        if process is not None:
            _end_process(process, last_words)


def _start_process(settings: ObserverSettings, bus: Bus) -> subprocess.Popen[bytes] | None:
    # -P: the folder we happen to stand in is not searched for modules.
    command = [sys.executable, "-P", "-m", "phalanx.run.observer.process"]
    try:
        process = subprocess.Popen(
            [*command, json.dumps(settings.to_json())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    except OSError as error:
        bus.emit(Note(OBSERVER_NOTE, {"why": f"cannot be started: {error.strerror}"}))
        return None
    threading.Thread(
        target=_forward_messages,
        args=(process, lambda line: bus.emit(Note(OBSERVER_NOTE, {"why": line}))),
        name="phalanx-hear-observer",
        daemon=True,
    ).start()
    return process


def _forward_messages(process: subprocess.Popen[bytes], say: Callable[[str], None]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                say(str(json.loads(line)["say"]))


def _end_process(process: subprocess.Popen[bytes], last_words: str) -> None:
    """Tell it that this process ends, and wait until it has sent and served what is left.

    From the end of its input alone it takes it that this process was killed.
    """
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        # One line: its end is told, too, as a process that user code forked may hold the pipe open.
        line = " ".join(last_words.split()) + "\n"
        process.stdin.write(line.encode("utf-8", "replace"))
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_END_TIMEOUT_S)
    except BaseException as error:
        # Ctrl-C while it waits for a last scrape: it has nothing that could be lost.
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
