"""A row of `verify` whose steps have more microbatches than others: a loss of the late ones shows
in it alone."""

from __future__ import annotations

from typing import Any

import torch
from test_verify import rows_of, small_job

from models import CPU
from phalanx.parallel.direct import DirectExecutor
from phalanx.verify.batches import join_steps
from phalanx.verify.cases import list_all_layouts, plan_layout_cases
from phalanx.verify.verified_job import make_verified_job

MANY = "ddp-9-microbatches"


def lose_microbatches_after_the_eighth() -> None:
    """A step computes eight microbatches and no more."""
    forward_backward = DirectExecutor.forward_backward

    def of_eight(self: Any, microbatches: Any, objective: Any, step: int, add: Any) -> None:
        forward_backward(self, microbatches[:8], objective, step, add)

    DirectExecutor.forward_backward = of_eight  # type: ignore[method-assign]


def test_late_microbatches_that_are_lost_show_in_the_row_with_many() -> None:
    rows = rows_of(
        small_job(), lose_microbatches_after_the_eighth, 2, ("float64",), only=("ddp", MANY)
    )
    assert rows["ddp float64"]["ok"]
    row = rows[f"{MANY} float64"]
    assert not row["ok"]
    assert row["first"]["what"] == "number of targets"
    assert "gradients summed over 9 microbatches" in row["judged"]


def test_a_row_of_many_microbatches_that_stands_alone_equals_the_reference() -> None:
    """Its reference is made of the job's own batch, also where no layout has that."""
    (row,) = rows_of(small_job(), None, 2, ("float64",), only=(MANY,)).values()
    assert row["ok"], row["first"]


def test_many_microbatches_are_those_of_three_steps() -> None:
    job = make_verified_job(small_job(), 2)
    layouts = [pair for pair in list_all_layouts(2) if pair[0] in (MANY, "ddp")]
    few, many = plan_layout_cases(job, layouts, num_ranks=2, cluster=CPU, shape=None)
    assert few.plan is not None
    assert many.plan is not None
    assert (few.plan.num_microbatches, many.plan.num_microbatches) == (3, 9)
    assert few.plan.micro_batch_size == many.plan.micro_batch_size
    steps = [[{"inputs": torch.tensor([3 * step + n])} for n in range(3)] for step in range(6)]
    joined = [[int(batch["inputs"]) for batch in step] for step in join_steps(steps, 9)]
    assert joined == [list(range(9)), list(range(9, 18))]
    # One step alone has its microbatches three times.
    assert [int(b["inputs"]) for b in join_steps(steps[:1], 9)[0]] == [0, 1, 2] * 3
