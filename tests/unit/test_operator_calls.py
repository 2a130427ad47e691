"""Operators are counted as they are called, and what one costs is measured without a draw."""

from __future__ import annotations

import torch
from torch.autograd.profiler import profile

from phalanx.parallel.operator_calls import counting_operator_calls, measure_call_seconds


def test_every_operator_of_a_forward_and_backward_is_counted() -> None:
    """The reference is torch's own profiler over the same body."""
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)

    def compute() -> None:
        layer.zero_grad()
        layer(x).relu().sum().backward()

    compute()
    with profile() as reference:
        compute()
    with counting_operator_calls() as calls:
        compute()
    named = [event.name() for event in reference.kineto_results.events()]
    assert calls.count() == sum(name.startswith("aten::") for name in named) > 10


def test_two_bodies_have_twice_the_calls() -> None:
    x = torch.ones(2)
    counts = []
    for times in (5, 10):
        with counting_operator_calls() as calls:
            for _ in range(times):
                x = x + 1
        counts.append(calls.count())
    assert counts[1] == 2 * counts[0] >= 10


def test_another_profiler_is_left_alone() -> None:
    with profile() as others:
        with counting_operator_calls() as calls:
            torch.ones(2).add(1)
    assert calls.count() == 0
    assert any(event.name == "aten::add" for event in others.function_events)


def test_measuring_a_call_draws_nothing_and_changes_no_gradient_mode() -> None:
    before = torch.random.get_rng_state()
    with torch.no_grad():
        call_s = measure_call_seconds()
        assert not torch.is_grad_enabled()
    assert call_s is not None
    assert 0 < call_s < 0.01
    assert torch.equal(before, torch.random.get_rng_state())
