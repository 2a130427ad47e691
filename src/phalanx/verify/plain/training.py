"""A second training loop, written out from the definitions: rates, clipping, skipped steps, AdamW
and SGD, evaluations, loss scale.

Imports torch and the standard library alone: the trainer that it is compared with shares nothing
with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

Batch = Mapping[str, torch.Tensor]
LossSum = Callable[[nn.Module, Batch], tuple[torch.Tensor, torch.Tensor]]
"""(sum of the losses of a batch's targets, how many they are)."""
ForwardContext = Callable[[int, int, int], AbstractContextManager[None]]
"""What a forward runs in: of (step, counted from 1; its first row of the step's batch; how many
rows)."""
Tensors = dict[str, torch.Tensor]

NORM_TYPES = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
)
PLAIN_OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True)
class RateSchedule:
    """The learning rate over a run of `num_steps`: linear warm-up to `peak` in the step `warmup`,
    then a shape that ends, in the last step, at `peak` x `last_over_peak`.

    `kind`: cosine (half a period), linear, constant, or wsd (constant, then linear over the last
    `decay_fraction` of the steps).
    """

    kind: str
    peak: float
    warmup: int
    num_steps: int
    last_over_peak: float
    decay_fraction: float

    def rate(self, step: int) -> float:
        """The rate of the update of `step`, counted from 1."""
        if step <= self.warmup:
            return self.peak / self.warmup * step
        if self.kind == "constant":
            return self.peak
        decay_steps = self.num_steps - self.warmup
        if self.kind == "wsd":
            decay_steps = max(1, round(self.decay_fraction * self.num_steps))
        remaining = min(1.0, (self.num_steps - step) / max(1, decay_steps))
        if self.kind == "cosine":
            remaining = (1 - math.cos(math.pi * remaining)) / 2
        return self.peak * (self.last_over_peak + (1 - self.last_over_peak) * remaining)


@dataclass(frozen=True)
class OptimizerDefinition:
    """An optimizer by its definition: `kind` is one of PLAIN_OPTIMIZERS."""

    kind: str
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    momentum: float

    def start(self, parameter: torch.Tensor) -> Tensors:
        """The state of a parameter before its first update."""
        if self.kind == "adamw":
            return {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        if self.momentum:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return {}

    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: Tensors,
        *,
        rate: float,
        decays: bool,
    ) -> None:
        """Change `parameter` and its `state` by one update."""
        decay = self.weight_decay if decays else 0.0
        if self.kind == "sgd":
            # L2: the decay is a part of the gradient.
            gradient = gradient + decay * parameter
            if self.momentum:
                gradient = self.momentum * state["momentum_buffer"] + gradient
                state["momentum_buffer"].copy_(gradient)
            parameter.sub_(rate * gradient)
            return
        # Loshchilov and Hutter (2019): the decay does not pass through the moments.
        parameter.sub_(rate * decay * parameter)
        state["step"] += 1
        count, (beta1, beta2) = int(state["step"]), self.betas
        first = beta1 * state["exp_avg"] + (1 - beta1) * gradient
        second = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient**2
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        root = (second / (1 - beta2**count)).sqrt()
        parameter.sub_(rate * (first / (1 - beta1**count)) / (root + self.eps))


@dataclass
class LossScaleRule:
    """Dynamic loss scaling: halved by a step that is not finite, doubled after `growth_steps` good
    ones in a row. With `growth_steps` 0 the scale is fixed."""

    scale: float
    growth_steps: int
    num_good: int = 0

    def adjust_scale(self, *, is_finite: bool) -> None:
        if not self.growth_steps:
            return
        if not is_finite:
            self.scale, self.num_good = self.scale / 2, 0
            return
        self.num_good += 1
        if self.num_good == self.growth_steps:
            self.scale, self.num_good = self.scale * 2, 0


@dataclass(frozen=True)
class HeldOutSource:
    """Batches to evaluate, and what their loss weighs in the loss over all sources."""

    weight: float
    batches: Sequence[Batch]


