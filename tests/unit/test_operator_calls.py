"""Operators are counted as autograd recorded them, and what one costs is measured without a
draw."""

from __future__ import annotations

import pytest
import torch

from phalanx.parallel.operator_calls import (
    count_operators,
    measure_matmul_flops_per_s,
    measure_operator_seconds,
)


@pytest.mark.parametrize("num_layers", [1, 5])
def test_every_operator_with_a_backward_is_counted_once(num_layers: int) -> None:
    """Of each layer a product and a ReLU, of the loss its sum; and a node for each parameter, whose
    gradient adds up there. Products with a bias have the transposed weight besides."""
    layers = [torch.nn.Linear(4, 4) for _ in range(num_layers)]
    x = torch.ones(2, 4)
    for layer in layers:
        x = layer(x).relu()
    assert count_operators((x + x).sum()) == 2 + num_layers * (1 + 1 + 1 + 2)


def test_a_loss_without_a_graph_has_none() -> None:
    assert count_operators(torch.ones(())) == 0


def test_measuring_draws_nothing_and_changes_no_gradient_mode() -> None:
    before = torch.random.get_rng_state()
    with torch.no_grad():
        operator_s = measure_operator_seconds()
        assert not torch.is_grad_enabled()
    assert 0 < operator_s < 0.01
    assert measure_matmul_flops_per_s(torch.float32) > 1e7
    assert torch.equal(before, torch.random.get_rng_state())
