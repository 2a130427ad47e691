"""The weights that are freed before the backward, in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from phalanx.parallel.data_parallel.freed_head import FreedHead


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_root_whose_parameters_are_all_in_blocks_has_nothing_to_free() -> None:
    """FSDP2 of torch 2.11 has no group of parameters for such a root."""
    root = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for block in root:
        fully_shard(block)
    fully_shard(root)
    head = FreedHead(root, root)
    for _ in range(2):
        root(torch.ones(1, 3)).sum().backward()
    assert head.hand_to_objective(None, "outputs") == "outputs"
