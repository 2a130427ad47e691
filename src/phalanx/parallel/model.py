"""ParallelModel: what `parallelize` returns. The same calls in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.core.errors import LayoutError, PhalanxError
from phalanx.core.phases import Phases
from phalanx.mesh.logical import LogicalShard, local_tensor, module_shards
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.calling import NamedTensors, call_with_batch, describe_batch
from phalanx.parallel.indices import TAKES_CLASSES, require_ids, require_looked_up, require_targets
from phalanx.parallel.protocol import Workpiece
from phalanx.parallel.saved import SavedBytes
from phalanx.plan.planner import Plan

Batch = Mapping[str, torch.Tensor]
Objective = Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class StepSums:
    """This rank's sums over the microbatches of a step: 0-d fp64 tensors, not yet reduced."""

    loss_sum: torch.Tensor
    num_targets: torch.Tensor


@dataclass(frozen=True)
class StepFacts:
    """A step over all ranks. `loss` is per target; `grad_norm` is exact and before clipping.

    `finite`: loss and every gradient are. When it is False, or `num_targets` is 0, gradients were left as they were
    and the step must not be applied. `votes` are the sums over ranks of what each rank handed in.
    """

    loss: float
    num_targets: int
    grad_norm: float
    finite: bool
    votes: tuple[float, ...] = ()

    @property
    def reason_to_skip(self) -> str | None:
        """Why the step must not be applied, or None."""
        if self.num_targets == 0:
            return "no_targets"
        return None if self.finite else "nonfinite_gradients"

    @property
    def usable(self) -> bool:
        return self.reason_to_skip is None


NORM_PIECE = 1 << 16  # elements


