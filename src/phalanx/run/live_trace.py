"""Asks a run that is under way for a trace, and waits until its ranks have written it. Torch-free.

The request is a file (`phalanx.observe.trace_request`): no signal, no port, and it works under any
launcher whose ranks share the run directory.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.ownership.run_lock import refuse_run_of_live_job
from phalanx.core.black_box_reader import (
    BlackBoxVersionError,
    LastPosition,
    read_last_position,
)
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import EnvironmentProblem, RunLockedError, UsageError
from phalanx.core.step_ranges import StepRange
from phalanx.launch.paths import black_box_path
from phalanx.observe.trace_part import (
    TracePartError,
    TracePartPath,
    is_trace_part_complete,
    list_trace_parts,
    read_trace_part_header,
)
from phalanx.observe.trace_request import (
    REFUSED,
    TraceAnswer,
    TraceRequest,
    read_pending_request_id,
    read_trace_answer,
    withdraw_trace_request,
    write_trace_request,
)

_POLL_INTERVAL_S = 0.1


@dataclass(frozen=True)
class TraceProgress:
    """The progress of a run: `step` (-1: not known) of those until `last_step` (0: not known
    yet)."""

    step: int
    last_step: int
    is_accepted: bool


TellProgress = Callable[[TraceProgress], None]


def is_run_live(run_dir: Path) -> bool:
    """True if a job holds the run, or may hold it on another machine."""
    try:
        refuse_run_of_live_job(run_dir)
    except RunLockedError:
        return True
    return False


def read_current_step(run_dir: Path) -> int:
    """The step that rank 0 is in; -1 where its black box does not say."""
    position = _read_position_of_first_rank(run_dir)
    if position is None:
        return -1
    return position.step


def is_attempt_over(run_dir: Path, attempt: int) -> bool:
    """True if the ranks were started again since `attempt`."""
    position = _read_position_of_first_rank(run_dir)
    if position is None or position.header is None:
        return False
    return position.header.incarnation > attempt


def _read_position_of_first_rank(run_dir: Path) -> LastPosition | None:
    try:
        return read_last_position(black_box_path(run_dir, 0))
    except BlackBoxVersionError:
        return None


def request_trace(
    run_dir: Path,
    first_step: int,
    num_steps: int,
    *,
    has_operators: bool,
    timeout_s: float,
    tell: TellProgress,
) -> tuple[StepRange, list[TracePartPath]]:
    """Ask for `num_steps` steps from `first_step` on (0: the next ones); returns them and the
    parts of the ranks.

    A request that was not answered when this ends is taken back. Raises UsageError if the run
    refuses it, EnvironmentProblem if it ends before it has answered, or if nothing comes for
    `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    request = TraceRequest(secrets.token_hex(8), first_step, num_steps, has_operators)
    try:
        write_trace_request(run_dir, request)
    except OSError as error:
        raise build_path_resource_error(error, "asking for a trace", run_dir) from None
    try:
        answer = _wait_for_answer(run_dir, request, deadline, tell)
    finally:
        withdraw_trace_request(run_dir, request)
    if answer.status == REFUSED:
        raise UsageError("the run cannot trace these steps", where=str(run_dir), why=answer.why)
    window = StepRange(answer.first_step, answer.last_step)
    parts = wait_for_parts(run_dir, window, answer.attempt, deadline, tell)
    if first_step == 0:
        return window, parts
    return StepRange(first_step, first_step + num_steps - 1), parts


def _wait_for_answer(
    run_dir: Path, request: TraceRequest, deadline: float, tell: TellProgress
) -> TraceAnswer:
    while True:
        # Before the look at the answer, which a run may write as its last deed.
        is_live = is_run_live(run_dir)
        is_pending = read_pending_request_id(run_dir) == request.id
        answer = read_trace_answer(run_dir, request.id)
        if answer is not None:
            return answer
        if not is_live:
            raise EnvironmentProblem(
                "the run has ended before it took the request", where=str(run_dir)
            )
        if time.monotonic() > deadline:
            why = "it may hang, or its phalanx is older" if is_pending else "a step takes longer"
            raise EnvironmentProblem(
                "the run has not answered in time",
                where=str(run_dir),
                why=why,
                fix=f"phalanx where {run_dir} says where its ranks are; --timeout waits longer",
            )
        if not is_pending and read_pending_request_id(run_dir) is not None:
            raise UsageError(
                "another phalanx trace asks this run, too", where=str(run_dir), fix="try again"
            )
        tell(TraceProgress(read_current_step(run_dir), 0, is_accepted=False))
        time.sleep(_POLL_INTERVAL_S)


def wait_for_parts(
    run_dir: Path, window: StepRange, attempt: int, deadline: float, tell: TellProgress
) -> list[TracePartPath]:
    """The parts of `window` once all ranks have written theirs, or the run has ended.

    Raises EnvironmentProblem at the deadline, or if the run has ended, or its ranks were started
    again, and there is none.
    """
    while True:
        is_live = is_run_live(run_dir) and not is_attempt_over(run_dir, attempt)
        parts = []
        for part in list_trace_parts(run_dir):
            if part.attempt == attempt and part.steps == window:
                parts.append(part)
        if are_parts_complete(parts):
            return parts
        if not is_live:
            if parts:
                return parts
            raise EnvironmentProblem(
                f"the run, or this attempt of it, has ended before step {window.first}",
                where=str(run_dir),
            )
        if time.monotonic() > deadline:
            raise EnvironmentProblem(
                f"the steps {window} are not done in time",
                where=str(run_dir),
                fix=f"phalanx trace {run_dir} --steps {window} goes on waiting",
            )
        tell(TraceProgress(read_current_step(run_dir), window.last, is_accepted=True))
        time.sleep(_POLL_INTERVAL_S)


def are_parts_complete(parts: Sequence[TracePartPath]) -> bool:
    """True if each rank of the run has a part with its end."""
    if not parts:
        return False
    try:
        world_size = read_trace_part_header(parts[0].path).world_size
    except TracePartError:
        return False
    if {part.rank for part in parts} != set(range(world_size)):
        return False
    return all(is_trace_part_complete(part.path) for part in parts)
