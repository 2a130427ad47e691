"""What an evaluation may do with weights, and what is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from torch import nn

from phalanx.mesh.bit_digest import list_unequal_digests
from phalanx.parallel.model import ParallelModel
from phalanx.train.evaluation_checks import EvaluationChecks


class _Model:
    """As much of a ParallelModel as is looked at; the head is tied to the first layer."""

    def __init__(self) -> None:
        self.module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        self.module[2].weight = self.module[0].weight
        self.module[1].bias.requires_grad_(False)
        self.gathers_weights, self.replaced = False, list[str]()

    def aliases(self) -> dict[str, str]:
        return {"2.weight": "0.weight"}

    def list_replaced_parameters(self) -> list[str]:
        return self.replaced

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()


def _leave_alone(module: nn.Sequential) -> None:
    module(torch.ones(4, 3))


def _write_in_place(module: nn.Sequential) -> None:
    module[0].weight.mul_(1.5)


def _write_data(module: nn.Sequential) -> None:
    module[0].weight.data[1, 1] += 1e-3


def _write_tied(module: nn.Sequential) -> None:
    module[2].weight.add_(1.0)


def _write_in_inference_mode(module: nn.Sequential) -> None:
    with torch.inference_mode():
        module[0].weight.add_(1.0)


def _swap_and_put_back(module: nn.Sequential) -> None:
    kept = module[0].weight.clone()
    module[0].weight.zero_()
    module[0].weight.copy_(kept)


def _write_frozen_and_buffers(module: nn.Sequential) -> None:
    module[1].bias.add_(1.0)
    module[1].running_mean.add_(1.0)


def _replace(module: nn.Sequential) -> None:
    module[1].weight = nn.Parameter(torch.zeros(3))


def _remove(module: nn.Sequential) -> None:
    del module[1].weight


def _freeze(module: nn.Sequential) -> None:
    module[1].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("evaluate", "changed"),
    [
        (_leave_alone, []),
        (_write_in_place, ["0.weight"]),
        (_write_data, ["0.weight"]),
        (_write_tied, ["0.weight"]),
        (_write_in_inference_mode, ["0.weight"]),
        (_swap_and_put_back, []),
        (_write_frozen_and_buffers, []),
        (_replace, ["1.weight"]),
        (_remove, ["1.weight"]),
        (_freeze, []),
    ],
)
def test_what_an_evaluation_changed(
    evaluate: Callable[[nn.Sequential], None], changed: list[str]
) -> None:
    model = _Model()
    checks = EvaluationChecks(cast(ParallelModel, model))
    checks.digest_before_evaluation()
    with torch.no_grad():
        evaluate(model.module)
    assert checks.find_changed_weights() == changed
    assert checks.num_digested == 3


@pytest.mark.parametrize("place", [0, 2], ids=["first place", "tied place"])
def test_what_fsdp_puts_back_in_an_evaluation_is_not_changed_by_it(place: int) -> None:
    model = _Model()
    checks = EvaluationChecks(cast(ParallelModel, model))
    own = model.module[0].weight
    model.module[place].weight = nn.Parameter(torch.ones(3, 3))
    model.replaced = [f"{place}.weight"]
    checks.digest_before_evaluation()
    model.module[place].weight, model.replaced = own, []
    with torch.no_grad():
        model.module[1].weight.add_(1.0)
    assert checks.find_changed_weights() == ["1.weight"]


def test_what_is_put_in_a_place_in_an_evaluation_of_fsdp_is_not_changed_by_it() -> None:
    """Where the next check of the optimizer's parameters tells it."""
    model = _Model()
    checks = EvaluationChecks(cast(ParallelModel, model))
    checks.digest_before_evaluation()
    model.replaced = ["1.weight"]
    _replace(model.module)
    assert checks.find_changed_weights() == []


def test_a_name_that_one_side_lacks_is_not_unequal() -> None:
    one, two = torch.tensor(1), torch.tensor(2)
    assert list_unequal_digests({"a": one, "b": one, "c": one}, {"a": one, "b": two}) == ["b"]
