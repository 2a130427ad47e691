"""The time of a step: what must hold for every model, machine and layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.job.model import build_preset_shape
from phalanx.job.presets import find_preset
from phalanx.job.shapes.stored import BuiltInShape
from phalanx.plan.accelerators import find_accelerator
from phalanx.plan.layout import Layout
from phalanx.plan.timing.machine import MachineRates, build_machine
from phalanx.plan.timing.setup import MEGATRON, StepSetup
from phalanx.plan.timing.step import estimate_many, estimate_step
from phalanx.plan.timing.step_time import TERMS, StepTime

LAYOUT = Layout(pp=2, dp_shard=4, tp=4)


def build_shape(name: str = "llama3-8b") -> BuiltInShape:
    preset = find_preset(name)
    assert preset is not None
    return build_preset_shape(preset)


@pytest.fixture(scope="module")
def machine() -> MachineRates:
    return build_machine(find_accelerator("h100-sxm"))


def setup_of(**keys: object) -> StepSetup:
    plain = StepSetup(LAYOUT, zero_stage=1, num_microbatches=8, seq_len=4096, stack=MEGATRON)
    return replace(plain, **keys)  # type: ignore[arg-type]


def test_terms_add_up_in_their_order(machine: MachineRates) -> None:
    time = estimate_step(build_shape(), machine, setup_of())
    assert tuple(time.terms) == TERMS
    assert time.total_s == pytest.approx(sum(time.terms.values()))
    assert time.low_s < time.total_s < time.high_s
    assert StepTime.from_json(time.to_json()) == time


def test_one_gpu_communicates_with_none(machine: MachineRates) -> None:
    setup = setup_of(layout=Layout(), zero_stage=0)
    terms = estimate_step(build_shape(), machine, setup).terms
    for term in ("tp", "cp", "ep", "bubble", "dp exposed", "offload"):
        assert terms[term] == 0.0
    assert terms["ideal"] > 0


@pytest.mark.parametrize("key", ["micro_batch_size", "num_microbatches", "seq_len"])
def test_more_work_takes_longer(machine: MachineRates, key: str) -> None:
    times = []
    for factor in (1, 2, 4):
        setup = setup_of()
        setup = replace(setup, **{key: factor * getattr(setup, key)})
        times.append(estimate_step(build_shape(), machine, setup).total_s)
    assert times == sorted(times)
    assert times[2] > 1.5 * times[0]


def test_more_layers_take_longer(machine: MachineRates) -> None:
    shape = build_shape()
    times = []
    for num_layers in (16, 32, 64):
        model = replace(shape, num_layers=num_layers)
        times.append(estimate_step(model, machine, setup_of()).total_s)
    assert times == sorted(times)


def test_many_setups_take_as_long_as_each_alone(machine: MachineRates) -> None:
    setups = [
        setup_of(),
        setup_of(recompute="full"),
        setup_of(layout=Layout(dp_shard=32), zero_stage=3),
        setup_of(layout=Layout(dp_shard=16, cp=2), zero_stage=3),
    ]
    together = estimate_many(build_shape(), machine, setups)
    for row, setup in enumerate(setups):
        alone = estimate_step(build_shape(), machine, setup)
        assert together.take(row).terms == pytest.approx(alone.terms)
    assert np.all(together.total_s > 0)
