"""Collectives of a tensor-parallel group, of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.tensor_group import TensorParallelGroup


class _OperatorLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def group() -> Iterator[TensorParallelGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield TensorParallelGroup(dist.group.WORLD.group_name, 0, 1, PhaseTimer())
    dist.destroy_process_group()


def test_no_gather_of_gloo_has_a_name_that_its_threads_race_for(group: TensorParallelGroup) -> None:
    """Two threads of a gloo group that end a functional all_gather_into_tensor together break the
    heap: of 8 processes with 64 under way at a time 5 crashed."""
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    with _OperatorLog() as log:
        gathered = group.wait(group.start_all_gather(x.T))
    assert torch.equal(gathered, x.T)
    assert "_c10d_functional.all_gather_into_tensor_out.default" in log.operators
    assert "_c10d_functional.all_gather_into_tensor.default" not in log.operators
    assert group.num_bytes["all_gather"] == x.nbytes
