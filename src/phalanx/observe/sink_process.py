"""A sink in a process of its own: `python -m phalanx.observe.sink_process KIND RUN_DIR`, events on
its standard input.

For sinks whose library (wandb, mlflow) starts threads, hooks `sys.exit`, waits for servers or may
hang: none of that touches a rank, and what hangs can be killed. The process says what it has to say
as lines of JSON on its standard output; whatever the library prints goes to RUN/logs/sink-KIND.log.
It ends when its input does, or with the rank's process group. What is durable is said as it becomes
so: of a process that is killed, everything else counts as lost.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import psutil

from phalanx.core.logs import redirect_output_to_log
from phalanx.core.secrets import Redactor
from phalanx.core.stop_signals import ignore_stop_signals
from phalanx.observe.events import Envelope, parse_event_line
from phalanx.observe.outlet import FlushableSink, Sink, describe_sink_error

SINKS_PACKAGE = "phalanx.observe.sinks"
END_OF_EVENTS = b"\n"  # said as well: a process that user code forked may hold the pipe open
SINK_NICENESS = 5  # the ranks come first
# What a process that is killed loses at most, of a sink that can make durable what it has.
FLUSH_INTERVAL_S = 2.0
MAX_PIPE_READ_BYTES = 1 << 16


class SinkProcessError(Exception):
    """The process of a sink ended before it was told to, or badly."""

    def __str__(self) -> str:
        return str(self.args[0])


class ProcessSink:
    """The rank's end: a Sink that hands lines to the process, and never outlives its patience."""

    def __init__(self, kind: str, run_dir: Path) -> None:
        self._said: list[str] = []
        self._reason = ""
        self._say: Callable[[str], None] | None = None
        self._is_open = True
        self._num_sent = self._num_written = 0
        self._seen: tuple[int, float] = (0, 0.0)
        # -P: the folder we happen to stand in is not searched for modules.
        # No session of its own: a rank's process group takes it along when it is killed.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.observe.sink_process", kind, str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._hearing = threading.Thread(
            target=self._read_messages, name=f"phalanx-hear-{kind}", daemon=True
        )
        self._hearing.start()

    def listen(self, say: Callable[[str], None]) -> None:
        self._say = say
        while self._said:
            say(self._said.pop(0))

    def write(self, envelope: Envelope) -> None:
        """Raises SinkProcessError if the process has ended; blocks while it does not read."""
        assert self._process.stdin is not None
        self._num_sent += 1
        try:
            self._process.stdin.write(envelope.to_line().encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._build_process_failure() from None

    @property
    def num_unwritten(self) -> int:
        """Events that the process was given, or is being given, and has not said to be durable."""
        return self._num_sent - self._num_written

    def has_progressed_since_last_call(self) -> bool:
        """True if it has come further, or used the processor, since this was asked last."""
        before, self._seen = self._seen, (self._num_written, self._read_cpu_seconds_of_process())
        return self._seen != before

    def _read_cpu_seconds_of_process(self) -> float:
        try:
            used = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(used.user + used.system)

    def close(self) -> None:
        """End its input and wait until it is done.

        Raises SinkProcessError if it did not end well.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._close_process_input()
        if self._process.wait() != 0:
            raise self._build_process_failure()
        # What it said last, of what is durable, may still be in the pipe.
        self._hearing.join()

    def abandon(self) -> None:
        self._process.kill()

    def _close_process_input(self) -> None:
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.write(END_OF_EVENTS)
            self._process.stdin.flush()
        with contextlib.suppress(OSError):  # what is left in the buffer of a broken pipe
            self._process.stdin.close()

    def _build_process_failure(self) -> SinkProcessError:
        self._close_process_input()
        code = self._process.wait()
        # The reason may still be in the pipe.
        self._hearing.join()
        self._is_open = False
        ending = f"exit code {code}"
        if code < 0:
            ending = f"killed by signal {-code}"
        return SinkProcessError(self._reason or f"its process ended ({ending})")

    def _read_messages(self) -> None:
        """Lines until the process is gone. Before anybody listens, what it says is kept."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    self._handle_message(json.loads(line))

    def _handle_message(self, message: dict[str, str]) -> None:
        self._reason = message.get("error") or self._reason
        self._num_written = int(message.get("written", self._num_written))
        if words := message.get("say"):
            if self._say is None:
                self._said.append(words)
            else:
                self._say(words)


def run_sink_process(arguments: Sequence[str]) -> int:
    """The process: open the sink of that kind, write what arrives, close it at the end of the
    input."""
    kind, run_dir = arguments[0], Path(arguments[1])
    # Sent to the whole job: the ranks decide when to end.
    ignore_stop_signals()
    with contextlib.suppress(OSError):
        os.nice(SINK_NICENESS)
    # A copy of standard output is the way back to the rank: what the library prints goes to a log.
    # Buffered by lines: what is said leaves at once, and stays said if the process is killed.
    speaker = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    redactor = Redactor(os.environ)
    redirect_output_to_log(run_dir / "logs" / f"sink-{kind}.log", redactor)
    try:
        module = importlib.import_module(f"{SINKS_PACKAGE}.{kind}")
        # Before the library is imported, by open_sink: it reads them then. What a user set, stays.
        if hasattr(module, "environment"):
            for name, value in module.environment(run_dir).items():
                os.environ.setdefault(name, value)
        sink: Sink = module.open_sink(run_dir)
        if greeting := getattr(sink, "greeting", ""):
            _send_message_to_rank(speaker, {"say": redactor.redact_text(greeting)})
        _write_lines_to_sink(sink, speaker)
    except BaseException as error:  # the library may call sys.exit
        _send_message_to_rank(speaker, {"error": redactor.redact_text(describe_sink_error(error))})
        return 1
    return 0


def _write_lines_to_sink(sink: Sink, speaker: TextIO) -> None:
    """Write what comes, and say how much of it is durable: each FLUSH_INTERVAL_S where the sink can
    do that, else at the end."""
    num_taken = num_flushed = 0
    flushed_s = time.monotonic()
    try:
        for line in _iterate_input_lines(sys.stdin.fileno()):
            if line:
                # Counted even if it cannot be parsed: the rank counts what it has sent.
                num_taken += 1
                envelope = parse_event_line(line.decode("utf-8", errors="replace"))
                if envelope is not None:
                    sink.write(envelope)
            if (
                num_taken > num_flushed
                and time.monotonic() - flushed_s >= FLUSH_INTERVAL_S
                and isinstance(sink, FlushableSink)
            ):
                sink.flush()
                num_flushed, flushed_s = num_taken, time.monotonic()
                _send_message_to_rank(speaker, {"written": str(num_flushed)})
    finally:
        sink.close()
    # Not before the sink is closed: only then is all of it durable.
    _send_message_to_rank(speaker, {"written": str(num_taken)})


def _iterate_input_lines(handle: int) -> Iterator[bytes]:
    """Lines as they come, up to END or the end of the input; an empty one where none has come
    for a while."""
    pending = b""
    while True:
        # os.read and not sys.stdin, in whose buffer select() would not see lines that wait.
        if not select.select([handle], [], [], FLUSH_INTERVAL_S / 2)[0]:
            yield b""
            continue
        data = os.read(handle, MAX_PIPE_READ_BYTES)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            if line + b"\n" == END_OF_EVENTS:
                return
            yield line


def _send_message_to_rank(speaker: TextIO, message: dict[str, str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        speaker.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    sys.exit(run_sink_process(sys.argv[1:]))
