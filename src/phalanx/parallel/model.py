"""ParallelModel: what `parallelize` returns. The same calls in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from phalanx.core.batch import flat_entries
from phalanx.core.deprecated import warn_renamed
from phalanx.core.errors import LayoutError, PhalanxError
from phalanx.core.phases import Phases
from phalanx.mesh.logical import LogicalShard, full_name
from phalanx.mesh.mesh import Mesh
from phalanx.mesh.transfer import fill_on_device, pin_memory
from phalanx.parallel.call.bind_batch import NamedTensors, call_with_batch, describe_batch
from phalanx.parallel.call.check_indices import (
    TAKES_CLASSES,
    require_ids,
    require_looked_up,
    require_targets,
)
from phalanx.parallel.call.check_objective import require_sums
from phalanx.parallel.dropout.interceptor import RandomOpInterceptor
from phalanx.parallel.expert.router_load import ExpertLoad, RouterLoads
from phalanx.parallel.gradients import Held, held_by, own_squares
from phalanx.parallel.loss_scale import loss_scale_of
from phalanx.parallel.pipeline.executor import PipelineRun, Span
from phalanx.parallel.protocol import ParallelContext
from phalanx.parallel.saved_tensors import SavedBytes, is_counted
from phalanx.plan.plan import Plan

Batch = Mapping[str, torch.Tensor]
Objective = Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class LocalLoss:
    """This rank's sums over the microbatches of a step: 0-d fp64 tensors, not yet reduced."""

    loss_sum: torch.Tensor
    num_targets: torch.Tensor


@dataclass(frozen=True)
class StepStats:
    """A step over all ranks. `loss` is per target; `grad_norm` is exact and before clipping.

    `finite`: loss and every gradient are. When it is False, or `num_targets` is 0, gradients were
    left as they were and the step must not be applied. `flags` are the sums over ranks of what each
    rank handed in.
    """

    loss: float
    num_targets: int
    grad_norm: float
    finite: bool
    flags: tuple[float, ...] = ()
    sent_bytes: int = 0
    """Bytes that this rank sent to reduce gradients."""
    sent_tp_bytes: int = 0
    """Bytes that this rank sent over tp; 0 in compiled code, where nobody counts."""
    sent_cp_bytes: int = 0
    sent_ep_bytes: int = 0
    sent_pp_bytes: int = 0
    loss_scale: float = 0.0
    """What the loss of this step was multiplied by; 0: nothing was scaled."""
    scale_adapts: bool = False

    @property
    def reason_to_skip(self) -> str | None:
        """Why the step must not be applied, or None.

        "overflow" is one that a smaller loss scale answers.
        """
        if self.num_targets == 0:
            return "no_targets"
        if self.finite:
            return None
        return "overflow" if self.scale_adapts else "nonfinite_gradients"

    @property
    def should_apply(self) -> bool:
        """True if the optimizer may apply the gradients of this step."""
        return self.reason_to_skip is None

    @property
    def usable(self) -> bool:
        """The old name of `should_apply`."""
        warn_renamed("usable", "should_apply")
        return self.should_apply


READS_PARTS = (  # what an objective has that can do with a part of the logits
    "reads_vocabulary_parts"
)


def gather_logits(outputs: Any) -> Any:
    """Logits of the whole vocabulary, where tensor parallelism has cut it or the objective was
    to make them."""
    gather_logits = getattr(outputs, "gather_logits", None)
    return outputs if gather_logits is None else gather_logits()


@dataclass(frozen=True)
class _Then:
    """Stands for an objective where outputs are wanted, not a loss."""

    then: Callable[[Any], Any]


