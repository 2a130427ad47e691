"""StepHooks: two transforms that need the same moment of a step both have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from phalanx.core.errors import LayoutError
from phalanx.parallel.step_hooks import StepHooks


def test_two_callbacks_of_one_moment_both_run_in_their_order() -> None:
    hooks, calls = StepHooks(), list[str]()
    runs = {
        "after_backward": hooks.run_after_backward_hooks,
        "gather_weights": hooks.run_gather_weights_hooks,
        "release_weights": hooks.run_release_weights_hooks,
        "after_weight_grads": hooks.run_after_weight_grads_hooks,
    }
    for moment, run in runs.items():
        for name in ("first", "second"):
            getattr(hooks, moment).append(
                lambda name=name, moment=moment: calls.append(name + moment)
            )
        run()
        assert calls[-2:] == [f"first{moment}", f"second{moment}"]
    assert len(calls) == 2 * len(runs)


def test_each_hook_before_the_reduction_sees_all_parameters() -> None:
    hooks, module = StepHooks(), nn.Linear(2, 3)
    names: list[list[str]] = []
    for _ in range(2):
        hooks.before_reduce.append(lambda named: names.append([name for name, _ in named]))
    hooks.run_before_reduce_hooks(module.named_parameters())  # an iterator, which is spent once
    assert names == [["weight", "bias"]] * 2


def test_contexts_of_a_microbatch_nest() -> None:
    hooks, events = StepHooks(), list[str]()

    def add(name: str) -> None:
        @contextmanager
        def around(is_last: bool) -> Iterator[None]:
            events.append(f"{name} begins, last: {is_last}")
            yield
            events.append(f"{name} ends")

        hooks.around_microbatch.append(around)

    with hooks.open_microbatch_context(is_last=True):
        assert events == []
    add("outer")
    with hooks.open_microbatch_context(is_last=False):
        assert events == ["outer begins, last: False"]
    events.clear()
    add("inner")
    with hooks.open_microbatch_context(is_last=True):
        assert events == ["outer begins, last: True", "inner begins, last: True"]
    assert events[2:] == ["inner ends", "outer ends"]


def test_the_first_explanation_of_an_error_wins() -> None:
    hooks, error = StepHooks(), RuntimeError("shape")
    assert hooks.explain_error_by_hooks(error) is None
    second, third = LayoutError("a shape that tp has cut"), LayoutError("too late")
    hooks.explain_error.extend([lambda error: None, lambda error: second, lambda error: third])
    assert hooks.explain_error_by_hooks(error) is second


def test_torch_is_asked_for_nothing_without_hooks() -> None:
    hooks = StepHooks()

    def refuse() -> Iterator[tuple[str, nn.Parameter]]:
        raise AssertionError("nobody reads the parameters")
        yield "", nn.Parameter(torch.zeros(1))

    hooks.run_before_reduce_hooks(refuse())


def test_no_list_of_callbacks_can_be_replaced() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        StepHooks().before_reduce = []  # type: ignore[misc]
