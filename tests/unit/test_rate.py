"""The peak learning rate follows the batch by rule, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from models import CPU
from phalanx.core.errors import JobError
from phalanx.core.roll_back import RollBack
from phalanx.job.learning_rate import (
    PeakLearningRate,
    list_learning_rate_overrides_on_resume,
    resolve_optim_section,
    resolve_peak_learning_rate,
)
from phalanx.job.load import load_job
from phalanx.job.schema import Job, Optim
from phalanx.observe.bus import Bus
from phalanx.observe.events import Note
from phalanx.observe.tail import read_recorded_events
from phalanx.optim.build import build_optimizer
from phalanx.plan.explain import describe_plan
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.run.data import emit_note_on_batch_size_change
from phalanx.run.rank_run import RollBacks
from phalanx.train.state import TrainState


def job(batch: int, **optim: object) -> Job:
    return Job.model_validate(
        {"train": {"global_batch_size": batch}, "optim": {"lr": 3e-3} | optim}
    )


@pytest.mark.parametrize(
    ("optim", "lr"),
    [
        ({}, 3e-3),
        ({"reference_batch_size": 16}, 3e-3),
        ({"lr_scaling": "auto", "reference_batch_size": 64}, 3e-3),
        ({"lr_scaling": "auto", "reference_batch_size": 16}, 6e-3),
        ({"lr_scaling": "linear", "reference_batch_size": 16}, 12e-3),
        ({"lr_scaling": "sqrt", "reference_batch_size": 256}, 1.5e-3),
        ({"kind": "sgd", "lr_scaling": "auto", "reference_batch_size": 16}, 12e-3),
        ({"kind": "sgd", "lr_scaling": "sqrt", "reference_batch_size": 16}, 6e-3),
    ],
)
def test_a_batch_of_64(optim: dict[str, object], lr: float) -> None:
    assert resolve_peak_learning_rate(job(64, **optim)).lr == pytest.approx(lr, rel=1e-12)


def test_it_says_why() -> None:
    def why(**optim: object) -> str:
        return resolve_peak_learning_rate(job(64, reference_batch_size=16, **optim)).why

    assert (
        why(lr_scaling="auto")
        == "lr 0.003 x sqrt(64/16) = 0.006: batch 64 instead of 16; Adam follows the square root"
        " (Malladi et al. 2022)"
    )
    assert (
        why(lr_scaling="auto", kind="sgd")
        == "lr 0.003 x 64/16 = 0.012: batch 64 instead of 16; SGD follows the batch (Goyal et al."
        " 2017)"
    )
    assert why(lr_scaling="linear").endswith("linear, as the job says")


def test_the_plan_has_the_rate_and_the_reason() -> None:
    scaled = job(64, lr_scaling="auto", reference_batch_size=16)
    plan = make_plan(scaled, cluster=CPU)
    assert PeakLearningRate(plan.peak_lr, plan.reasons[-1]) == resolve_peak_learning_rate(scaled)
    assert f"why     {resolve_peak_learning_rate(scaled).why}" in describe_plan(plan)
    assert Plan.from_json(plan.to_json()).peak_lr == plan.peak_lr


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optim.lr_scaling=auto"], "set optim.reference_batch_size"),
        (["optim.lr_scaling=linear"], "nothing says which that was"),
        (
            ["optim.kind=mine:build", "optim.lr_scaling=auto", "optim.reference_batch_size=4"],
            "no rule is known for your own",
        ),
        (["optim.kind=sdg"], 'did you mean "sgd"?'),
        (["optim.weight_decay=none"], 'wanted a number of at least 0 or "auto"'),
        (["optim.momentum=1"], "optim.momentum"),
        (["optim.reference_batch_size=0"], "optim.reference_batch_size"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(JobError) as refused:
        load_job(None, overrides)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("optim", "said"),
    [
        ({}, "optim.lr stays 0.003, as the job says"),
        (
            {"lr_scaling": "auto", "reference_batch_size": 16},
            "lr 0.003 x sqrt(64/16) = 0.006: batch 64 instead of 16",
        ),
    ],
)
def test_a_run_that_goes_on_with_another_batch_says_which_rate_it_has(
    optim: dict[str, object], said: str, tmp_path: Path
) -> None:
    """Ten steps of 16 samples are done; there is nothing to train here, so no model."""
    grown, none = job(64, **optim), cast("Any", None)
    bus = Bus(rank=0, run_dir=tmp_path)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    state = TrainState(none, optimizer, seed=1, step=10, samples_seen=160)
    emit_note_on_batch_size_change(grown, make_plan(grown, cluster=CPU), state, bus, RollBacks())
    bus.close()
    (note,) = read_recorded_events(tmp_path, Note)
    assert isinstance(note.event, Note)
    assert said in note.event.facts["why"]
    assert (
        "steps from 11 on read 64 samples each, the first of them sample 160"
        in note.event.facts["why"]
    )


@pytest.mark.parametrize(
    ("step", "samples_seen", "batch_before", "num_notes"),
    [
        # Back at step 8 from one in step 12, it reads on behind that; and two steps later.
        (8, 12 * 16, 16, 0),
        (10, 14 * 16, 16, 0),
        # From a checkpoint of after the step that it may go back to, or with another batch since.
        (11, 12 * 16, 16, 1),
        (10, 12 * 16 + 2 * 10, 16, 1),
        # Two steps of 32 since, or four of 16: only the first can have read 12 * 32 samples before.
        (10, 14 * 32, 32, 1),
    ],
)
def test_a_run_that_has_read_on_after_a_roll_back_has_the_batch_that_it_had(
    step: int, samples_seen: int, batch_before: int, num_notes: int, tmp_path: Path
) -> None:
    same, none = job(16), cast("Any", None)
    bus = Bus(rank=0, run_dir=tmp_path)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    state = TrainState(none, optimizer, seed=1, step=step, samples_seen=samples_seen)
    spike = RollBack("loss_spike", 12, 10, "", 12 * batch_before)
    backs = (RollBack("corruption", 5, 4, ""), spike)
    plan = make_plan(same, cluster=CPU)
    emit_note_on_batch_size_change(same, plan, state, bus, RollBacks(backs))
    bus.close()
    assert len([*read_recorded_events(tmp_path, Note)]) == num_notes


def test_a_resumed_run_refers_to_the_batch_it_had() -> None:
    """Only where a rule is asked for now, and nothing else was said."""
    bigger = "train.global_batch_size=64"
    assert list_learning_rate_overrides_on_resume(job(16), [bigger]) == []
    assert list_learning_rate_overrides_on_resume(job(16), [bigger, "optim.lr_scaling=none"]) == []
    assert list_learning_rate_overrides_on_resume(job(16), [bigger, "optim.lr_scaling=auto"]) == [
        "optim.reference_batch_size=16"
    ]
    assert (
        list_learning_rate_overrides_on_resume(
            job(16), ["optim.lr_scaling=auto", "optim.reference_batch_size=8"]
        )
        == []
    )
    assert (
        list_learning_rate_overrides_on_resume(
            job(16, reference_batch_size=8), ["optim.lr_scaling=auto"]
        )
        == []
    )


def hugging_face(directory: Path, *weights: str) -> str:
    directory.mkdir()
    for name in ("config.json", *weights):
        (directory / name).write_text('{"model_type": "llama"}')
    return f"model.kind=hf:{directory}"


@pytest.mark.parametrize(
    ("overrides", "lr"),
    [
        ([], 3e-3),
        (["optim.kind=sgd"], 3e-3),
        (["model.init_from=old"], 2e-5),
        (["model.init_from=old", "optim.kind=sgd"], 1e-3),
        (["model.init_from=old", "optim.kind=mine:build"], 3e-3),
        (["model.init_from=old", "optim.lr=1e-3"], 1e-3),
        (["model.init_from=old", "optim.lr=auto"], 2e-5),
        (["model.init_from=old", "optim.lr_scaling=auto", "optim.reference_batch_size=4"], 4e-5),
    ],
)
def test_weights_that_are_trained_already_have_a_rate_of_their_own(
    overrides: list[str], lr: float
) -> None:
    wanted = load_job(None, overrides)
    assert resolve_peak_learning_rate(wanted).lr == pytest.approx(lr, rel=1e-12)
    reason = resolve_peak_learning_rate(wanted).why
    assert ("lr 2e-05: the weights of model.init_from=old are trained already" in reason) == (
        lr in (2e-5, 4e-5)
    ), "said where it is not the rate of random weights"


def test_a_directory_with_weights_is_trained_and_a_config_alone_is_not(tmp_path: Path) -> None:
    with_weights = hugging_face(tmp_path / "trained", "model.safetensors")
    assert resolve_peak_learning_rate(load_job(None, [with_weights])).lr == 2e-5
    assert (
        resolve_peak_learning_rate(load_job(None, [f"{with_weights}/config.json"])).lr == 3e-3
    )  # begins from random weights
    assert resolve_peak_learning_rate(load_job(None, [hugging_face(tmp_path / "bare")])).lr == 3e-3


def test_an_own_optimizer_is_built_with_a_number() -> None:
    for overrides, lr in (([], 3e-3), (["model.init_from=old"], 2e-5), (["optim.lr=0.5"], 0.5)):
        wanted = load_job(None, overrides)
        assert resolve_optim_section(wanted).lr == lr
        assert wanted.optim.lr == ("auto" if lr != 0.5 else 0.5), (
            "nothing derived is written into the job"
        )
        optimizer = build_optimizer(torch.nn.Linear(2, 2), resolve_optim_section(wanted))
        assert {group["lr"] for group in optimizer.param_groups} == {lr}
    optimizer = build_optimizer(torch.nn.Linear(2, 2), Optim())
    assert {group["lr"] for group in optimizer.param_groups} == {3e-3}
