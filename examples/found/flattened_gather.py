"""DTensor gathers an unevenly cut dimension wrongly, as soon as the mesh has a flattened dimension.

torchrun --nproc-per-node 4 examples/found/flattened_gather.py
"""

import torch
from outcome import Outcome, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 4


# [reproduction]
def reproduce() -> Outcome:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh._flatten("dp_tp")
    full = torch.arange(15.0).reshape(5, 3)
    sharded = distribute_tensor(full, mesh, [Shard(0), Shard(0)])
    return Outcome(sharded.full_tensor(), full)


# [/reproduction]


if __name__ == "__main__":
    report(reproduce)
