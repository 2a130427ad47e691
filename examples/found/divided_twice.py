"""FSDP2 divides gradients twice where one rank is the whole group and a divisor is set.

In float16 and float64, and in any type with `set_force_sum_reduction_for_comms`.

torchrun --nproc-per-node 2 examples/found/divided_twice.py
"""

import torch
from outcome import Outcome, report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

RANKS = 2


# [reproduction]
def reproduce() -> Outcome:
    module = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("experts", "shards"))
    fully_shard(module, mesh=mesh["shards"])
    module.set_gradient_divide_factor(4.0)
    module(torch.ones(1, 1, dtype=torch.float16)).sum().backward()
    gradient = module.weight.grad
    assert isinstance(gradient, DTensor)
    return Outcome(gradient.full_tensor(), torch.full((1, 1), 1 / 4, dtype=torch.float16))


# [/reproduction]


if __name__ == "__main__":
    report(reproduce)
