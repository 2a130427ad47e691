"""Whether a node's host memory holds what its ranks leave there."""

from __future__ import annotations

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes
from phalanx.plan.candidates import CandidateEvaluator
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Candidate


def require_host_memory(cluster: Cluster, evaluator: CandidateEvaluator, chosen: Candidate) -> None:
    """Raise LayoutError where offloaded states and activations of a node's ranks are more than its
    host memory. Where nobody says how much that is, nothing is asked."""
    work = evaluator.work
    if not (work.options.has_state_on_host or work.offloads_activations):
        return
    if cluster.host_memory_bytes is None:
        return
    num_ranks = min(evaluator.num_ranks, cluster.devices_per_node or cluster.num_devices)
    needed = num_ranks * evaluator.predict_host_bytes(chosen)
    if needed > cluster.host_memory_bytes:
        raise LayoutError(
            f"what {num_ranks} ranks of a node offload takes {format_bytes(needed)} of its host"
            f" memory, and {format_bytes(cluster.host_memory_bytes)} are there",
            fix="offload less (parallel.offload, train.offload_activations), or shard over more"
            " nodes",
        )
