"""The comparison of the trainer with the second loop, on observations made by hand."""

from phalanx.verify.trainer_cases import NUM_STEPS, REPEATED_STEP
from phalanx.verify.trainer_errors import ErrorRecord
from phalanx.verify.trainer_facts import (
    AttemptObservation,
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
