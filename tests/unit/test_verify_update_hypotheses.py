"""Wrong updates that torch's own optimizers make, with another setting or state, are told by their
numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from phalanx.verify.plain.training import OptimizerDefinition
from phalanx.verify.update_hypotheses import find_mistake
from phalanx.verify.update_replays import UpdatedElements

ADAMW = OptimizerDefinition("adamw", 0.1, (0.9, 0.95), 1e-8, 0.9)
SGD = OptimizerDefinition("sgd", 0.0, (0.9, 0.95), 1e-8, 0.9)
RATE, CLIPPING, NUM_ELEMENTS = 2e-4, 0.3, 200

Optimizers = Callable[[torch.Tensor], torch.optim.Optimizer]
Change = Callable[[torch.optim.Optimizer], None]


def settings_of(rule: OptimizerDefinition, *, decays: bool = True) -> dict[str, Any]:
    decay = rule.weight_decay if decays else 0.0
    if rule.kind == "sgd":
        return {"lr": RATE, "momentum": rule.momentum, "weight_decay": decay}
    return {"lr": RATE, "betas": rule.betas, "eps": rule.eps, "weight_decay": decay}


def make_gradients(num_steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """With sizes that vary, and some that eps is not small beside; clipped from the second on."""
    generator = torch.Generator().manual_seed(1)
    sizes = 10.0 ** torch.linspace(-7, -1, NUM_ELEMENTS, dtype=torch.float64)
    gradients = []
    for number in range(num_steps):
        drawn = sizes * torch.randn(NUM_ELEMENTS, generator=generator, dtype=torch.float64)
        drawn *= 1.0 + number % 2
        gradients.append((drawn * (CLIPPING if number else 1.0)).to(dtype))
    return gradients


def update(
    build: Optimizers, gradients: list[torch.Tensor], weights: list[torch.Tensor], change: Change
) -> torch.Tensor:
    """The weights after the last update of a torch optimizer, which has made those before it from
    `weights`; `change` is called before it."""
    parameter = torch.nn.Parameter(weights[0].clone())
    optimizer = build(parameter)
    for number, gradient in enumerate(gradients):
        with torch.no_grad():
            parameter.copy_(weights[min(number, len(weights) - 1)])
        parameter.grad = gradient.clone()
        if number == len(gradients) - 1:
            change(optimizer)
        optimizer.step()
    return parameter.detach()


def build_right(rule: OptimizerDefinition, *, decays: bool = True) -> Optimizers:
    settings = settings_of(rule, decays=decays)
    if rule.kind == "sgd":
        return lambda parameter: torch.optim.SGD([parameter], **settings)
    return lambda parameter: torch.optim.AdamW([parameter], **settings)


def diagnose(
    rule: OptimizerDefinition,
    num_steps: int,
    *,
    build: Optimizers | None = None,
    change: Change = lambda optimizer: None,
    wrong: Callable[[UpdatedElements, torch.Tensor], torch.Tensor] | None = None,
    decays: bool = True,
    dtype: torch.dtype = torch.float64,
    **told: OptimizerDefinition | None,
) -> str:
    """What is found of the last of `num_steps` updates. It is made by `build` in place of the right
    optimizer, by one that `change` has changed, or it is `wrong(elements, right weights)`. `job`
    among `told`: the rule that the job is said to have, where it is another."""
    generator = torch.Generator().manual_seed(0)
    weights = [(0.02 * torch.randn(NUM_ELEMENTS, generator=generator)).to(dtype)]
    gradients = make_gradients(num_steps, dtype)
    right = build_right(rule, decays=decays)
    for number in range(num_steps):
        after = update(right, gradients[: number + 1], weights, lambda optimizer: None)
        weights.append(after)
    *before, expected = [tensor.double() for tensor in weights]
    elements = UpdatedElements([g.double() for g in gradients], before, CLIPPING, RATE)
    if wrong is not None:
        actual = wrong(elements, expected)
    else:
        actual = update(build or right, gradients, weights[:-1], change).double()
    return find_mistake(told.get("job", rule), elements, actual, expected, dtype=dtype)


def adamw(**changes: Any) -> Optimizers:
    settings = {**settings_of(ADAMW), **changes}
    return lambda parameter: torch.optim.AdamW([parameter], **settings)


def sgd(**changes: Any) -> Optimizers:
    settings = {**settings_of(SGD), **changes}
    return lambda parameter: torch.optim.SGD([parameter], **settings)


def change_state(**factors: float) -> Change:
    """Multiplies slots of the state."""

    def change(optimizer: torch.optim.Optimizer) -> None:
        for slots in optimizer.state.values():
            for name, factor in factors.items():
                slots[name] *= factor

    return change


def change_group(**values: Any) -> Change:
    return lambda optimizer: optimizer.param_groups[0].update(values)


def scale_gradient(factor: float) -> Change:
    def change(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["params"][0].grad *= factor

    return change


def make_a_step_more(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def take_gradient_of_step_before(optimizer: torch.optim.Optimizer) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad.copy_(make_gradients(2, torch.float64)[-2])


LOST = {"exp_avg": 0.0, "exp_avg_sq": 0.0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_steps", "change", "words"),
    [
        (4, make_a_step_more, "the update were made twice"),
        (4, change_state(step=0.0, **LOST), "its moments and its count of steps began anew"),
        (4, change_state(**LOST), "both moments were lost"),
        (4, change_state(exp_avg=0.0), "its first moment (momentum) were lost"),
        (4, change_state(exp_avg_sq=0.0), "its second moment were lost"),
        (2, change_state(step=0.0), "(for the bias correction) were 1 in place of 2"),
        (5, change_state(step=2.0), "(for the bias correction) were 9 in place of 5"),
        (3, change_group(lr=2 * RATE), "its learning rate were 2 x the right one"),
        (3, change_group(lr=-RATE), "the update had the other sign"),
        (3, change_group(lr=0.0), "this update were left out"),
        (3, change_group(weight_decay=0.0), "this tensor did not decay"),
        (3, change_group(weight_decay=0.2), "its weight decay were 2 x the job's"),
        (3, change_group(weight_decay=0.1 / RATE), "not multiplied by the learning rate"),
        (1, change_group(eps=1e-6), "eps were 1e-06 in place of 1e-08"),
        (3, change_group(eps=3e-5), "eps were 3e-05 in place of 1e-08"),
        (2, take_gradient_of_step_before, "it took the gradient of the step before"),
        (3, scale_gradient(1 / CLIPPING), "its gradient were not clipped"),
        (3, scale_gradient(CLIPPING), "its gradient were clipped twice"),
        (3, scale_gradient(0.0), "it had no gradient in this step"),
        (3, scale_gradient(-1.0), "its gradient had the other sign"),
    ],
)
def test_an_adamw_with_another_state_or_setting_is_told(
    num_steps: int, change: Change, words: str, dtype: torch.dtype
) -> None:
    found = diagnose(ADAMW, num_steps, change=change, dtype=dtype)
    assert words in found
    # In float32 another one may come as near as rounding allows.
    assert dtype is torch.float32 or ", or " not in found


@pytest.mark.parametrize(
    ("num_steps", "build", "words"),
    [
        (2, adamw(betas=(0.95, 0.9)), "its betas were swapped, (0.95, 0.9)"),
        (2, adamw(betas=(0.9, 0.999)), "its betas were (0.9, 0.999) in place of (0.9, 0.95)"),
        (2, adamw(betas=(0.8, 0.95)), "its betas were (0.8, 0.95)"),
        (4, adamw(amsgrad=True), "largest second moment so far (amsgrad)"),
        (
            1,
            lambda parameter: torch.optim.Adam([parameter], **settings_of(ADAMW)),
            "its decay were added to the gradient (L2",
        ),
        (1, adamw(maximize=True), "its gradient had the other sign"),
    ],
)
def test_another_kind_of_adamw_is_told(num_steps: int, build: Optimizers, words: str) -> None:
    assert diagnose(ADAMW, num_steps, build=build).startswith(words) or words in diagnose(
        ADAMW, num_steps, build=build
    )


def test_decay_of_what_has_none_is_told() -> None:
    found = diagnose(ADAMW, 3, build=adamw(), decays=False)
    assert found == "this tensor decayed (by 0.1), which has no weight decay"


@pytest.mark.parametrize("part", ["both", "first", "second"])
def test_a_bias_that_is_not_corrected_is_told(part: str) -> None:
    beta1, beta2 = ADAMW.betas

    def wrong(elements: UpdatedElements, expected: torch.Tensor) -> torch.Tensor:
        gradient, weights = elements.gradients[0], elements.weights[0]
        first = (1 - beta1) * gradient / (1 - beta1 if part == "second" else 1)
        second = (1 - beta2) * gradient**2 / (1 - beta2 if part == "first" else 1)
        return weights * (1 - RATE * 0.1) - RATE * first / (second.sqrt() + ADAMW.eps)

    found = diagnose(ADAMW, 1, wrong=wrong)
    assert {"both": "neither", "first": "the first moment's", "second": "the second moment's"}[
        part
    ] in found
    assert "corrected" in found


@pytest.mark.parametrize(
    ("divisor", "words"),
    [
        (lambda g: (g**2 + 1e-8).sqrt(), "eps were inside the root"),
        (
            lambda g: ((0.05 * g**2).sqrt() + 1e-8) / 0.05**0.5,
            "eps were added before the second moment's bias is corrected",
        ),
    ],
)
def test_eps_at_another_place_is_told(
    divisor: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    def wrong(elements: UpdatedElements, expected: torch.Tensor) -> torch.Tensor:
        gradient, weights = elements.gradients[0], elements.weights[0]
        return weights * (1 - RATE * 0.1) - RATE * gradient / divisor(gradient)

    assert words in diagnose(ADAMW, 1, wrong=wrong)


SGD_WITH_DECAY = replace(SGD, weight_decay=0.1)
NO_MOMENTUM = replace(SGD, momentum=0.0)


@pytest.mark.parametrize(
    ("rule", "num_steps", "build", "change", "words"),
    [
        (SGD, 3, sgd(), change_state(momentum_buffer=0.0), "its momentum were lost"),
        (SGD, 2, sgd(momentum=0.8), None, "its momentum were 0.8 in place of 0.9"),
        (SGD, 1, sgd(nesterov=True), None, "its momentum were Nesterov's"),
        (SGD, 2, sgd(dampening=0.9), None, "gradients were damped by 0.1 (dampening)"),
        (SGD, 3, sgd(), make_a_step_more, "the update were made twice"),
        (SGD, 3, sgd(), scale_gradient(1 / CLIPPING), "its gradient were not clipped"),
        (SGD, 3, sgd(), scale_gradient(4.0), "it took in 4 x its gradient"),
        (SGD, 2, sgd(), take_gradient_of_step_before, "the gradient of the step before"),
        (SGD_WITH_DECAY, 1, sgd(), None, "this tensor did not decay"),
        (NO_MOMENTUM, 3, sgd(momentum=0, lr=RATE / 4), None, "learning rate were 0.25 x"),
    ],
)
def test_a_wrong_sgd_is_told(
    rule: OptimizerDefinition,
    num_steps: int,
    build: Optimizers,
    change: Change | None,
    words: str,
) -> None:
    found = diagnose(rule, num_steps, build=build, change=change or (lambda optimizer: None))
    assert words in found


def test_stale_weights_are_told() -> None:
    found = diagnose(ADAMW, 3, wrong=lambda elements, expected: elements.weights[1])
    assert found == "it had the weights of update 1: a stale part"


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32], ids=str)
def test_rounding_is_told(narrow: torch.dtype) -> None:
    def round_weights(elements: UpdatedElements, expected: torch.Tensor) -> torch.Tensor:
        return expected.to(narrow).double()

    def round_update(elements: UpdatedElements, expected: torch.Tensor) -> torch.Tensor:
        before = elements.weights[-1]
        return before + (expected - before).to(narrow).double()

    name = str(narrow).removeprefix("torch.")
    assert diagnose(ADAMW, 3, wrong=round_weights) == f"the weights were rounded to {name} after it"
    assert diagnose(ADAMW, 3, wrong=round_update) == f"the update were rounded to {name}"


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1.0])
@pytest.mark.parametrize("rule", [ADAMW, SGD, None], ids=["adamw", "sgd", "own"])
def test_a_wrong_update_that_no_mistake_makes_is_not_explained(
    rule: OptimizerDefinition | None, size: float
) -> None:
    """Of any size, at any step."""
    generator = torch.Generator().manual_seed(2)

    def wrong(elements: UpdatedElements, expected: torch.Tensor) -> torch.Tensor:
        moved = expected - elements.weights[-1]
        noise = torch.randn(NUM_ELEMENTS, generator=generator, dtype=torch.float64)
        return expected + size * float(moved.norm()) / NUM_ELEMENTS**0.5 * noise

    for num_steps in range(1, 6):
        assert diagnose(rule or ADAMW, num_steps, wrong=wrong, job=rule) == ""


@pytest.mark.parametrize("job", [replace(ADAMW, eps=1e-3), SGD, None], ids=["eps", "sgd", "own"])
def test_of_an_optimizer_that_is_not_the_jobs_no_state_is_named(
    job: OptimizerDefinition | None,
) -> None:
    """Only what needs no formula of it."""
    assert diagnose(ADAMW, 3, change=change_state(exp_avg=0.0), job=job) == ""
    assert "were 2 x" in diagnose(ADAMW, 3, change=change_group(lr=2 * RATE), job=job)
