"""The data of a judged run: the batch of each step, held-out batches, and an objective whose
gradients are multiplied in some steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from phalanx.core.batch import IGNORE_INDEX
from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.executor import Batch, Objective
from phalanx.plan.plan import Plan
from phalanx.train.evaluation import HeldOutBatches
from phalanx.verify.batches import (
    cast_steps_to_dtype,
    has_step_without_targets,
    make_global_microbatches,
)
from phalanx.verify.trainer_cases import (
    HALF_MASKED_STEP,
    INFINITE_LOSS_STEP,
    NO_TARGETS_STEP,
    NUM_STEPS,
    OVERFLOW_FACTOR,
    OVERFLOW_STEP,
    REPEATED_STEP,
    UNMASKED_STEP,
)
from phalanx.verify.verified_job import NUM_MICROBATCHES

WITHOUT_TARGETS = "without targets"
SOURCE_WEIGHTS = {"first": 0.3, WITHOUT_TARGETS: 0.2, "second": 0.5}
"""What each held-out source weighs. One of them has no mean loss, and no part in that of all."""


@dataclass(frozen=True)
class TrainerRunBatches:
    """All rows of each step, and of each batch of the held-out sources; the same on every rank."""

    steps: tuple[Batch, ...]
    held_out: Mapping[str, Sequence[Batch]]

    def microbatches(self, step: int, count: int) -> list[Batch]:
        """The rows of `step`, counted from 1, in `count` equal microbatches."""
        return split_batch_rows(self.steps[step - 1], count)


def make_run_batches(job: Job, plan: Plan, data_dir: Path | None) -> TrainerRunBatches:
    """Batches in float64: made up, or of the data in `data_dir`.

    In HALF_MASKED_STEP the second half of the rows has no targets, in NO_TARGETS_STEP none has, and
    none in a held-out source; in UNMASKED_STEP none is masked. Not so where an own objective may
    not know what that is, nor of images, but for the last.
    """
    num_batches = NUM_STEPS + len(SOURCE_WEIGHTS) - 1
    global_steps = make_global_microbatches(job, plan, data_dir, num_steps=num_batches)
    batches: list[Batch] = []
    for microbatches in cast_steps_to_dtype(global_steps, torch.float64):
        batches.append(
            {key: torch.cat([batch[key] for batch in microbatches]) for key in microbatches[0]}
        )
    steps = batches[:NUM_STEPS]
    num_rows = len(next(iter(steps[0].values())))
    # Of data without targets the second loop says what it lacks.
    may_mask = has_step_without_targets(job, plan, num_batches) and "targets" in steps[0]
    if may_mask:
        for step, first_row in ((HALF_MASKED_STEP, num_rows // 2), (NO_TARGETS_STEP, 0)):
            steps[step - 1] = _mask_targets_from_row(steps[step - 1], first_row)
    if job.model.objective is None and "targets" in steps[0]:
        steps[UNMASKED_STEP - 1] = _unmask_targets(steps[UNMASKED_STEP - 1])
    held_out = _make_held_out_batches(*batches[NUM_STEPS:], may_mask=may_mask)
    return TrainerRunBatches(tuple(steps), held_out)


def _make_held_out_batches(
    first: Batch, second: Batch, *, may_mask: bool
) -> dict[str, list[Batch]]:
    """The sources' batches: parts, which have a row for each rank; two of each source, and three of
    the last one, which no number of stages divides.

    With `may_mask` those of a source have unequal numbers of targets, and one source has none.
    """
    parts = split_batch_rows(first, NUM_MICROBATCHES)[:2]
    other_parts = split_batch_rows(second, NUM_MICROBATCHES)
    if not may_mask:
        return {"first": parts, "second": other_parts}
    return {
        "first": [parts[0], _mask_every_second_target(parts[1])],
        WITHOUT_TARGETS: [_mask_targets_from_row(part, 0) for part in other_parts[:2]],
        "second": [_mask_every_second_target(other_parts[0]), *other_parts[1:]],
    }


def _mask_every_second_target(batch: Batch) -> Batch:
    """The batch without every second one of the targets that it has."""
    masked = batch["targets"].clone()
    places = (masked != IGNORE_INDEX).nonzero()[1::2]
    masked[tuple(places.T)] = IGNORE_INDEX
    return {**batch, "targets": masked}


def _unmask_targets(batch: Batch) -> Batch:
    """The batch with token or class 0 for each target."""
    return {**batch, "targets": torch.zeros_like(batch["targets"])}


def _mask_targets_from_row(batch: Batch, first_row: int) -> Batch:
    """The batch without the targets of the rows from `first_row` on."""
    masked = batch["targets"].clone()
    masked[first_row:] = IGNORE_INDEX
    return {**batch, "targets": masked}


def split_batch_rows(batch: Batch, count: int) -> list[Batch]:
    """The rows of a batch in `count` equal batches."""
    chunks = {key: tensor.chunk(count) for key, tensor in batch.items()}
    return [{key: parts[index] for key, parts in chunks.items()} for index in range(count)]


@dataclass
class RankBatches:
    """The microbatches of one rank, as the trainer asks for them; `on_step` is called first, with
    the step that begins."""

    batches: TrainerRunBatches
    plan: Plan
    mesh: Mesh
    on_step: Callable[[int], None]
    step: int = 0

    def step_microbatches(self, step: int) -> Sequence[Batch]:
        self.on_step(step)
        self.step = step
        return [
            self._select_rank_share(b)
            for b in self.batches.microbatches(step, self.plan.num_microbatches)
        ]

    def held_out(self) -> HeldOutBatches:
        """This rank's share of the held-out batches, by source."""
        sources: dict[str, list[Batch]] = {}
        for name, held_out in self.batches.held_out.items():
            sources[name] = [self._select_rank_share(batch) for batch in held_out]
        return sources

    def _select_rank_share(self, batch: Batch) -> Batch:
        """This rank's equal run of rows of a batch."""
        return split_batch_rows(batch, self.plan.layout.data_parallel_size)[
            self.mesh.data_parallel_rank
        ]


