"""Failed checks in words."""

from __future__ import annotations

import pytest

from phalanx.observe.events import InvariantChecked
from phalanx.observe.invariant_words import describe_failed_check

BACK = "FSDP has put its own back, so what was put there trains no more"


def test_parameters_that_the_model_no_longer_has() -> None:
    event = InvariantChecked(
        7,
        "optimizer_parameters",
        ok=False,
        tensors=["a", "b"],
        num_tensors=2,
        removed=["b"],
        ranks=[0, 1],
        expected=0.0,
        actual=2.0,
    )
    assert describe_failed_check(event) == (
        "step 7: the optimizer does not update a, the model no longer has b and the optimizer has"
        " 2 parameters (summed over ranks) that the model does not have, on ranks 0, 1"
    )


@pytest.mark.parametrize(
    ("tensors", "num_tensors", "replaced", "foreign", "sentence"),
    [
        (["a"], 1, [], 0.0, "the optimizer does not update a, on rank 1"),
        (
            ["a", "b", "c"],
            5,
            [],
            2.0,
            "the optimizer does not update a, b, c and 2 more and it has 2 parameters that the model"
            " does not have, on rank 1",
        ),
        (
            ["a"],
            1,
            ["a"],
            0.0,
            f"a was replaced in its module since the last check, on rank 1: {BACK}",
        ),
        (
            ["a", "b"],
            2,
            ["b"],
            0.0,
            "the optimizer does not update a, on rank 1; b was replaced in its module since the last"
            f" check, on rank 1: {BACK}",
        ),
        # Names are cut at 20.
        (
            ["a"] * 20,
            30,
            ["a"] * 20,
            0.0,
            f"a, a, a and 27 more was replaced in its module since the last check, on rank 1: {BACK}",
        ),
        (
            ["long." * 30],
            1,
            ["long." * 30],
            0.0,
            f" was replaced in its module since the last check, on rank 1: {BACK}",
        ),
    ],
)
def test_parameters_that_are_not_updated_or_were_replaced(
    tensors: list[str], num_tensors: int, replaced: list[str], foreign: float, sentence: str
) -> None:
    event = InvariantChecked(
        7,
        "optimizer_parameters",
        ok=False,
        tensors=tensors,
        num_tensors=num_tensors,
        replaced=replaced,
        ranks=[1],
        expected=0.0,
        actual=foreign,
    )
    described = describe_failed_check(event)
    assert described.startswith("step 7: ")
    assert described.endswith(sentence)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([5], "w has other bits on rank 5 than on others that hold the same part of it"),
        # Two replicas: there are no others.
        (
            [0, 1],
            "w has not the same bits on all ranks that hold the same part of it: those of ranks 0,"
            " 1 are not those of a majority",
        ),
    ],
)
def test_replicas_that_differ(ranks: list[int], words: str) -> None:
    event = InvariantChecked(7, "replicas_equal", ok=False, tensors=["w"], ranks=ranks)
    assert describe_failed_check(event) == f"step 7: {words}"
