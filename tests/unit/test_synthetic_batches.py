"""Batches made up for a model: their documents and their masks."""

from __future__ import annotations

import pytest
import torch

from models import CPU
from phalanx.core.batch import IGNORE_INDEX
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.run.one_process.synthetic_batches import MAX_DOCUMENTS, make_synthetic_batch
from phalanx.verify.batches import (
    STEP_WITH_CHUNKS_WITHOUT_TARGETS,
    choose_loss_chunk_tokens,
    make_global_microbatches,
)
from phalanx.verify.row import NUM_STEPS
from phalanx.verify.verified_job import make_verified_job

LENGTH = 64


def _plan(**data: int) -> Plan:
    job = Job.model_validate({"data": {"seq_len": LENGTH, **data}})
    return make_plan(job, cluster=CPU, vocab_size=50, num_ranks=1)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_rows_have_from_one_to_five_documents() -> None:
    batch = make_synthetic_batch(_plan(), 2 * MAX_DOCUMENTS, _generator(), documents=True)
    ids, positions = batch["document_ids"], batch["positions"]
    assert sorted((ids[:MAX_DOCUMENTS, -1] + 1).tolist()) == list(range(1, MAX_DOCUMENTS + 1))
    assert (ids[:, 0] == 0).all()
    begins = ids.diff(dim=1) == 1
    assert torch.equal(begins, ids.diff(dim=1) != 0)
    # Each document counts from 0, by ones.
    assert torch.equal(positions[:, 1:] == 0, begins)
    assert (positions.diff(dim=1)[~begins] == 1).all()
    lengths = [row.bincount().tolist() for row in ids]
    assert any(1 in row for row in lengths)
    # Ranks of cp, however many, have a border in common with some document.
    assert begins[:, LENGTH // 2 - 1].any()


def test_documents_leave_all_else_as_it_is() -> None:
    with_documents = make_synthetic_batch(_plan(), 8, _generator(), documents=True)
    without = make_synthetic_batch(_plan(), 8, _generator(), documents=False)
    assert all(torch.equal(with_documents[key], without[key]) for key in ("inputs", "targets"))


def test_the_shortest_sequences_have_documents_too() -> None:
    for length in (1, 2, 3):
        batch = make_synthetic_batch(_plan(seq_len=length), 5, _generator(), documents=True)
        assert batch["document_ids"].shape == (5, length)
        assert int(batch["document_ids"].max()) < length


def test_targets_without_masks_are_those_that_masks_left() -> None:
    masked, whole = (
        make_synthetic_batch(
            _plan(), 8, _generator(), documents=False, has_masked_targets=has_masked_targets
        )
        for has_masked_targets in (True, False)
    )
    assert torch.equal(masked["inputs"], whole["inputs"])
    assert (whole["targets"] != IGNORE_INDEX).all()
    assert torch.equal(whole["targets"][:, :-1], whole["inputs"][:, 1:])
    kept = masked["targets"] != IGNORE_INDEX
    # A row's first target is there even if it was masked, as token 0.
    kept[0, 0] = False
    assert 0 < int(kept.sum()) < kept.numel()
    assert torch.equal(masked["targets"][kept], whole["targets"][kept])


@pytest.mark.parametrize("seed", range(5))
def test_a_middle_chunk_of_logits_without_targets(seed: int) -> None:
    job = make_verified_job(Job.model_validate({"run": {"seed": seed}}), 4)
    plan = make_plan(job, cluster=CPU, vocab_size=50, num_ranks=4)
    microbatches = make_global_microbatches(job, plan, None, num_steps=NUM_STEPS)[
        STEP_WITH_CHUNKS_WITHOUT_TARGETS
    ]
    # Ranks have 2, 4 and all 8 rows where data parallelism is 4, 2 and 1.
    for batch, num_rows in zip(microbatches, (2, 4, 8), strict=True):
        targets = batch["targets"][:num_rows].flatten()
        chunks = targets.split(choose_loss_chunk_tokens(len(targets)))
        assert [bool((chunk != IGNORE_INDEX).any()) for chunk in chunks] == [True, False, True]
