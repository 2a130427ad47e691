"""What an optimizer's update would be if it made one of the usual mistakes: AdamW and SGD by plain
formulas, over elements of a tensor, from the gradients of all steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from phalanx.verify.plain.training import OptimizerDefinition

# What training scripts usually have: one of them may stand where the job's own should.
USUAL_BETAS = (0.0, 0.5, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.999)
TORCH_BETAS = (0.9, 0.999)

Moments = tuple[torch.Tensor, torch.Tensor]
Candidate = tuple[str, torch.Tensor]
"""(what would have to be so, to be read after "as if"; the update that it makes)."""


@dataclass(frozen=True)
class UpdatedElements:
    """Elements of a tensor in one process, in float64, with one dimension.

    `gradients`: as applied in each step up to that of the update, clipped in the last one by
    `clipping`. `weights`: before each of these updates. `rate`: the learning rate of all of them.
    """

    gradients: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    clipping: float
    rate: float

    @property
    def count(self) -> int:
        """Updates so far, with the last one."""
        return len(self.gradients)

    def with_last_gradient(self, gradient: torch.Tensor) -> UpdatedElements:
        """The same with another gradient in the last step."""
        return replace(self, gradients=(*self.gradients[:-1], gradient))

    def with_update_more(self, update: torch.Tensor) -> UpdatedElements:
        """The same after `update`, with the last gradient once more."""
        return replace(
            self,
            gradients=(*self.gradients, self.gradients[-1]),
            weights=(*self.weights, self.weights[-1] + update),
        )


def compute_update(
    rule: OptimizerDefinition, elements: UpdatedElements, decay: float
) -> torch.Tensor:
    """The last update by `rule`, with `decay` in place of its weight decay."""
    if rule.kind == "sgd":
        return -elements.rate * _compute_buffers(rule, elements, decay)[-1]
    first, second = compute_moments(elements.gradients, rule.betas)[-1]
    return _AdamWStep(rule, elements, decay).move(first, second)


def list_candidate_updates(
    rule: OptimizerDefinition, elements: UpdatedElements, decay: float
) -> Iterator[Candidate]:
    """The last update as mistakes make it that both kinds have, and then those of its kind."""
    update = compute_update(rule, elements, decay)
    twice = compute_update(rule, elements.with_update_more(update), decay)
    yield "the update were made twice", update + twice
    weights, rate = elements.weights[-1], elements.rate
    if decay and rule.kind == "adamw":
        moved = weights + update + rate * decay * weights
        yield "it decayed after the update", moved * (1 - rate * decay) - weights
    for words, gradient in _list_other_gradients(elements):
        yield words, compute_update(rule, elements.with_last_gradient(gradient), decay)
    yield from (_list_sgd_updates if rule.kind == "sgd" else _list_adamw_updates)(
        rule, elements, decay
    )


def _list_other_gradients(elements: UpdatedElements) -> Iterator[Candidate]:
    """What may stand in place of the last gradient."""
    gradient, clipping = elements.gradients[-1], elements.clipping
    if elements.count > 1:
        yield "it took the gradient of the step before", elements.gradients[-2]
        yield "it had no gradient in this step", torch.zeros_like(gradient)
    if clipping != 1:
        yield "its gradient were not clipped", gradient / clipping
        yield "its gradient were clipped twice", gradient * clipping
    yield "its gradient had the other sign", -gradient


# AdamW


def compute_moments(gradients: Sequence[torch.Tensor], betas: tuple[float, float]) -> list[Moments]:
    """The moments before the first gradient and after each of them."""
    moments = [(torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0]))]
    for gradient in gradients:
        moments.append(_update_moments(moments[-1], gradient, betas))
    return moments


def _update_moments(
    moments: Moments, gradient: torch.Tensor, betas: tuple[float, float]
) -> Moments:
    beta1, beta2 = betas
    first = beta1 * moments[0] + (1 - beta1) * gradient
    return first, beta2 * moments[1] + (1 - beta2) * gradient**2


@dataclass(frozen=True)
class _AdamWStep:
    """The last update of AdamW, by its moments."""

    rule: OptimizerDefinition
    elements: UpdatedElements
    decay: float

    def corrections(self, count: int) -> tuple[float, float]:
        beta1, beta2 = self.rule.betas
        return 1 - beta1**count, 1 - beta2**count

    def move(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        corrections: tuple[float, float] | None = None,
    ) -> torch.Tensor:
        """The update by these moments; `corrections` divide them, by default as many updates' as
        there were."""
        one, two = corrections or self.corrections(self.elements.count)
        return self.move_by(first / one / ((second / two).sqrt() + self.rule.eps))

    def move_by(self, direction: torch.Tensor) -> torch.Tensor:
        """The update along `direction`, with decay; elements that are 0 / 0 stay."""
        decayed = self.decay * self.elements.weights[-1]
        return -self.elements.rate * (torch.nan_to_num(direction) + decayed)


def _list_adamw_updates(
    rule: OptimizerDefinition, elements: UpdatedElements, decay: float
) -> Iterator[Candidate]:
    step, moments = (
        _AdamWStep(rule, elements, decay),
        compute_moments(elements.gradients, rule.betas),
    )
    yield from _list_lost_moments(step, moments)
    first, second = moments[-1]
    yield from _list_other_counts(step, first, second)
    yield from _list_other_roots(step, moments)
    for words, betas in _list_other_betas(rule.betas):
        changed = replace(rule, betas=betas)
        yield words, compute_update(changed, elements, decay)
    decay_of_rule = decay or rule.weight_decay
    if decay_of_rule:
        joined = [
            gradient + decay_of_rule * weights
            for gradient, weights in zip(elements.gradients, elements.weights, strict=True)
        ]
        yield (
            "its decay were added to the gradient (L2, as Adam has it) and not decoupled",
            compute_update(rule, replace(elements, gradients=joined), 0.0),
        )


def _list_lost_moments(step: _AdamWStep, moments: Sequence[Moments]) -> Iterator[Candidate]:
    """Moments that are lost or stale before the last update."""
    gradient, betas = step.elements.gradients[-1], step.rule.betas
    first, second = moments[-1]
    new_first, new_second = _update_moments(moments[0], gradient, betas)
    yield (
        "its moments and its count of steps began anew",
        step.move(new_first, new_second, step.corrections(1)),
    )
    yield "both moments were lost, and the count of steps kept", step.move(new_first, new_second)
    yield "its first moment (momentum) were lost", step.move(new_first, second)
    yield "its second moment were lost", step.move(first, new_second)
    old_first, old_second = moments[-2]
    yield "its moments did not take in this step's gradient", step.move(old_first, old_second)
    yield (
        "its first moment did not take in this step's gradient",
        step.move(old_first, second),
    )
    yield (
        "its second moment did not take in this step's gradient",
        step.move(first, old_second),
    )
    if len(moments) > 3:
        behind = _update_moments(moments[-3], gradient, betas)
        yield "what the update before made of its moments were not kept", step.move(*behind)


def _list_other_counts(
    step: _AdamWStep, first: torch.Tensor, second: torch.Tensor
) -> Iterator[Candidate]:
    """Bias corrections of another count of steps, or none."""
    count = step.elements.count
    for other in range(1, 4 * count + 8):
        if other != count:
            words = f"its count of steps (for the bias correction) were {other} in place of {count}"
            yield words, step.move(first, second, step.corrections(other))
    one, two = step.corrections(count)
    yield "neither moment had its bias corrected", step.move(first, second, (1.0, 1.0))
    yield "the first moment's bias were not corrected", step.move(first, second, (1.0, two))
    yield "the second moment's bias were not corrected", step.move(first, second, (one, 1.0))


def _list_other_roots(step: _AdamWStep, moments: Sequence[Moments]) -> Iterator[Candidate]:
    """Other divisors: of eps elsewhere, and of the largest second moment."""
    first, second = moments[-1]
    eps, (one, two) = step.rule.eps, step.corrections(step.elements.count)
    yield "eps were inside the root", step.move_by(first / one / (second / two + eps).sqrt())
    yield (
        "eps were added before the second moment's bias is corrected",
        step.move_by(first / one / ((second.sqrt() + eps) / two**0.5)),
    )
    seconds = torch.stack([second for _, second in moments])
    corrected = torch.stack(
        [
            second / step.corrections(number)[1]
            for number, (_, second) in enumerate(moments[1:], start=1)
        ]
    )
    words = "it divided by the largest second moment so far (amsgrad)"
    yield words, step.move(first, seconds.amax(0))
    yield f"{words}, after correction", step.move(first, corrected.amax(0), (one, 1.0))


def _list_other_betas(
    betas: tuple[float, float],
) -> Iterator[tuple[str, tuple[float, float]]]:
    beta1, beta2 = betas
    if beta1 != beta2:
        yield f"its betas were swapped, ({beta2:g}, {beta1:g})", (beta2, beta1)
    single_changes = [(beta, beta2) for beta in USUAL_BETAS if beta != beta1]
    single_changes += [(beta1, beta) for beta in USUAL_BETAS if beta != beta2]
    for other in dict.fromkeys((*single_changes, TORCH_BETAS)):
        if other not in (betas, (beta2, beta1)):
            words = (
                f"its betas were ({other[0]:g}, {other[1]:g}) in place of ({beta1:g}, {beta2:g})"
            )
            yield words, other


def find_eps(
    rule: OptimizerDefinition, elements: UpdatedElements, decay: float, update: torch.Tensor
) -> float | None:
    """The eps by which AdamW makes `update`, a power of 10 times the rule's where it is near one;
    None where no number is."""
    step = _AdamWStep(rule, elements, decay)
    first, second = compute_moments(elements.gradients, rule.betas)[-1]
    one, two = step.corrections(elements.count)
    root = (second / two).sqrt()
    divisor = (first / one) / (-update / elements.rate - decay * elements.weights[-1])
    # What rounding of an update changes of eps, upside down; 0 where an element says nothing.
    precision = torch.nan_to_num((first / one).abs() / divisor**2, nan=0.0, posinf=0.0)
    votes = (precision / precision.max()) ** 2
    eps = float((torch.nan_to_num(divisor - root, posinf=0.0, neginf=0.0) * votes).sum())
    eps /= float(votes.sum())
    if not math.isfinite(eps):
        return None
    if abs(eps) < 0.05 * rule.eps:
        return 0.0
    if eps < 0:
        return None
    usual = rule.eps * 10.0 ** round(math.log10(eps / rule.eps))
    return usual if abs(eps / usual - 1) < 0.1 else eps


# SGD


def _compute_buffers(
    rule: OptimizerDefinition,
    elements: UpdatedElements,
    decay: float,
    *,
    share: float = 1.0,
    first_share: float = 1.0,
) -> list[torch.Tensor]:
    """The buffer before the first gradient and after each of them: it takes in `share` of a
    gradient, of the first one `first_share`."""
    buffers = [torch.zeros_like(elements.gradients[0])]
    for gradient, weights in zip(elements.gradients, elements.weights, strict=True):
        part = first_share if len(buffers) == 1 else share
        buffers.append(rule.momentum * buffers[-1] + part * (gradient + decay * weights))
    return buffers


def _list_sgd_updates(
    rule: OptimizerDefinition, elements: UpdatedElements, decay: float
) -> Iterator[Candidate]:
    rate, momentum = elements.rate, rule.momentum
    gradient = elements.gradients[-1] + decay * elements.weights[-1]
    buffers = _compute_buffers(rule, elements, decay)
    if not momentum:
        return
    yield "its momentum were Nesterov's", -rate * (gradient + momentum * buffers[-1])
    yield "its momentum did not take in this step's gradient", -rate * buffers[-2]
    for first_share, words in ((1.0, ""), (1 - momentum, ", the first one, too")):
        damped = _compute_buffers(
            rule, elements, decay, share=1 - momentum, first_share=first_share
        )
        yield f"gradients were damped by {1 - momentum:g}{words} (dampening)", -rate * damped[-1]
    if decay:
        plain = _compute_buffers(rule, elements, 0.0)[-1]
        yield (
            "its decay were added after momentum, and not before",
            -rate * (plain + decay * elements.weights[-1]),
        )


def compute_momentum_part(
    rule: OptimizerDefinition, elements: UpdatedElements, decay: float
) -> torch.Tensor:
    """What the buffer of SGD is before the last update, times the momentum and the rate."""
    return -elements.rate * rule.momentum * _compute_buffers(rule, elements, decay)[-2]
