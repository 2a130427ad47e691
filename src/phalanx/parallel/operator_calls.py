"""How many operators a microbatch calls, and what one costs the host whatever the size of its
tensors.

Where tensors are small, a step on CPUs is mostly the work of calling operators: Python, autograd,
dispatch. It is the same for a microbatch of any size, so larger ones have less of it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_NUM_LAYERS, _NUM_REPEATS = 8, 8
_MATMUL_SIDE, _MATMUL_BUDGET_S = 512, 0.03


@dataclass(frozen=True)
class OperatorCost:
    """Operators of one microbatch's forward that have a backward, the seconds that one costs by
    itself in both, and the FLOP/s that large products reach on this rank."""

    num_operators: int
    operator_s: float
    matmul_flops_per_s: float


def count_operators(loss: torch.Tensor) -> int:
    """Operators in the graph that autograd has recorded for `loss`: one that a checkpoint hides,
    or a function of one's own, counts as one."""
    counted = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in counted:
            continue
        counted.add(node)
        for following, _ in node.next_functions:
            waiting.append(following)
    return len(counted)


def measure_operator_seconds() -> float:
    """Seconds that one operator costs in a forward and backward whose tensors are so small that
    nothing else counts. Draws nothing."""
    num_operators = count_operators(_compute_small_loss())
    seconds = []
    for _ in range(_NUM_REPEATS):
        began = time.perf_counter()
        _compute_small_loss().backward()
        seconds.append(time.perf_counter() - began)
    # The best: others may have had the processor meanwhile.
    return min(seconds) / num_operators


def measure_matmul_flops_per_s(dtype: torch.dtype) -> float:
    """FLOP/s of this rank's products of 512 x 512 in `dtype`: the best of a few, as others may
    compute beside it."""
    side = _MATMUL_SIDE
    lhs, rhs = (torch.ones(side, side, dtype=dtype) for _ in range(2))
    best_s, until = math.inf, time.perf_counter() + _MATMUL_BUDGET_S
    while True:
        began = time.perf_counter()
        torch.mm(lhs, rhs)
        now = time.perf_counter()
        best_s = min(best_s, now - began)
        if now >= until:
            return 2.0 * side**3 / best_s


def _compute_small_loss() -> torch.Tensor:
    with torch.enable_grad():
        weight = torch.ones(8, 8, requires_grad=True)
        scale = torch.ones(8, requires_grad=True)
        x = torch.ones(4, 8)
        for _ in range(_NUM_LAYERS):
            x = x + F.gelu(F.linear(F.layer_norm(x, (8,), scale), weight))
        return x.sum()
