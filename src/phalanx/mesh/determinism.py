"""train.deterministic: torch takes deterministic implementations alone, and what has none is
refused in one line."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import torch

from phalanx.core.errors import EnvironmentProblem, LayoutError
from phalanx.core.uncaught import find_innermost_user_code_line

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
# With these cuBLAS is deterministic; the first is faster and takes 24 MiB.
DETERMINISTIC_CUBLAS_VALUES = (":4096:8", ":16:8")
_NONDETERMINISTIC_OP_PATTERN = re.compile(
    r"(\S+) does not have a deterministic implementation"
)  # how torch begins


@contextlib.contextmanager
def using_deterministic_algorithms(
    enabled: bool, *, device: str = "cpu", compiles: bool = False
) -> Iterator[None]:
    """Make torch deterministic in the body, if `enabled`: equal inputs give equal bits on one
    machine.

    To be entered before CUDA starts in this process. Raises EnvironmentProblem for a
    CUBLAS_WORKSPACE_CONFIG of the user's own with which cuBLAS varies, and LayoutError for an
    operation without a deterministic implementation.
    """
    if not enabled:
        yield
        return
    workspace = os.environ.setdefault(CUBLAS_VARIABLE, DETERMINISTIC_CUBLAS_VALUES[0])
    if device == "cuda" and workspace not in DETERMINISTIC_CUBLAS_VALUES:
        raise EnvironmentProblem(
            f"{CUBLAS_VARIABLE} is {workspace!r}, with which cuBLAS is not deterministic, and"
            " train.deterministic is true",
            fix=f"unset it, or set it to {' or '.join(DETERMINISTIC_CUBLAS_VALUES)}",
        )
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # With it cuDNN takes the convolution that was fastest at the moment.
    torch.backends.cudnn.benchmark = False
    if compiles:
        _compiling_without_benchmarked_kernels()
    try:
        with raising_layout_error_for_nondeterminism(enabled):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def raising_layout_error_for_nondeterminism(enabled: bool) -> Iterator[None]:
    """Raise a LayoutError, if `enabled`, for what torch refuses in the body for want of a
    deterministic implementation."""
    try:
        yield
    except Exception as error:
        if not enabled:
            raise
        refusal = _convert_determinism_error(error)
        if refusal is None:
            raise
        raise refusal from error


def _compiling_without_benchmarked_kernels() -> None:
    """Inductor may choose among kernels by how long they take, and these round differently."""
    import torch._inductor.config as inductor

    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True


def _convert_determinism_error(error: BaseException) -> LayoutError | None:
    """torch's refusal as ours, also where another error was made of it; None for anything else."""
    link: BaseException | None = error
    # A chain may be a circle, where user code has set `__cause__` so.
    for _ in range(10):
        if link is None:
            return None
        if match := _NONDETERMINISTIC_OP_PATTERN.search(str(link)):
            return LayoutError(
                f"torch has no deterministic implementation of {match[1]}, and train.deterministic"
                " is true",
                # An error in a backward has no line of the user's code.
                where=find_innermost_user_code_line(link.__traceback__) or None,
                fix=(
                    "use another operation in your model or objective, or set"
                    " train.deterministic=false"
                ),
            )
        link = link.__cause__ or link.__context__
    return None
