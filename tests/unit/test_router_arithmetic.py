"""Routers whose scores have fewer digits in a narrow type than defined, which the reference has in
common with every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_narrowing_modules import TRACE

from models import CPU
from phalanx.job.schema import Job
from phalanx.nn.routing import Router, Routing
from phalanx.plan.plan import Plan
from phalanx.run.one_process.original_module import build_original_module
from phalanx.verify.cases import plan_layout_cases
from phalanx.verify.narrow_reference import AutocastLoss
from phalanx.verify.router_arithmetic import RouterArithmetic
from phalanx.verify.scope import list_quantities_not_compared
from phalanx.verify.trace_facts import ArithmeticFault
from phalanx.verify.verified_job import make_narrow_dtype_job, make_verified_job, shrink_job


def plan_one_process(dtype: str, model: dict[str, Any]) -> tuple[Job, Plan]:
    job = make_verified_job(shrink_job(Job.model_validate({"model": model}))[0], 1)
    narrow = job if dtype == "float32" else make_narrow_dtype_job(job, dtype)
    (case,) = plan_layout_cases(narrow, [("one", {})], num_ranks=1, cluster=CPU, shape=None)
    assert case.plan is not None
    return job, case.plan


def find_faults(
    dtype: str = "bfloat16", model: dict[str, Any] | None = None
) -> tuple[ArithmeticFault, ...] | None:
    job, plan = plan_one_process(dtype, model or {"preset": "small-mixtral"})
    module, _ = build_original_module(job, plan, "float32", materialize=True)
    arithmetic = RouterArithmetic(module, job, plan, dtype)
    tokens = torch.randint(250, (2, 3, 16), generator=torch.manual_seed(0))
    with torch.no_grad():
        AutocastLoss(job, torch.bfloat16)(module, {"inputs": tokens[0], "targets": tokens[1]})
    return arithmetic.faults


DEEPSEEK = {
    "preset": "small-mixtral",
    "router_scores": "sigmoid",
    "router_scale": 2.5,
    "balance_bias": 0.01,
    "expert_capacity": 1.0,
}


@pytest.mark.parametrize("model", [{"preset": "small-mixtral"}, DEEPSEEK])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_in_float32_are_no_fault(dtype: str, model: dict[str, Any]) -> None:
    assert find_faults(dtype, model) == ()


def test_nothing_is_looked_at_without_routers_and_in_wide_types() -> None:
    assert find_faults(model={"preset": "small"}) is None
    assert find_faults("float32") is None


def test_scores_with_fewer_digits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Router.forward

    def rounded(self: Router, x_BTD: torch.Tensor) -> Routing:
        routing = own(self, x_BTD)
        return routing._replace(weights_BTK=routing.weights_BTK.bfloat16().float())

    monkeypatch.setattr(Router, "forward", rounded)
    faults = find_faults()
    assert faults is not None
    assert [fault.name for fault in faults] == [
        "blocks.0.moe.router.weight",
        "blocks.1.moe.router.weight",
    ]
    assert all(1e-4 < fault.error < 1e-2 for fault in faults)


@pytest.mark.parametrize("model", [{"preset": "small-mixtral", "experts_per_token": 1}, DEEPSEEK])
def test_scores_that_only_decide_the_choice_are_looked_at(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the one chosen expert counts in full, whatever its score."""
    own = Router.forward

    def choose_by_rounded(self: Router, x_BTD: torch.Tensor) -> Routing:
        choose = self.choose
        self.choose = lambda scores_BTE, per_token: choose(scores_BTE.bfloat16().float(), per_token)
        try:
            return own(self, x_BTD)
        finally:
            self.choose = choose

    monkeypatch.setattr(Router, "forward", choose_by_rounded)
    faults = find_faults(model=model)
    assert faults is not None
    assert len(faults) == 2


def test_rows_in_narrow_types_say_whose_arithmetic_they_share() -> None:
    _, plan = plan_one_process("bfloat16", {"preset": "small-mixtral"})
    trace = replace(TRACE, dtype="bfloat16", initial_faults=())
    (line,) = list_quantities_not_compared(plan, trace)
    assert line.startswith("the model's own arithmetic in bf16: ")
    (line,) = list_quantities_not_compared(plan, replace(trace, arithmetic_faults=()))
    assert line.startswith("the model's own arithmetic in bf16 but for routers' scores: ")
    assert list_quantities_not_compared(plan, replace(trace, dtype="float64")) == ()
