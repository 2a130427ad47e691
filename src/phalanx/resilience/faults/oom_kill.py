"""The memory of the machine, or of the container, is used up, and the kernel kills the rank that
has most of it."""

from __future__ import annotations

from phalanx.core.errors import EnvironmentProblem
from phalanx.launch.oom_kills import find_memory_limit
from phalanx.resilience.expectation import Expectation

EXPECTATION = Expectation(
    verdict="killed for memory", detected_s=5.0, trained_again_s=10.0, stage="memory_limit"
)
PIECE_BYTES = 64 << 20
# More than any machine should be asked for by a drill.
MOST_BYTES = 16 << 30


def inject() -> None:
    """Take memory and use it until the kernel ends this process. Raises EnvironmentProblem where no
    limit of its own cgroup would stop it."""
    limit_bytes = find_memory_limit()
    if not 0 < limit_bytes <= MOST_BYTES:
        raise EnvironmentProblem(
            "this fault uses up all memory that it may, and nothing limits that to 16 GiB",
            fix="run it by phalanx drill, or in a container with a limit",
        )
    pieces = []
    while True:
        # Pages count once they are written.
        pieces.append(b"1" * PIECE_BYTES)
