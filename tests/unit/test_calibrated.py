"""The time of a step on a machine that was measured, with a profile of round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.profiles import FLOPS_PER_S, make_profile

from phalanx.core.errors import LayoutError
from phalanx.job.load import load_job
from phalanx.plan.calibrated.step import estimate_step_from_profile
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.profiles import MachineProfile, ProfileSection
from phalanx.plan.timing.step_time import STEP_TERMS

SMALL = (
    "model.dim=256",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.vocab_size=2048",
    "data.seq_len=256",
    "train.global_batch_size=8",
)
CPU = Cluster("cpu", 2, 2**36)


def plan_of(*overrides: str) -> Plan:
    return make_plan(load_job(None, [*SMALL, *overrides]), cluster=CPU, vocab_size=2048)


def total_s(*overrides: str, profile: MachineProfile | None = None) -> float:
    return estimate_step_from_profile(plan_of(*overrides), profile or make_profile()).total_s


LAYOUTS: dict[str, tuple[str, ...]] = {
    "one": ("parallel.ranks=1",),
    "ddp": ("parallel.ranks=2",),
    "zero1": ("parallel.dp_shard=2", "parallel.zero_stage=1"),
    "zero2": ("parallel.dp_shard=2", "parallel.zero_stage=2"),
    "zero3": ("parallel.dp_shard=2", "parallel.zero_stage=3"),
    "tp": ("parallel.tp=2", "parallel.ranks=2", "parallel.sequence_parallel=false"),
    "sp": ("parallel.tp=2", "parallel.ranks=2"),
    "cp": ("parallel.cp=2", "parallel.ranks=2"),
    "ulysses": ("parallel.cp=2", "parallel.ranks=2", "parallel.cp_attention=ulysses"),
    "pp": ("parallel.pp=2", "parallel.ranks=2", "train.micro_batch_size=2"),
    "zb": ("parallel.pp=2", "parallel.schedule=zb-v", "train.micro_batch_size=1"),
    "hsdp": ("parallel.dp_replicate=2", "parallel.dp_shard=2"),
    "ep": ("model.preset=small-mixtral", "parallel.ep=2", "parallel.dp_shard=2"),
    "full": ("parallel.ranks=2", "train.recompute=full"),
    "bf16": ("parallel.ranks=2", "precision.compute=bf16"),
    "compile": ("parallel.ranks=2", "train.compile=true"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_a_time_made_of_terms(name: str) -> None:
    time = estimate_step_from_profile(plan_of(*LAYOUTS[name]), make_profile())
    assert tuple(time.terms) == STEP_TERMS
    assert time.total_s == pytest.approx(sum(time.terms.values()))
    assert 0 < time.low_s < time.total_s < time.high_s
    assert all(seconds >= 0 for seconds in time.terms.values()), time.terms
    of_axes = {"tp": "tp", "sp": "tp", "cp": "cp", "ulysses": "cp", "ep": "ep", "pp": "bubble"}
    for layout, term in of_axes.items():
        if name == layout:
            assert time.terms[term] > 0
    for term in ("tp", "cp", "ep", "bubble"):
        if of_axes.get(name) != term and not (name == "zb" and term == "bubble"):
            assert time.terms[term] == 0


def test_one_rank_sends_nothing_and_needs_no_comm() -> None:
    profile = make_profile(num_devices=1)
    profile = replace(profile, sections={"gemm": profile.sections["gemm"]})
    fits = tuple(replace(fit, num_ranks=1) for fit in profile.sections["gemm"].fits)
    profile = profile.with_sections({"gemm": replace(profile.sections["gemm"], fits=fits)})
    assert total_s("parallel.ranks=1", profile=profile) > 0


def test_a_larger_model_batch_and_sequence_take_longer() -> None:
    base = total_s()
    for larger in ("model.num_layers=5", "model.vocab_size=4096", "train.global_batch_size=16"):
        assert total_s(larger) > base
    assert total_s("data.seq_len=512") > 1.8 * base


def test_products_take_at_least_as_long_as_their_flops() -> None:
    plan = plan_of("parallel.ranks=2")
    work = plan.model_shape.work(plan.seq_len)
    assert work is not None
    time = estimate_step_from_profile(plan, make_profile())
    ideal_s = 3 * work.matmul_flops * 4 / FLOPS_PER_S["fp32"]
    assert time.terms["ideal"] == pytest.approx(ideal_s)
    assert time.terms["matmul loss"] > 0


def test_what_is_computed_after_the_blocks_takes_as_long_as_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decoder behind an encoder had no time at all."""
    plan = plan_of("parallel.ranks=1")
    work = plan.model_shape.work(plan.seq_len)
    assert work is not None
    inside = estimate_step_from_profile(plan, make_profile()).terms
    # As a trace has it: the pairs that are computed, whatever mask they come from.
    attention = replace(work.blocks[-1].attention, is_causal=False, is_computed_as_counted=True)
    outer = replace(work.blocks[-1], num_params=0, attention=attention)
    moved = replace(work, blocks=work.blocks[:-1], after_blocks=(outer,))
    monkeypatch.setattr(type(plan.model_shape), "work", lambda _shape, _seq_len: moved)
    after = estimate_step_from_profile(plan, make_profile()).terms
    for term in ("ideal", "attention", "elementwise"):
        assert after[term] == pytest.approx(inside[term], rel=0.01)