def _pieces(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """`gradients` cut small: the CPU's norm adds squares one after another in fp32 and loses 0.2 % of 50 M elements."""
    if gradients[0].device.type != "cpu":
        return gradients
    return [piece for gradient in gradients for piece in gradient.reshape(-1).split(NORM_PIECE)]


def _norm_dtype(gradients: list[torch.Tensor]) -> torch.dtype:
    """At least fp32: a norm of half-precision gradients in their own type has three digits."""
    wide = torch.float32
    for gradient in gradients:
        wide = torch.promote_types(wide, gradient.dtype)
    return wide


def _require_sums(found: Any) -> None:
    """An objective returns (loss_sum, num_targets); what is easily returned instead is a mean loss."""
    fix = "return (loss_sum, num_targets): the sum of the losses, a tensor of no dimensions, and how many they are"
    if not isinstance(found, tuple) or len(found) != 2:
        raise LayoutError(f"the objective returned {_kind(found)}", fix=fix)
    loss, targets = found
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
        raise LayoutError(f"the objective's loss_sum is {_kind(loss)}", fix=fix)
    if (isinstance(targets, torch.Tensor) and targets.ndim) or not isinstance(targets, torch.Tensor | int | float):
        raise LayoutError(f"the objective's num_targets is {_kind(targets)}", fix=fix)
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise LayoutError(
            "the objective's loss_sum has no gradient",
            fix="compute it from the model's outputs with torch, without detach(), item() or no_grad",
        )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")


class ParallelModel:
    """This rank's part of a model, and the calls that train it."""

    def __init__(self, piece: Workpiece) -> None:
        self._piece = piece
        self.plan: Plan = piece.plan
        self.mesh: Mesh = piece.mesh
        self.phases: Phases = piece.phases
        self.module: nn.Module = piece.root.module
        self.saved_bytes: int | None = None
        """Bytes autograd kept in the first microbatch; None before it, and where blocks are recomputed or compiled."""
        self._count_saved = piece.plan.recompute == "none" and not piece.plan.compile
        # Gradients are reduced after division by this constant; finish_step applies the exact token factor.
        self._constant = float(piece.plan.targets_per_rank)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on this rank's inputs."""
        with self._autocast():
            return self._piece.outer(args, kwargs, None)

    def call_then(self, batch: Batch, then: Callable[[Any], Any]) -> Any:
        """`then(outputs)` of one forward, run while a sharded model's outermost weights are still whole."""
        args, kwargs = call_with_batch(self.module, batch)
        with self._autocast():
            return self._piece.outer(args, kwargs, then)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters an optimizer updates: this rank's shards, as DTensors where they are sharded."""
        self._piece.rest()
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        self._piece.rest()
        return self.module.named_parameters()

    def train(self, mode: bool = True) -> None:
        self._piece.outer.train(mode)

    def shards(self) -> dict[str, LogicalShard]:
        """Parameters and persistent buffers of this rank by full-model name; tied tensors appear once."""
        return self._shards()[0]

    def aliases(self) -> dict[str, str]:
        """Names of tied tensors -> the name they are stored under."""
        return self._shards()[1]

    def _shards(self) -> tuple[dict[str, LogicalShard], dict[str, str]]:
        self._piece.rest()
        return module_shards(self.module, replica=self.mesh.rank, num_replicas=self.mesh.world_size)

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self._piece.autocast or self.plan.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.mesh.device.type, self._piece.compute_dtype)

    def forward_backward(self, microbatches: Sequence[Batch], objective: Objective) -> StepSums:
        """Accumulate gradients over `microbatches`; ranks communicate during the last one only.

        Every rank must hand in the same number of microbatches. Returns local sums; `finish_step` makes them a step.
        """
        assert microbatches, "a step needs at least one microbatch"
        device = self.mesh.device
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        num_targets = torch.zeros((), dtype=torch.float64, device=device)
        for index, batch in enumerate(microbatches):
            with self._piece.sync(index == len(microbatches) - 1):
                with self.phases("forward"), self._counting_once():
                    loss, targets = self._loss(batch, objective)
                with self.phases("backward"):
                    (loss / self._constant).backward()
                    self._piece.after_backward()
            loss_sum += loss.detach()
            num_targets += targets
        return StepSums(loss_sum, num_targets)

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
    def evaluate(self, microbatches: Iterable[Batch], objective: Objective) -> StepSums:
        """Local sums without gradients. Every rank must hand in the same number of microbatches."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        num_targets = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        try:
            for batch in microbatches:
                loss, targets = self._loss(batch, objective)
                loss_sum += loss
                num_targets += targets
        finally:  # no backward follows that would free the weights
            self._piece.rest()
        return StepSums(loss_sum, num_targets)

    def _loss(self, batch: Batch, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
        given = batch
        if self.plan.model_shape.is_known:
            require_ids(given, self.plan.vocab_size)
        batch = NamedTensors({key: t.to(self.mesh.device, non_blocking=True) for key, t in given.items()})

        def loss_of(outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if getattr(objective, TAKES_CLASSES, False):
                require_targets(given, outputs)
            return objective(outputs, batch)

        try:
            found = self.call_then(batch, loss_of)
        except Exception as error:
            if not isinstance(error, PhalanxError):
                require_looked_up(given, error)
                error.add_note(f"the batch: {describe_batch(batch)}")
            raise
        _require_sums(found)
        loss, targets = found
        return loss, targets

    @torch.no_grad()
    def finish_step(self, sums: StepSums, *, max_norm: float | None = None, votes: Sequence[float] = ()) -> StepFacts:
        """One reduction over all ranks: loss, targets, the exact global gradient norm and `votes`.

        Then gradients become those of sum(loss) / sum(targets), scaled down to `max_norm` if their norm exceeds it.
        """
        with self.phases("optimizer"):
            gradients = [local_tensor(p.grad) for p in self.parameters() if p.grad is not None]
            gradients = [g for g in gradients if g.numel()]
            squares = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
            if gradients:
                norms = torch._foreach_norm(_pieces(gradients), 2, dtype=_norm_dtype(gradients))
                squares = torch.stack(norms).double().square().sum()
            # Ranks that hold the same gradient each bring an equal part of its square.
            squares = squares / self.plan.layout.dp_replicate
            vector = torch.stack((sums.loss_sum, sums.num_targets, squares))
            vector = torch.cat((vector, torch.tensor(votes, dtype=torch.float64, device=vector.device)))
        with self.phases("collective", "all_reduce step facts"):
            self.mesh.all_reduce_sum(vector)
            loss_sum, num_targets, total_squares, *reduced = vector.tolist()
        if num_targets == 0:
            return StepFacts(0.0, 0, 0.0, True, tuple(reduced))
        factor = self.plan.layout.data_parallel_size * self._constant / num_targets
        norm = factor * total_squares**0.5
        loss = loss_sum / num_targets
        finite = norm - norm == 0.0 and loss - loss == 0.0  # false for NaN and infinities
        if finite:
            if max_norm is not None and norm > max_norm:
                factor *= max_norm / norm
            if factor != 1.0:
                with self.phases("optimizer"):
                    torch._foreach_mul_(gradients, factor)
        return StepFacts(loss, int(num_targets), norm, finite, tuple(reduced))

    def reduce_sums(self, sums: StepSums) -> tuple[float, int]:
        """(loss per target, number of targets) over all ranks."""
        vector = self.mesh.all_reduce_sum(torch.stack((sums.loss_sum, sums.num_targets)))
        loss_sum, num_targets = vector.tolist()
        return (loss_sum / num_targets if num_targets else float("nan")), int(num_targets)
