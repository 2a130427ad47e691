"""Which layouts are judged in steps of one microbatch, and which say that they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.job.schema import Job
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.verify.cases import (
    ONE_MICROBATCH_SUFFIX,
    list_all_layouts,
    list_axes_without_one_microbatch_row,
)
from phalanx.verify.choose import select_layout_cases


def plan_layouts(*names: str) -> dict[str, Plan]:
    selection = select_layout_cases(Job(), names, ranks=4, steps=1, shrink=True, types="float64")
    return {case.name: case.plan for case in selection.cases if case.plan is not None}


def test_each_way_of_reducing_has_a_row_of_one_microbatch() -> None:
    names = [name for name, _ in list_all_layouts(4) if name.endswith(ONE_MICROBATCH_SUFFIX)]
    plans = plan_layouts(*names)
    assert {
        (plan.layout.dp_replicate > 1, plan.parallel.zero_stage) for plan in plans.values()
    } == {(True, 0), (False, 1), (False, 3), (True, 2)}
    assert {plan.num_microbatches for plan in plans.values()} == {1}
    assert not any(map(list_axes_without_one_microbatch_row, plans.values()))


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("ddp", []),
        ("zero2", []),
        ("hsdp2x2-zero3", []),
        ("hsdp2x2-zero1", ["copies of the shards of ZeRO-1"]),
        ("tp4", ["tp"]),
        ("cp4", ["cp"]),
        # As many microbatches as its schedule needs.
        ("pp2-tp2-1f1b", []),
    ],
)
def test_a_layout_without_a_row_of_one_microbatch_says_so(name: str, axes: list[str]) -> None:
    (plan,) = plan_layouts(name).values()
    assert list_axes_without_one_microbatch_row(plan) == axes


def test_experts_have_no_row_of_one_microbatch() -> None:
    (plan,) = plan_layouts("zero3").values()
    with_experts = replace(plan, layout=Layout(dp_shard=4, ep=2))
    assert list_axes_without_one_microbatch_row(with_experts) == ["ep"]
