"""No memory is left: what is asked for next is refused."""

from __future__ import annotations

import resource

import psutil
import torch

from phalanx.resilience.expectation import Ending, Expectation

EXPECTATION = Expectation(
    verdict="out of memory",
    ending=Ending.STOPS,
    detected_s=5.0,
    trained_again_s=None,
    exit_code=7,
)

# For the stacks and variables of threads.
SLACK_BYTES = 256 << 20
TENSOR_BYTES = 1 << 30


def inject() -> None:
    """Let this process map little more than it has, and ask for a tensor of a gigabyte.

    With nothing at all left the C library ends the process, before anybody can say why. The limit
    is lifted once that is refused: a device, too, has its memory again when a step is given up.
    """
    size_bytes = psutil.Process().memory_info().vms + SLACK_BYTES
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes, limits[1]))
    try:
        torch.ones(TENSOR_BYTES // 4)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
