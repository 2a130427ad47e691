"""torch.distributed.checkpoint loads float32 into a bfloat16 tensor without a word.

torchrun --nproc-per-node 2 examples/found/narrowed_by_load.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from outcome import Outcome, report

RANKS = 2


# [reproduction]
def reproduce() -> Outcome:
    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory, src=0)
    dcp.save({"weight": torch.tensor([1.001])}, checkpoint_id=directory[0])
    loaded = {"weight": torch.zeros(1, dtype=torch.bfloat16)}
    dcp.load(loaded, checkpoint_id=directory[0])
    return Outcome(loaded["weight"].float(), torch.tensor([1.001]))


# [/reproduction]


if __name__ == "__main__":
    report(reproduce)
