"""Memory bandwidth: verdicts over recorded steps beside a profile of round numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.recorded_steps import COMPUTE_S, write_run

from phalanx.job.load import load_job
from phalanx.observe.events import OperatorsCounted
from phalanx.plan.accelerators import list_accelerators
from phalanx.plan.calibrated.roofline import estimate_roofline
from phalanx.plan.cluster import Cluster
from phalanx.plan.memory_rates import find_memory_rates, select_memory_rates
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.profiles import (
    PROCESSOR,
    ProfileSection,
    TimedOperation,
    build_empty_profile,
    get_profile_path,
    save_profile,
)
from phalanx.report.bottleneck.cause import BottleneckVerdict
from phalanx.report.bottleneck.describe import describe_bottleneck, list_verdict_lines
from phalanx.report.bottleneck.of_run import judge_run
from phalanx.report.end_of_run import list_end_of_run_lines
from phalanx.report.reduce import collect_run_facts

MIB = 2**20
CPU = Cluster("cpu", 4, 2**36)
ADAMW = {"optim": {"kind": "adamw"}}
RATE = 10e9


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("phalanx.plan.memory_rates.detect_cluster", lambda device: CPU)


def copy_row(
    num_bytes: int, rate: float, num_ranks: int, *, low_rate: float = 0, cpu_rate: float = 0
) -> TimedOperation:
    # A core reads what it is about to write: memory moves three bytes for two of a copy.
    seconds = 1.5 * num_bytes / rate
    low_s = 1.5 * num_bytes / (low_rate or rate)
    size = (num_bytes // 2,)
    return TimedOperation(
        *("copy", "", "fp32", size, num_ranks, CPU.num_devices // num_ranks),
        *(seconds, low_s, seconds, seconds, 1.5 * num_bytes / (cpu_rate or rate), 9),
        num_bytes=num_bytes,
    )


def measure_copies(rate: float = RATE) -> None:
    """A profile of this machine in which each of 4 ranks copies at `rate`, five times as fast what
    a cache holds."""
    rows = (copy_row(8 * MIB, 5 * rate, 4), copy_row(96 * MIB, rate, 4))
    section = ProfileSection("2026-11-24T18:00:00+00:00", 0.0, False, 0, "wall", (), rows)
    profile = replace(build_empty_profile(CPU), sections={"gemm": section})
    save_profile(profile, get_profile_path(profile))


def plan_of_update(seconds: float, rate: float = RATE, zero_stage: int = 0) -> dict[str, Any]:
    """A plan of four ranks whose update moves so many bytes that it takes `seconds` at `rate`."""
    num_params = seconds * rate / 32
    return {
        "layout": {"dp_replicate": 4, "tp": 1},
        "device": "cpu",
        "global_batch_size": 8,
        "zero_stage": zero_stage,
        "memory": {"predicted_bytes": {"optimizer": 8 * num_params}},
    }


def judge_update(
    run_dir: Path, update_s: float, plan: dict[str, Any], job: Any = ADAMW
) -> BottleneckVerdict:
    if not run_dir.exists():
        write_run(run_dir, {-1: {"optimizer": update_s}})
    verdict = judge_run(run_dir, plan, job)
    assert verdict is not None
    return verdict


def test_an_update_at_the_rate_of_copies_is_bound_by_memory(tmp_path: Path) -> None:
    measure_copies()
    verdict = judge_update(tmp_path / "run", 0.100, plan_of_update(0.090))
    main = verdict.main
    assert main is not None
    assert (main.kind, main.phase, main.rank) == ("memory bandwidth", "optimizer", None)
    step_s = verdict.mean_step_s
    assert main.share == pytest.approx(0.100 / step_s, abs=0.01)
    # It cannot go away wholly.
    assert main.is_upper_bound
    assert main.speedup == pytest.approx(step_s / (step_s - 0.100), abs=0.02)
    assert "at least 858.3 MiB" in main.evidence[0]
    assert "9 GB/s, 90.0 % of the 10 GB/s" in main.evidence[0]
    assert "phalanx bench timed on 2026-11-24" in main.evidence[0]
    assert "memory bandwidth in the optimizer's update, 48" in describe_bottleneck(verdict)


def test_the_gain_of_larger_batches_and_of_sharing_is_that_of_the_steps_again(
    tmp_path: Path,
) -> None:
    """Of 204 ms the update is 100: twice the batch takes 308 ms, and trains twice the tokens."""
    measure_copies()
    main = judge_update(tmp_path / "run", 0.100, plan_of_update(0.100)).main
    assert main is not None
    gains = {gain.setting: gain.speedup for gain in main.gains}
    assert gains == {
        "train.global_batch_size=16": pytest.approx(2 * 0.2055 / 0.311, abs=0.01),
        "train.global_batch_size=32": pytest.approx(4 * 0.2055 / 0.522, abs=0.01),
        "parallel.zero_stage=1": pytest.approx(0.2055 / (0.2055 - 0.075), abs=0.01),
    }
    assert [gain.limit for gain in main.gains] == ["at least", "at least", "at most"]
    assert "train.global_batch_size=16 at least 1.3" in main.action
    assert main.to_json()["gains"][0]["setting"] == "train.global_batch_size=16"
    # What ranks send once a step, too, does not grow.
    sending = write_run(
        tmp_path / "sending",
        {-1: {"optimizer": 0.100}},
        transfer_s=0.054,
        communication=lambda seconds: {"dp: all_reduce gradients": seconds - 0.004},
    )
    main = judge_update(sending, 0.100, plan_of_update(0.100)).main
    assert main is not None
    assert main.gains[0].speedup == pytest.approx(2 * 0.2555 / 0.361, abs=0.01)
    sharded = judge_update(tmp_path / "run", 0.1, plan_of_update(0.1, zero_stage=1)).main
    assert sharded is not None
    assert not any("zero_stage" in gain.setting for gain in sharded.gains)


def test_without_a_measurement_nothing_is_said_of_memory_but_the_update_is(tmp_path: Path) -> None:
    verdict = judge_update(tmp_path / "run", 0.100, plan_of_update(0.100))
    main = verdict.main
    assert main is not None
    assert (main.kind, main.phase, main.is_upper_bound) == ("optimizer", "optimizer", True)
    assert "the optimizer's update, 48" in describe_bottleneck(verdict)
    assert main.speedup == pytest.approx(0.2055 / 0.1055, abs=0.02)
    assert "train.global_batch_size=16" in main.action
    assert any(
        "the evidence does not suffice" in text and "phalanx bench gemm" in text
        for text in verdict.not_judged
    )


@pytest.mark.parametrize(
    ("seconds_at_rate", "why"),
    [
        (0.060, "memory gives 10 GB/s"),  # at 60 % of it something else is slow
        (0.200, "memory gives 10 GB/s"),  # at twice its rate a cache was faster
    ],
)
def test_an_update_far_from_the_rate_of_copies_is_not_called_bound_by_it(
    tmp_path: Path, seconds_at_rate: float, why: str
) -> None:
    measure_copies()
    verdict = judge_update(tmp_path / "run", 0.100, plan_of_update(seconds_at_rate))
    assert [cause.kind for cause in verdict.causes] == ["optimizer"]
    assert any(why in text for text in verdict.not_judged)


def test_what_a_cache_may_hold_is_not_compared_with_copies_from_memory(tmp_path: Path) -> None:
    """60 MiB of weights and state, at a rate that 96 MiB are copied at."""
    measure_copies(rate=1.2e9)
    verdict = judge_update(tmp_path / "run", 0.100, plan_of_update(0.100, rate=1.2e9))
    assert [cause.kind for cause in verdict.causes] == ["optimizer"]
    assert any("memory gives 6 GB/s" in text for text in verdict.not_judged)


def test_a_step_of_products_is_not_bound_by_memory_for_its_update(tmp_path: Path) -> None:
    measure_copies()
    verdict = judge_update(tmp_path / "run", 0.015, plan_of_update(0.015))
    assert [cause.kind for cause in verdict.causes] == ["compute"]
    assert verdict.causes[0].gains == ()
    assert "nothing else takes a tenth" in describe_bottleneck(verdict)


@pytest.mark.parametrize("job", [{}, {"optim": {"kind": "mine:build"}}, {"optim": []}, None])
def test_of_an_optimizer_that_nobody_knows_only_its_seconds_are_judged(
    tmp_path: Path, job: Any
) -> None:
    measure_copies()
    verdict = judge_update(tmp_path / "run", 0.100, plan_of_update(0.100), job)
    assert [cause.kind for cause in verdict.causes] == ["optimizer"]
    assert any("nobody knows how much" in text for text in verdict.not_judged)


def test_an_update_that_takes_longer_than_what_ranks_send_is_named_before_it(
    tmp_path: Path,
) -> None:
    """It was said behind the sentence alone, as not judged, and communication bound the run."""
    measure_copies()
    run = write_run(
        tmp_path / "run",
        {-1: {"optimizer": 0.100}},
        transfer_s=0.054,
        communication=lambda seconds: {"dp: all_reduce gradients": seconds - 0.004},
    )
    verdict = judge_update(run, 0.100, plan_of_update(0.055))
    assert [cause.kind for cause in verdict.causes] == ["optimizer", "communication"]


def test_the_end_of_a_run_and_its_report_say_it_with_the_next_action(tmp_path: Path) -> None:
    measure_copies()
    run = write_run(tmp_path / "run", {-1: {"optimizer": 0.100}})
    (run / "plan.json").write_text(json.dumps(plan_of_update(0.095)))
    (run / "job.json").write_text(json.dumps(ADAMW))
    facts = collect_run_facts(run)
    assert facts.bottleneck is not None
    assert facts.bottleneck.to_json()["causes"][0]["kind"] == "memory bandwidth"
    lines = list_end_of_run_lines(facts)
    assert any(line.startswith("bounds  memory bandwidth in the optimizer") for line in lines)
    assert any("train.global_batch_size=16" in line for line in lines)
    assert any("GB/s" in line for line in list_verdict_lines(facts.bottleneck))


# Rates


def test_ranks_share_the_memory_of_a_cpu_and_a_gpu_has_its_own() -> None:
    rows = (copy_row(96 * MIB, 8e9, 1), copy_row(96 * MIB, 3e9, 4))
    section = ProfileSection("2026-11-24T18:00:00+00:00", 0.0, False, 0, "wall", (), rows)
    profile = replace(build_empty_profile(CPU), sections={"gemm": section})

    def rate(num_ranks: int, device: str = "cpu") -> float:
        rates = select_memory_rates(replace(profile, device=device), num_ranks)
        assert rates is not None
        assert rates.find_rate(64 * MIB) == 0
        return rates.find_rate(128 * MIB)

    assert (rate(1), rate(4)) == (pytest.approx(8e9), pytest.approx(3e9))
    assert rate(3) == pytest.approx(4e9)
    assert rate(3, "cuda") == pytest.approx(2e9)
    assert select_memory_rates(build_empty_profile(CPU), 1) is None


def test_of_a_machine_that_others_used_the_fastest_copies_count() -> None:
    rows = (
        copy_row(96 * MIB, 2e9, 4, low_rate=5e9, cpu_rate=7e9),
        copy_row(96 * MIB, 2e9, 1, low_rate=5e9, cpu_rate=7e9),
    )
    section = ProfileSection("2026-11-24T18:00:00+00:00", 0.6, False, 0, PROCESSOR, (), rows)
    profile = replace(build_empty_profile(CPU), sections={"gemm": section})
    rates = {num_ranks: select_memory_rates(profile, num_ranks) for num_ranks in (1, 4)}
    # By processor seconds, where one thread spent them.
    assert rates[4] is not None
    assert rates[1] is not None
    assert rates[4].find_rate(96 * MIB) == pytest.approx(7e9)
    assert rates[1].find_rate(96 * MIB) == pytest.approx(5e9)
    assert "others used" in rates[4].basis


def test_more_ranks_than_cores_have_no_rate_and_a_gpu_that_of_its_data_sheet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure_copies()
    assert find_memory_rates("cpu", 4) is not None
    assert find_memory_rates("cpu", 5) is None
    h100 = Cluster("cuda", 8, 2**36, accelerator=list_accelerators()["h100-sxm"])
    monkeypatch.setattr("phalanx.plan.memory_rates.detect_cluster", lambda device: h100)
    rates = find_memory_rates("cuda", 8)
    assert rates is not None
    assert not rates.is_measured
    assert "data sheet" in rates.basis
    assert 2e12 < rates.find_rate(2**30) < 3.35e12


# Forward and backward


def plan_of_job(*overrides: str) -> Plan:
    small = (
        *("model.dim=256", "model.num_layers=4", "model.num_heads=4", "model.vocab_size=2048"),
        *("data.seq_len=256", "train.global_batch_size=32", "parallel.ranks=4"),
    )
    return make_plan(load_job(None, [*small, *overrides]), cluster=CPU, vocab_size=2048)


def test_a_roofline_has_products_at_one_rate_and_all_else_at_the_other() -> None:
    plan = plan_of_job("cluster.device=cpu")
    roofline = estimate_roofline(plan, 1e10, 1e9)
    assert roofline is not None
    assert plan.flops_per_token is not None
    tokens = 32 * 256 / 4
    assert roofline.products_s == pytest.approx(plan.flops_per_token * tokens / 1e10, rel=0.02)
    faster = estimate_roofline(plan, 2e10, 4e9)
    assert faster is not None
    assert faster.products_s == pytest.approx(roofline.products_s / 2)
    assert faster.between_s == pytest.approx(roofline.between_s / 4)
    assert estimate_roofline(plan_of_job("parallel.pp=2"), 1e10, 1e9) is None


def judge_computation(tmp_path: Path, products_share: float, between_share: float) -> Any:
    """The verdict of a run whose forwards and backwards are such parts of products and traffic."""
    plan = plan_of_job("cluster.device=cpu")
    once = estimate_roofline(plan, 1.0, 1.0)
    assert once is not None
    measure_copies(once.between_s / (between_share * COMPUTE_S))
    counted = OperatorsCounted(3, 1, 1, 1e-6, once.products_s / (products_share * COMPUTE_S))
    run = write_run(tmp_path / "run", {}, more=(counted,))
    verdict = judge_run(run, plan.to_json(), ADAMW)
    assert verdict is not None
    return verdict


def test_what_is_between_products_is_no_more_than_the_step(tmp_path: Path) -> None:
    """A roofline may explain a fifth more than there is."""
    main = judge_computation(tmp_path, 0.01, 1.19).main
    assert main is not None
    assert main.kind == "memory bandwidth"
    assert main.share <= 1


def test_what_is_between_products_is_bound_by_memory_where_both_explain_the_step(
    tmp_path: Path,
) -> None:
    verdict = judge_computation(tmp_path, 0.4, 0.5)
    main = verdict.main
    assert (main.kind, main.phase) == ("memory bandwidth", "forward")
    assert main.share == pytest.approx(0.5 * COMPUTE_S / verdict.mean_step_s, abs=0.01)
    assert main.is_upper_bound
    assert main.speedup == pytest.approx(0.1045 / (0.1045 - 0.05), abs=0.03)
    # A compiler leaves half of it.
    assert main.gains[0].setting == "train.compile=true"
    assert main.gains[0].speedup == pytest.approx(0.1045 / (0.1045 - 0.025), abs=0.02)


@pytest.mark.parametrize(
    ("products", "between"),
    [(0.9, 0.1), (0.2, 0.3), (0.8, 0.9)],
    ids=["products", "neither explains it", "faster than memory"],
)
def test_where_products_or_something_else_take_the_time_memory_does_not_bound_it(
    tmp_path: Path, products: float, between: float
) -> None:
    verdict = judge_computation(tmp_path, products, between)
    assert [cause.kind for cause in verdict.causes] == ["compute"]
    assert any("products take at least" in text for text in verdict.main.evidence)
    assert not any("memory bandwidth" in text for text in verdict.not_judged)


def test_a_damaged_plan_has_no_roofline(tmp_path: Path) -> None:
    measure_copies()
    run = write_run(tmp_path / "run", {}, more=(OperatorsCounted(3, 1, 1, 1e-6, 1e10),))
    body = plan_of_job("cluster.device=cpu").to_json()
    for damage in ({"layout": 3}, {"shape": []}, {"memory": []}, {"seq_len": "x"}):
        verdict = judge_run(run, {**body, **damage}, ADAMW)
        assert verdict is not None
        assert describe_bottleneck(verdict)
