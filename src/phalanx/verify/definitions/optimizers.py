"""The job's optimizer in float32, in which weights are trained, beside its definition in float64:
rows of the trainer compare it in float64 alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from phalanx.job.schema import Job
from phalanx.optim.build import build_optimizer
from phalanx.verify.definitions.check import make_difference
from phalanx.verify.plain.training import OptimizerDefinition
from phalanx.verify.row import Difference
from phalanx.verify.trainer_cases import explain_no_trainer_run
from phalanx.verify.trainer_reference import make_optimizer_definition

JUDGED = "updates of float32 weights by the job's optimizer, beside its definition in float64"
RATE, NUM_STEPS, WIDTH = 0.01, 4, 16
# Of the largest movement of a weight.
TOLERANCE = 1e-5


def find_wrong_updates(job: Job) -> Iterator[Difference]:
    """The parameters of a small module that the job's optimizer moves otherwise than by definition;
    none for an optimizer of the user's own."""
    if explain_no_trainer_run(job):
        return
    optim = job.optim
    rule = make_optimizer_definition(optim)
    module = _make_module()
    before = {name: p.detach().double() for name, p in module.named_parameters()}
    optimizer = build_optimizer(module, optim.model_copy(update={"lr": RATE}))
    for gradients in _list_gradients(module):
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name].clone()
        optimizer.step()
    expected = _update_by_definition(rule, before)
    for name, parameter in module.named_parameters():
        after = parameter.detach().double()
        error = _compute_error(after, expected[name], before[name])
        if not error <= TOLERANCE:
            cause = (
                f"{optim.kind} moves float32 weights otherwise than its definition with the job's"
                " numbers does, by gradients from 1e-12 to 1"
            )
            for words, other in _list_usual_mistakes(rule, before):
                if _compute_error(after, other[name], before[name]) <= TOLERANCE:
                    cause += f", as if {words}"
                    break
            yield make_difference("update of", name, error, cause)


def _update_by_definition(
    rule: OptimizerDefinition, before: dict[str, torch.Tensor], *, vectors_decay: bool = False
) -> dict[str, torch.Tensor]:
    """The parameters of `_make_module` after the updates of all its gradients."""
    expected = {name: tensor.clone() for name, tensor in before.items()}
    states = {name: rule.start(tensor) for name, tensor in expected.items()}
    for gradients in _list_gradients(_make_module()):
        for name, tensor in expected.items():
            # Norms, biases and other vectors do not decay.
            decays = vectors_decay or tensor.ndim > 1
            rule.update(tensor, gradients[name].double(), states[name], rate=RATE, decays=decays)
    return expected


def _compute_error(after: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> float:
    """The largest error of an element, relative to the largest movement of one."""
    return float((after - expected).abs().max()) / float((expected - before).abs().max())


def _list_usual_mistakes(
    rule: OptimizerDefinition, before: dict[str, torch.Tensor]
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """What is usually wrong, in words, and where parameters would be then."""
    yield "nothing decayed", _update_by_definition(replace(rule, weight_decay=0.0), before)
    yield "vectors decayed, too", _update_by_definition(rule, before, vectors_decay=True)
    if rule.momentum and rule.kind == "sgd":
        yield "there were no momentum", _update_by_definition(replace(rule, momentum=0.0), before)


def _make_module() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    return module


def _list_gradients(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Gradients of each step, whose sizes go through all decades that matter."""
    generator = torch.Generator().manual_seed(1)
    sizes = {}
    for name, parameter in module.named_parameters():
        decades = torch.linspace(-12, 0, parameter.numel()).view(parameter.shape)
        sizes[name] = 10.0**decades
    for _ in range(NUM_STEPS):
        yield {
            name: size * (0.5 + torch.rand(size.shape, generator=generator))
            for name, size in sizes.items()
        }
