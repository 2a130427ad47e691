"""The reference of a judged run: the second loop's numbers, and its tensors after each step, in
files."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job, Optim
from phalanx.plan.plan import Plan
from phalanx.run.one_process.dropout_masks import DropoutMasks
from phalanx.run.one_process.job_loss import JobLoss
from phalanx.run.one_process.original_module import build_original_module
from phalanx.verify.forward_probe import describe_reference_failure, probe_forward
from phalanx.verify.number_types import is_narrow_dtype
from phalanx.verify.plain.training import (
    HeldOutSource,
    OptimizerDefinition,
    PlainRun,
    PlainStep,
    Tensors,
    train_by_definition,
)
from phalanx.verify.rate_definition import make_rate_schedule
from phalanx.verify.trainer_batches import SOURCE_WEIGHTS, TrainerRunBatches
from phalanx.verify.trainer_cases import (
    EVALUATED_STEPS,
    INFINITE_LOSS_STEP,
    NUM_STEPS,
    OVERFLOW_FACTOR,
    OVERFLOW_STEP,
    REFUSED_STEP,
    UNMASKED_STEP,
    choose_row_loss_scaling,
    choose_step_factors,
)
from phalanx.verify.trainer_facts import (
    BEFORE,
    BUFFER,
    FACTS_FILE_NAME,
    GRADIENT,
    STATE,
    UPDATE,
    WEIGHT,
    SecondLoopRecord,
    SecondLoopStep,
)

# The defaults of `optim.weight_decay` in docs/job.md.
WEIGHT_DECAY_OF_OPTIMIZER = {"adamw": 0.1, "sgd": 0.0}


def write_second_loop_reference(
    directory: Path, job: Job, plan: Plan, batches: TrainerRunBatches, num_microbatches: int
) -> str:
    """Write the reference, or return why there is none: what the module does in one process is no
    layout's fault."""
    try:
        _ReferenceWriter(directory, job, plan, batches, num_microbatches).write()
    except Exception as error:
        traceback.print_exc()  # in the rank's log
        return describe_reference_failure(error, "float64")
    return ""


