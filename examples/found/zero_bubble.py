"""A zero-bubble pipeline over FSDP2 modules that reshard after forward computes wrong gradients.

torchrun --nproc-per-node 2 examples/found/zero_bubble.py
"""

import copy

import torch
from outcome import Outcome, report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

RANKS = 2


def mean_squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


# [reproduction]
def reproduce() -> Outcome:
    """The gradients of this rank's first stage, which is one linear layer of four."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
    inputs, targets = torch.randn(2, 4, 4).double()
    stages = []
    for index in (rank, rank + 2):
        module = copy.deepcopy(layers[index])
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=True)
        stages.append(PipelineStage(module, index, 4, torch.device("cpu"), group=group))
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=mean_squared_error)
    schedule.step(*[inputs][rank:], target=targets)
    mean_squared_error(layers(inputs), targets).backward()
    gradient = stages[0].submod.weight.grad
    computed = torch.zeros(4, 4) if gradient is None else gradient.full_tensor()
    return Outcome(computed.double(), layers[rank].weight.grad)


# [/reproduction]


if __name__ == "__main__":
    report(reproduce)