def test_slower_links_make_slower_steps_and_zero3_suffers_more_than_ddp() -> None:
    slow = make_profile(comm_per_s=1e8)
    costs = {}
    for name in ("ddp", "zero3"):
        costs[name] = total_s(*LAYOUTS[name], profile=slow) - total_s(*LAYOUTS[name])
    assert 0 < costs["ddp"] < costs["zero3"]


@pytest.mark.parametrize("axes", [("dp_replicate=2",), ("dp_shard=2", "zero_stage=1")])
def test_a_backward_hides_reductions_and_a_pipeline_hides_none(axes: tuple[str, ...]) -> None:
    profile, hiding = make_profile(hidden_share=0.0), make_profile(hidden_share=1.0)
    keys = [f"parallel.{axis}" for axis in axes]
    assert total_s(*keys, profile=hiding) < total_s(*keys, profile=profile)
    keys += ["parallel.pp=2", "train.micro_batch_size=1"]
    assert total_s(*keys, profile=hiding) == total_s(*keys, profile=profile)


def test_recomputing_all_adds_about_a_forward() -> None:
    none, full = (
        total_s("parallel.ranks=1", f"train.recompute={mode}") for mode in ("none", "full")
    )
    selective = total_s("parallel.ranks=1", "train.recompute=selective")
    assert 1.15 < full / none < 1.4
    assert none < selective < full


def test_four_ranks_on_two_cores_take_turns() -> None:
    """Each has half of the batch of two ranks, and half of a core."""
    two, four = (
        estimate_step_from_profile(plan_of(f"parallel.ranks={ranks}"), make_profile())
        for ranks in (2, 4)
    )
    assert four.terms["ideal"] == pytest.approx(two.terms["ideal"])
    assert four.total_s > two.total_s


def test_more_microbatches_fill_a_pipeline() -> None:
    shares = []
    for micro in (4, 1):
        pipeline = plan_of("parallel.pp=2", f"train.micro_batch_size={micro}")
        time = estimate_step_from_profile(pipeline, make_profile())
        shares.append(time.terms["bubble"] / time.total_s)
    assert shares[0] > shares[1] > 0


def through(what: str, comm_per_s: float = 2e9) -> ProfileSection:
    section = make_profile(comm_per_s=comm_per_s).sections["comm"]
    return replace(section, collectives=what)


def test_a_plan_uses_the_collectives_that_its_job_has() -> None:
    """Shared memory's for auto, gloo's for gloo; what nobody measured is not predicted."""
    auto, gloo = (
        plan_of("parallel.ranks=2"),
        plan_of("parallel.ranks=2", "parallel.collectives=gloo"),
    )
    usual = make_profile().with_sections({"comm": through("shared memory", 8e9)})
    both = usual.with_sections({"comm_gloo": through("gloo", 1e8)})
    expected = [make_profile(comm_per_s=per_s) for per_s in (8e9, 1e8)]
    for plan, reference in zip((auto, gloo), expected, strict=True):
        step = estimate_step_from_profile(plan, both)
        assert step == estimate_step_from_profile(plan, reference)
    with pytest.raises(LayoutError, match=r"no all_reduce through gloo.*--collectives gloo"):
        estimate_step_from_profile(gloo, usual)
    # Where ranks cannot share memory, the usual ones are gloo's; and older files do not say.
    for what in ("gloo", ""):
        estimate_step_from_profile(gloo, make_profile().with_sections({"comm": through(what)}))


def test_tensor_parallel_gathers_take_twice_as_long_through_gloo_alone() -> None:
    plan = plan_of("parallel.tp=2")
    times = {
        what: estimate_step_from_profile(
            plan, make_profile().with_sections({"comm": through(what)})
        ).terms["tp"]
        for what in ("", "gloo", "shared memory")
    }
    assert times[""] == times["gloo"]
    # What is reduced and not gathered takes as long through both.
    assert 1.8 < times["gloo"] / times["shared memory"] < 2


def test_a_profile_without_an_operation_is_refused_with_what_to_do() -> None:
    profile = make_profile()
    profile = replace(profile, sections={"gemm": profile.sections["gemm"]})
    with pytest.raises(LayoutError, match=r"no all_reduce.*run phalanx bench"):
        estimate_step_from_profile(plan_of("parallel.ranks=2"), profile)
