"""A rank that has no memory left: what it asked for, where, and beside that what the plan said."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from types import TracebackType

from phalanx.core.black_box_reader import read_last_position
from phalanx.core.errors import OutOfMemoryError
from phalanx.core.uncaught import find_innermost_user_code_line
from phalanx.core.units import format_bytes
from phalanx.launch.paths import black_box_path
from phalanx.launch.positions import describe_rank_position
from phalanx.parallel.model import ParallelModel
from phalanx.run.rank_run import RankRunInputs
from phalanx.train.memory import MemoryMeter
from phalanx.train.memory_request import find_memory_request, list_calls

# The words of torch's allocators: that of the CPU, and those of GPUs.
_ALLOCATOR_MESSAGE = re.compile(
    r"can't allocate memory|not enough memory|out of memory|cannot allocate memory", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for what Python and torch raise when memory is refused."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and bool(_ALLOCATOR_MESSAGE.search(str(error)))


@contextlib.contextmanager
def explaining_out_of_memory(
    run: RankRunInputs, meter: MemoryMeter, find_model: Callable[[], ParallelModel | None]
) -> Iterator[None]:
    """Raise OutOfMemoryError (exit 7) for an error of the body that is one of memory.
    `find_model`: the model that the body trains, None before there is one."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        raise _build_error(run, meter, error, find_model()) from error


def _build_error(
    run: RankRunInputs, meter: MemoryMeter, error: BaseException, model: ParallelModel | None
) -> OutOfMemoryError:
    where = describe_rank_position(read_last_position(black_box_path(run.run_dir, run.rank)))
    request = "asked"
    # It needs a little memory itself: without it the error is still one of memory.
    with contextlib.suppress(Exception):
        request = f"asked {find_memory_request(error, model).describe()}".rstrip()
    planned = sum(run.plan.memory_of_rank(run.rank).values())
    memory = meter.read_rank_memory()
    peak = memory.peak_bytes or memory.rss_bytes
    return OutOfMemoryError(
        f"rank {run.rank} is out of memory {where}",
        why=(
            f"{request} at {describe_place_of_request(error.__traceback__)};"
            f" {format_bytes(planned)} planned, {format_bytes(peak)} measured at the peak so far"
        ),
    )


def describe_place_of_request(trace: TracebackType | None) -> str:
    """The user's own line that led to the error, and what it called: "model.py:12 (in __init__,
    linear.py:112)"; where there is none of theirs, the innermost line alone."""
    _, frame = list_calls(trace)[-1]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    own_place = os.path.basename(find_innermost_user_code_line(trace))
    if own_place in ("", place):
        return f"{place} in {frame.name}"
    return f"{own_place} (in {frame.name}, {place})"
