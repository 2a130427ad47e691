"""`--explain TERM`: formulas with numbers, read off the planner; the printed numbers make the printed
results."""

from __future__ import annotations

import json

import numpy as np
import pytest

from phalanx.core.errors import UsageError
from phalanx.job.load import load_job
from phalanx.plan.accelerators import find_accelerator
from phalanx.plan.advice.explain_term import (
    MEMORY_FORMULAS,
    TIME_FORMULAS,
    ExplainedTerm,
    explain_memory_term,
    explain_time_term,
    format_explained_term,
    parse_term_name,
    round_line_inputs,
)
from phalanx.plan.advice.formula_trace import trace_formulas
from phalanx.plan.cluster import Cluster
from phalanx.plan.layout import Layout
from phalanx.plan.planner import make_plan
from phalanx.plan.timing.machine import build_rates_of_accelerator
from phalanx.plan.timing.setup import StepSetup
from phalanx.plan.timing.step import estimate_step_times
from phalanx.plan.timing.step_time import STEP_TERMS, StepTime

CLUSTER = Cluster("cuda", 64, 80 * 2**30, "h100-sxm", (9, 0))
KEYS = [
    "model.preset=llama3-8b",
    "train.global_batch_size=64",
    "train.micro_batch_size=1",
    "parallel.ranks=64",
    "data.seq_len=2048",
]
SETUP = StepSetup(Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=4), 1, 1, 8, 2048)


SHAPE = make_plan(load_job(None, [*KEYS, "precision.compute=bf16"]), cluster=CLUSTER).model_shape
FEW = ("optimizer state", "activations", "communication")


def predict() -> StepTime:
    return estimate_step_times(
        SHAPE, build_rates_of_accelerator(find_accelerator("h100-sxm")), SETUP
    )


TIME = predict()


def count_arithmetic(explained: ExplainedTerm) -> int:
    """The lines whose printed numbers were computed again, and made the printed result."""
    checked = 0
    for call in explained.calls:
        for line in call.lines:
            printed = round_line_inputs(line)
            if line.result is None or not printed.is_arithmetic:
                continue
            value = eval(printed.expression_with_numbers, {"np": np})
            assert float(value) == pytest.approx(line.result, rel=1e-3, abs=1e-9), printed
            checked += 1
    return checked


def test_every_term_of_time_is_known() -> None:
    assert set(TIME_FORMULAS) == set(STEP_TERMS)


@pytest.mark.parametrize("term", [term for term in STEP_TERMS if term not in ("ep", "offload")])
def test_printed_numbers_make_the_printed_results(term: str) -> None:
    explained = explain_time_term(term, TIME.terms, predict)
    assert explained.calls, "its functions have other names now: explain_term.TIME_FORMULAS"
    assert count_arithmetic(explained) >= 1
    assert format_explained_term(explained, TIME.total_s)[0].startswith(f"{term}: ")
    json.dumps(explained.to_json())


@pytest.mark.parametrize("term", ["tp", "bubble", "jitter", "attention"])
def test_the_last_line_is_the_term_itself(term: str) -> None:
    explained = explain_time_term(term, TIME.terms, predict)
    assert explained.sums[-1].result == pytest.approx(TIME.terms[term])


@pytest.mark.parametrize(
    "keys", [[], ["parallel.pp=2", "parallel.tp=2"], ["parallel.pp=2", "parallel.cp=2"]]
)
def test_categories_of_memory_are_explained(keys: list[str]) -> None:
    job = load_job(None, [*KEYS, *keys, "precision.compute=bf16"])
    plan = make_plan(job, cluster=CLUSTER)
    categories, stage = plan.chosen.predicted_bytes, plan.chosen.zero_stage
    num_checked = 0
    assert set(FEW) <= set(MEMORY_FORMULAS)
    for term in FEW:
        explained = explain_memory_term(
            term, categories, stage, lambda: make_plan(job, cluster=CLUSTER)
        )
        size = categories.get(term.removesuffix(" state"), 0)
        assert explained.value == size
        if size:
            assert explained.calls or explained.sums, term
        num_checked += count_arithmetic(explained)
        assert format_explained_term(explained, sum(categories.values()))
    assert num_checked >= 3


def test_unknown_terms_are_refused_with_the_list() -> None:
    assert parse_term_name("dp-exposed") == "dp exposed"
    assert parse_term_name("Matmul_Loss") == "matmul loss"
    with pytest.raises(UsageError) as caught:
        parse_term_name("quux")
    assert "dp-exposed" in str(caught.value.fix)


def test_tracing_leaves_the_tracer_of_others_in_place() -> None:
    import sys

    before = sys.gettrace()
    calls = trace_formulas(predict, ("phalanx.plan.timing.step",), ("_jitter_share",))
    assert sys.gettrace() is before
    assert [call.function for call in calls] == ["_jitter_share"]
    with pytest.raises(ZeroDivisionError):
        trace_formulas(lambda: 1 / 0, (), ())
    assert sys.gettrace() is before
