"""Starts the observer of a run, hears what it says, and ends it with the run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.core.units import format_seconds
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
_SILENT_WAIT_S = 2.0
_END_TIMEOUT_S = LAST_ALERTS_TIMEOUT_S + MAX_LAST_SCRAPE_WAIT_S + 10.0


@contextlib.contextmanager
def observing_run(
    job: Job,
    run_dir: Path,
    attempt: int,
    bus: Bus,
    say_at_end: Callable[[str], None],
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[None]:
    """Have the run observed during the body, if its job asks for metrics or alerts; alerts are of
    attempts from `attempt` on. What the observer has to say, `bus` and `say` take; `say_at_end` is
    for lines after the run's own last ones.

    It ends by itself soon after the body; a second interrupt does not wait for it. Where it cannot
    be started, that is said, and training goes on.
    """
    if not job.observe.has_observer:
        yield
        return

    def tell(line: str) -> None:
        bus.emit(Note(OBSERVER_NOTE, {"why": line}))
        say(line)

    process = _start_process(build_observer_settings(job, run_dir, attempt), tell)
    last_words = "it ended"
    try:
        yield
    except BaseException as error:
        last_words = str(error) or type(error).__name__
        raise
    finally:
        if process is not None:
            process.end(last_words, say_at_end)


def _start_process(
    settings: ObserverSettings, tell: Callable[[str], None]
) -> _ObserverProcess | None:
    # -P: the folder we happen to stand in is not searched for modules.
    command = [sys.executable, "-P", "-m", "phalanx.run.observer.process"]
    try:
        popen = subprocess.Popen(
            [*command, json.dumps(settings.to_json())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Heard like what it says: nothing of it goes past the filter of the terminal.
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        tell(f"the observer of the run cannot be started: {error.strerror}")
        return None
    process = _ObserverProcess(popen, tell)
    process.start_hearing()
    return process


class _ObserverProcess:
    """The observer, as the process that holds the run sees it. `tell` takes what it says."""

    def __init__(self, popen: subprocess.Popen[bytes], tell: Callable[[str], None]) -> None:
        self._popen, self._tell = popen, tell
        self._is_ending = False

    def start_hearing(self) -> None:
        threading.Thread(
            target=self._hear_until_it_ends, name="phalanx-hear-observer", daemon=True
        ).start()

    def end(self, last_words: str, say: Callable[[str], None]) -> None:
        """Tell it that this process ends, and wait until it has sent and served what is left.
        `say` is told if that takes a while.

        From the end of its input alone it takes it that this process was killed.
        """
        self._is_ending = True
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):
            # One line, whose end says enough: user code may have forked a process that holds the
            # pipe open.
            line = " ".join(last_words.split()) + "\n"
            self._popen.stdin.write(line.encode("utf-8", "replace"))
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        try:
            self._wait_until_it_ends(say)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            # The run has ended, and is on record: Ctrl-C says no more than not to wait.
            self._popen.kill()
            self._popen.wait()

    def _wait_until_it_ends(self, say: Callable[[str], None]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_SILENT_WAIT_S)
            return
        say(
            "waiting until the last alerts are sent and the end of the run is scraped, at most"
            f" {format_seconds(_END_TIMEOUT_S)}; Ctrl-C does not wait"
        )
        self._popen.wait(_END_TIMEOUT_S)

    def _hear_until_it_ends(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._tell(str(json.loads(line)["say"]))
        code = self._popen.wait()
        if not self._is_ending:
            self._tell(
                f"the observer of the run has ended (exit code {code}), and with it metrics and"
                " alerts; RUN/logs/observer.log may say why"
            )