@dataclass
class _ReferenceWriter:
    directory: Path
    job: Job
    plan: Plan
    batches: TrainerRunBatches
    num_microbatches: int
    _loss_sum: JobLoss = field(init=False)

    def __post_init__(self) -> None:
        self._loss_sum = JobLoss(self.job)

    def write(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        probed = probe_forward(
            self._build_reference_module,
            self._loss_sum,
            self._list_steps()[0][0],
            self.job.run.seed,
        )
        if is_narrow_dtype(probed.narrows):
            raise LayoutError(
                f"the module rounds to {probed.narrows} by itself",
                why="what a run by its own gradients comes to after ten steps is as good as chance",
                fix="the rows of layouts judge it, by what that rounding costs",
            )
        max_norm = self._choose_max_norm()
        module = self._build_reference_module()
        start = {name: p.detach().clone() for name, p in module.named_parameters()}
        _save_tensors(self._locate_step_file(0), _flatten_tensors_by_key(start, {}, {}, {}))
        records, unused, before = [], set(start), start
        for step in self._train_by_definition(module, max_norm=max_norm):
            tensors = _flatten_tensors_by_key(
                step.weights, step.buffers, step.gradients, step.states
            )
            _save_tensors(self._locate_step_file(step.step), tensors)
            unused -= {name for name, gradient in step.gradients.items() if gradient.any()}
            records.append(_make_step_record(step, start, before))
            before = {name: tensor.detach().clone() for name, tensor in step.weights.items()}
        run = SecondLoopRecord(
            max_norm, bool(probed.narrows), tuple(sorted(unused)), tuple(records)
        )
        # Last: whoever finds this file finds the others.
        (self.directory / FACTS_FILE_NAME).write_text(json.dumps(run.to_json()))

    def _choose_max_norm(self) -> float | None:
        """A norm that half of the steps exceed, and UNMASKED_STEP in any case; None where the job
        clips nothing."""
        if self.job.optim.clip_norm is None:
            return None
        norms = {
            step.step: step.grad_norm
            for step in self._train_by_definition(self._build_reference_module(), max_norm=None)
            if not step.skipped
        }
        limit = _median_norm([*norms.values()])
        unmasked = norms.get(UNMASKED_STEP, math.inf)
        smaller = [norm for norm in norms.values() if norm < unmasked]
        # Where nothing is smaller, it is another step that must stay below the norm.
        if unmasked > limit or not smaller:
            return limit
        return (max(smaller) + unmasked) / 2

    def _locate_step_file(self, step: int) -> Path:
        return self.directory / f"step-{step}.safetensors"

    def _build_reference_module(self) -> nn.Module:
        return build_original_module(self.job, self.plan, "float64", materialize=True)[0]

    def _list_steps(self) -> list[list[Mapping[str, torch.Tensor]]]:
        numbers = range(1, NUM_STEPS + 1)
        return [self.batches.microbatches(number, self.num_microbatches) for number in numbers]

    def _train_by_definition(
        self, module: nn.Module, *, max_norm: float | None
    ) -> Iterator[PlainStep]:
        masks = DropoutMasks(module, self.job.run.seed)

        def around(step: int, first_row: int, num_rows: int) -> AbstractContextManager[None]:
            return masks.dropping_by_masks(step, first_row, num_rows)

        sources: dict[str, HeldOutSource] = {}
        for name, held_out in self.batches.held_out.items():
            sources[name] = HeldOutSource(SOURCE_WEIGHTS[name], held_out)
        scaling = choose_row_loss_scaling(self.job)
        run = PlainRun(
            steps=self._list_steps(),
            held_out=sources,
            evaluated=EVALUATED_STEPS,
            schedule=make_rate_schedule(self.job),
            rule=make_optimizer_definition(self.job.optim),
            max_norm=max_norm,
            gradient_factors={OVERFLOW_STEP: OVERFLOW_FACTOR},
            step_factors=choose_step_factors(self.job, self.plan),
            infinite_losses=frozenset({INFINITE_LOSS_STEP}),
            refused=frozenset({REFUSED_STEP}),
            loss_scale=(scaling.initial, scaling.growth_steps),
        )
        return train_by_definition(module, self._loss_sum, run, around=around)


def make_optimizer_definition(optim: Optim) -> OptimizerDefinition:
    """The definition of one of phalanx's optimizers, with the numbers of [optim]."""
    decay = optim.weight_decay
    if decay == "auto":
        decay = WEIGHT_DECAY_OF_OPTIMIZER[optim.kind]
    return OptimizerDefinition(optim.kind, decay, optim.betas, optim.eps, optim.momentum)


def _median_norm(norms: list[float]) -> float:
    """A norm that half of the steps exceed."""
    if len(norms) < 2:
        raise ArithmeticError("fewer than two steps have targets and finite gradients")
    ordered = sorted(norms)
    middle = len(ordered) // 2
    return (ordered[middle - 1] + ordered[middle]) / 2


def _flatten_tensors_by_key(
    weights: Tensors, buffers: Tensors, gradients: Tensors, states: Mapping[str, Tensors]
) -> Tensors:
    """All tensors after a step by KIND/NAME, of the optimizer's slots by optim/SLOT/NAME."""
    tensors: Tensors = {}
    for kind, group in ((WEIGHT, weights), (BUFFER, buffers), (GRADIENT, gradients)):
        for name, tensor in group.items():
            tensors[f"{kind}/{name}"] = tensor
    for name, slots in states.items():
        for slot, tensor in slots.items():
            tensors[f"{STATE}/{slot}/{name}"] = tensor
    return tensors


def _save_tensors(path: Path, tensors: Tensors) -> None:
    copies: Tensors = {}
    for key, tensor in tensors.items():
        # safetensors refuses memory that is not contiguous, or that two tensors share.
        copies[key] = tensor.detach().clone(memory_format=torch.contiguous_format)
    save_file(copies, path)


def _make_step_record(step: PlainStep, start: Tensors, before: Tensors) -> SecondLoopStep:
    """The record of a step; weights were `start` at first and `before` just before it."""
    moved: Tensors = {}
    for name, tensor in step.weights.items():
        moved[name] = tensor.detach() - start[name]
    sizes = {
        WEIGHT: _compute_norms_by_name(moved),
        BUFFER: _compute_norms_by_name(step.buffers),
        GRADIENT: _compute_norms_by_name(step.gradients),
        # States are those of the trained ones.
        BEFORE: _compute_norms_by_name({name: before[name] for name in step.states}),
        UPDATE: _compute_norms_by_name(
            {name: step.weights[name].detach() - before[name] for name in step.states}
        ),
    }
    evaluation = step.evaluation
    for name, slots in step.states.items():
        for slot, tensor in slots.items():
            sizes.setdefault(f"{STATE}/{slot}", {})[name] = tensor.double().norm().item()
    return SecondLoopStep(
        step=step.step,
        loss=step.loss,
        num_targets=step.num_targets,
        grad_norm=step.grad_norm,
        rate=step.rate,
        skipped=step.skipped,
        is_clipped=step.is_clipped,
        tokens_seen=step.tokens_seen,
        loss_scale=step.loss_scale,
        evaluation=None if evaluation is None else evaluation.loss,
        evaluated_targets=0 if evaluation is None else evaluation.num_targets,
        evaluated_sources={} if evaluation is None else dict(evaluation.loss_by_source),
        sizes=sizes,
    )


def _compute_norms_by_name(tensors: Tensors) -> dict[str, float]:
    norms: dict[str, float] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_complex():
            norms[name] = tensor.detach().double().norm().item()
    return norms


class SecondLoopReader:
    """Reads blocks of the reference's tensors; files stay open until the end."""

    def __init__(self, directory: Path) -> None:
        self.recording_phase = SecondLoopRecord.from_json(
            json.loads((directory / FACTS_FILE_NAME).read_text())
        )
        self._directory = directory
        self._files: dict[int, Any] = {}
        self._keys: dict[int, frozenset[str]] = {}

    def has(self, step: int, key: str) -> bool:
        self._open_step_file(step)
        return key in self._keys[step]

    def block(
        self, step: int, key: str, offset: tuple[int, ...], size: tuple[int, ...]
    ) -> torch.Tensor:
        """The elements [offset, offset + size) of a tensor after a step (0: the beginning)."""
        file = self._open_step_file(step)
        # A tensor without dimensions has no slices.
        if not size:
            tensor: torch.Tensor = file.get_tensor(key)
            return tensor
        block: torch.Tensor = file.get_slice(key)[
            tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        ]
        return block

    def _open_step_file(self, step: int) -> Any:
        if step not in self._files:
            path = self._directory / f"step-{step}.safetensors"
            self._files[step] = safe_open(path, framework="pt")  # type: ignore[no-untyped-call]
            self._keys[step] = frozenset(self._files[step].keys())
        return self._files[step]
