"""fp16: a scaled loss computes what fp32 does, an overflow on one rank is one on all, and the
scale is state."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import edit_manifest, newest
from models import CPU, decoder, global_batches, plan, share
from phalanx.core.errors import CheckpointError, NumericsError
from phalanx.job.schema import Job
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.loss_scale import MIN_LOSS_SCALE, LossScale, require_valid_loss_scale_state
from phalanx.parallel.parallelize import parallelize
from phalanx.parallel.step_stats import StepStats
from phalanx.plan.plan import LossScaling
from phalanx.plan.planner import make_plan
from phalanx.resilience.guards import SkippedStepsGuard
from ranks import run_ranks
from resuming import (
    SAVED,
    STEPS,
    copy_run,
    differing,
    job_for,
    new_module,
    new_state,
    resume,
    train,
    write_corpus,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "ddp-int8": {"dp_replicate": 2, "compress": "int8"},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
}


def overflow_once(rank: int) -> dict[str, Any]:
    """Three steps; in the second the loss of rank 1 is too large for fp16 to hold its gradients."""
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        for precision in ("fp32", "fp16"):
            a_plan = plan(2, 2, precision=precision, **layout)
            with open_mesh(a_plan.layout, device="cpu") as mesh:
                model = parallelize(decoder(tied=True, dtype=torch.float32), a_plan, mesh)
                optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
                steps = []
                for step, whole in enumerate(global_batches(3)):
                    large = 1e30 if (precision, rank, step) == ("fp16", 1, 1) else 1.0
                    optimizer.zero_grad()
                    before = [p.detach().clone() for p in model.parameters()]
                    sums = model.forward_backward(share(whole, rank, 2, 2), _times(large))
                    facts = model.reduce_and_clip(sums, max_norm=1.0)
                    if facts.should_apply and step != 1:
                        optimizer.step()
                    kept = all(
                        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
                    )
                    steps.append(
                        (facts.reason_to_skip, facts.loss_scale, facts.loss, facts.grad_norm, kept)
                    )
                after = model.loss_scale.state_to_save() if model.loss_scale is not None else {}
                unsent = (
                    {}
                    if model.compression is None
                    else model.compression.error_feedback_gradients()
                )
                errors = all(bool(e.isfinite().all()) for e in unsent.values())
                weights = sum(
                    t.sum().item() for t in (s.tensor.double() for s in model.shards().values())
                )
                found[f"{name} {precision}"] = (steps, after, errors, weights)
    return found


def _times(factor: float) -> Any:
    objective = causal_cross_entropy(16)

    def large(outputs: Any, batch: Any) -> Any:
        loss, targets = objective(outputs, batch)
        return loss * factor, targets

    return large


@pytest.fixture(scope="module")
def overflowed() -> list[dict[str, Any]]:
    return run_ranks(2, overflow_once)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_is_skipped_by_all(
    overflowed: list[dict[str, Any]], layout: str
) -> None:
    for found in overflowed:
        steps, after, errors, _ = found[f"{layout} fp16"]
        assert [reason for reason, *_ in steps] == [None, "overflow", None]
        assert [scale for _, scale, *_ in steps] == [65536.0, 65536.0, 32768.0]
        assert [kept for *_, kept in steps] == [False, True, False]
        assert after == {"scale": 32768.0, "good_steps": 1}
        assert errors, "what compression keeps is not spoilt"
    if layout.startswith("ddp"):
        assert overflowed[0][f"{layout} fp16"][3] == overflowed[1][f"{layout} fp16"][3], (
            "weights are equal"
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp16_is_close_to_fp32(overflowed: list[dict[str, Any]], layout: str) -> None:
    """The reference is the same layout in fp32, which leaves out the same step. fp16 has three
    digits."""
    wide, half = overflowed[0][f"{layout} fp32"][0], overflowed[0][f"{layout} fp16"][0]
    for step in (0, 2):
        assert half[step][2] == pytest.approx(wide[step][2], rel=2e-3)
        assert half[step][3] == pytest.approx(wide[step][3], rel=1e-2)


# Resuming


def fp16_job(kind: dict[str, Any]) -> Job:
    """The scale begins too high: the first steps overflow."""
    body = job_for(2, **kind).to_json()
    precision = {"compute": "fp16", "loss_scale_initial": 2.0**19, "loss_scale_growth_steps": 2}
    return Job.model_validate_json(json.dumps(body | {"precision": precision}))


def interrupt(rank: int, root: Path) -> dict[str, Any]:
    found = {}
    for name, layout in LAYOUTS.items():
        job = fp16_job(layout)
        a_plan = make_plan(job, cluster=CPU, vocab_size=257)
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            straight_dir = copy_run(root / "empty", root / name, mesh)
            state = new_state(mesh, job, a_plan, new_module(torch.float32))
            straight = train(state, job, a_plan, straight_dir, attempt=0, look_at=(STEPS,))
            outcomes = {}
            for what in ("continued", "lost"):
                run_dir = copy_run(root / name, root / f"{name} {what}", mesh)
                if what == "lost" and rank == 0:
                    edit_manifest(newest(run_dir), lambda body: body["facts"].pop("loss_scale"))
                mesh.barrier()
                again = new_state(mesh, job, a_plan, new_module(torch.float32, seed=2))
                outcomes[what] = resume(again, job, a_plan, run_dir)
            rest = {step: loss for step, loss in straight.losses.items() if step > SAVED}
            found[name] = {
                "facts": straight.facts["loss_scale"],
                "same facts": outcomes["continued"].facts == straight.facts,
                "same losses": outcomes["continued"].losses == rest,
                "weights": differing(straight.whole[STEPS], outcomes["continued"].whole[STEPS]),
                "weights without it": differing(
                    straight.whole[STEPS], outcomes["lost"].whole[STEPS]
                ),
            }
    return found


def test_a_run_is_continued_bit_for_bit_with_its_scale() -> None:
    """Against the run that nothing happened to; a checkpoint that lost the scale makes another
    run of it."""
    with tempfile.TemporaryDirectory() as directory:
        write_corpus(Path(directory))
        for found in run_ranks(2, interrupt, Path(directory)):
            for name, seen in found.items():
                assert seen["facts"]["scale"] < 2.0**19, "some steps overflowed"
                assert (seen["same facts"], seen["same losses"], seen["weights"]) == (
                    True,
                    True,
                    [],
                ), name
                assert seen["weights without it"], name


# The scale itself, and who gives up


def test_it_halves_and_doubles() -> None:
    scale = LossScale(8.0, growth_steps=3)
    seen = []
    for finite in (True, True, False, True, True, True, True):
        scale.adjust_after_step(finite=finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 4, 4, 4, 8, 8]
    again = LossScale(1.0, growth_steps=3)
    again.load_saved_state(scale.state_to_save())
    assert again == scale


def test_it_gives_up_where_a_smaller_one_would_not_help() -> None:
    scale = LossScale(4 * MIN_LOSS_SCALE, growth_steps=3)
    scale.adjust_after_step(finite=False)
    scale.adjust_after_step(finite=False)
    with pytest.raises(NumericsError, match=r"loss scale of 1 .*bf16"):
        scale.adjust_after_step(finite=False)


def test_a_fixed_one_stays_and_its_skips_count() -> None:
    scale = LossScale(128.0, growth_steps=0)
    scale.adjust_after_step(finite=False)
    assert scale.scale == 128.0
    overflow = StepStats(1.0, 8, float("inf"), finite=False, loss_scale=128.0, scale_adapts=True)
    fixed = StepStats(1.0, 8, float("inf"), finite=False, loss_scale=128.0)
    guard = SkippedStepsGuard(limit=2)
    assert [guard.reason_to_skip(step, overflow) for step in range(9)] == [None] * 9
    assert (overflow.reason_to_skip, fixed.reason_to_skip) == ("overflow", "nonfinite_gradients")
    assert [guard.reason_to_skip(step, fixed) for step in range(2)] == [None] * 2
    with pytest.raises(NumericsError, match="non-finite"):
        guard.reason_to_skip(3, fixed)


@pytest.mark.parametrize(
    "facts", [{}, {"scale": 0, "good_steps": 1}, {"scale": "nan", "good_steps": 0}, 7]
)
def test_a_scale_that_is_none_is_refused(facts: Any) -> None:
    with pytest.raises(CheckpointError, match="loss scale"):
        require_valid_loss_scale_state(facts, "step-3")


def test_the_plan_says_what_is_scaled() -> None:
    dynamic = plan(2, precision="fp16", dp_replicate=2)
    assert dynamic.loss_scaling == LossScaling(65536.0, 2000)
    assert any("65504" in reason for reason in dynamic.reasons)
    assert plan(2, precision="bf16", dp_replicate=2).loss_scaling is None
    body = Job.model_validate(
        {"precision": {"compute": "fp16", "loss_scale": 512.0}, "parallel": {"ranks": 1}}
    )
    fixed = make_plan(body, cluster=CPU)
    assert fixed.loss_scaling == LossScaling(512.0, 0)
    assert (fixed.to_json()["loss_scale"], fixed.to_json()["loss_scale_growth_steps"]) == (512.0, 0)
    assert type(fixed).from_json(fixed.to_json()) == fixed
    half, wide = (
        plan(2, precision=p, dp_replicate=2).chosen.predicted_bytes for p in ("fp16", "fp32")
    )
    assert half["activations"] < wide["activations"]
