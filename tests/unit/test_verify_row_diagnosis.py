"""Which parts of a batch do not count once in gradients that are off, and what is said of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models import CPU
from phalanx.core.batch import IGNORE_INDEX
from phalanx.job.schema import Job
from phalanx.mesh.logical import Box, LogicalShard
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.run.one_process.job_loss import JobLoss
from phalanx.run.one_process.original_module import build_original_module
from phalanx.run.one_process.plain_loss import Batch
from phalanx.verify.batches import (
    cast_steps_to_dtype,
    choose_loss_chunk_tokens,
    make_global_microbatches,
)
from phalanx.verify.diagnosis_of_rows import RowDiagnosis
from phalanx.verify.row_gradients import (
    FirstWrongGradients,
    fit_part_counts,
    write_part_gradients_or_none,
)
from phalanx.verify.trace_facts import BEGIN_KIND, Trace, TraceStep, name_gradients_set
from phalanx.verify.verified_job import (
    ROWS_PER_RANK,
    SHRUNK_VOCAB_SIZE,
    make_verified_job,
    shrink_job,
)

NUM_RANKS = 4
COUNT = Callable[[int, int, list[list[int]]], float]
"""How many times a sequence counts: of (microbatch, sequence of it, the targets of all)."""


@dataclass(frozen=True)
class OneStep:
    """A step of one process: gradients by name of sequences that count as asked."""

    job: Job
    plan: Plan
    trace: Trace
    microbatches: list[Batch]
    targets: list[list[int]]

    def gradients(self, count: COUNT) -> dict[str, torch.Tensor]:
        """Of the batch, in which each sequence has its weight."""
        module = build_original_module(self.job, self.plan, "float64", materialize=True)[0]
        loss_sum, total = JobLoss(self.job), sum(map(sum, self.targets))
        for microbatch, batch in enumerate(self.microbatches):
            for row in range(len(self.targets[microbatch])):
                weight = count(microbatch, row, self.targets) / total
                sequence = {key: tensor[row : row + 1] for key, tensor in batch.items()}
                (weight * loss_sum(module, sequence)[0]).backward()
        return {
            name: parameter.grad.clone()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> OneStep:
    directory: Path = tmp_path_factory.mktemp("reference")
    job = make_verified_job(shrink_job(Job())[0], NUM_RANKS)
    plan = make_plan(job, cluster=CPU, vocab_size=SHRUNK_VOCAB_SIZE, num_ranks=NUM_RANKS)
    steps = make_global_microbatches(job, plan, None, num_steps=1)
    microbatches = list(cast_steps_to_dtype(steps, torch.float64)[0])
    targets = [[int(count) for count in (batch["targets"] >= 0).sum(1)] for batch in microbatches]
    module = build_original_module(job, plan, "float64", materialize=True)[0]
    begin = {name: p.detach().clone() for name, p in module.named_parameters()}
    save_file(begin, directory / f"{BEGIN_KIND}.safetensors")
    trace = Trace(
        directory,
        "float64",
        1e-3,
        (TraceStep(3.0, sum(map(sum, targets)), 1.0, None),),
        tuple(begin),
        {BEGIN_KIND: dict.fromkeys(begin, 1.0)},
    )
    step = OneStep(job, plan, trace, microbatches, targets)
    whole = step.gradients(lambda *_: 1.0)
    save_file(whole, directory / f"{name_gradients_set(0)}.safetensors")
    return step


def _explain(step: OneStep, gradients: dict[str, torch.Tensor]) -> str:
    """What the diagnosis says of four ranks of which each holds a quarter of each matrix's rows."""
    parts = write_part_gradients_or_none(step.job, step.plan, step.trace, 0, step.microbatches)
    assert parts is not None
    assert sum(part.num_targets for part in parts) == sum(map(sum, step.targets))
    observations = []
    for rank in range(NUM_RANKS):
        kept = FirstWrongGradients(0, _quarter_of_each(gradients, rank))
        counts = fit_part_counts(kept, step.plan, step.trace, 0)
        found = {"step": 0, "is_off": True, "counts": counts, "rows_of_rank": ROWS_PER_RANK}
        observations.append({"part_counts": {**found, "parts": [astuple(p) for p in parts]}})
    return RowDiagnosis(observations, "float64").explain(0)


def _quarter_of_each(gradients: dict[str, torch.Tensor], rank: int) -> dict[str, LogicalShard]:
    shards = {}
    for name, gradient in gradients.items():
        parts = gradient.chunk(NUM_RANKS)
        if rank < len(parts):
            offset = sum(len(part) for part in parts[:rank]), *[0] * (gradient.ndim - 1)
            box = Box(offset, (0,) * gradient.ndim, tuple(parts[rank].shape))
            shards[name] = LogicalShard(
                name, tuple(gradient.shape), "float64", (box,), parts[rank].clone()
            )
    return shards


