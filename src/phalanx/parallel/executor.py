"""Executor: runs the microbatches of a step on this rank. Direct, or by a pipeline's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from phalanx.parallel.operator_calls import OperatorCost

Batch = Mapping[str, torch.Tensor]
Objective = Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor]]
LossAndTargets = tuple[torch.Tensor, torch.Tensor]
AddLoss = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes (loss, number of targets) of a microbatch: 0-d tensors without gradients."""


class Executor(Protocol):
    """Runs microbatches on this rank: `DirectExecutor` or `PipelineExecutor`. All of it is
    collective."""

    @property
    def saved_bytes(self) -> int | None:
        """Bytes autograd kept for the backward; None before the first, and where they are out of
        sight (can_count_saved_bytes)."""
        ...

    @property
    def operator_cost(self) -> OperatorCost | None:
        """The host's cost of a microbatch's operators; None before the third step, in
        pipelines, on GPUs, and on other ranks than 0."""
        ...

    def forward_backward(
        self, microbatches: Sequence[Batch], objective: Objective, step: int, add: AddLoss
    ) -> None:
        """Accumulate gradients; `add` is called for each microbatch where its loss is."""
        ...

    def evaluate(
        self, microbatches: Iterable[Batch], objective: Objective
    ) -> Iterator[LossAndTargets | None]:
        """Loss and targets of each microbatch without gradients; None where another rank has
        them."""
        ...

    def run_forward_then(self, batch: Batch, then: Callable[[Any], Any]) -> Any:
        """`then(outputs)` of one forward, on every rank."""
        ...