@dataclass(frozen=True)
class PlainRun:
    """A run as the loop is told of it. Steps are counted from 1.

    `gradient_factors`: what the gradients of a step's first microbatch are multiplied by;
    `step_factors`: what those of all of its microbatches are. `infinite_losses`: the steps in which
    the loss of the first microbatch is infinite, and its gradients are what they are without.
    `refused`: steps that a guard refuses though they are good. `evaluated`: the steps after which
    `held_out` is evaluated. `loss_scale`: (first scale, growth_steps), None where nothing is
    scaled.
    """

    steps: Sequence[Sequence[Batch]]
    held_out: Mapping[str, HeldOutSource]
    evaluated: frozenset[int]
    schedule: RateSchedule
    rule: OptimizerDefinition
    max_norm: float | None
    gradient_factors: Mapping[int, float]
    step_factors: Mapping[int, float] = field(default_factory=dict)
    infinite_losses: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()
    loss_scale: tuple[float, int] | None = None


@dataclass(frozen=True)
class PlainEvaluation:
    """`loss` per target in evaluation mode: the mean of the sources' own losses, by their weights,
    and `num_targets` of all. A source without targets has no loss, and is not in
    `loss_by_source`."""

    loss: float
    num_targets: int
    loss_by_source: Mapping[str, float]


@dataclass(frozen=True)
class PlainStep:
    """A step and the state after it.

    `skipped`: "" if it was applied, else "no_targets", "not_finite" or "refused". `grad_norm` is
    before clipping, `gradients` are after it (none of a skipped step). `evaluation`: after the
    step, None where nothing was evaluated.
    """

    step: int
    loss: float
    num_targets: int
    grad_norm: float
    rate: float
    skipped: str
    is_clipped: bool
    tokens_seen: int
    loss_scale: float
    gradients: Tensors
    weights: Tensors
    buffers: Tensors
    states: Mapping[str, Tensors]
    evaluation: PlainEvaluation | None


def find_decayed_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters that decay: all but norms, biases, other vectors and embeddings.

    A tensor with several names decays if it does under all of them.
    """
    exempt: set[int] = set()
    for holder in module.modules():
        is_exempt = isinstance(holder, (nn.Embedding, nn.EmbeddingBag, *NORM_TYPES))
        for name, parameter in holder.named_parameters(recurse=False):
            if is_exempt or parameter.ndim <= 1 or "embed" in name:
                exempt.add(id(parameter))
    return {name for name, tensor in module.named_parameters() if id(tensor) not in exempt}


def train_by_definition(
    module: nn.Module,
    loss_sum: LossSum,
    run: PlainRun,
    *,
    around: ForwardContext = lambda step, first_row, num_rows: nullcontext(),
) -> Iterator[PlainStep]:
    """Train `module` as `run` says; yields after each step. Tensors of a PlainStep are those of
    training: whoever keeps them copies them."""
    decayed = find_decayed_parameters(module)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    states = {name: run.rule.start(parameter.detach()) for name, parameter in named.items()}
    scale = None if run.loss_scale is None else LossScaleRule(*run.loss_scale)
    tokens_seen = 0
    for number, microbatches in enumerate(run.steps, start=1):
        before = {name: buffer.clone() for name, buffer in _list_persistent_buffers(module).items()}
        loss, count = _accumulate_gradients(module, loss_sum, run, number, microbatches, around)
        tokens_seen += count
        gradients = _average_gradients(named, max(1, count))
        norm = _compute_l2_norm(gradients)
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        used_scale = 0.0
        # Of a step without targets nothing is known that a scale could follow.
        if scale is not None and count:
            used_scale = scale.scale
            scale.adjust_scale(is_finite=is_finite)
        skipped = ""
        if not count:
            skipped = "no_targets"
        elif not is_finite:
            skipped = "not_finite"
        elif number in run.refused:
            skipped = "refused"
        is_clipped, rate = False, run.schedule.rate(number)
        if skipped:
            gradients = {}
            _undo_forwards(module, before)
        else:
            gradients, is_clipped = _clip_gradients(gradients, norm, run.max_norm)
            _update_parameters(named, gradients, states, run.rule, rate, decayed)
            # Routers move their biases by the load of the step.
            if hasattr(module, "after_step"):
                module.after_step()
        evaluation = None
        if number in run.evaluated:
            evaluation = evaluate_by_definition(module, loss_sum, run.held_out)
        yield PlainStep(
            step=number,
            loss=loss / max(1, count),
            num_targets=count,
            grad_norm=norm if count else 0.0,
            rate=rate,
            skipped=skipped,
            is_clipped=is_clipped,
            tokens_seen=tokens_seen,
            loss_scale=used_scale,
            gradients=gradients,
            weights=dict(module.named_parameters()),
            buffers=_list_persistent_buffers(module),
            states=states,
            evaluation=evaluation,
        )


def _average_gradients(named: Mapping[str, nn.Parameter], count: int) -> Tensors:
    """The gradients that a step's backwards have left, over `count`."""
    return {name: p.grad / count for name, p in named.items() if p.grad is not None}


