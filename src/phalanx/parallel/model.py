"""ParallelModel: what `parallelize` returns. The same calls in every layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.core.batch import flatten_batch
from phalanx.core.deprecated import warn_renamed
from phalanx.core.errors import LayoutError
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import LogicalShard, get_local_tensor
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.block_norms import NO_BLOCK_NORMS, BlockNormRequest, BlockSquares
from phalanx.parallel.context.transform import ContextParallelBatchSplitter
from phalanx.parallel.data_parallel.compression import GradientCompression
from phalanx.parallel.data_parallel.replaced_parameters import ReplacedParameters
from phalanx.parallel.data_parallel.replicate import BackwardCommunicationTimer
from phalanx.parallel.direct import DirectExecutor
from phalanx.parallel.dropout.interceptor import RandomOpInterceptor
from phalanx.parallel.executor import Batch, Executor, Objective
from phalanx.parallel.expert.router_load import ReducedRouterLoads, RouterStepLoad
from phalanx.parallel.gradients import naming_sparse_gradients
from phalanx.parallel.loss_forward import MicrobatchLossForward, gather_logits
from phalanx.parallel.operator_calls import OperatorCost
from phalanx.parallel.pipeline.executor import PipelineExecutor
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.protocol import ParallelContext
from phalanx.parallel.rank_parameters import ParametersOfRank
from phalanx.parallel.step_reducer import StepReducer
from phalanx.parallel.step_stats import LocalLoss, StepStats
from phalanx.plan.plan import Plan


class ParallelModel:
    """This rank's part of a model, and the calls that train it.

    `step`: the last one that was begun. `pipeline`: what runs this rank's stages; None without
    pipeline parallelism. `compression`: of gradients; None if they travel as they are.
    """

    def __init__(self, context: ParallelContext, *, has_weights: bool = True) -> None:
        self.plan: Plan = context.plan
        self.mesh: Mesh = context.mesh
        self.phases: PhaseTimer = context.phases
        self.module: nn.Module = context.root.module
        self.step = 0
        self._unreduced: LocalLoss | None = None
        self._adds_to_unreduced = False
        self.dropout_rng = context.dropout_rng
        self.loss_scale = context.normalizer.loss_scale
        self.copies: Mapping[str, tuple[int, int]] = context.copies
        self.compression = context.axes.find(GradientCompression)
        self._context = context
        self._has_weights = has_weights
        self._parameters = ParametersOfRank(context)
        self._split = context.axes.find(ContextParallelBatchSplitter)
        self._watch = context.axes.find(BackwardCommunicationTimer)
        self._interceptor = RandomOpInterceptor(self.module, context)
        expected = context.plan.model_shape.may_have_routers
        self._loads = ReducedRouterLoads.collect(
            self.module, context.mesh, context.phases, expected=expected
        )
        # Biases of routers move in `update`: after an optimizer's own step alone they would stay
        # behind.
        context.optimizer_params.watch_optimizer_steps(
            self.module.parameters() if self._loads.has_router_biases else ()
        )
        self.block_squares = BlockSquares(
            context.block_of, self._parameters, context.plan, context.mesh.rank
        )
        self._reducer = StepReducer(context, self._parameters, self._loads, self.block_squares)
        self._forward = MicrobatchLossForward(context)
        self._executor, self.pipeline = self._build_executor()
        self.is_staged = self.pipeline is not None
        """True for a part of a pipeline: other ranks may have parameters to train where this one
        has none."""

    def _build_executor(self) -> tuple[Executor, PipelineExecutor | None]:
        staged = self._context.axes.find(PipelineOfRank)
        if staged is None:
            return DirectExecutor(self._context, self._interceptor, self._forward), None
        pipeline = PipelineExecutor(self._context, staged, self._interceptor, self._forward)
        return pipeline, pipeline

    @property
    def module_with_objective(self) -> nn.Module:
        """What is called for each microbatch: the module, and after it the objective on its outputs
        where this rank has the last of them."""
        return self._context.root

    def persistent_buffers(self) -> list[torch.Tensor]:
        """The buffers of this rank's module that a checkpoint holds, as they are now."""
        buffers = []
        for part, name in self._buffer_places:
            buffer = part._buffers[name]
            if buffer is not None:
                buffers.append(buffer)
        return buffers

    def list_places_never_saved(self) -> list[tuple[nn.Module, str, str]]:
        """(module, name in it, whole name) of each buffer that no checkpoint holds."""
        return [
            (part, name, f"{part_name}.{name}".removeprefix("."))
            for part_name, part in self.module.named_modules()
            for name in part._non_persistent_buffers_set
        ]

    @functools.cached_property
    def _buffer_places(self) -> list[tuple[nn.Module, str]]:
        places = []
        for part in self.module.modules():
            for name in part._buffers:
                if name not in part._non_persistent_buffers_set:
                    places.append((part, name))
        return places

    @property
    def saved_bytes(self) -> int | None:
        """Bytes autograd kept for the backward; None before the first one, and where they are out
        of sight (can_count_saved_bytes)."""
        return self._executor.saved_bytes

    @property
    def operator_cost(self) -> OperatorCost | None:
        """The host's cost of a microbatch's operators; None before the third step, in
        pipelines, on GPUs, and on other ranks than 0."""
        return self._executor.operator_cost

    @property
    def finished_at(self) -> Any:
        """Mark of `phases.clock` when this rank left the reduction of the last step, as all do
        at about one time."""
        return self._reducer.finished_at

    @property
    def expert_load(self) -> Mapping[str, RouterStepLoad]:
        """By name of this rank's routers: what came to their experts in the last step, over all
        ranks."""
        return self._loads.last_step_loads

    @property
    def left_to_torch(self) -> Mapping[str, str]:
        """Modules that draw as torch does, so that their numbers depend on the layout: name -> why.

        Known once a step was done.
        """
        return self.dropout_rng.left_to_torch

    @property
    def unused_parameters(self) -> frozenset[str]:
        """Names of those that had no part in a loss of this rank so far, where
        parallel.unused_parameters allows it."""
        if self._watch is None:
            return frozenset()
        return frozenset(self._watch.unused)

    def take_replaced_parameters(self) -> list[str]:
        """Full names of trained parameters of which FSDP has found others in their place since the
        last call, and has put its own back; tied ones may go by an alias. Elsewhere a replaced
        parameter stays where it is seen."""
        replaced = self._context.axes.find(ReplacedParameters)
        return [] if replaced is None else replaced.take_names()

    def list_replaced_parameters(self) -> list[str]:
        """What `take_replaced_parameters` would give, and those in whose place others are now,
        which FSDP will take out again."""
        replaced = self._context.axes.find(ReplacedParameters)
        return [] if replaced is None else replaced.list_names()

    @property
    def gathers_weights(self) -> bool:
        """True if forwards read copies of weights that are gathered for them and freed afterwards
        (ZeRO-2 and 3)."""
        return self._context.axes.find(ReplacedParameters) is not None

    @property
    def plain_bytes(self) -> int:
        """`StepStats.sent_bytes` as it would be with uncompressed gradients in fp32; 0 if that
        is not known."""
        return self._context.traffic.gradients.plain_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on this rank's inputs.

        Raises LayoutError where it is cut into stages.
        """
        if self._split is not None:
            raise LayoutError(
                "a model whose sequences are cut (parallel.cp) is called through call_then"
            )
        with self._forward.open_autocast_context():
            return self._context.outer(args, kwargs, gather_logits)

    def call_then(self, batch: Batch, then: Callable[[Any], Any]) -> Any:
        """`then(outputs)` of one forward, run while a sharded model's outermost weights are still
        whole.

        Of a pipeline: called where the last stage is, and must give a tensor, which every rank
        returns. Collective. With cp each rank has outputs of its own tokens; every rank returns, as
        a tensor, what is made where the last token is the last one. A batch is then inputs alone,
        of any length.
        """
        if self._split is None:
            return self._executor.run_forward_then(batch, then)
        with self._split.pad_batch_to_equal_chunks(batch) as padded:
            return self._split.group.broadcast_from_rank_of_last_token(
                self._executor.run_forward_then(padded, then)
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters an optimizer updates: this rank's shards, as DTensors where they are
        sharded."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._parameters.iterate_optimizer_parameters()

    def train(self, mode: bool = True) -> None:
        self._context.outer.train(mode)

    def shards(self) -> dict[str, LogicalShard]:
        """Parameters and persistent buffers of this rank by full-model name; tied tensors appear
        once."""
        return self._parameters.collect_shards()[0]

    def trained_shards(self) -> dict[str, LogicalShard]:
        """Shards of what `named_parameters` gives, which may be less of each parameter than the
        rank holds."""
        return self._parameters.collect_trained_shards()

    def aliases(self) -> dict[str, str]:
        """Names of tied tensors -> the name they are stored under."""
        return self._parameters.collect_shards()[1]

    def forward_backward(
        self, microbatches: Sequence[Batch], objective: Objective, *, step: int | None = None
    ) -> LocalLoss:
        """Accumulate gradients over `microbatches`; ranks communicate during the last one only.

        Every rank must hand in the same number of microbatches. Returns local sums;
        `reduce_and_clip` makes them a step. What dropout drops is a function of `step`, the last
        one's number plus one if it is not given.
        """
        assert microbatches, "a step needs at least one microbatch"
        assert self._has_weights, (
            "nothing was written into shards() yet, or refresh() was not called after it"
        )
        with self.phases("prepare"):
            microbatches = [flatten_batch(batch, of_tensors=True) for batch in microbatches]
            self.step = self.step + 1 if step is None else step
            # Whoever draws outside of dropout layers is found by watching the generator over a
            # step.
            self._interceptor.begin_step()
            self._context.optimizer_params.require_model_updated_after_step()
            self._adds_to_unreduced = self._unreduced is not None and any(
                parameter.grad is not None and bool(get_local_tensor(parameter.grad).any())
                for parameter in self.parameters()
            )
            if not self._adds_to_unreduced:
                self._context.missing_gradients.begin_step()
            # A pipeline's stages do not see the objective: they are told what a balance loss of
            # experts weighs beside it.
            balance = getattr(self.module, "balance", None)
            if balance is not None:
                balance.scale = self._context.normalizer.loss_multiplier
            loss_sum, num_targets = self._zero_loss_sum(), self._zero_loss_sum()

        losses: list[torch.Tensor] = []

        def add(loss: torch.Tensor, targets: torch.Tensor) -> None:
            loss_sum.add_(loss)
            num_targets.add_(targets)
            losses.append(loss)

        with self._context.traffic.counting_step_traffic():
            with naming_sparse_gradients(self.module):
                self._executor.forward_backward(microbatches, objective, self.step, add)
            with self.phases("prepare"):
                self._interceptor.end_step()
                # Inside of `counting_step_traffic`: it reduces the gradients that DDP and FSDP
                # leave to us.
                self._context.optimizer_params.move_gradients_to_optimizer()
        self._unreduced = self._build_local_loss(loss_sum, num_targets, losses)
        return self._unreduced

    def _build_local_loss(
        self, loss_sum: torch.Tensor, num_targets: torch.Tensor, losses: list[torch.Tensor]
    ) -> LocalLoss:
        if self.plan.is_layout_free:
            return LocalLoss(loss_sum, num_targets, tuple(losses))
        return LocalLoss(loss_sum, num_targets)

    @property
    def why_step_is_done_once(self) -> str:
        """The reason why this rank cannot do a second forward and backward of a batch without a
        trace; empty if it can, as far as buffers are put back."""
        if self.compression is not None:
            return "compressed gradients would count it twice"
        if self._loads.routers:
            return "loads of experts would count it twice"
        return ""

    @property
    def sets_buckets_anew(self) -> bool:
        """True if DDP orders its buckets by the first backward: of three addends or more the sum
        then rounds otherwise from the second step on.

        Not where a forward and a backward whose gradients nobody takes may leave a trace.
        """
        ddp = self._context.outer
        if not isinstance(ddp, DistributedDataParallel):
            return False
        if self.compression is not None or self.plan.model_shape.may_have_routers:
            return False
        if ddp.find_unused_parameters:
            return False
        return self.mesh.layout.gradient_reduction_layout.data_parallel_size > 2

    def settle_buckets(self, microbatch: Batch, objective: Objective, *, step: int) -> None:
        """Have DDP set its buckets as they are from the second step of a run on, by a forward and
        a backward whose gradients nobody takes. Collective.

        Statistics of batches are what they were before.
        """
        buffers = self.persistent_buffers()
        before = [buffer.detach().clone() for buffer in buffers]
        self.forward_backward([microbatch], objective, step=step)
        self._unreduced = None
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    def _zero_loss_sum(self) -> torch.Tensor:
        # In fp64: sums over ranks in any order then agree to more digits than fp32 has.
        return torch.zeros((), dtype=torch.float64, device=self.mesh.device)

    @torch.no_grad()
    def reduce_and_clip(
        self,
        local_loss: LocalLoss,
        *,
        max_norm: float | None = None,
        flags: Sequence[float] = (),
        by_block: BlockNormRequest = NO_BLOCK_NORMS,
    ) -> StepStats:
        """One reduction over all ranks: loss, targets, the exact global gradient norm, `flags`, and
        what is asked for by block of the model (`block_squares.names`).

        Then gradients become those of sum(loss) / sum(targets), scaled down to `max_norm` if their
        norm exceeds it. Raises LayoutError for the sums of the last of several `forward_backward`
        whose gradients add up.
        """
        if self._adds_to_unreduced and local_loss is self._unreduced:
            raise LayoutError(
                "gradients are those of several forward_backward, and the sums of the last alone",
                fix="hand in all microbatches of a step in one call of forward_backward",
            )
        self._unreduced = None
        return self._reducer.reduce_and_clip(
            local_loss, max_norm=max_norm, flags=flags, by_block=by_block
        )

    def finish_step(
        self, sums: LocalLoss, *, max_norm: float | None = None, votes: Sequence[float] = ()
    ) -> StepStats:
        """The old name of `reduce_and_clip`."""
        warn_renamed("finish_step", "reduce_and_clip")
        return self.reduce_and_clip(sums, max_norm=max_norm, flags=votes)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step()`, after which every rank sees what all ranks updated, and biases of
        routers follow what came to experts in the step.

        Collective. Raises LayoutError for gradients that are still sums of losses.
        """
        if self._unreduced is not None:
            raise LayoutError(
                "gradients are those of a sum of losses, which nobody divided by its targets",
                fix="call model.reduce_and_clip(local_loss) between forward_backward and update",
            )
        self._context.optimizer_params.require_optimizer_of_substitute_parameters(optimizer)
        optimizer.step()
        self._context.optimizer_params.copy_updates_to_model_on_all_ranks()
        self._loads.update_router_biases_once()

    def refresh(self) -> None:
        """After weights were written into `shards()`: what an optimizer has of them elsewhere
        follows."""
        self._context.optimizer_params.refresh()
        self._has_weights = True

    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Batch], objective: Objective) -> LocalLoss:
        """Local sums without gradients. Every rank must hand in the same number of microbatches."""
        loss_sum, num_targets = self._zero_loss_sum(), self._zero_loss_sum()
        losses: list[torch.Tensor] = []
        batches = (flatten_batch(batch, of_tensors=True) for batch in microbatches)
        try:
            for outcome in self._executor.evaluate(batches, objective):
                if outcome is not None:
                    loss_sum += outcome[0]
                    num_targets += outcome[1]
                    losses.append(outcome[0])
        finally:
            # No backward follows that would free the weights.
            self._context.hooks.run_release_weights_hooks()
        return self._build_local_loss(loss_sum, num_targets, losses)

    def reduce_sums(self, local_loss: LocalLoss) -> tuple[float, int]:
        """(loss per target, number of targets) over all ranks."""
        return self._reducer.reduce_sums(local_loss)
