"""Nested samples are flat on their way, by joined names, and as they were for a model and an
objective."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nested
from models import plan
from phalanx.core.batch import flatten_batch, list_outermost_names, unflatten_entry
from phalanx.core.errors import DataError
from phalanx.data.user_dataset import UserSamples, collate_samples
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.call.bind_batch import BatchOfNamedTensors, build_forward_arguments
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.layout import Layout


def test_a_batch_of_nested_samples_has_joined_names() -> None:
    batch = UserSamples(nested.dataset("train"), "nested:dataset", seed=0, shuffled=False).take(
        np.arange(3)
    )
    shapes = {name: array.shape for name, array in batch.items()}
    assert shapes == {
        "views.0": (3, 4),
        "views.1": (3, 6),
        "of.sample.weight": (3,),
        "of.sample.tags": (3, 3),
        "targets.mean": (3,),
    }


def test_levels_come_back() -> None:
    sample = {"a": {"b": [1, {"c": 2}], "d": 3}, "e": 4}
    flat = flatten_batch(sample)
    assert flat == {"a.b.0": 1, "a.b.1.c": 2, "a.d": 3, "e": 4}
    assert list_outermost_names(flat) == ["a", "e"]
    assert {name: unflatten_entry(flat, name) for name in list_outermost_names(flat)} == sample
    with pytest.raises(KeyError):
        unflatten_entry(flat, "f")


def test_lists_of_numbers_and_of_equal_arrays_are_arrays_as_before() -> None:
    batch = collate_samples([{"ids": [1, 2], "pair": [np.zeros(2), np.ones(2)]}], [0], "mine")
    assert {name: array.shape for name, array in batch.items()} == {
        "ids": (1, 2),
        "pair": (1, 2, 2),
    }


def test_samples_of_other_levels_are_refused_by_their_names() -> None:
    with pytest.raises(DataError, match=r"sample 0 has \['a.x'\], sample 1 has \['a.y'\]"):
        collate_samples([{"a": {"x": 1}}, {"a": {"y": 1}}], [0, 1], "mine")


def test_a_forward_gets_levels_by_name_and_an_objective_reads_them() -> None:
    batch = BatchOfNamedTensors(
        {"inputs.x": torch.ones(2, 3), "inputs.y": torch.ones(2), "mask.0": torch.zeros(2)}
    )
    named = SimpleNamespace(forward=lambda inputs, mask: None)
    args, kwargs = build_forward_arguments(named, batch)  # type: ignore[arg-type]
    assert list(args[0]) == ["x", "y"]
    assert torch.equal(kwargs["mask"][0], torch.zeros(2))
    assert torch.equal(batch["inputs"]["y"], torch.ones(2))
    with pytest.raises(DataError, match="a batch has no 'labels'"):
        batch["labels"]


def test_an_own_loop_may_hand_in_nested_microbatches() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(1, 1)

        def forward(self, pair: list[torch.Tensor]) -> torch.Tensor:
            made: torch.Tensor = self.scale(pair[0] + pair[1])
            return made

    def objective(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return outputs.sum() * batch["more"]["factor"].sum(), torch.tensor(len(batch["pair"][0]))

    model = parallelize(Sum(), plan(1), Mesh(Layout(), 0, 0, torch.device("cpu")))
    microbatch = {
        "pair": (torch.ones(2, 1), torch.ones(2, 1)),
        "more": {"factor": torch.tensor([1.0, 2.0])},
    }
    sums = model.forward_backward([microbatch], objective)  # type: ignore[list-item]
    assert int(sums.num_targets) == 2
    assert all(parameter.grad is not None for parameter in model.parameters())
