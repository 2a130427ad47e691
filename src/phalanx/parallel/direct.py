"""DirectExecutor: one microbatch after another, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from phalanx.parallel.data_parallel.gradient_tree import GradientTree
from phalanx.parallel.dropout.interceptor import RandomOpInterceptor
from phalanx.parallel.executor import AddLoss, Batch, LossAndTargets, Objective
from phalanx.parallel.loss_forward import MicrobatchLossForward
from phalanx.parallel.operator_calls import (
    OperatorCost,
    count_operators,
    measure_matmul_flops_per_s,
    measure_operator_seconds,
)
from phalanx.parallel.protocol import ParallelContext
from phalanx.parallel.saved_tensors import SavedBytesCounter, can_count_saved_bytes


class DirectExecutor:
    """Computes whole forwards on this rank: every layout without a pipeline."""

    def __init__(
        self,
        context: ParallelContext,
        interceptor: RandomOpInterceptor,
        forward: MicrobatchLossForward,
    ) -> None:
        self.saved_bytes: int | None = None
        self.operator_cost: OperatorCost | None = None
        self._context, self._interceptor, self._forward = context, interceptor, forward
        # Hooks on saved tensors cost time, so what autograd saves is counted once.
        self._is_due = can_count_saved_bytes(context.plan)
        # In the third step: in the first ones much is done that never is again. On a GPU calls cost
        # nothing where kernels wait in its queue.
        counts = context.mesh.rank == 0 and context.mesh.device.type == "cpu"
        self._num_steps_until_count = 3 if counts else 0

    def forward_backward(
        self, microbatches: Sequence[Batch], objective: Objective, step: int, add: AddLoss
    ) -> None:
        """Forward and backward of each microbatch; ranks communicate during the last one only."""
        hooks, phases = self._context.hooks, self._context.phases
        order: Sequence[int] = range(len(microbatches))
        tree = self._context.axes.find(GradientTree)
        if tree is not None:
            order = tree.begin_step(len(microbatches))
        for index in order:
            batch = microbatches[index]
            phases.microbatch = index
            with (
                phases("prepare"),
                # Gradients add up locally until the last microbatch: one reduction per step,
                # unless parallel.accumulate says otherwise.
                hooks.open_microbatch_context(is_last=index == order[-1]),
                self._interceptor.drawing_in_microbatch(step, index, batch),
            ):
                with (
                    phases("forward"),
                    self._counting_saved_bytes_of_first_forward(),
                    self._interceptor.intercepting_forward(),
                ):
                    loss, targets = self._forward(batch, objective)
                self._count_operators_of_third_step(loss, index)
                with phases("backward"):
                    self._context.normalizer.scale_loss(loss).backward()
                    # Inside of the phase: it leaves the one that waiting for DDP has entered.
                    hooks.run_after_backward_hooks()
            # Detached, or the step's sum would hold on to the graphs of all microbatches.
            add(loss.detach(), targets)
        phases.microbatch = -1

    def evaluate(
        self, microbatches: Iterable[Batch], objective: Objective
    ) -> Iterator[LossAndTargets]:
        """Loss and targets of each microbatch, without a backward."""
        for batch in microbatches:
            loss, targets = self._forward(batch, objective)
            yield loss, targets

    def run_forward_then(self, batch: Batch, then: Callable[[Any], Any]) -> Any:
        """`then(outputs)` of one forward of this rank's tokens."""
        return self._forward.run_module_forward(self._forward.keep_own_tokens_of_batch(batch), then)

    def _count_operators_of_third_step(self, loss: torch.Tensor, microbatch: int) -> None:
        """Count the operators of the first microbatch of the third step, which takes a few tens of
        milliseconds longer."""
        if self._num_steps_until_count == 0 or microbatch != 0:
            return
        self._num_steps_until_count -= 1
        if self._num_steps_until_count == 0:
            with self._context.phases("record"):
                self.operator_cost = OperatorCost(
                    count_operators(loss),
                    measure_operator_seconds(),
                    measure_matmul_flops_per_s(self._context.compute_dtype),
                )

    @contextmanager
    def _counting_saved_bytes_of_first_forward(self) -> Iterator[None]:
        if not self._is_due:
            yield
            return
        self._is_due, saved = False, SavedBytesCounter()
        with saved.counting_saved_tensors():
            yield
        self.saved_bytes = saved.num_bytes
