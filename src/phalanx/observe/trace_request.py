"""A request to trace a run that is under way: a small file in RUN/traces, and its answer.

Rank 0 looks for the file, at most twice a second. What it finds travels as one number in the step's
reduction, so that all ranks begin with the same step.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.core.files import read_json, write_json_atomically
from phalanx.core.step_ranges import MAX_TRACED_STEPS, StepRange
from phalanx.core.typed_json import JsonRecord, TypedJsonError
from phalanx.observe.trace_part import TRACES

REQUEST_SCHEMA, ANSWER_SCHEMA = "phalanx.trace-request/1", "phalanx.trace-answer/1"
ACCEPTED, REFUSED = "accepted", "refused"
LOOK_INTERVAL_S = 0.5
_REQUEST_FILE_NAME, _ANSWER_FILE_NAME = "request.json", "answer.json"
_MAX_FILE_BYTES = 4096
# The places of a request in one whole number, of which a float holds 53 bits: first step * 256,
# number of steps * 2, kernels.
_STEPS_FACTOR, _FIRST_FACTOR = 2, 256
assert MAX_TRACED_STEPS * _STEPS_FACTOR + 1 < _FIRST_FACTOR
_MAX_FIRST_STEP = 2**44


@dataclass(frozen=True)
class TraceRequest(JsonRecord):
    """A request to trace `num_steps` steps from `first_step` on (0: from the next one on)."""

    id: str
    first_step: int
    num_steps: int
    has_operators: bool = False
    schema: str = REQUEST_SCHEMA

    def pack(self) -> float:
        """The request, without its id, as a number; 0 stands for none."""
        packed = self.first_step * _FIRST_FACTOR + self.num_steps * _STEPS_FACTOR
        return float(packed + int(self.has_operators))

    @classmethod
    def unpack(cls, number: float) -> TraceRequest:
        first_step, rest = divmod(int(number), _FIRST_FACTOR)
        num_steps, has_operators = divmod(rest, _STEPS_FACTOR)
        return cls("", first_step, num_steps, bool(has_operators))

    def choose_steps(self, next_step: int) -> StepRange:
        """The steps that are meant where `next_step` is the first that can still be traced."""
        first = self.first_step or next_step
        return StepRange(first, first + self.num_steps - 1)

    @property
    def is_valid(self) -> bool:
        return (
            self.schema == REQUEST_SCHEMA
            and 0 <= self.first_step < _MAX_FIRST_STEP
            and 1 <= self.num_steps <= MAX_TRACED_STEPS
        )


@dataclass(frozen=True)
class TraceAnswer(JsonRecord):
    """The answer of rank 0 to request `id`, at the end of `step`: "accepted" with the steps that
    will be traced, or "refused" and why."""

    id: str
    status: str
    step: int
    attempt: int
    first_step: int = 0
    last_step: int = 0
    why: str = ""
    schema: str = ANSWER_SCHEMA


class TraceRequestInbox:
    """Looks for requests in a run directory; for rank 0 alone."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / TRACES / _REQUEST_FILE_NAME
        self._looked_s = 0.0

    def take_request(self) -> TraceRequest | None:
        """The request that has come since, if one has: its file is removed."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_INTERVAL_S:
            return None
        self._looked_s = now_s
        try:
            request = TraceRequest.from_json(read_json(self._path, _MAX_FILE_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypedJsonError, RecursionError):
            # No request of this version: whoever wrote it waits in vain, and training goes on.
            request = None
        with contextlib.suppress(OSError):
            self._path.unlink()
        if request is None or not request.is_valid:
            return None
        return request


def write_trace_request(run_dir: Path, request: TraceRequest) -> None:
    """Ask; an earlier request that was not taken yet is replaced. Raises OSError."""
    folder = run_dir / TRACES
    folder.mkdir(exist_ok=True)
    write_json_atomically(folder / _REQUEST_FILE_NAME, request.to_json(), durable=False)


def withdraw_trace_request(run_dir: Path, request: TraceRequest) -> bool:
    """True if the request had not been taken, and is gone now."""
    path = run_dir / TRACES / _REQUEST_FILE_NAME
    if read_pending_request_id(run_dir) != request.id:
        return False
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


def read_pending_request_id(run_dir: Path) -> str | None:
    """The id of the request that nobody has taken yet; None without one."""
    try:
        document = read_json(run_dir / TRACES / _REQUEST_FILE_NAME, _MAX_FILE_BYTES)
        return TraceRequest.from_json(document).id
    except (OSError, ValueError, TypedJsonError, RecursionError):
        return None


def write_trace_answer(run_dir: Path, answer: TraceAnswer) -> None:
    """Answer. Never raises: a disk that refuses it must not end the training."""
    with contextlib.suppress(OSError):
        path = run_dir / TRACES / _ANSWER_FILE_NAME
        write_json_atomically(path, answer.to_json(), durable=False)


def read_trace_answer(run_dir: Path, request_id: str) -> TraceAnswer | None:
    """The answer to a request; None as long as there is none."""
    try:
        document = read_json(run_dir / TRACES / _ANSWER_FILE_NAME, _MAX_FILE_BYTES)
        answer = TraceAnswer.from_json(document)
    except (OSError, ValueError, TypedJsonError, RecursionError):
        return None
    if answer.id != request_id:
        return None
    return replace(answer, why=answer.why[:500])
