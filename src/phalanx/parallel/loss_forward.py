"""MicrobatchLossForward: forward and loss of one microbatch, the same under both executors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.core.errors import PhalanxError
from phalanx.mesh.devices import is_cpu
from phalanx.mesh.transfer import pin_memory
from phalanx.parallel.call.bind_batch import (
    BatchOfNamedTensors,
    build_forward_arguments,
    describe_batch,
)
from phalanx.parallel.call.check_indices import (
    TARGETS_ARE_CLASSES_ATTRIBUTE,
    raise_for_out_of_range_index,
    require_targets_within_classes,
    require_token_ids_in_vocabulary,
)
from phalanx.parallel.call.check_objective import require_loss_sum_and_num_targets
from phalanx.parallel.context.transform import ContextParallelBatchSplitter
from phalanx.parallel.data_parallel.freed_head import FreedHead
from phalanx.parallel.executor import Batch, LossAndTargets, Objective
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.protocol import ParallelContext

ACCEPTS_VOCABULARY_SHARDS_ATTRIBUTE = "reads_vocabulary_parts"
"""An objective with this attribute computes with a part of the logits."""


def gather_logits(outputs: Any) -> Any:
    """Logits of the whole vocabulary, where tensor parallelism has cut it or the objective was
    to make them."""
    gather_logits = getattr(outputs, "gather_logits", None)
    if gather_logits is None:
        return outputs
    return gather_logits()


@dataclass(frozen=True)
class FunctionOfOutputs:
    """Stands for an objective where outputs are wanted, not a loss."""

    then: Callable[[Any], Any]


class MicrobatchLossForward:
    """Takes a microbatch from the host to its loss: copies and cuts it, calls the module with the
    objective inside, and explains errors by the batch and the layout."""

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._module = context.root.module
        # Once: a plan reads its shape from JSON each time that it is asked.
        shape = context.plan.model_shape
        # A loop of the user's own may bring another module than the one that was planned.
        is_planned_model = context.names.issuperset(shape.module_names)
        self._looks_up_ids = shape.has_token_table and is_planned_model
        self._split = context.axes.find(ContextParallelBatchSplitter)
        staged = context.axes.find(PipelineOfRank)
        self._stage_forward = None if staged is None else staged.stage_forward
        self._freed_head = context.axes.find(FreedHead)
        self._has_run = False
        self._shares_copies = False
        # By id of the batch, which lives as long as this.
        self._copies: dict[int, dict[str, torch.Tensor]] = {}

    def __call__(self, batch: Batch, objective: Objective | FunctionOfOutputs) -> Any:
        """(loss, targets) of a microbatch; hidden states of a pipeline's stage that is not the
        last; the result of a FunctionOfOutputs."""
        # Before the copy: on the host ids are looked at without waiting for a device.
        if self._looks_up_ids:
            require_token_ids_in_vocabulary(batch, self._context.plan.vocab_size)
        on_device = self._copy_batch_to_device(batch)
        if self._split is not None:
            on_device = BatchOfNamedTensors(self._split.keep_own_tokens_of_batch(on_device))
        # The objective runs inside of the module's call: FSDP keeps the head whole until that
        # returns, and DDP arms its hooks on what it returns.
        compute_loss = functools.partial(
            self._compute_loss_or_stage_output, objective, batch, on_device
        )
        try:
            outcome = self.run_module_forward(on_device, compute_loss)
        except PhalanxError:
            raise
        except Exception as error:
            self._raise_user_error_or_add_notes(error, batch)
            raise
        self._has_run = True
        if self._yields_loss(objective):
            # An objective that returns a mean loss would train, at a wrong rate.
            require_loss_sum_and_num_targets(outcome)
        return outcome

    def run_module_forward(self, batch: Batch, then: Callable[[Any], Any]) -> Any:
        """`then(outputs)` of one forward, inside of the call that data parallelism wraps."""
        args, kwargs = build_forward_arguments(self._module, batch)
        with self.open_autocast_context():
            return self._context.outer(args, kwargs, then)

    def open_autocast_context(self) -> AbstractContextManager[Any]:
        if not self._context.autocast or self._context.plan.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._context.mesh.device.type, self._context.compute_dtype)

    def keep_own_tokens_of_batch(self, batch: Batch) -> Batch:
        """This rank's tokens of `batch`, where sequences are cut; all of it elsewhere."""
        if self._split is None:
            return batch
        return self._split.keep_own_tokens_of_batch(batch)

    @contextmanager
    def caching_device_copies_of_batches(self) -> Iterator[None]:
        """Copy each microbatch to the device once, though several stages ask for it. It must live
        as long as this."""
        self._shares_copies = not is_cpu(self._context.mesh.device)
        try:
            yield
        finally:
            self._shares_copies, self._copies = False, {}

    def _compute_loss_or_stage_output(
        self,
        objective: Objective | FunctionOfOutputs,
        batch: Batch,
        on_device: Batch,
        outputs: Any,
    ) -> LossAndTargets | Any:
        if self._stage_forward is not None:
            self._stage_forward.require_outputs_without_placeholders(outputs)
            # An objective counts and draws as often as there are microbatches.
            if self._stage_forward.is_inferring_shapes:
                return torch.zeros(()), torch.zeros(())
        if isinstance(objective, FunctionOfOutputs):
            return objective.then(outputs)
        if not getattr(objective, ACCEPTS_VOCABULARY_SHARDS_ATTRIBUTE, False):
            outputs = gather_logits(outputs)
        if getattr(objective, TARGETS_ARE_CLASSES_ATTRIBUTE, False):
            require_targets_within_classes(batch, outputs)
        if self._freed_head is not None:
            outputs = self._freed_head.hand_to_objective(objective, outputs)
        return objective(outputs, on_device)

    def _yields_loss(self, objective: Objective | FunctionOfOutputs) -> bool:
        if isinstance(objective, FunctionOfOutputs):
            return False
        return self._stage_forward is None or self._stage_forward.is_last_stage

    def _raise_user_error_or_add_notes(self, error: Exception, batch: Batch) -> None:
        """Raise what a user can mend in place of `error`, or add notes to it."""
        raise_for_out_of_range_index(batch, error)
        # A layout's misfit shows in the first forward.
        if not self._has_run:
            refusal = self._context.hooks.explain_error_by_hooks(error)
            if refusal is not None:
                raise refusal from error
        error.add_note(f"the batch: {describe_batch(batch)}")
        if self._context.cuts:
            error.add_note(
                "tp has cut parameters by rules: a view that counts heads or features needs divide="
            )

    def _copy_batch_to_device(self, batch: Batch) -> BatchOfNamedTensors:
        """`batch` on this rank's device.

        From page-locked memory, which a loader's thread may have put it in already: a copy from
        other memory waits for all that the device has to do.
        """
        device = self._context.mesh.device
        if id(batch) in self._copies:
            return BatchOfNamedTensors(self._copies[id(batch)])
        is_copied = not is_cpu(device)
        with self._context.phases("host_to_device") if is_copied else nullcontext():
            copied = {
                key: pin_memory(tensor, device).to(device, non_blocking=True)
                for key, tensor in batch.items()
            }
        if self._shares_copies:
            self._copies[id(batch)] = copied
        return BatchOfNamedTensors(copied)
