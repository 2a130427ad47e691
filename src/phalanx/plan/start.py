"""Host memory of a run's start, where the model cannot be built without memory: ranks of a machine
build it whole, one at a time. Torch-free.
"""

from __future__ import annotations

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes
from phalanx.job.costs import ModelCosts
from phalanx.plan.cluster import Cluster
from phalanx.plan.memory import StateBytes
from phalanx.plan.plan import Candidate


def describe_start_of_whole_module(shape: ModelCosts, cluster: Cluster, chosen: Candidate) -> str:
    """A line about the host memory that building the model whole takes; "" for a model that is
    built by parts.

    Raises LayoutError if the machine has less.
    """
    if not getattr(shape, "is_built_whole", False):
        return ""
    whole_bytes = shape.num_params * StateBytes().parameters
    held_bytes, memory_bytes = 0, cluster.host_memory_bytes
    if cluster.device == "cpu":
        # What other ranks have cut off already; of a GPU's ranks it is on the GPUs.
        ranks_here = min(chosen.layout.world_size, cluster.devices_per_node or cluster.num_devices)
        held_bytes = ranks_here * chosen.predicted_bytes["parameters"]
        memory_bytes = cluster.memory_bytes
    needed = whole_bytes + held_bytes
    if memory_bytes is not None and needed > memory_bytes:
        raise LayoutError(
            f"the model cannot be built without memory, and built whole it needs"
            f" {format_bytes(needed)} of a machine's {format_bytes(memory_bytes)}",
            fix="let its factory draw from torch's own random state alone"
            " (docs/your-own-module.md, large modules)",
        )
    text = (
        "start: building the model cannot be recorded, so ranks of a machine build it whole one at"
        f" a time, {format_bytes(whole_bytes)} of host memory"
    )
    if held_bytes:
        text += f" beside the {format_bytes(held_bytes)} of weights that ranks have by then"
    return text
