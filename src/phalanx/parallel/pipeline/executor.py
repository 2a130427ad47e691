"""Run a pipeline: each rank does its row of the schedule, action by action.

An action waits for what it needs, computes, and sends on what it made. Communication goes on beside
computation; how long an action computed is noted, so that what remains of a step is waiting: the
bubble.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.core.errors import LayoutError, PhalanxError
from phalanx.mesh.casts import sharing_casts_between_autocast_regions
from phalanx.mesh.tensor_group import TensorParallelGroup
from phalanx.parallel.dropout.interceptor import RandomOpInterceptor
from phalanx.parallel.executor import AddLoss, Batch, Objective
from phalanx.parallel.loss_forward import FunctionOfOutputs, MicrobatchLossForward
from phalanx.parallel.pipeline.p2p import P2PQueue, TensorSpec
from phalanx.parallel.pipeline.shape_inference import (
    broadcast_float_tensor,
    infer_stage_input_specs,
)
from phalanx.parallel.pipeline.stage_memory import PipelineSavedBytes
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.pipeline.weight_grads import DeferredWeightGrads
from phalanx.parallel.protocol import ParallelContext
from phalanx.parallel.saved_tensors import can_count_saved_bytes
from phalanx.plan.pipeline.messages import P2PMessage, RankMessages, output_of, plan_rank_messages
from phalanx.plan.pipeline.pipeline_plan import SCHEDULE_FROM_FILE, Pipeline
from phalanx.plan.pipeline.schedule import Action, Schedule

Span = tuple[str, Any, Any]
"""(action, begin, end): marks of the clock of phases."""


@dataclass
class StageForwardForBackward:
    """State that a forward keeps for its backward: the stage's input (None: tokens), and its
    output or its loss."""

    stage_input: torch.Tensor | None
    output: torch.Tensor


# Why not torch's schedules: its stages fix their shapes (a sequence of another length hangs), its V
# schedules need two stages of one process to talk over gloo (refused by torch 2.11), its split of a
# backward walks the autograd graph and goes wrong with FSDP, and they are classes, while ours are
# data that `plan` checks and simulates. What interprets them here is small beside the planning;
# tests hold the order of actions to torch's.
@dataclass
class PipelineExecutor:
    """One rank's part. `spans`: the actions of the last step, without waiting for messages."""

    context: ParallelContext
    staged: PipelineOfRank
    interceptor: RandomOpInterceptor
    forward: MicrobatchLossForward
    spans: list[Span] = field(default_factory=list)
    is_under_way: bool = False
    """Stays true where an error left a schedule half done: other ranks then wait for this one."""
    _deferred: DeferredWeightGrads = field(default_factory=DeferredWeightGrads)
    _saved: dict[tuple[int, int], StageForwardForBackward] = field(default_factory=dict)
    _specs: dict[Any, dict[int, TensorSpec]] = field(default_factory=dict)
    _num_tokens: dict[Any, int] = field(default_factory=dict)
    _schedules: dict[int, Schedule] = field(default_factory=dict)
    _messages: dict[tuple[str, int], RankMessages] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._memory = PipelineSavedBytes(
            can_count_saved_bytes=can_count_saved_bytes(self.context.plan)
        )
        self._tensor_group = self.context.axes.find(TensorParallelGroup)

    @property
    def operator_cost(self) -> None:
        """Not counted: stages call operators for several microbatches in turn."""
        return None

    @property
    def saved_bytes(self) -> int | None:
        """Bytes autograd kept at most at one time, of all microbatches in flight."""
        return self._memory.saved_bytes

    @property
    def is_inferring_shapes(self) -> bool:
        """True while stages learn what they hand on: what is computed then is thrown away."""
        return self.staged.stage_forward.is_inferring_shapes

    def forward_backward(
        self,
        microbatches: Sequence[Batch],
        objective: Objective,
        step: int,
        add: AddLoss,
    ) -> None:
        """All actions of this rank.

        `add(loss, num_targets)` is called for each microbatch of the last stage.
        """
        self._require_no_unfinished_step()
        schedule = self._get_schedule_for_num_microbatches(len(microbatches))
        # Spans are of one step: the record of a pipeline reads the last one.
        self.spans = []
        self._saved.clear()
        hooks = self.context.hooks
        # For data parallelism a whole schedule is one microbatch, the last one: it reduces after
        # it.
        with (
            # What is between its actions: messages are sent and expected, batches are copied.
            self.context.phases("prepare"),
            self.forward.caching_device_copies_of_batches(),
            hooks.open_microbatch_context(is_last=True),
        ):
            with self.context.traffic.excluding_from_step_traffic():
                self._infer_stage_input_specs(microbatches, objective)
            queue = self._open_message_queue(schedule, microbatches)
            self.is_under_way = True
            # Microbatches share the casts of weights that autocast makes: each would make its own.
            with sharing_casts_between_autocast_regions():
                for index, action in enumerate(schedule.actions[self.staged.stage_group.rank]):
                    queue.start_receives_for_action(index)
                    self._run_scheduled_action(action, queue, microbatches, objective, step, add)
            with self.context.phases("pipeline", "settle sends"):
                queue.wait_for_sends()
        self.context.phases.microbatch = -1
        self.is_under_way = False
        assert not self._saved, "a schedule that was checked leaves nothing"
        assert not self._deferred.num_deferred_microbatches, "nor does it leave a W"

    def _require_no_unfinished_step(self) -> None:
        """Another step's messages would be taken for those that other ranks still wait for."""
        if self.is_under_way:
            raise PhalanxError(
                "an error left the pipeline in the middle of a schedule, and nothing can follow it",
                why="the other ranks wait for what this one has not sent",
                fix="end the process after such an error, and start again from a checkpoint",
            )

    def _get_schedule_for_num_microbatches(self, num_microbatches: int) -> Schedule:
        if num_microbatches not in self._schedules:
            pipeline = self.staged.pipeline
            if (
                num_microbatches != pipeline.num_microbatches
                and pipeline.schedule_name == SCHEDULE_FROM_FILE
            ):
                raise LayoutError(
                    f"the schedule is of {pipeline.num_microbatches} microbatches, and a step has"
                    f" {num_microbatches}"
                )
            self._schedules[num_microbatches] = pipeline.change_num_microbatches(
                num_microbatches
            ).schedule()
        return self._schedules[num_microbatches]

    # One action

    def _run_scheduled_action(
        self,
        action: Action,
        queue: P2PQueue,
        microbatches: Sequence[Batch],
        objective: Objective,
        step: int,
        add: AddLoss,
    ) -> None:
        output: torch.Tensor | None = None
        self.context.phases.microbatch = action.microbatch
        if action.kind == "F":
            stage_input = self._receive_input(queue, action, is_gradient=False)
            with self._timing_action(action, "forward"):
                output = self._run_forward_action(
                    action, stage_input, microbatches[action.microbatch], objective, step, add
                )
        elif action.kind == "W":
            with self._timing_action(action, "backward"):
                # W needs nothing from other ranks, so a schedule puts it where a rank would wait.
                self._deferred.compute_deferred_gradients((action.stage, action.microbatch))
                self.context.hooks.run_after_weight_grads_hooks()
        else:
            gradient = self._receive_input(queue, action, is_gradient=True)
            # A recomputation inside of the backward asks for the length, too.
            self._set_sequence_length_of_tensor_group(microbatches[action.microbatch])
            with self._timing_action(action, "backward"):
                output = self._run_backward_action(action, gradient)
        message = output_of(action, self.staged.pipeline.num_stages)
        if message is not None:
            assert output is not None
            queue.send(message, output)

    def _receive_input(
        self, queue: P2PQueue, action: Action, *, is_gradient: bool
    ) -> torch.Tensor | None:
        edge = self.staged.pipeline.num_stages - 1 if is_gradient else 0
        if action.stage == edge:
            return None
        message = P2PMessage(action.stage, action.microbatch, is_gradient)
        if queue.is_from_stage_of_this_rank(message):
            return queue.receive(message)
        with self.context.phases("pipeline", f"receive for {action}"):
            return queue.receive(message)

    @contextmanager
    def _timing_action(self, action: Action, phase: str) -> Iterator[None]:
        clock = self.context.phases.clock
        start = clock.mark()
        with self.context.phases(phase, str(action)):
            yield
        self.spans.append((str(action), start, clock.mark()))

    def _run_forward_action(
        self,
        action: Action,
        stage_input: torch.Tensor | None,
        batch: Batch,
        objective: Objective,
        step: int,
        add: AddLoss,
    ) -> torch.Tensor:
        if stage_input is not None:
            # What arrives is a leaf: its gradient is what goes back to the stage before.
            stage_input.requires_grad_()
        with (
            self.interceptor.drawing_in_microbatch(step, action.microbatch, batch),
            self._memory.counting_saved_bytes_of_stage(action.stage),
        ):
            with self.interceptor.intercepting_forward(action.stage):
                outcome = self._compute_stage_forward(action.stage, stage_input, batch, objective)
        if action.stage + 1 == self.staged.pipeline.num_stages:
            loss, num_targets = outcome
            add(loss.detach(), num_targets)
            outcome = self.context.normalizer.scale_loss(loss)
        self._saved[action.stage, action.microbatch] = StageForwardForBackward(stage_input, outcome)
        self._memory.record_stages_in_flight(stage for stage, _ in self._saved)
        # Detached: what is sent must not keep the graph, which `_saved` holds until the backward.
        return outcome.detach()

    def _run_backward_action(
        self, action: Action, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        key = (action.stage, action.microbatch)
        saved = self._saved.pop(key)
        if action.kind == "I":
            with self._deferred.deferring_to(key):
                self._backward_through_stage(saved, gradient)
        else:
            self._backward_through_stage(saved, gradient)
        self.context.hooks.run_after_backward_hooks()
        if saved.stage_input is None:
            return None
        # The stage before waits for a gradient even where nothing here depends on what it sent.
        if saved.stage_input.grad is None:
            return torch.zeros_like(saved.stage_input)
        return saved.stage_input.grad

    def _backward_through_stage(
        self, saved: StageForwardForBackward, gradient: torch.Tensor | None
    ) -> None:
        # The output of a first stage whose parameters are all frozen has no graph.
        if saved.output.requires_grad:
            saved.output.backward(gradient)

    def _compute_stage_forward(
        self,
        stage: int,
        stage_input: torch.Tensor | None,
        batch: Batch,
        objective: Objective | FunctionOfOutputs,
    ) -> Any:
        ranges = self.staged.pipeline.stages.block_ranges
        if not self.staged.stage_forward.is_inferring_shapes:
            self._set_sequence_length_of_tensor_group(batch)
        with self.staged.stage_forward.running_as_stage(stage, ranges[stage], stage_input):
            return self.forward(batch, objective)

    def _set_sequence_length_of_tensor_group(self, batch: Batch) -> None:
        """Tell the tensor group how long the sequences of `batch` are, which only the first
        stage's embedding sees."""
        if self._tensor_group is not None:
            self._tensor_group.num_tokens = self._num_tokens[self._batch_shape_key(batch)]

    # Shapes and types of what stages send

    def _batch_shape_key(self, batch: Batch) -> Any:
        shapes = tuple(sorted((name, tuple(t.shape), str(t.dtype)) for name, t in batch.items()))
        return shapes, self.context.root.module.training

    def _infer_stage_input_specs(
        self, microbatches: Iterable[Batch], objective: Objective | FunctionOfOutputs
    ) -> None:
        for batch in microbatches:
            key = self._batch_shape_key(batch)
            if key in self._specs:
                continue
            stage_forward = self.staged.stage_forward
            stage_forward.is_inferring_shapes = self.is_under_way = True

            def compute(stage: int, stage_input: torch.Tensor | None, batch: Batch = batch) -> Any:
                return self._compute_stage_forward(stage, stage_input, batch, objective)

            try:
                with self.context.phases(
                    "pipeline", "infer shapes of a new form of microbatch", axis="pp"
                ):
                    pipeline = self.staged.pipeline
                    self._specs[key] = infer_stage_input_specs(
                        self.context.root,
                        self.staged.stage_group,
                        pipeline.rank_of_stage,
                        compute,
                        self._tensor_group,
                    )
                if self._tensor_group is not None:
                    self._num_tokens[key] = self._tensor_group.num_tokens
                self.is_under_way = False
            except PhalanxError:
                # All ranks raise the same refusal, so none waits for this one.
                self.is_under_way = False
                raise
            finally:
                stage_forward.is_inferring_shapes = False

    def _open_message_queue(self, schedule: Schedule, microbatches: Sequence[Batch]) -> P2PQueue:
        specs = {
            (stage, index): spec
            for index, batch in enumerate(microbatches)
            for stage, spec in self._specs[self._batch_shape_key(batch)].items()
        }
        stage_group, key = self.staged.stage_group, (schedule.name, schedule.num_microbatches)
        if key not in self._messages:
            self._messages[key] = plan_rank_messages(
                schedule, stage_group.rank, in_one_queue=stage_group.is_one_queue
            )
        return P2PQueue(stage_group, self._messages[key], self.staged.pipeline.rank_of_stage, specs)

    # Without gradients

    def evaluate(
        self, microbatches: Iterable[Batch], objective: Objective | FunctionOfOutputs
    ) -> Iterator[Any]:
        """Yield the objective's result for each microbatch where the last stage is, None elsewhere.

        No gradients.

        As many microbatches as there are ranks are under way together.
        """
        self._require_no_unfinished_step()
        pipeline = self.staged.pipeline
        batches = iter(microbatches)
        while group_of_batches := list(itertools.islice(batches, pipeline.num_ranks)):
            self.context.hooks.run_gather_weights_hooks()
            self._infer_stage_input_specs(group_of_batches, objective)
            schedule = _list_evaluation_actions_by_rank(pipeline, len(group_of_batches))
            queue, outcome = (
                self._open_message_queue(schedule, group_of_batches),
                [None] * len(group_of_batches),
            )
            self.is_under_way = True
            for index, action in enumerate(schedule.actions[self.staged.stage_group.rank]):
                queue.start_receives_for_action(index)
                stage_input = self._receive_input(queue, action, is_gradient=False)
                output = self._compute_stage_forward(
                    action.stage, stage_input, group_of_batches[action.microbatch], objective
                )
                message = output_of(action, pipeline.num_stages)
                if message is None:
                    outcome[action.microbatch] = output
                else:
                    queue.send(message, output.detach())
            queue.wait_for_sends()
            self.is_under_way = False
            # Not before: a caller may leave a generator where it yields, and other ranks would wait
            # for the rest.
            yield from outcome

    def run_forward_then(self, batch: Batch, then: Callable[[Any], Any]) -> torch.Tensor:
        """`then(outputs)`, a tensor of the rank with the last stage, on every rank of the
        pipeline."""
        (result,) = self.evaluate([batch], FunctionOfOutputs(then))
        self.context.hooks.run_release_weights_hooks()
        return broadcast_float_tensor(
            self.staged.stage_group, self.staged.rank_of_last_stage, result
        )


def _list_evaluation_actions_by_rank(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """A pass without gradients: on each rank the microbatches of its first stage, then those of
    its second."""
    rows = tuple(
        tuple(
            Action("F", stage, index)
            for stage in pipeline.stages_of_rank(rank)
            for index in range(num_microbatches)
        )
        for rank in range(pipeline.num_ranks)
    )
    return Schedule("forward", num_microbatches, pipeline.rank_of_stage, rows)
