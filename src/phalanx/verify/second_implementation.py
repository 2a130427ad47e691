"""Judges phalanx's own module, in one process, by a second implementation of it: loss, gradients
and the buffers that a step moves."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import nn

from phalanx.core.batch import IGNORE_INDEX
from phalanx.core.block_sizes import BlockSizes, shrink_block_sizes, use_block_sizes
from phalanx.job.schema import Job
from phalanx.nn.build import build_objective
from phalanx.plan.plan import Plan
from phalanx.run.one_process.job_loss import JobLoss
from phalanx.run.one_process.original_module import build_original_module
from phalanx.run.one_process.plain_loss import Batch
from phalanx.verify.begin import randomize_constant_parameters
from phalanx.verify.reference import list_parameters_in_forward_order
from phalanx.verify.row import Difference, Row
from phalanx.verify.trace_facts import TOLERANCE_OF_DTYPE

RELATIVE_STEP_SIZE = 0.01  # of each weight's norm, by a step
# So few that some experts get none.
NUM_SHORT_TOKENS = 2
# Of a long sequence: few tokens of it are enough.
FAR_POSITION = 5003

ONLY_IN_BLOCKS = (
    "; in one piece it computes what it should: a loop over chunks of logits, or over blocks of"
    " attention, goes wrong"
)

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """The result of a step in one implementation: the loss per target, and its gradients per
    target; `buffers` after it, of those that are compared. `narrows`: it rounded to float32 on its
    way."""

    loss: float
    num_targets: int
    gradients: Tensors
    buffers: Tensors = field(default_factory=dict)
    narrows: bool = False


class WeightsError(Exception):
    """A second implementation cannot take the weights of a module, or give gradients back: `what`
    is wrong, of the tensor `name` ("" for none in particular)."""

    def __init__(self, kind_of_number: str, name: str, cause: str) -> None:
        super().__init__(kind_of_number, name, cause)
        self.what, self.name, self.cause = kind_of_number, name, cause


class SecondImplementation(Protocol):
    """Computes a step of phalanx's module by other code.

    `judged` and `not_judged`: what of it is compared, in words. `cause`: what a difference may
    come from. `notes`: sentences for its row. `takes_far_positions`: its numbers agree in float64
    also thousands of tokens behind a sequence's begin.
    """

    @property
    def judged(self) -> tuple[str, ...]: ...

    @property
    def not_judged(self) -> tuple[str, ...]: ...

    @property
    def cause(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def takes_far_positions(self) -> bool: ...

    def compute(self, module: nn.Module, microbatches: Sequence[Batch]) -> StepResult:
        """The result of a step from the weights and buffers of `module`, which stay as they
        are. Gradients have phalanx's names. Raises WeightsError."""


def compare_with_second_implementation(
    second: SecondImplementation,
    job: Job,
    plan: Plan,
    steps: Sequence[Sequence[Batch]],
    dtype: str,
    layout: str,
) -> Row:
    """The row `layout`: phalanx's module in one process, judged by a second implementation.

    steps: the microbatches of each, of which the first two are taken, and a short one. Between
    steps the weights are moved along the gradients. In float32 a near-tie of a router may be
    decided otherwise: decoders with experts are for float64.
    """
    began = time.monotonic()
    module, _ = build_original_module(job, plan, dtype, materialize=True)
    randomize_constant_parameters(module)
    outputs = JobLoss(job).compute_outputs
    order = list_parameters_in_forward_order(module, partial(outputs, module, steps[0][0]))
    differences: list[Difference] = []
    narrows = False
    # A rotation's angle in float32 has lost three digits there.
    is_far = second.takes_far_positions and dtype == "float64"
    chosen = _choose_microbatches_and_block_sizes(steps, FAR_POSITION if is_far else 0)
    for number, (microbatches, sizes) in enumerate(chosen):
        try:
            other = second.compute(module, microbatches)
        except WeightsError as error:
            differences.append(
                Difference(error.what, error.name, number, math.inf, 0, (0,), "whole", error.cause)
            )
            break
        with use_block_sizes(sizes):
            own_step = _compute_step_by_phalanx(job, plan, module, microbatches)
        of_step = list(_list_step_differences(number, own_step, other, order, second.cause))
        if sizes != BlockSizes() and _is_any_wrong(of_step, dtype):
            own_step = _compute_step_by_phalanx(job, plan, module, microbatches)
            unblocked = _list_step_differences(number, own_step, other, order, second.cause)
            # What moves buffers has moved them twice by now.
            if not _is_any_wrong((each for each in unblocked if each.what != "buffer"), dtype):
                of_step = [replace(each, cause=f"{each.cause}{ONLY_IN_BLOCKS}") for each in of_step]
        differences += of_step
        narrows = narrows or other.narrows
        _move_weights_against_gradients(module)
    tolerance, notes = TOLERANCE_OF_DTYPE[dtype], second.notes
    if narrows:
        tolerance = TOLERANCE_OF_DTYPE["float32"]
        notes += (f"it computes in fewer digits than {dtype} on its way, and is judged by those",)
    first = next((error for error in differences if error.error > tolerance), None)
    if first is not None and first.what == "gradient":
        # Differences come in the order of the backward, after the loss.
        first = replace(
            first,
            cause=f"{first.cause}; the loss agrees, and the backward goes wrong where it meets"
            f" {first.name}",
        )
    return Row(
        layout=layout,
        parallel={},
        model=plan.model_shape.kind,
        dtype=dtype,
        ok=first is None,
        errors=_find_largest_error_by_kind(differences),
        tolerance=tolerance,
        first=first,
        notes=notes,
        judged=second.judged,
        not_judged=second.not_judged,
        wall_s=round(time.monotonic() - began, 3),
    )


