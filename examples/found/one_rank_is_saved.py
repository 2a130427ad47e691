"""torch.distributed.checkpoint keeps one rank's value of a key that ranks fill differently.

torchrun --nproc-per-node 2 examples/found/one_rank_is_saved.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from outcome import Outcome, report

RANKS = 2


# [reproduction]
def reproduce() -> Outcome:
    """The position of a rank's data loader, saved and loaded by the same ranks."""
    rank = dist.get_rank()
    directory = [tempfile.mkdtemp()]
    dist.broadcast_object_list(directory, src=0)
    dcp.save({"position": torch.tensor(10 * rank)}, checkpoint_id=directory[0])
    loaded = {"position": torch.tensor(-1)}
    dcp.load(loaded, checkpoint_id=directory[0])
    return Outcome(loaded["position"], torch.tensor(10 * rank))


# [/reproduction]


if __name__ == "__main__":
    report(reproduce)
