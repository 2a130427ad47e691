"""What memory was refused for, by allocators that refuse it."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import plan
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.layout import Layout
from phalanx.train.memory_request import MemoryRequest, find_memory_request

# Of four bytes each: more than any machine has.
MANY = 1 << 44


class Widens(nn.Module):
    """A module's forward asks for too much."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 1)
        self.widen = nn.Linear(1, 1 << 10, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.widen(self.first(inputs).expand(MANY >> 10, 1))


class AsksItself(Widens):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.first(inputs)
        return inputs.new_empty(MANY)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(1, 4))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return F.embedding(numbers, self.row.expand(MANY >> 2, 4))


class LooksUp(nn.Module):
    """The gradient of what a forward looks up in is too much; other nodes run before it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.table, self.after = nn.Linear(4, 4), Table(), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = self.table(torch.arange(len(inputs)))
        return self.after((self.before(inputs) + rows).tanh())


def sum_up(
    outputs: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs.sum(), torch.tensor(1)


def train_until_refused(module: nn.Module) -> MemoryRequest:
    model = parallelize(module, plan(1), Mesh(Layout(), 0, 0, torch.device("cpu")))
    with pytest.raises(RuntimeError) as caught:
        model.forward_backward([{"inputs": torch.ones(1, 4)}], sum_up, step=1)
    return find_memory_request(caught.value, model)


@pytest.mark.parametrize(
    ("module", "operation", "owner"),
    [
        (Widens, "F.linear(input, self.weight, self.bias)", "in widen"),
        (AsksItself, "inputs.new_empty(MANY)", "in the model"),
        (LooksUp, "EmbeddingBackward0", "in the backward beside table.row"),
    ],
)
def test_the_operation_and_the_module_are_named(
    module: Callable[[], nn.Module], operation: str, owner: str
) -> None:
    request = train_until_refused(module())
    assert request == MemoryRequest(4 * MANY, operation, owner)
    assert re.fullmatch(rf"for 64\.0 TiB by {re.escape(operation)} {owner}", request.describe())


def test_a_parameter_that_memory_is_for_is_named() -> None:
    linear = nn.Linear(4, 4)
    model = parallelize(linear, plan(1), Mesh(Layout(), 0, 0, torch.device("cpu")))

    def make_state(parameter: nn.Parameter) -> None:
        torch.zeros_like(
            parameter.detach().expand(MANY, 4, 4), memory_format=torch.contiguous_format
        )

    with pytest.raises(RuntimeError) as caught:
        make_state(linear.weight)
    request = find_memory_request(caught.value, model)
    assert request.owner == "for weight"
    assert request.operation.startswith("torch.zeros_like(")


@pytest.mark.parametrize(
    ("error", "num_bytes"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
                " 79.25 GiB of which 1.50 GiB is free."
            ),
            2 << 30,
        ),
        (MemoryError("Unable to allocate 1.50 MiB for an array with shape (1,)"), 3 << 19),
        (MemoryError(), None),
    ],
)
def test_the_size_is_read_from_the_words_of_each_allocator(
    error: Exception, num_bytes: int | None
) -> None:
    assert find_memory_request(error, None) == MemoryRequest(num_bytes, "", "")


def test_numpy_says_it_so() -> None:
    with pytest.raises(MemoryError) as caught:
        np.ones((MANY, 64), np.float32)
    assert find_memory_request(caught.value, None).num_bytes == 4 * 64 * MANY