def _clip_gradients(
    gradients: Tensors, norm: float, max_norm: float | None
) -> tuple[Tensors, bool]:
    """(the gradients scaled down to `max_norm`, True if their `norm` was above it)."""
    if max_norm is None or norm <= max_norm:
        return gradients, False
    return {name: gradient * (max_norm / norm) for name, gradient in gradients.items()}, True


@torch.no_grad()
def _undo_forwards(module: nn.Module, before: Tensors) -> None:
    """Take back what the forwards of a skipped step have moved: the buffers, such as the running
    mean of a batch norm, are those of `before`, and what its tokens chose moves no bias of a
    router, neither now nor in the next step."""
    for part in module.modules():
        if hasattr(part, "load") and hasattr(part, "num_experts"):
            part.load.take(part.num_experts, next(part.parameters()).device)
    for name, buffer in _list_persistent_buffers(module).items():
        if name in before:
            buffer.copy_(before[name])


def _accumulate_gradients(
    module: nn.Module,
    loss_sum: LossSum,
    run: PlainRun,
    step: int,
    microbatches: Sequence[Batch],
    around: ForwardContext,
) -> tuple[float, int]:
    """(sum of the losses of a step, number of its targets); the gradients of that sum stay in
    `module`."""
    module.zero_grad()
    loss, count, first_row = 0.0, 0, 0
    for index, batch in enumerate(microbatches):
        num_rows = len(next(iter(batch.values())))
        with around(step, first_row, num_rows):
            total, targets = loss_sum(module, batch)
        first_row += num_rows
        factor = run.step_factors.get(step, 1.0)
        if index == 0:
            factor *= run.gradient_factors.get(step, 1.0)
        # The loss stays what it is: only its gradients are multiplied.
        (total * factor).backward()
        loss, count = loss + total.item(), count + int(targets)
    if step in run.infinite_losses:
        loss = math.inf
    return loss, count


@torch.no_grad()
def _update_parameters(
    named: Mapping[str, torch.Tensor],
    gradients: Tensors,
    states: Mapping[str, Tensors],
    rule: OptimizerDefinition,
    rate: float,
    decayed: set[str],
) -> None:
    for name, gradient in gradients.items():
        rule.update(named[name], gradient, states[name], rate=rate, decays=name in decayed)


@torch.no_grad()
def evaluate_by_definition(
    module: nn.Module, loss_sum: LossSum, held_out: Mapping[str, HeldOutSource]
) -> PlainEvaluation:
    """Evaluate; modes and buffers are left as they were."""
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    module.eval()
    weighted, weights, num_targets = 0.0, 0.0, 0
    loss_by_source: dict[str, float] = {}
    for name, source in held_out.items():
        loss, count = 0.0, 0
        for batch in source.batches:
            total, targets = loss_sum(module, batch)
            loss, count = loss + total.item(), count + int(targets)
        if count:
            loss_by_source[name] = loss / count
            weighted += source.weight * loss / count
            weights += source.weight
            num_targets += count
    for part, mode in modes:
        part.training = mode
    for buffer, value in buffers:
        buffer.copy_(value)
    return PlainEvaluation(weighted / weights, num_targets, loss_by_source)


def _compute_l2_norm(tensors: Tensors) -> float:
    """The L2 norm of all elements together."""
    total = 0.0
    for tensor in tensors.values():
        total += tensor.double().square().sum().item()
    return math.sqrt(total)


def _list_persistent_buffers(module: nn.Module) -> Tensors:
    """The buffers that a checkpoint keeps."""
    saved = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}
