"""Losses whose rows see each other are told from those that only look so, and collectives in
them by their line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from models import CPU
from phalanx.job.schema import Job
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.plan.mixed_rows import BatchRowMixing, warn_of_mixed_rows
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.run.one_process.check_rows import find_how_loss_treats_rows
from phalanx.run.one_process.dropout_masks import DropoutMasks
from phalanx.run.one_process.row_mixing import mixes_rows
from phalanx.run.one_process.rows_probe import probe_row_mixing, read_or_make_up_batch

SHAPE = MeasuredModule("mixing", 0, 200, 200, 200, 0)  # for the plan's memory alone


def job_of(
    objective: str | None,
    kind: str = "mixing:encoder",
    ranks: int = 2,
    micro: int | None = None,
    **args: Any,
) -> Job:
    body = {
        "model": {"kind": kind, "args": args, "objective": objective and f"mixing:{objective}"},
        "data": {"source": "mixing:views", "seq_len": 1},
        "train": {"global_batch_size": 8, "micro_batch_size": micro},
        "parallel": {"ranks": ranks},
    }
    return Job.model_validate(body)


def plan_of(job: Job) -> Plan:
    return make_plan(job, cluster=CPU, shape=SHAPE)


def facts_of(objective: str | None, **how: Any) -> BatchRowMixing:
    job = job_of(objective, **how)
    plan = plan_of(job)
    return find_how_loss_treats_rows(job, plan, read_or_make_up_batch(job, plan))


@pytest.mark.parametrize("source", ["labelled", "sorted_by_label"])
@pytest.mark.parametrize(
    "objective", ["like_to_like", "mean_of_those_with_a_like", "hinge_of_triples"]
)
def test_a_loss_of_pairs_is_found_although_few_rows_have_a_like(
    objective: str, source: str
) -> None:
    job = job_of(objective)
    job = job.model_copy(
        update={"data": job.data.model_copy(update={"source": f"mixing:{source}"})}
    )
    plan = plan_of(job)
    assert find_how_loss_treats_rows(job, plan, read_or_make_up_batch(job, plan)) == BatchRowMixing(
        mixes="objective"
    )


@pytest.mark.parametrize(
    ("objective", "how", "mixes"),
    [
        ("contrastive", {}, "objective"),
        ("contrastive", {"norm": "batch"}, "objective"),
        ("by_rows", {}, ""),  # although it has dropout
        ("by_rows", {"norm": "batch"}, ""),  # of which the plan speaks already
        ("by_rows", {"norm": "layer"}, ""),
        ("mean_of_rows", {}, ""),
        ("by_rows", {"centred": True}, "model"),
        ("by_rows", {"noise": 0.5}, ""),  # draws: tried without, in evaluation mode
        ("contrastive", {"noise": 0.5}, "objective"),
    ],
)
def test_what_makes_rows_see_each_other_is_named(
    objective: str, how: dict[str, Any], mixes: str
) -> None:
    assert facts_of(objective, **how) == BatchRowMixing(mixes=mixes)  # type: ignore[arg-type]


def test_looking_changes_nothing_of_the_process() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    facts_of("contrastive", noise=0.5)
    assert torch.equal(before, torch.get_rng_state())


def test_a_loss_that_fails_is_left_to_training() -> None:
    assert facts_of("no_such_function") == BatchRowMixing()
    assert facts_of("by_rows", no_such_argument=1) == BatchRowMixing()


def test_an_objective_that_is_not_there_is_told_with_the_nearest_name() -> None:
    """Before ranks start, and not by a plan that knows nothing of it."""
    job = job_of("contrastiv")
    facts = BatchRowMixing(
        **probe_row_mixing({"job": job.to_json(), "plan": plan_of(job).to_json()})
    )
    assert facts == BatchRowMixing(
        unknown="'mixing' has no 'contrastiv'; did you mean \"contrastive\"?"
    )


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is rank 0 of two that are not there."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_a_collective_in_the_loss_is_seen_before_it_is_called() -> None:
    call = facts_of("gathering").collective
    assert call.startswith("all_gather (mixing.py:")
    assert facts_of("contrastive") == BatchRowMixing(mixes="objective")
    assert facts_of("contrastive", kind="mixing:synchronised") == BatchRowMixing(), (
        "a factory's own is no part of the loss"
    )


@pytest.mark.parametrize(
    ("facts", "ranks", "micro", "words"),
    [
        (
            BatchRowMixing("objective"),
            2,
            None,
            ["the objective mixing:contrastive", "part of 4", "2 data-parallel ranks x 1"],
        ),
        (
            BatchRowMixing("model"),
            1,
            2,
            ["the model mixing:encoder", "Of 8 rows", "1 data-parallel ranks x 4 microbatches"],
        ),
        (BatchRowMixing("objective"), 1, None, []),  # the whole batch at once
        (BatchRowMixing(), 2, None, []),
        (BatchRowMixing(collective="all_gather (x.py:3)"), 1, None, ["calls all_gather (x.py:3)"]),
    ],
)
def test_the_warning_says_which_numbers_change_the_loss(
    facts: BatchRowMixing, ranks: int, micro: int | None, words: list[str]
) -> None:
    job = job_of("contrastive", ranks=ranks, micro=micro)
    said = warn_of_mixed_rows(facts, job, plan_of(job))
    assert len(said) == bool(words), said
    assert [word for word in words if word not in said[0].text] == []


def test_facts_pass_through_json() -> None:
    assert BatchRowMixing(**asdict(BatchRowMixing("model", "x"))) == BatchRowMixing("model", "x")


def test_what_is_too_large_in_itself_is_not_built_however_short_its_rows_are() -> None:
    job = job_of("contrastive")
    plan = plan_of(job)
    assert (
        find_how_loss_treats_rows(
            job, replace(plan, num_params=2 * 10**8), read_or_make_up_batch(job, plan)
        )
        == BatchRowMixing()
    )


def test_a_loss_that_is_no_number_says_nothing_of_rows() -> None:
    class Spoiled(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * float("nan")

    class Loss:
        def compute_outputs(self, module: torch.nn.Module, batch: Any) -> Any:
            return module(batch["inputs"])

        def __call__(self, module: torch.nn.Module, batch: Any) -> Any:
            return self.compute_outputs(module, batch).sum(), torch.tensor(len(batch["inputs"]))

    module, batch = Spoiled(), {"inputs": torch.ones(4, 2)}
    masks = DropoutMasks(module, 0)
    assert not mixes_rows(module, Loss(), batch, masks, float("nan"), 4)