def _is_any_wrong(differences: Iterable[Difference], dtype: str) -> bool:
    return any(difference.error > TOLERANCE_OF_DTYPE[dtype] for difference in differences)


def divide_gradients_by_targets(parameters: Tensors, count: int) -> dict[str, torch.Tensor]:
    """The gradients of a sum over `count` targets, each divided by that; 0 where a parameter had
    no part."""
    gradients = {}
    for name, parameter in parameters.items():
        gradients[name] = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients[name] = parameter.grad / count
    return gradients


def _choose_microbatches_and_block_sizes(
    steps: Sequence[Sequence[Batch]], far_position: int
) -> Iterator[tuple[Sequence[Batch], BlockSizes]]:
    """The microbatches of each judged step, and the sizes of blocks with which phalanx's module
    computes it. In the second step sequences begin at `far_position`."""
    # A small model reaches loops over blocks with small blocks alone, and what is computed at once
    # (attention's one mask) with the usual ones.
    yield steps[0], shrink_block_sizes()
    yield [_move_positions(batch, far_position) for batch in steps[1]], BlockSizes()
    yield [_truncate_to_short_sequence(steps[0][0])], BlockSizes()


def _move_positions(batch: Batch, by: int) -> Batch:
    if "positions" not in batch:
        return batch
    return {**batch, "positions": batch["positions"] + by}


def _truncate_to_short_sequence(batch: Batch) -> Batch:
    """The first sequence that has a target, from there on for `NUM_SHORT_TOKENS` tokens; or its
    image."""
    targets = batch["targets"]
    first = (targets != IGNORE_INDEX).nonzero()[0]
    row = slice(int(first[0]), int(first[0]) + 1)
    cut = {key: tensor[row] for key, tensor in batch.items()}
    if targets.ndim == 1:
        return cut
    # The last tokens, if the target is one of them.
    start = max(0, min(int(first[1]), targets.shape[1] - NUM_SHORT_TOKENS))
    for key, tensor in batch.items():
        if tensor.shape[:2] == targets.shape:
            cut[key] = tensor[row, start : start + NUM_SHORT_TOKENS]
    return cut


def _compute_step_by_phalanx(
    job: Job, plan: Plan, module: nn.Module, microbatches: Sequence[Batch]
) -> StepResult:
    outputs, objective = JobLoss(job).compute_outputs, build_objective(job)
    module.zero_grad()
    total, count = 0.0, 0
    for batch in microbatches:
        loss, num_targets = objective(outputs(module, batch), batch)
        loss.backward()
        total, count = total + loss.item(), count + int(num_targets)
    # Routers move their biases by the load of the step.
    if hasattr(module, "after_step"):
        module.after_step()
    gradients = divide_gradients_by_targets(dict(module.named_parameters()), count)
    return StepResult(total / count, count, gradients, dict(module.named_buffers()))


def _list_step_differences(
    step: int, own_step: StepResult, other: StepResult, order: Sequence[str], cause: str
) -> Iterator[Difference]:
    """All that is compared, in the order in which things go wrong: of the gradients first the one
    that is nearest to the loss."""

    def difference(kind_of_number: str, name: str, error: float) -> Difference:
        # NaN is above any tolerance.
        if math.isnan(error):
            error = math.inf
        return Difference(kind_of_number, name, step, error, 0, (0,), "whole", cause)

    error = abs(own_step.loss - other.loss) / abs(other.loss)
    if own_step.num_targets != other.num_targets:
        error = math.inf
    yield difference("loss", "", error)
    # Some gradients are 0 but for rounding: a key's bias without rotary positions.
    norms = {name: float(gradient.norm()) for name, gradient in other.gradients.items()}
    floor = 1e-4 * max(norms.values())
    for name in reversed(order):
        off = float((own_step.gradients[name] - other.gradients[name]).norm())
        yield difference("gradient", name, off / max(norms[name], floor))
    for name, buffer in other.buffers.items():
        off = float((own_step.buffers[name] - buffer).norm())
        yield difference("buffer", name, off / max(float(buffer.norm()), 1e-30))


def _find_largest_error_by_kind(differences: Sequence[Difference]) -> dict[str, float]:
    """The largest error of each kind."""
    worst: dict[str, float] = {}
    for difference in differences:
        worst[difference.what] = max(worst.get(difference.what, 0.0), difference.error)
    return worst


@torch.no_grad()
def _move_weights_against_gradients(module: nn.Module) -> None:
    """Against the gradients, each weight by `RELATIVE_STEP_SIZE` of its norm."""
    for parameter in module.parameters():
        if parameter.grad is None or not parameter.grad.any():
            continue
        parameter -= parameter.grad * (
            RELATIVE_STEP_SIZE * parameter.norm() / parameter.grad.norm()
        )
