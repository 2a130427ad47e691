"""The plain statement of which elements topk sends."""

from __future__ import annotations

import pytest
import torch

from phalanx.verify.plain.compression import plain_topk_excess

GRADIENT = torch.tensor([[0.5, -4.0, 0.1], [3.0, 0.0, -2.0]])


def _keep(*sent: tuple[int, int]) -> torch.Tensor:
    kept = GRADIENT.clone()
    for row, column in sent:
        kept[row, column] = 0.0
    return kept


def test_the_largest_elements_are_no_excess() -> None:
    assert plain_topk_excess(GRADIENT, _keep((0, 1), (1, 0)), 1 / 3) <= 0
    assert plain_topk_excess(GRADIENT, torch.zeros(2, 3), 1.0) <= 0
    assert plain_topk_excess(torch.zeros(4), torch.zeros(4), 0.5) <= 0


def test_a_smaller_element_in_place_of_a_larger_one_is_an_excess() -> None:
    assert plain_topk_excess(GRADIENT, _keep((0, 1), (0, 2)), 1 / 3) == pytest.approx(2.9 / 4.0)


def test_another_number_of_elements_is_an_excess() -> None:
    for sent in ([(0, 1)], [(0, 1), (1, 0), (1, 2)]):
        assert plain_topk_excess(GRADIENT, _keep(*sent), 1 / 3) == float("inf")
