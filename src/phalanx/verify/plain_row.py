"""Judges phalanx's own model, in one process, by the plain implementation of it: loss, gradients
and the routers' biases of a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.vit import VitShape
from phalanx.plan.plan import Plan
from phalanx.run.one_process.plain_loss import Batch
from phalanx.verify.cases import PLAIN
from phalanx.verify.plain.decoder import compute_plain_loss, compute_updated_router_biases
from phalanx.verify.plain.settings import PlainSettings, VisionSettings
from phalanx.verify.plain.vision import compute_plain_vision_loss
from phalanx.verify.plain_settings import make_plain_decoder_settings, make_plain_vision_settings
from phalanx.verify.row import Row
from phalanx.verify.second_implementation import (
    StepResult,
    Tensors,
    compare_with_second_implementation,
    divide_gradients_by_targets,
)


@dataclass(frozen=True)
class PlainImplementation:
    """`phalanx.verify.plain` as a second implementation."""

    settings: PlainSettings | VisionSettings
    not_judged = ()
    cause = (
        "phalanx.nn and a plain implementation from the papers' definitions disagree: the reference"
        " itself may be wrong, and then every layout is, alike"
    )
    notes = ()

    @property
    def takes_far_positions(self) -> bool:
        return isinstance(self.settings, PlainSettings) and self.settings.positions == "rope"

    @property
    def judged(self) -> tuple[str, ...]:
        if isinstance(self.settings, VisionSettings):
            return ("loss", "gradients")
        biases = ("routers' biases",) if self.settings.balance_bias else ()
        return ("loss", "gradients", *biases)

    def compute(self, module: nn.Module, microbatches: Sequence[Batch]) -> StepResult:
        parameters = {
            name: parameter.detach().clone().requires_grad_()
            for name, parameter in module.named_parameters()
        }
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        total, count = 0.0, 0
        for batch in microbatches:
            loss, num_targets = self._compute_plain_loss(parameters, buffers, batch)
            loss.backward()
            total, count = total + loss.item(), count + num_targets
        gradients = divide_gradients_by_targets(parameters, count)
        if isinstance(self.settings, VisionSettings):
            return StepResult(total / count, count, gradients)
        global_batch = {
            key: torch.cat([batch[key] for batch in microbatches]) for key in microbatches[0]
        }
        biases = compute_updated_router_biases(self.settings, parameters, buffers, global_batch)
        return StepResult(total / count, count, gradients, biases)

    def _compute_plain_loss(
        self, parameters: Tensors, buffers: Tensors, batch: Batch
    ) -> tuple[torch.Tensor, int]:
        if isinstance(self.settings, VisionSettings):
            return compute_plain_vision_loss(self.settings, parameters, batch)
        return compute_plain_loss(self.settings, parameters, buffers, batch)


def explain_no_plain_row(job: Job, plan: Plan) -> str:
    """Why there is no plain implementation of this job; "" if there is one."""
    if job.model.is_foreign or not isinstance(plan.model_shape, DecoderShape | VitShape):
        return "there is a plain implementation of phalanx's own models alone"
    if job.model.objective is not None:
        return "there is a plain implementation of phalanx's own loss alone"
    return ""


def compare_with_plain_implementation(
    job: Job, plan: Plan, steps: Sequence[Sequence[Batch]], dtype: str
) -> Row:
    """The row "plain": phalanx's module in one process, judged by the plain implementation, as
    `compare_with_second_implementation` says.

    Raises LayoutError where `explain_no_plain_row` has a reason.
    """
    refused = explain_no_plain_row(job, plan)
    if refused:
        raise LayoutError(refused)
    return compare_with_second_implementation(
        _build_plain_implementation(plan), job, plan, steps, dtype, PLAIN
    )


def _build_plain_implementation(plan: Plan) -> PlainImplementation:
    shape = plan.model_shape
    if isinstance(shape, VitShape):
        return PlainImplementation(make_plain_vision_settings(shape))
    assert isinstance(shape, DecoderShape)
    return PlainImplementation(make_plain_decoder_settings(shape))
