"""Every rule of thumb on a plan where it holds and on one where it does not, with its numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.plan.advice.check_rules import evaluate_rules_of_thumb, list_rules_of_thumb
from phalanx.plan.advice.decision_tables import load_decision_tables, look_up_decision_tables
from phalanx.plan.advice.facts import BatchFacts, HardwareFacts, ModelFacts, PlanFacts
from phalanx.plan.advice.rule import RuleVerdict, format_measured_value
from phalanx.plan.layout import Layout
from phalanx.plan.pipeline.generate import generate_schedule
from phalanx.plan.pipeline.simulate import StageCosts, simulate_timeline

GIB = 2**30
LLAMA_8B = ModelFacts("llama3-8b", 8_030_000_000, 8_030_000_000, 32, 4096, 128_256, 32, 8)
LLAMA_70B = ModelFacts("llama3-70b", 70_600_000_000, 70_600_000_000, 80, 8192, 128_256, 64, 8)
MIXTRAL = replace(
    LLAMA_8B, name="moe", num_params=46_700_000_000, num_experts=8, experts_per_token=2
)
H100 = HardwareFacts("h100-sxm", 64, 8, 80 * GIB, 8, 989e12, 3350, 450, 50)


def make_facts(layout: Layout | None = None, **changes: Any) -> PlanFacts:
    facts = PlanFacts(
        LLAMA_8B, H100, layout or Layout(dp_replicate=64), BatchFacts(8192, 1, 4, 256)
    )
    return replace(facts, **changes)


def judge(name: str, facts: PlanFacts) -> RuleVerdict | None:
    return next((v for v in evaluate_rules_of_thumb(facts) if v.name == name), None)


TP8, TP16 = Layout(dp_replicate=8, tp=8), Layout(dp_replicate=4, tp=16)
PP4 = Layout(pp=4, dp_replicate=16)
ZERO3 = Layout(dp_shard=64)
TERMS = {"ideal": 1.0, "matmul loss": 0.5, "tp": 0.1, "dp exposed": 0.05, "optimizer": 0.01}
SLOW = TERMS | {"tp": 0.4}
ONE_NODE = replace(H100, num_devices=8)
ETHERNET = replace(H100, network_gb_s=3.125)
MANY = BatchFacts(8192, 1, 32, 2048)

# (rule, facts where it holds, facts where it does not, the value of the second)
CASES: list[tuple[str, PlanFacts, PlanFacts, float]] = [
    ("tp-in-link-domain", make_facts(TP8), make_facts(TP16), 16),
    ("tp-width", make_facts(Layout(dp_replicate=16, tp=4)), make_facts(TP8), 512),
    ("matmul-waves", make_facts(TP8, wave_loss=0.05), make_facts(TP8, wave_loss=0.2), 0.2),
    ("kv-heads", make_facts(TP8), make_facts(TP16), 8),
    ("sequence-parallel", make_facts(TP8), make_facts(TP8, sequence_parallel=False), 8),
    (
        "vocab-padding",
        make_facts(model=replace(LLAMA_8B, vocab_size=128 * 1000)),
        make_facts(model=replace(LLAMA_8B, vocab_size=10_007)),
        105 / 10_007,
    ),
    ("pipeline-bubble", make_facts(PP4, bubble=0.1), make_facts(PP4, bubble=0.3), 0.3),
    ("pipeline-microbatches", make_facts(PP4, batch=MANY), make_facts(PP4), 4),
    (
        "stage-balance",
        make_facts(PP4, busiest_stage_ratio=1.02),
        make_facts(PP4, busiest_stage_ratio=1.2),
        0.2,
    ),
    ("zero-in-pipeline", make_facts(PP4, zero_stage=1), make_facts(PP4, zero_stage=3), 3),
    (
        "exposed-communication",
        make_facts(TP8, terms_s=TERMS),
        make_facts(TP8, terms_s=SLOW),
        0.45 / 1.96,
    ),
    (
        "fsdp-tokens",
        make_facts(ZERO3, zero_stage=3),
        make_facts(ZERO3, zero_stage=3, hardware=ETHERNET, batch=BatchFacts(1024, 1, 4, 256)),
        1024,
    ),
    (
        "reduction-window",
        make_facts(Layout(dp_replicate=64), batch=BatchFacts(8192, 4, 1, 256)),
        make_facts(Layout(dp_replicate=64), hardware=ETHERNET),
        # 64.24 GB in two transfers at 25 GB/s; 4 x 8.03e9 x 8192 FLOPs at 0.6 of 989e12.
        (2 * 4 * 8.03e9 / 25e9) / (4 * 8.03e9 * 8192 / (0.6 * 989e12)),
    ),
    (
        "large-model-network",
        make_facts(model=LLAMA_70B),
        make_facts(model=LLAMA_70B, hardware=ETHERNET),
        3.125,
    ),
    (
        "scaling-efficiency",
        make_facts(single_domain_efficiency=0.9),
        make_facts(single_domain_efficiency=0.7),
        0.7,
    ),
    (
        "memory-headroom",
        make_facts(peak_bytes=60 * GIB, capacity_bytes=70 * GIB),
        # A plan that fits, of a device of 80 GiB: what no plan does is no rule for plans.
        make_facts(peak_bytes=69 * GIB, capacity_bytes=70 * GIB),
        69 / 70,
    ),
    (
        "data-parallel-first",
        make_facts(TP8, data_parallel_bytes=90 * GIB, capacity_bytes=70 * GIB),
        make_facts(TP8, data_parallel_bytes=60 * GIB, capacity_bytes=70 * GIB),
        1,
    ),
    (
        "smallest-zero-stage",
        make_facts(ZERO3, zero_stage=3, smaller_zero_bytes=90 * GIB, capacity_bytes=70 * GIB),
        make_facts(ZERO3, zero_stage=3, smaller_zero_bytes=60 * GIB, capacity_bytes=70 * GIB),
        1,
    ),
    (
        "recompute-where-needed",
        make_facts(recompute="full", plain_bytes=90 * GIB, capacity_bytes=70 * GIB),
        make_facts(recompute="full", plain_bytes=60 * GIB, capacity_bytes=70 * GIB),
        1,
    ),
    (
        "offload-hidden",
        make_facts(offload="optimizer", terms_s=TERMS | {"offload": 0.01}),
        make_facts(offload="optimizer", terms_s=TERMS | {"offload": 1.0}),
        1.0 / 2.66,
    ),
    (
        "critical-batch",
        make_facts(batch=BatchFacts(2048, 1, 1, 256)),
        make_facts(batch=BatchFacts(8192, 1, 32, 2048)),
        8192 * 2048,
    ),
    (
        "learning-rate",
        make_facts(reference_batch_size=64, lr_scaling="sqrt"),
        make_facts(reference_batch_size=64, lr_scaling="linear"),
        2.0,
    ),
    (
        "arithmetic-intensity",
        make_facts(),
        make_facts(TP8, batch=BatchFacts(256, 1, 4, 256)),
        256 * 512 * 4096 / (256 * 512 + 512 * 4096 + 256 * 4096),
    ),
    (
        "expert-tokens",
        make_facts(model=MIXTRAL),
        make_facts(model=MIXTRAL, batch=BatchFacts(1024, 1, 4, 256)),
        256,
    ),
    ("goodput", make_facts(goodput=0.96), make_facts(goodput=0.8), 0.8),
    ("spot", make_facts(spot_cost_ratio=0.5), make_facts(spot_cost_ratio=1.1), 1.1),
]


@pytest.mark.parametrize(("name", "good", "bad", "value"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_holds_and_does_not(
    name: str, good: PlanFacts, bad: PlanFacts, value: float
) -> None:
    held, failed = judge(name, good), judge(name, bad)
    assert held is not None
    assert failed is not None
    assert held.state in ("holds", "tight")
    assert failed.state == "fails"
    assert failed.value == pytest.approx(value)
    assert failed.remedy
    assert failed.consequence
    assert failed.evidence
    assert failed.to_json()["comparison"] == failed.comparison


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    names = [rule.name for rule in list_rules_of_thumb()]
    assert len(set(names)) == len(names)
    assert {case[0] for case in CASES} == set(names)


def test_rules_that_do_not_apply_are_silent_and_unknown_numbers_are_said() -> None:
    names = {verdict.name for verdict in evaluate_rules_of_thumb(make_facts())}
    assert not names & {"tp-in-link-domain", "pipeline-bubble", "fsdp-tokens", "offload-hidden"}
    bubble = judge("pipeline-bubble", make_facts(PP4))
    assert bubble is not None
    assert bubble.state == "unknown"
    assert "not judged" in bubble.comparison
    assert "simulated step" in bubble.consequence


def test_a_bubble_between_good_and_bad_is_tight() -> None:
    states = [judge("pipeline-bubble", make_facts(PP4, bubble=b)).state for b in (0.08, 0.1, 0.21)]  # type: ignore[union-attr]
    assert states == ["holds", "tight", "fails"]


@pytest.mark.parametrize(("stages_per_rank", "name"), [(1, "1f1b"), (2, "interleaved")])
def test_a_bubble_is_compared_with_one_of_the_same_unit(stages_per_rank: int, name: str) -> None:
    facts = make_facts(PP4, bubble=0.3, stages_per_rank=stages_per_rank)
    verdict = judge("pipeline-bubble", facts)
    assert verdict is not None
    costs = [StageCosts(1, 1, 1)] * 4 * stages_per_rank
    schedule = generate_schedule(name, 4, facts.batch.num_microbatches, stages_per_rank)
    expected = 100 * float(simulate_timeline(schedule, costs).bubble)
    assert f"would wait for {expected:.1f} % of it" in verdict.consequence
    assert ("interleaved" in verdict.consequence) is (name == "interleaved")


def test_micro_batches_are_those_of_the_plan_whatever_a_rank_has_of_stages() -> None:
    plain = judge("pipeline-microbatches", make_facts(PP4))
    verdict = judge("pipeline-microbatches", make_facts(PP4, stages_per_rank=2))
    assert plain is not None
    assert verdict is not None
    assert plain.comparison == "4 micro-batches, at least 16"
    assert verdict.comparison == "4 micro-batches, at least 8"
    assert verdict.remedy.startswith("8 micro-batches")
    assert "4 for each of 4 ranks, divided by 2 stages on each" in verdict.consequence


def test_model_parallelism_that_is_faster_is_not_needless() -> None:
    facts = make_facts(TP8, data_parallel_bytes=60 * GIB, capacity_bytes=70 * GIB, terms_s=TERMS)
    name = "data-parallel-first"
    slower = judge(name, replace(facts, data_parallel_step_s=2.0 * sum(TERMS.values())))
    faster = judge(name, replace(facts, data_parallel_step_s=0.9 * sum(TERMS.values())))
    assert slower is not None
    assert faster is not None
    assert (slower.state, faster.state) == ("holds", "fails")


def test_failures_come_first() -> None:
    verdicts = evaluate_rules_of_thumb(make_facts(TP16, peak_bytes=79 * GIB, terms_s=SLOW))
    order = ["fails", "tight", "unknown", "holds"]
    ranks = [order.index(verdict.state) for verdict in verdicts]
    assert ranks == sorted(ranks)
    assert ranks[0] == 0


def test_learning_rate_of_sgd_is_linear_and_unscaled_rates_fail() -> None:
    sgd = make_facts(reference_batch_size=64, lr_scaling="linear", optimizer="sgd")
    assert judge("learning-rate", sgd).state == "holds"  # type: ignore[union-attr]
    unscaled = judge("learning-rate", make_facts(reference_batch_size=64))
    assert unscaled is not None
    assert unscaled.value == pytest.approx(2.0)
    auto = make_facts(reference_batch_size=64, lr_scaling="auto")
    assert judge("learning-rate", auto).state == "holds"  # type: ignore[union-attr]


def test_numbers_have_units() -> None:
    assert format_measured_value(0.123, "%") == "12.3 %"
    assert format_measured_value(4096, "tokens") == "4,096 tokens"
    assert format_measured_value(3.125, "GB/s") == "3.12 GB/s"


def test_decision_tables_contradict_each_other_and_say_where_the_plan_differs() -> None:
    facts = make_facts(
        Layout(dp_shard=64), zero_stage=3, model=replace(LLAMA_70B, num_params=13_500_000_000)
    )
    answers = look_up_decision_tables(facts)
    assert len(answers) == len(load_decision_tables()) == 4
    assert {answer.agrees for answer in answers} == {True, False}
    first, second = answers[0], answers[1]
    assert first.agrees is True
    assert first.says.startswith("ZeRO-3")
    assert second.agrees is False
    assert second.differences == "the table has tp"


def test_decision_tables_with_experts_and_small_models() -> None:
    small = make_facts(model=replace(LLAMA_8B, num_params=100_000_000))
    assert [answer.agrees for answer in look_up_decision_tables(small)] == [True] * 4
    experts = look_up_decision_tables(make_facts(TP8, model=MIXTRAL))
    assert experts[0].says.startswith("tensor, pipeline and expert")
    assert experts[0].differences == "the table has ep, pp"


def test_a_value_that_is_shown_as_its_limit_says_on_which_side_it_is() -> None:
    verdict = judge("stage-balance", make_facts(PP4, busiest_stage_ratio=1.0502))
    assert verdict is not None
    assert verdict.state == "fails"
    assert verdict.comparison == "just above 5.0 %, at most 5.0 %"


def test_a_pipeline_keeps_the_zero_stage_that_fits_or_is_faster() -> None:
    facts = make_facts(
        PP4,
        zero_stage=2,
        terms_s={"ideal": 4.0},
        peak_bytes=36 * GIB,
        capacity_bytes=41 * GIB,
        stage_1_bytes=40 * GIB,
        stage_1_step_s=4.0,
    )
    verdict = judge("zero-in-pipeline", facts)
    assert verdict is not None
    assert verdict.state == "fails"
    assert "40.0 GiB per rank with stage 1 and 36.0 GiB with 2" in verdict.consequence
    assert judge("zero-in-pipeline", replace(facts, stage_1_bytes=43 * GIB)) is None
    assert judge("zero-in-pipeline", replace(facts, stage_1_step_s=4.2)) is None


def test_remedies_name_no_change_that_the_plan_has_already() -> None:
    waves = [judge("matmul-waves", make_facts(layout, wave_loss=0.2)) for layout in (TP8, PP4)]
    assert ["smaller parallel.tp" in verdict.remedy for verdict in waves if verdict] == [
        True,
        False,
    ]
    bubbles = [
        judge("pipeline-bubble", make_facts(PP4, bubble=0.3, stages_per_rank=stages))
        for stages in (1, 2)
    ]
    assert ["stages_per_rank=2" in verdict.remedy for verdict in bubbles if verdict] == [
        True,
        False,
    ]
    exposed = [
        judge(
            "exposed-communication", make_facts(terms_s={"ideal": 1, "dp exposed": 1}, zero_stage=s)
        )
        for s in (0, 1)
    ]
    assert ["lower ZeRO stage" in verdict.remedy for verdict in exposed if verdict] == [False, True]
