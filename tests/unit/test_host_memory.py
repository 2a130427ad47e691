"""What a layout offloads must fit into the host memory of a node."""

from __future__ import annotations

import pytest

from phalanx.core.errors import LayoutError
from phalanx.core.units import GIB
from phalanx.job.load import load_job
from phalanx.plan.cluster import Cluster
from phalanx.plan.planner import make_plan

KEYS = [
    "model.preset=llama3-8b",
    "train.global_batch_size=64",
    "train.micro_batch_size=1",
    "train.recompute=full",
    "data.seq_len=2048",
    "precision.compute=bf16",
    "parallel.zero_stage=3",
]


def plan(num_gpus: int, host_memory_gib: int | None, *keys: str) -> None:
    host_bytes = None if host_memory_gib is None else host_memory_gib * GIB
    cluster = Cluster(
        "cuda",
        num_gpus,
        80 * GIB,
        "h100-sxm",
        (9, 0),
        devices_per_node=8,
        host_memory_bytes=host_bytes,
    )
    make_plan(load_job(None, [*KEYS, *keys, f"parallel.ranks={num_gpus}"]), cluster=cluster)


def test_an_offload_that_the_host_does_not_hold_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"8 ranks of a node offload takes 89.7.* and 40.0 GiB"):
        plan(8, 40, "parallel.offload=parameters")
    plan(8, 400, "parallel.offload=parameters")
    # Without an offload nothing waits there; and nobody may know how much memory there is.
    plan(8, 40)
    plan(8, None, "parallel.offload=parameters")


def test_more_nodes_share_what_waits_in_host_memory() -> None:
    plan(64, 40, "parallel.offload=parameters")
    with pytest.raises(LayoutError, match="host memory"):
        # Each copy of the model is one node's.
        plan(64, 40, "parallel.offload=parameters", "parallel.dp_shard=8")