@dataclass
class GradientInjector:
    """Multiplies gradients, and leaves the loss as it is. Those of `step_factors`: step -> what all
    gradients of the step are multiplied by.

    In INFINITE_LOSS_STEP it leaves the gradients, and the first microbatch on the first
    data-parallel rank has an infinite loss, as often as the step is computed.

    In OVERFLOW_STEP those of the first microbatch on the first data-parallel rank: only the norm is
    not finite. So they are when the step is repeated: its numbers are at fault, and no processor.
    In REPEATED_STEP, if the trainer `repeats_steps`, they are the first time alone: computed again
    the step is as good as any other.

    Compressed gradients become infinite: compression keeps what it did not send of a finite one,
    also where the step is skipped for its norm.
    """

    batches: RankBatches
    step_factors: Mapping[int, float]
    repeats_steps: bool
    _num_calls: dict[int, int] = field(default_factory=dict)

    def wrap_objective(self, objective: Objective) -> Objective:
        """The objective, whose gradients are multiplied, or whose loss is infinite."""

        # Attributes of the objective say what it reads: the wrapper has them, too.
        @functools.wraps(objective)
        def call_and_multiply(outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            loss, targets = objective(outputs, batch)
            if loss.requires_grad:
                num_calls = self._count_call()
                factor = self._choose_factor(num_calls)
                if factor != 1.0:
                    loss.register_hook(lambda gradient: gradient * factor)
                if self._is_first_microbatch_of(INFINITE_LOSS_STEP, num_calls):
                    loss = loss + math.inf
            return loss, targets

        return call_and_multiply

    def _count_call(self) -> int:
        """How often the objective was called for the step before."""
        num_calls = self._num_calls.get(self.batches.step, 0)
        self._num_calls[self.batches.step] = num_calls + 1
        return num_calls

    def _choose_factor(self, num_calls: int) -> float:
        factor = self.step_factors.get(self.batches.step, 1.0)
        if self._is_overflow_due(num_calls):
            factor *= self._overflow_factor
        return factor

    @property
    def _overflow_factor(self) -> float:
        if self.batches.plan.parallel.compress != "none":
            return math.inf
        return OVERFLOW_FACTOR

    def _is_overflow_due(self, num_calls: int) -> bool:
        if self.batches.step == REPEATED_STEP:
            is_first_rank = self.batches.mesh.data_parallel_rank == 0
            return is_first_rank and self.repeats_steps and num_calls == 0
        return self._is_first_microbatch_of(OVERFLOW_STEP, num_calls)

    def _is_first_microbatch_of(self, step: int, num_calls: int) -> bool:
        """True for the first microbatch on the first data-parallel rank, each time that `step` is
        computed."""
        if self.batches.step != step or self.batches.mesh.data_parallel_rank != 0:
            return False
        return num_calls % self.batches.plan.num_microbatches == 0
