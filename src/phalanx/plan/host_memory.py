"""The host memory of a node that its ranks fill with what they offload."""

from __future__ import annotations

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes
from phalanx.plan.candidates import CandidateEvaluator
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Candidate


class HostMemoryError(LayoutError):
    """What the ranks of a node offload is more than its host memory.

    `needed_bytes`: of a node; `capacity_bytes`: what it has.
    """

    def __init__(self, num_ranks: int, needed_bytes: int, capacity_bytes: int) -> None:
        super().__init__(
            f"what {num_ranks} ranks of a node offload takes {format_bytes(needed_bytes)} of its"
            f" host memory, and {format_bytes(capacity_bytes)} are there",
            fix="offload less (parallel.offload, train.offload_activations), or shard over more"
            " nodes",
        )
        self.needed_bytes, self.capacity_bytes = needed_bytes, capacity_bytes


def predict_offloaded_bytes(evaluator: CandidateEvaluator, chosen: Candidate) -> int:
    """Bytes of one rank in host memory, beside those of its GPU; 0 where nothing is offloaded."""
    work = evaluator.work
    if not (work.options.has_state_on_host or work.offloads_activations):
        return 0
    return evaluator.predict_host_bytes(chosen)


def require_host_memory(cluster: Cluster, num_ranks: int, bytes_of_rank: int) -> None:
    """Raise HostMemoryError where what `num_ranks` ranks offload is more than the host memory of a
    node, `bytes_of_rank` of each. Where nobody says how much that is, nothing is asked."""
    if cluster.host_memory_bytes is None:
        return
    num_ranks_of_node = count_ranks_of_node(cluster, num_ranks)
    needed = num_ranks_of_node * bytes_of_rank
    if needed > cluster.host_memory_bytes:
        raise HostMemoryError(num_ranks_of_node, needed, cluster.host_memory_bytes)


def count_ranks_of_node(cluster: Cluster, num_ranks: int) -> int:
    """Of `num_ranks` ranks those on one node, the fullest."""
    return min(num_ranks, cluster.devices_per_node or cluster.num_devices)
