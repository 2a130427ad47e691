"""A sharded DTensor on CPU is initialized with the same numbers on every rank.

torchrun --nproc-per-node 2 examples/found/random_shards_repeat.py
"""

import torch
from outcome import Outcome, report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2


# [reproduction]
def reproduce() -> Outcome:
    """How many different rows a weight of two rows has, one on each rank."""
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.empty(2, 64), mesh, [Shard(0)])
    torch.manual_seed(0)
    nn.init.normal_(weight)
    return Outcome(torch.tensor(len(weight.full_tensor().unique(dim=0))), torch.tensor(2))


# [/reproduction]


if __name__ == "__main__":
    report(reproduce)
