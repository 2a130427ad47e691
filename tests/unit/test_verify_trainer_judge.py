"""The comparison of the trainer with the second loop, on observations made by hand."""

from dataclasses import replace

import pytest

from phalanx.verify.diagnosis_of_experts import find_router_of_wrong_balance
from phalanx.verify.trainer_cases import NUM_STEPS, REPEATED_STEP, SAME_LAYOUT
from phalanx.verify.trainer_errors import ErrorRecord
from phalanx.verify.trainer_facts import (
    AttemptObservation,
    Dots,
    RecordedNorms,
    SecondLoopRecord,
    SecondLoopStep,
    StateObservation,
    StepObservation,
)
from phalanx.verify.trainer_states import StateComparator
from phalanx.verify.trainer_steps import StepComparator

BATCH, TARGETS = 4, 10


def make_record() -> SecondLoopRecord:
    steps = [
        SecondLoopStep(
            step=step,
            loss=2.0,
            num_targets=TARGETS,
            grad_norm=1.0,
            rate=0.1,
            skipped="",
            is_clipped=False,
            tokens_seen=step * TARGETS,
            loss_scale=0.0,
            evaluation=None,
            evaluated_targets=0,
            evaluated_sources={},
            sizes={},
        )
        for step in range(1, NUM_STEPS + 1)
    ]
    return SecondLoopRecord(max_norm=1.0, narrows=False, unused=(), steps=tuple(steps))


def list_causes_in_step(step: int, why_not_repeated: str = "") -> list[str]:
    """The causes of a step whose loss is another one, and whose gradients are half of what they
    should be."""
    observed = StepObservation(step, 2.5, TARGETS, 1.0, "", 0.0, 1, (0.1,))
    observed.gradients = {"a": (0.25, 0.25, 0.5, 1.0)}
    attempt = AttemptObservation("", 1, why_not_repeated=why_not_repeated)
    comparator = StepComparator(ErrorRecord(1e-8), is_scaled=False, compress="none")
    found = comparator.compare([observed], make_record(), attempt, [attempt])
    return [difference.cause for difference in found]


def test_what_goes_wrong_when_a_step_is_repeated_is_said_to_be_of_a_repetition() -> None:
    words = "the step is repeated"
    assert [words in cause for cause in list_causes_in_step(REPEATED_STEP)] == [True, True]
    assert [words in cause for cause in list_causes_in_step(REPEATED_STEP, "it is not")] == [
        False,
        False,
    ]
    assert [words in cause for cause in list_causes_in_step(REPEATED_STEP - 1)] == [False, False]


def test_choices_that_an_evaluation_leaves_in_the_loads_of_experts_are_found() -> None:
    """They would move biases with those of the next step."""
    observed = StateObservation(3, 3, 3 * TARGETS, 3 * BATCH, asked_step=4)
    observed.left_loads["blocks.0.moe.router"] = 24.0
    attempt = AttemptObservation("", 1)
    comparator = StateComparator(ErrorRecord(1e-8), batch_size=BATCH, compress="none")
    (found,) = comparator.compare([observed], make_record(), "", [attempt])
    assert (found.what, found.name) == ("load of experts", "blocks.0.moe.router")
    assert "24 choices of experts are counted before the next step has begun" in found.cause


@pytest.mark.parametrize(
    ("off", "router"),
    [
        (("a.1.moe.router.weight", "a.0.moe.experts.up"), "a.1.moe.router"),
        (("a.1.moe.router.weight", "a.1.moe.experts.up"), ""),
        (("a.0.moe.router.weight",), ""),
    ],
)
def test_the_balance_loss_is_wrong_where_the_last_router_is_and_its_experts_are_not(
    off: tuple[str, ...], router: str
) -> None:
    names = [f"a.{i}.moe.{part}" for i in range(2) for part in ("router.weight", "experts.up")]
    assert find_router_of_wrong_balance(names, off) == router


def test_a_balance_loss_that_keeps_the_loss_scale_is_told_with_both_scales() -> None:
    router, experts = "a.0.moe.router.weight", "a.0.moe.experts.up"
    record = make_record()
    steps = [replace(step, loss_scale=1024.0 if step.step < 3 else 2048.0) for step in record.steps]
    record = replace(record, steps=tuple(steps))
    observed = StepObservation(3, 2.0, TARGETS, 1.1, "", 2048.0, 1, (0.1,))
    observed.gradients = {router: (0.25, 0.25, 0.5, 1.0), experts: (0.0, 1.0, 1.0, 1.0)}
    attempt = AttemptObservation("", 1)
    comparator = StepComparator(ErrorRecord(1e-8), is_scaled=True, compress="none")
    cause = next(comparator.compare([observed], record, attempt, [attempt])).cause
    assert "so the balance loss of experts is weighed otherwise" in cause
    assert "the loss scale is 2048 from this step on, 1024 before it" in cause


def explain_states(
    kind: str, tensors: dict[str, Dots], restored: str, measured: bool = False
) -> list[str]:
    """The causes of tensors of a kind after step 4."""
    observed = StateObservation(4, 4, 4 * TARGETS, 4 * BATCH, asked_step=5)
    observed.tensors[kind] = tensors
    norms = (RecordedNorms(4, {"a": 1.0}, {"a": 1.0}, {"a": 1.0}),) if measured else ()
    attempt = AttemptObservation("", 1, norms=norms)
    record = make_record()
    sizes = {
        kind: dict.fromkeys(tensors, 1.0),
        "before": dict.fromkeys(tensors, 20.0),
        "update": dict.fromkeys(tensors, 0.5),
    }
    steps = [replace(step, sizes=sizes) for step in record.steps]
    comparator = StateComparator(ErrorRecord(1e-8), batch_size=BATCH, compress="none")
    found = comparator.compare([observed], replace(record, steps=tuple(steps)), restored, [attempt])
    return [difference.cause for difference in found if difference.name]


def test_a_weight_that_is_zero_after_an_update_is_no_mistake_of_the_optimizer() -> None:
    zero = (400.25, 2 * 400.0, 0.0, 2 * 0.25)
    (cause,) = explain_states("weight", {"a": zero}, "")
    assert "all of it is zero after the update" in cause
    assert "norms" not in cause
    (cause,) = explain_states("weight", {"a": zero}, "", measured=True)
    assert "the step measures norms of updates" in cause
    (cause,) = explain_states("weight", {"a": (0.3, 0.6, 0.0, 0.25)}, "")
    assert "decay of the wrong parameters" in cause


def test_what_is_restored_elsewhere_was_no_copy_only_if_all_of_it_differs() -> None:
    wrong, right, elsewhere = (1.0, 1.0, 0.5, 1.0), (0.0, 1.0, 1.0, 1.0), "resumed in zero3"
    kind = "optim/exp_avg"
    (cause,) = explain_states(kind, {"a": wrong}, elsewhere)
    assert "must be a copy that later updates do not change" in cause
    (cause,) = explain_states(kind, {"a": wrong, "b": right}, elsewhere)
    assert "1 tensors of the kind differ and 1 do not" in cause
    (cause,) = explain_states(kind, {"a": wrong, "b": right}, SAME_LAYOUT)
    assert cause.endswith(SAME_LAYOUT)
