"""Judges phalanx's own decoder, in one process, by the plain implementation of it: loss, gradients
and the routers' biases of two steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.nn.build import build_objective
from phalanx.plan.plan import Plan
from phalanx.run.one_process.job_loss import JobLoss
from phalanx.run.one_process.original_module import build_original_module
from phalanx.run.one_process.plain_loss import Batch
from phalanx.verify.begin import randomize_constants
from phalanx.verify.plain.decoder import plain_biases, plain_loss
from phalanx.verify.plain.settings import PlainSettings
from phalanx.verify.plain_settings import make_plain_settings
from phalanx.verify.reference import forward_order
from phalanx.verify.row import Difference, Row
from phalanx.verify.trace_facts import TOLERANCE

NUM_STEPS = 2
MOVE = 0.01  # of each weight's norm, by the first step
JUDGED = ("loss", "gradients", "routers' biases")
CAUSE = (
    "phalanx.nn and a plain implementation from the papers' definitions disagree: the reference"
    " itself may be wrong, and then every layout is, alike"
)

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Seen:
    """What one implementation makes of a step: the loss per target, and its gradients; `biases` of
    the routers after it."""

    loss: float
    num_targets: int
    gradients: Tensors
    biases: Tensors


def why_no_plain_row(job: Job, plan: Plan) -> str:
    """Why there is no plain implementation of this job; "" if there is one."""
    if job.model.is_foreign or not isinstance(plan.model_shape, DecoderShape):
        return "there is a plain implementation of phalanx's decoders alone"
    if job.model.objective is not None:
        return "there is a plain implementation of phalanx's own loss alone"
    return ""


def judge_plain(job: Job, plan: Plan, steps: Sequence[Sequence[Batch]], dtype: str) -> Row:
    """The row "plain": phalanx's module in one process, judged by the plain implementation.

    steps: the microbatches of each, of which two are taken. Before the second the weights are moved
    along the first one's gradients. In float32 a near-tie of a router may be decided otherwise:
    decoders with experts are for float64.

    Raises LayoutError where `why_no_plain_row` has a reason.
    """
    refused = why_no_plain_row(job, plan)
    if refused:
        raise LayoutError(refused)
    assert isinstance(plan.model_shape, DecoderShape)
    began = time.monotonic()
    module, _ = build_original_module(job, plan, dtype, materialize=True)
    randomize_constants(module)
    settings, outputs = make_plain_settings(plan.model_shape), JobLoss(job, plan).outputs
    order = forward_order(module, partial(outputs, module, steps[0][0]))
    worst = {"loss": 0.0, "gradient": 0.0, "buffer": 0.0}
    first: Difference | None = None
    for number, microbatches in enumerate(steps[:NUM_STEPS]):
        plain = _run_plain(settings, module, microbatches)
        own = _run_own(job, plan, module, microbatches)
        for difference in _errors(number, own, plain, order):
            worst[difference.what] = max(worst[difference.what], difference.error)
            if first is None and difference.error > TOLERANCE[dtype]:
                first = difference
        _move_weights(module)
    return Row(
        layout="plain",
        parallel={},
        model=plan.model_shape.kind,
        dtype=dtype,
        ok=first is None,
        errors=worst,
        tolerance=TOLERANCE[dtype],
        first=first,
        judged=JUDGED,
        wall_s=time.monotonic() - began,
    )


def _run_plain(settings: PlainSettings, module: nn.Module, microbatches: Sequence[Batch]) -> _Seen:
    parameters = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in module.named_parameters()
    }
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    total, count = 0.0, 0
    for batch in microbatches:
        loss, num_targets = plain_loss(settings, parameters, buffers, batch)
        loss.backward()
        total, count = total + loss.item(), count + num_targets
    whole = {key: torch.cat([batch[key] for batch in microbatches]) for key in microbatches[0]}
    biases = plain_biases(settings, parameters, buffers, whole)
    return _Seen(total / count, count, _gradients(parameters, count), biases)


def _run_own(job: Job, plan: Plan, module: nn.Module, microbatches: Sequence[Batch]) -> _Seen:
    outputs, objective = JobLoss(job, plan).outputs, build_objective(job)
    module.zero_grad()
    total, count = 0.0, 0
    for batch in microbatches:
        loss, num_targets = objective(outputs(module, batch), batch)
        loss.backward()
        total, count = total + loss.item(), count + int(num_targets)
    module.after_step()  # type: ignore[operator]
    gradients = _gradients(dict(module.named_parameters()), count)
    return _Seen(total / count, count, gradients, dict(module.named_buffers()))


def _gradients(parameters: Tensors, count: int) -> dict[str, torch.Tensor]:
    """Per target; 0 where a parameter had no part."""
    gradients = {}
    for name, parameter in parameters.items():
        gradients[name] = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients[name] = parameter.grad / count
    return gradients


def _errors(step: int, own: _Seen, plain: _Seen, order: Sequence[str]) -> Iterator[Difference]:
    """All that is compared, in the order in which things go wrong: of the gradients first the one
    that is nearest to the loss."""

    def difference(what: str, name: str, error: float) -> Difference:
        # NaN is above any tolerance.
        if math.isnan(error):
            error = math.inf
        return Difference(what, name, step, error, 0, (0,), "whole", CAUSE)

    error = abs(own.loss - plain.loss) / abs(plain.loss)
    if own.num_targets != plain.num_targets:
        error = math.inf
    yield difference("loss", "", error)
    # Some gradients are 0 but for rounding: a key's bias without rotary positions.
    norms = {name: float(gradient.norm()) for name, gradient in plain.gradients.items()}
    floor = 1e-4 * max(norms.values())
    for name in reversed(order):
        off = float((own.gradients[name] - plain.gradients[name]).norm())
        yield difference("gradient", name, off / max(norms[name], floor))
    for name, bias in plain.biases.items():
        off = float((own.biases[name] - bias).norm())
        yield difference("buffer", name, off / max(float(bias.norm()), 1e-30))


@torch.no_grad()
def _move_weights(module: nn.Module) -> None:
    """Against the gradients, each weight by `MOVE` of its norm."""
    for parameter in module.parameters():
        if parameter.grad is None or not parameter.grad.any():
            continue
        parameter -= parameter.grad * (MOVE * parameter.norm() / parameter.grad.norm())
