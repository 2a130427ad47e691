"""Initial weights of phalanx's own models are drawn as a plain table declares, or verify says so."""

from __future__ import annotations

import pytest
import torch

from models import CPU
from phalanx.job.schema import Job
from phalanx.nn import block
from phalanx.nn import init as nn_init
from phalanx.plan.plan import Plan
from phalanx.run.one_process.original_module import build_original_module
from phalanx.verify.cases import plan_layout_cases
from phalanx.verify.initial_weights import find_initial_faults
from phalanx.verify.trace_facts import InitialFault
from phalanx.verify.verified_job import make_verified_job, shrink_job


def _plan(preset: str, seed: int = 0) -> tuple[Job, Plan]:
    data = {"seq_len": 32}
    if "vit" in preset:
        data |= {"source": "my.data:images"}
    body = {"model": {"preset": preset}, "data": data, "run": {"seed": seed}}
    job = make_verified_job(shrink_job(Job.model_validate(body))[0], 1)
    (case,) = plan_layout_cases(job, [("one", {})], num_ranks=1, cluster=CPU, shape=None)
    assert case.plan is not None, case.refused
    return job, case.plan


def _find(preset: str, seed: int = 0) -> tuple[InitialFault, ...] | None:
    job, plan = _plan(preset, seed)
    module, _ = build_original_module(job, plan, "float64", materialize=True)
    return find_initial_faults(job, plan, dict(module.named_parameters()))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "preset", ["gpt2", "small-deepseek", "gemma3-1b", "small-mixtral", "small-vit"]
)
def test_presets_draw_what_is_declared(preset: str, seed: int) -> None:
    assert _find(preset, seed) == ()


def test_another_width_everywhere_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "INIT_STD", 0.03)
    faults = _find("gpt2")
    assert faults
    assert faults[0].name == "embed.weight"
    assert "0.02 is declared" in faults[0].words
    assert faults[0].error == pytest.approx(0.5, abs=0.05)


def test_another_shape_of_the_distribution_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw_uniform(key: int, start: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((key + start) % 2**31)
        return (torch.rand(count, generator=generator) - 0.5) * 12**0.5

    monkeypatch.setattr(nn_init, "make_standard_normals", draw_uniform)
    faults = _find("gpt2")
    assert faults
    assert "no normal distribution" in faults[0].words


def test_weights_that_do_not_depend_on_their_name_are_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nn_init, "hash_to_stable_64_bits", lambda *parts: 7)
    faults = _find("gpt2")
    assert faults
    assert any("do not depend on the name" in fault.words for fault in faults)


def test_a_norm_that_does_not_begin_as_the_identity_is_a_fault() -> None:
    job, plan = _plan("gpt2")
    module, _ = build_original_module(job, plan, "float64", materialize=True)
    initial = {name: p.detach().clone() for name, p in module.named_parameters()}
    initial["norm.weight"][3] = 0.0
    faults = find_initial_faults(job, plan, initial)
    assert faults is not None
    assert [fault.name for fault in faults] == ["norm.weight"]


def test_of_a_module_of_your_own_nothing_is_declared() -> None:
    job, plan = _plan("gpt2")
    foreign = Job.model_validate(
        {"model": {"kind": "models:tiny"}, "data": {"source": "my.data:images"}}
    )
    assert find_initial_faults(foreign, plan, {}) is None
    assert find_initial_faults(job, plan, {}) == ()