def _count_mean_of_means(microbatch: int, row: int, targets: list[list[int]]) -> float:
    per_rank = ROWS_PER_RANK
    first = row // per_rank * per_rank
    own = sum(targets[microbatch][first : first + per_rank])
    return sum(map(sum, targets)) / (NUM_RANKS * len(targets) * max(1, own))


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (
            lambda microbatch, row, targets: 1.0001 if microbatch == 1 else 1.0,
            "those of microbatch 2 of 3 (1.0001 x), and all others do count once",
        ),
        (
            lambda microbatch, row, targets: 1 + 1e-6 * (microbatch == 0),
            "those of microbatch 1 of 3 (1.000001 x), and all others do count once",
        ),
        (
            lambda microbatch, row, targets: float(microbatch < 2),
            "those of microbatch 3 of 3 (left out), and all others do count once",
        ),
        (
            lambda microbatch, row, targets: 2.0 if row // ROWS_PER_RANK == 2 else 1.0,
            "those of data-parallel rank 2 (2 x), and all others do count once",
        ),
        (
            lambda microbatch, row, targets: float(row % ROWS_PER_RANK == 0),
            "those of place 2 of each microbatch of a rank (left out)",
        ),
        (
            lambda microbatch, row, targets: 0.5 if (microbatch, row) == (0, 3) else 1.0,
            "chunk 2 of the logits, sequence 2 of data-parallel rank 1, microbatch 1 (0.5 x)",
        ),
        (
            lambda microbatch, row, targets: (
                (0.1, 0.5, 1.0)[microbatch] * (1 + row // ROWS_PER_RANK)
            ),
            "those of microbatch 1 of data-parallel rank 0 (0.1 x), those of microbatch 1 of",
        ),
        (
            _count_mean_of_means,
            "microbatches of each data-parallel rank count alike, however many targets each has",
        ),
    ],
)
def test_sequences_that_do_not_count_once_are_named(
    step: OneStep, count: COUNT, words: str
) -> None:
    assert words in _explain(step, step.gradients(count))


def test_a_chunk_of_logits_that_weighs_more_is_named(step: OneStep) -> None:
    whole = step.gradients(lambda *_: 1.0)
    module = build_original_module(step.job, step.plan, "float64", materialize=True)[0]
    loss_sum, total = JobLoss(step.job), sum(map(sum, step.targets))
    for batch in step.microbatches:
        for rows in torch.arange(len(batch["targets"])).split(ROWS_PER_RANK):
            targets = batch["targets"][rows].clone()
            chunk = choose_loss_chunk_tokens(targets.numel())
            targets.view(-1)[: 2 * chunk] = IGNORE_INDEX
            if bool((targets != IGNORE_INDEX).any()):
                of_rank = {key: tensor[rows] for key, tensor in batch.items()}
                loss = loss_sum(module, {**of_rank, "targets": targets})[0]
                (1e-4 / total * loss).backward()
    more = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    words = _explain(step, {name: whole[name] + more[name] for name in whole})
    assert "those of chunk 3 of the logits of a rank's microbatch (1.0001 x)" in words


@pytest.mark.parametrize("size", [1e-6, 1e-2])
def test_gradients_that_are_no_sum_over_sequences_are_not_explained(
    step: OneStep, size: float
) -> None:
    gradients = step.gradients(lambda *_: 1.0)
    generator = torch.Generator().manual_seed(0)
    off = {
        name: gradient * (1 + size * torch.randn(gradient.shape, generator=generator))
        for name, gradient in gradients.items()
    }
    assert _explain(step, off) == ""


def test_a_factor_of_all_sequences_is_no_matter_of_some(step: OneStep) -> None:
    assert _explain(step, step.gradients(lambda *_: 0.5)) == ""


def test_the_first_wrong_gradients_are_kept(step: OneStep) -> None:
    shards = _quarter_of_each(step.gradients(lambda *_: 1.0), 0)
    kept, name = FirstWrongGradients(), next(iter(shards))
    right, wrong = (0.0, 1.0, 1.0, 1.0, 1.0), (1e-4, 1.0, 1.0, 1.0, 1.0)
    of_another_shape = (math.inf, -math.inf, 0.0, 1.0, 1.0)
    kept.keep_if_first(step.trace, 0, shards, dict.fromkeys(shards, right))
    kept.keep_if_first(step.trace, 1, shards, dict.fromkeys(shards, of_another_shape))
    assert kept.step == -1
    kept.keep_if_first(step.trace, 2, shards, {**dict.fromkeys(shards, right), name: wrong})
    kept.keep_if_first(step.trace, 3, shards, dict.fromkeys(shards, wrong))
    assert (kept.step, list(kept.shards)) == (2, [name])
    # A copy: the layout's own are overwritten next.
    assert kept.shards[name].tensor.data_ptr() != shards[name].tensor.data_ptr()


def test_gradients_of_what_one_process_freezes_are_no_sum_over_sequences(
    step: OneStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the batch owes anything to them."""
    sampled = torch.ones(9), torch.zeros(9), torch.zeros(9, 3)
    monkeypatch.setattr("phalanx.verify.row_gradients._sample_elements", lambda *_: sampled)
    assert fit_part_counts(FirstWrongGradients(0, {}), step.plan, step.trace, 0) is None
