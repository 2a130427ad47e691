"""Finds the parts of the steps that somebody wants to see, or asks the run for them; and writes the
trace. Torch-free."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import UsageError
from phalanx.core.files import create_regular_file
from phalanx.core.step_ranges import StepRange
from phalanx.launch.paths import refuse_symlinked_run_folders
from phalanx.observe.trace_part import TracePartError, TracePartPath
from phalanx.report.trace.merge import (
    TraceFacts,
    find_parts_of_steps,
    list_traced_steps,
    merge_trace_parts,
)
from phalanx.report.trace.words import list_windows_in_words
from phalanx.run.live_trace import (
    TellProgress,
    are_parts_complete,
    is_run_live,
    request_trace,
    wait_for_parts,
)


@dataclass(frozen=True)
class WantedTrace:
    """The steps that a trace is to show: `steps`, or the next `num_next` of a run that goes on;
    with neither the only steps that were traced, or the next `default_next`."""

    steps: StepRange | None = None
    num_next: int | None = None
    has_operators: bool = False
    timeout_s: float = 600.0
    default_next: int = 3


def find_or_request_parts(
    run_dir: Path, request: WantedTrace, tell: TellProgress
) -> tuple[StepRange, list[TracePartPath]]:
    """The steps, and the parts of the ranks that have them.

    Raises UsageError for steps that were not traced and cannot be any more, EnvironmentProblem for
    a run that does not answer or ends before them.
    """
    # Whoever asks writes into RUN/traces, and a run may come from anywhere.
    refuse_symlinked_run_folders(run_dir)
    is_live = is_run_live(run_dir)
    if request.steps is None:
        return _find_or_request_without_steps(run_dir, request, tell, is_live=is_live)
    parts = find_parts_of_steps(run_dir, request.steps)
    if not is_live:
        if not parts:
            raise _untraced_steps_error(run_dir, request.steps)
        return request.steps, parts
    if are_parts_complete(parts):
        return request.steps, parts
    if parts:
        # The run is at them.
        deadline = time.monotonic() + request.timeout_s
        attempt, window = parts[0].attempt, parts[0].steps
        return request.steps, wait_for_parts(run_dir, window, attempt, deadline, tell)
    return _request(run_dir, request, request.steps.first, request.steps.num_steps, tell)


def _find_or_request_without_steps(
    run_dir: Path, request: WantedTrace, tell: TellProgress, *, is_live: bool
) -> tuple[StepRange, list[TracePartPath]]:
    if is_live:
        num_steps = request.num_next or request.default_next
        return _request(run_dir, request, 0, num_steps, tell)
    if request.num_next is not None:
        raise UsageError(
            "the run has ended: it has no next steps",
            where=str(run_dir),
            fix="--steps A:B shows steps that were traced",
        )
    traced = list_traced_steps(run_dir)
    if not traced:
        raise _untraced_steps_error(run_dir, None)
    (_, steps), parts = list(traced.items())[-1]
    if len({window for _, window in traced}) > 1:
        raise UsageError(
            "the run has traces of several steps",
            where=str(run_dir),
            fix=f"choose with --steps: {list_windows_in_words(list(traced))}",
        )
    return steps, parts


def _request(
    run_dir: Path, request: WantedTrace, first_step: int, num_steps: int, tell: TellProgress
) -> tuple[StepRange, list[TracePartPath]]:
    return request_trace(
        run_dir,
        first_step,
        num_steps,
        has_operators=request.has_operators,
        timeout_s=request.timeout_s,
        tell=tell,
    )


def _untraced_steps_error(run_dir: Path, steps: StepRange | None) -> UsageError:
    traced = list_traced_steps(run_dir)
    example = f'["{steps}"]' if steps is not None else '["100:103"]'
    fix = f"train again with observe.trace_steps={example}, or ask with phalanx trace while it runs"
    if traced:
        fix = f"there are traces of steps {list_windows_in_words(list(traced))}; or {fix}"
    return UsageError(
        f"no trace of steps {steps} is there" if steps is not None else "no trace is there",
        where=str(run_dir),
        why="the run has ended",
        fix=fix,
    )


def write_trace_file(
    path: Path,
    parts: list[TracePartPath],
    steps: StepRange,
    tell: Callable[[int, int], None] = lambda num_done, num_total: None,
) -> tuple[int, TraceFacts]:
    """Write the trace of `steps` to `path`, which is there as a whole or not at all; returns its
    bytes and its facts.

    `tell`: see `merge_trace_parts`. Raises UsageError if no part can be read or `path` is a
    folder or a device, ResourceError if the file cannot be written.
    """
    if path.exists() and not path.is_file():
        raise UsageError("it is no file", where=str(path), fix="give --out the name of a file")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with create_regular_file(partial) as file:
            facts = merge_trace_parts(parts, steps, file.write, tell)
        num_bytes = partial.stat().st_size
        os.replace(partial, path)
    except TracePartError as error:
        raise UsageError(
            "no part of the trace can be read", where=str(parts[0].path.parent), why=str(error)
        ) from None
    except OSError as error:
        raise build_path_resource_error(error, "writing the trace", path) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return num_bytes, facts
