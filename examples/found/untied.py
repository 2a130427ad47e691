"""`parallelize_module` makes two weights of one that an embedding and a head share.

torchrun --nproc-per-node 2 examples/found/untied.py
"""

import torch
from outcome import Outcome, report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

RANKS = 2


# [reproduction]
def reproduce() -> Outcome:
    """The gradient of the embedding, of which the head's is a part in one process."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)).double()
    module[1].weight = module[0].weight
    tokens = torch.arange(8)
    module(tokens).square().sum().backward()
    expected = module[0].weight.grad
    module.zero_grad()
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate()),
        "1": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(module, init_device_mesh("cpu", (2,)), plan)
    module(tokens).square().sum().backward()
    gradient = module[0].weight.grad
    assert isinstance(gradient, DTensor)
    return Outcome(gradient.full_tensor(), expected)


# [/reproduction]


if __name__ == "__main__":
    report(reproduce)
