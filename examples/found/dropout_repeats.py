"""Dropout of a sharded DTensor on CPU draws the same mask on every rank.

torchrun --nproc-per-node 2 examples/found/dropout_repeats.py
"""

import torch
import torch.nn.functional as F
from outcome import Outcome, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2


# [reproduction]
def reproduce() -> Outcome:
    """How many different masks two ranks draw for 64 elements each."""
    mesh = init_device_mesh("cpu", (2,))
    activations = distribute_tensor(torch.ones(2, 64), mesh, [Shard(0)])
    torch.manual_seed(0)
    dropped = F.dropout(activations, 0.5).full_tensor()
    return Outcome(torch.tensor(len(dropped.unique(dim=0))), torch.tensor(2))


# [/reproduction]


if __name__ == "__main__":
    report(reproduce)
