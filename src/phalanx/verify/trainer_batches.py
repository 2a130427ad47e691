"""The data of a judged run: the batch of each step, held-out batches, and an objective that spoils
the gradients of one step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from phalanx.verify.cases import NUM_MICROBATCHES
from phalanx.verify.trainer_cases import (
    HALF_MASKED_STEP,
    NO_TARGETS_STEP,
    NUM_STEPS,
    OVERFLOW_FACTOR,
    OVERFLOW_STEP,
)

SOURCE_WEIGHTS = {"first": 0.3, "second": 0.7}


@dataclass(frozen=True)
class TrainerRunBatches:
    """All rows of each step, and of each held-out source; the same on every rank."""

    steps: tuple[Batch, ...]
    held_out: Mapping[str, Batch]

    def microbatches(self, step: int, count: int) -> list[Batch]:
        """The rows of `step`, counted from 1, in `count` equal microbatches."""
        return split_batch_rows(self.steps[step - 1], count)


def make_run_batches(job: Job, plan: Plan, data_dir: Path | None) -> TrainerRunBatches:
    """Batches in float64: made up, or of the data in `data_dir`.

    In HALF_MASKED_STEP the second half of the rows has no targets, in NO_TARGETS_STEP none has;
    not where an own objective may not know what that is.
    """
    num_batches = NUM_STEPS + len(SOURCE_WEIGHTS)
    global_steps = make_global_microbatches(job, plan, data_dir, num_steps=num_batches)
    batches: list[Batch] = []
    for microbatches in cast_steps_to_dtype(global_steps, torch.float64):
        batches.append(
            {key: torch.cat([batch[key] for batch in microbatches]) for key in microbatches[0]}
        )
    steps = batches[:NUM_STEPS]
    num_rows = len(next(iter(steps[0].values())))
    if has_step_without_targets(job, plan, num_batches):
        for step, first_row in ((HALF_MASKED_STEP, num_rows // 2), (NO_TARGETS_STEP, 0)):
            steps[step - 1] = _mask_targets_from_row(steps[step - 1], first_row)
    held_out: dict[str, Batch] = {}
    for name, batch in zip(SOURCE_WEIGHTS, batches[NUM_STEPS:], strict=True):
        # A part is enough, which has a row for each rank.
        held_out[name] = split_batch_rows(batch, NUM_MICROBATCHES)[0]
    return TrainerRunBatches(tuple(steps), held_out)


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
        for name, batch in self.batches.held_out.items():
            sources[name] = [self._select_rank_share(batch)]
        return sources

    def _select_rank_share(self, batch: Batch) -> Batch:
        """This rank's equal run of rows of a batch."""
        return split_batch_rows(batch, self.plan.layout.data_parallel_size)[
            self.mesh.data_parallel_rank
        ]


@dataclass
class OverflowInjector:
    """Multiplies the gradients of the first microbatch of OVERFLOW_STEP on the first
    data-parallel rank: its loss stays as it is, and only the norm is not finite. So they are when
    the step is repeated: its numbers are at fault, and no processor.

    Compressed gradients become infinite: compression keeps what it did not send of a finite one,
    also where the step is skipped for its norm.
    """

    batches: RankBatches
    _num_calls: int = 0

    def wrap_objective(self, objective: Objective) -> Objective:
        """The objective, which also spoils."""

        # Attributes of the objective say what it reads: the wrapper has them, too.
        @functools.wraps(objective)
        def call_and_spoil(outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            loss, targets = objective(outputs, batch)
            if loss.requires_grad and self._is_overflow_due():
                loss.register_hook(lambda gradient: gradient * self._factor)
            return loss, targets

        return call_and_spoil

    @property
    def _factor(self) -> float:
        if self.batches.plan.parallel.compress != "none":
            return math.inf
        return OVERFLOW_FACTOR

    def _is_overflow_due(self) -> bool:
        if self.batches.step != OVERFLOW_STEP or self.batches.mesh.data_parallel_rank != 0:
            return False
        self._num_calls += 1
        # The first of each time that the step is computed.
        return (self._num_calls - 1) % self.batches.plan.num_microbatches == 0