class ParallelModel:
    """This rank's part of a model, and the calls that train it."""

    def __init__(self, context: ParallelContext, *, has_weights: bool = True) -> None:
        self._context = context
        self._has_weights = has_weights
        self.plan: Plan = context.plan
        self.mesh: Mesh = context.mesh
        self.phases: Phases = context.phases
        self.module: nn.Module = context.root.module
        self.saved_bytes: int | None = None
        """Bytes autograd kept in the first microbatch; None before it, and where they are out of
        sight (is_counted)."""
        self._count_saved = is_counted(context.plan)
        self._held: dict[str, tuple[Held, ...]] | None = None
        self._has_run = False  # a forward
        self._keeps_copies = False
        self._copied: dict[int, dict[str, torch.Tensor]] = {}  # by id of the batch
        self.step = 0
        """The last one that was begun."""
        self.finished_at: Any = 0.0
        """Mark of `phases.clock` when this rank left the reduction of the last step, as all do
        at about one time."""
        self._interceptor = RandomOpInterceptor(self.module, context)
        # Gradients are reduced after division by this constant; reduce_and_clip applies the exact
        # token factor.
        self._constant = float(context.plan.targets_per_rank)
        self.loss_scale = loss_scale_of(context.plan)
        if context.compression is not None:
            context.compression.loss_scale = self.loss_scale
        shape = context.plan.model_shape
        expected = shape.num_experts > 0 or not shape.is_known
        self._loads = RouterLoads.of(self.module, context.mesh, context.phases, expected=expected)
        context.optimizer_params.watch_optimizers(
            self.module.parameters() if self._loads.moves_biases else ()
        )
        self._run: PipelineRun | None = None
        if context.staged is not None:
            scaled = self._scaled_share
            self._run = PipelineRun(
                context, context.staged, self._interceptor, self._outcome, scaled
            )
            self._run.counts_saved = self._count_saved

    @property
    def is_staged(self) -> bool:
        """True for a part of a pipeline: others may have parameters to train where this rank has
        none."""
        return self._run is not None

    @property
    def pipeline_spans(self) -> list[Span] | None:
        """(action, begin, end) of what this rank computed in the last step, without waiting; None:
        no pipeline.

        Begin and end are marks of `phases.clock`: seconds of the host's perf_counter, or events on
        a GPU.
        """
        return None if self._run is None else self._run.spans

    @property
    def stages_of(self) -> Mapping[str, tuple[int, ...]]:
        """By full name of this rank's parameters: the pipeline stages that hold each; empty
        without a pipeline."""
        return {} if self._context.staged is None else self._context.staged.stages

    @property
    def is_amid_schedule(self) -> bool:
        """True once an error has left a pipeline's schedule half done: this rank's word alone,
        the others wait."""
        return self._run is not None and self._run.is_under_way

    @property
    def is_inferring_shapes(self) -> bool:
        """True while a pipeline learns what its stages hand on: what is computed then is thrown
        away."""
        return (
            self._context.staged is not None
            and self._context.staged.stage_forward.is_inferring_shapes
        )

    @property
    def rows_under_way(self) -> tuple[int, int] | None:
        """(step, its first row of that step's batch) of the microbatch whose forward is under way;
        None outside of `forward_backward`."""
        moment = self._context.dropout_rng.moment
        return None if moment is None else (moment.step, moment.first_row)

    @property
    def most_in_flight(self) -> dict[int, int]:
        """By own pipeline stage: the microbatches whose activations were held at once, at most."""
        return {} if self._run is None else dict(self._run.most_in_flight)

    @property
    def expert_load(self) -> Mapping[str, ExpertLoad]:
        """By name of this rank's routers: what came to their experts in the last step, over all
        ranks."""
        return self._loads.found

    @property
    def left_to_torch(self) -> Mapping[str, str]:
        """Modules that draw as torch does, so that their numbers depend on the layout: name -> why.

        Known once a step was done.
        """
        return self._context.dropout_rng.left_to_torch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on this rank's inputs.

        Raises LayoutError where it is cut into stages.
        """
        if self._context.cp is not None:
            raise LayoutError(
                "a model whose sequences are cut (parallel.cp) is called through call_then"
            )
        with self._autocast():
            return self._context.outer(args, kwargs, gather_logits)

    def call_then(self, batch: Batch, then: Callable[[Any], Any]) -> Any:
        """`then(outputs)` of one forward, run while a sharded model's outermost weights are still
        whole.

        Of a pipeline: called where the last stage is, and must give a tensor, which every rank
        returns. Collective. With cp each rank has outputs of its own tokens; every rank returns, as
        a tensor, what is made where the last token is the last one. A batch is then inputs alone,
        of any length.
        """
        cp = self._context.cp
        if cp is None:
            return self._call_then(batch, then)
        with cp.padded(batch) as padded:
            return cp.group.from_last(self._call_then(padded, then))

    def _call_then(self, batch: Batch, then: Callable[[Any], Any]) -> Any:
        if self._run is not None:
            (result,) = self._run.only_forward([batch], _Then(then))
            self._context.hooks.run_release_weights()
            return self._run.on_all(result)
        return self._call(batch if self._context.cp is None else self._context.cp.cut(batch), then)

    def _call(self, batch: Batch, then: Callable[[Any], Any]) -> Any:
        args, kwargs = call_with_batch(self.module, batch)
        with self._autocast():
            return self._context.outer(args, kwargs, then)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters an optimizer updates: this rank's shards, as DTensors where they are
        sharded."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        self._context.hooks.run_release_weights()
        return self._context.optimizer_params.named_parameters(self.module)

    def train(self, mode: bool = True) -> None:
        self._context.outer.train(mode)

    def shards(self) -> dict[str, LogicalShard]:
        """Parameters and persistent buffers of this rank by full-model name; tied tensors appear
        once."""
        return self._shards()[0]

    def trained_shards(self) -> dict[str, LogicalShard]:
        """Shards of what `named_parameters` gives, which may be less of each parameter than the
        rank holds."""
        found = self.shards()
        for raw_name, part in self._context.optimizer_params.named_shards(self.module):
            name = full_name(raw_name)
            found[name] = self._context.place.shard(name, part)
        return found

    def aliases(self) -> dict[str, str]:
        """Names of tied tensors -> the name they are stored under."""
        return self._shards()[1]

    @property
    def copies(self) -> Mapping[str, tuple[int, int]]:
        """Name -> (which, of how many) of parameters that several stages of a pipeline hold."""
        return {} if self._context.staged is None else self._context.staged.copies

    def reduction_shards(self) -> dict[str, LogicalShard]:
        """Shards of what compression keeps between steps, as `comm/<parameter>/<slot>`."""
        return (
            {}
            if self._context.compression is None
            else self._context.compression.shards(self.shards(), self.mesh)
        )

    def unsent_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients that compression has kept back on this rank, by name, in the units in which
        gradients are reduced."""
        return {} if self._context.compression is None else self._context.compression.errors()

    @property
    def plain_bytes(self) -> int:
        """`StepStats.sent_bytes` as it would be with uncompressed gradients in fp32; 0 if that
        is not known."""
        return self._context.traffic.gradients.plain_bytes

    def _shards(self) -> tuple[dict[str, LogicalShard], dict[str, str]]:
        self._context.hooks.run_release_weights()
        return self._context.shards()

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self._context.autocast or self.plan.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.mesh.device.type, self._context.compute_dtype)

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
        microbatches = [flat_entries(batch, of_tensors=True) for batch in microbatches]
        self.step = self.step + 1 if step is None else step
        self._interceptor.begin_step()
        self._context.optimizer_params.require_synced()
        self._weigh_balance()
        device = self.mesh.device
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        num_targets = torch.zeros((), dtype=torch.float64, device=device)

        def add(loss: torch.Tensor, targets: torch.Tensor) -> None:
            loss_sum.add_(loss)
            num_targets.add_(targets)

        with self._context.traffic.counting():
            if self._run is not None:
                with self._keeping_copies():
                    self._run.forward_backward(microbatches, objective, self.step, add)
                self.saved_bytes = self._run.peak_bytes or None
            else:
                self._run_microbatches(microbatches, objective, add)
            self._interceptor.end_step()
            self._context.optimizer_params.move_grads()
        return LocalLoss(loss_sum, num_targets)

    def _run_microbatches(
        self,
        microbatches: Sequence[Batch],
        objective: Objective,
        add: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        for index, batch in enumerate(microbatches):
            with (
                self._context.hooks.enter_microbatch(is_last=index == len(microbatches) - 1),
                self._interceptor.microbatch(self.step, index, batch),
            ):
                with self.phases("forward"), self._counting_once(), self._interceptor.forward():
                    loss, targets = self._loss(batch, objective)
                with self.phases("backward"):
                    self._scaled_share(loss).backward()
                    self._context.hooks.run_after_backward()
            add(loss.detach(), targets)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step()`, after which every rank sees what all ranks updated, and biases of
        routers follow what came to experts in the step.

        Collective.
        """
        self._context.optimizer_params.require_own_params(optimizer)
        optimizer.step()
        self._context.optimizer_params.sync_to_model()
        self._loads.move_biases()

    def refresh(self) -> None:
        """After weights were written into `shards()`: what an optimizer has of them elsewhere
        follows."""
        self._context.optimizer_params.refresh()
        self._has_weights = True

    @property
    def unused_parameters(self) -> frozenset[str]:
        """Names of those that had no part in a loss of this rank so far, where
        parallel.unused_parameters allows it."""
        return frozenset(self._context.unused)

    def _weigh_balance(self) -> None:
        """A pipeline's stages do not see the objective: what a balance loss weighs beside it is
        told beforehand."""
        balance = getattr(self.module, "balance", None)
        if balance is not None:
            balance.scale = (
                1.0 if self.loss_scale is None else self.loss_scale.scale
            ) / self._constant

    def _scaled_share(self, loss: torch.Tensor) -> torch.Tensor:
        """The share of the loss that gradients are taken of."""
        loss = loss / self._constant
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    @contextmanager
    def _keeping_copies(self) -> Iterator[None]:
        """While `microbatches` live: each is copied to the device once, though several stages
        ask for it."""
        self._keeps_copies = self.mesh.device.type != "cpu"
        try:
            yield
        finally:
            self._keeps_copies, self._copied = False, {}

    @contextmanager
    def _counting_once(self) -> Iterator[None]:
        if not self._count_saved:
            yield
            return
        self._count_saved, saved = False, SavedBytes()
        with saved.counting():
            yield
        self.saved_bytes = saved.num_bytes

    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Batch], objective: Objective) -> LocalLoss:
        """Local sums without gradients. Every rank must hand in the same number of microbatches."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        num_targets = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        try:
            for outcome in self._each(
                (flat_entries(batch, of_tensors=True) for batch in microbatches), objective
            ):
                if outcome is not None:
                    loss_sum += outcome[0]
                    num_targets += outcome[1]
        finally:  # no backward follows that would free the weights
            self._context.hooks.run_release_weights()
        return LocalLoss(loss_sum, num_targets)

    def _each(self, microbatches: Iterable[Batch], objective: Objective) -> Iterator[Any]:
        if self._run is not None:
            return self._run.only_forward(microbatches, objective)
        return (self._loss(batch, objective) for batch in microbatches)

    def _loss(self, batch: Batch, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
        loss, targets = self._outcome(batch, objective)
        return loss, targets

    def _outcome(self, batch: Batch, objective: Objective) -> Any:
        """(loss, targets); of a pipeline's stage that is not the last its hidden states."""
        microbatch, staged = batch, self._context.staged
        if self.plan.model_shape.is_known:
            require_ids(microbatch, self.plan.vocab_size)
        batch = self._on_device(microbatch)
        if self._context.cp is not None:
            batch = NamedTensors(self._context.cp.cut(batch))

        def loss_of(outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if staged is not None:
                staged.stage_forward.require_clean_outputs(outputs)
                if (
                    staged.stage_forward.is_inferring_shapes
                ):  # an objective counts and draws as often as there are microbatches
                    return torch.zeros(()), torch.zeros(())
            if isinstance(objective, _Then):
                return objective.then(outputs)
            if not getattr(objective, READS_PARTS, False):
                outputs = gather_logits(outputs)
            if getattr(objective, TAKES_CLASSES, False):
                require_targets(microbatch, outputs)
            return objective(outputs, batch)

        try:
            outcome = self._call(batch, loss_of)
        except Exception as error:
            if not isinstance(error, PhalanxError):
                require_looked_up(microbatch, error)
                if (
                    not self._has_run
                    and (refusal := self._context.hooks.find_explanation(error)) is not None
                ):
                    raise refusal from error
                error.add_note(f"the batch: {describe_batch(batch)}")
                if self._context.cuts:
                    error.add_note(
                        "tp has cut parameters by rules: a view that counts heads or features needs"
                        " divide="
                    )
            raise
        self._has_run = True
        if (staged is not None and not staged.stage_forward.is_last_stage) or isinstance(
            objective, _Then
        ):
            return outcome
        require_sums(outcome)
        return outcome

    def _on_device(self, given: Batch) -> NamedTensors:
        """`given` on this rank's device.

        From page-locked memory, which a loader's thread may have put it in already: a copy from
        other memory waits for all that the device has to do. Stages of a pipeline share one copy.
        """
        device = self.mesh.device
        if id(given) in self._copied:
            return NamedTensors(self._copied[id(given)])
        copied = {
            key: pin_memory(t, device).to(device, non_blocking=True) for key, t in given.items()
        }
        if self._keeps_copies:
            self._copied[id(given)] = copied
        return NamedTensors(copied)

    @torch.no_grad()
    def reduce_and_clip(
        self, local_loss: LocalLoss, *, max_norm: float | None = None, flags: Sequence[float] = ()
    ) -> StepStats:
        """One reduction over all ranks: loss, targets, the exact global gradient norm and `flags`.

        Then gradients become those of sum(loss) / sum(targets), scaled down to `max_norm` if their
        norm exceeds it.
        """
        with self._context.traffic.counting():
            self._context.hooks.run_before_reduce(self.named_parameters())
        sent = self._context.traffic.take()
        self._loads.reduce()
        with self.phases("optimizer"):
            gradients, squares = self._gradients()
            vector = torch.stack((*self._counted(local_loss), squares))
            vector = torch.cat((vector, fill_on_device(flags, vector.device)))
        with self.phases("collective", "all_reduce step facts"):
            self.mesh.all_reduce_sum(vector)
            loss_sum, num_targets, total_squares, *reduced = vector.tolist()
            self.finished_at = self.phases.clock.mark()
        facts = StepStats(
            0.0,
            0,
            0.0,
            True,
            tuple(reduced),
            sent_bytes=sent["dp"],
            sent_tp_bytes=sent["tp"],
            sent_cp_bytes=sent["cp"],
            sent_ep_bytes=sent["ep"],
            sent_pp_bytes=sent["pp"],
        )
        scale = self.loss_scale
        if num_targets == 0:
            return facts
        factor = (
            self.plan.layout.reduced.data_parallel_size
            * self._constant
            / num_targets
            / (scale.scale if scale else 1.0)
        )
        norm = factor * total_squares**0.5
        loss = loss_sum / num_targets
        finite = norm - norm == 0.0 and loss - loss == 0.0  # false for NaN and infinities
        if finite:
            if max_norm is not None and norm > max_norm:
                factor *= max_norm / norm
            if factor != 1.0 and gradients:  # a stage may have none: all of it frozen
                with self.phases("optimizer"):
                    torch._foreach_mul_(gradients, factor)
        facts = replace(
            facts, loss=loss, num_targets=int(num_targets), grad_norm=norm, finite=finite
        )
        if scale is not None:
            facts = replace(facts, loss_scale=scale.scale, scale_adapts=scale.is_dynamic)
            scale.after(finite=finite)
        return facts

    def finish_step(
        self, sums: LocalLoss, *, max_norm: float | None = None, votes: Sequence[float] = ()
    ) -> StepStats:
        """The old name of `reduce_and_clip`."""
        warn_renamed("finish_step", "reduce_and_clip")
        return self.reduce_and_clip(sums, max_norm=max_norm, flags=votes)

    def _gradients(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(this rank's gradients, its part of the sum of their squares)."""
        if self._held is None:
            self._held = {name: held_by(shard) for name, shard in self.trained_shards().items()}
        gradients, squares = own_squares(self.named_parameters(), self._held)
        if (
            squares.device != self.mesh.device
        ):  # gradients in host memory: a number that the host has costs a kernel
            squares = fill_on_device((squares.item(),), self.mesh.device)[0]
        return gradients, squares

    def _counted(self, local_loss: LocalLoss) -> tuple[torch.Tensor, torch.Tensor]:
        """Ranks that read the same samples have the same sums: one of them counts."""
        if self.mesh.is_tp_leader:
            return local_loss.loss_sum, local_loss.num_targets
        return torch.zeros_like(local_loss.loss_sum), torch.zeros_like(local_loss.num_targets)

    def reduce_sums(self, local_loss: LocalLoss) -> tuple[float, int]:
        """(loss per target, number of targets) over all ranks."""
        vector = self.mesh.all_reduce_sum(torch.stack(self._counted(local_loss)))
        loss_sum, num_targets = vector.tolist()
        return (loss_sum / num_targets if num_targets else float("nan")), int(num_targets)
