"""What a layout offloads must fit into the host memory of a node."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from phalanx.core.errors import LayoutError
from phalanx.core.units import GIB
from phalanx.job.load import load_job
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.search.finalists import TOO_MUCH_HOST_MEMORY_REASON
from phalanx.plan.search.search import search_layouts
from phalanx.plan.search.task import build_search_task

KEYS = [
    "model.preset=llama3-8b",
    "train.global_batch_size=64",
    "train.micro_batch_size=1",
    "train.recompute=full",
    "data.seq_len=2048",
    "precision.compute=bf16",
    "parallel.zero_stage=3",
]


def plan(num_gpus: int, host_memory_gib: int | None, *keys: str) -> Plan:
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
    return make_plan(load_job(None, [*KEYS, *keys, f"parallel.ranks={num_gpus}"]), cluster=cluster)


def test_an_offload_that_the_host_does_not_hold_is_refused() -> None:
    # 8.03 B parameters: weights, gradients and two moments in fp32.
    with pytest.raises(LayoutError, match=r"8 ranks of a node offload takes 119.7.* and 40.0 GiB"):
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


def test_a_plan_keeps_what_a_rank_offloads() -> None:
    # Of 64 ranks that share each state, a rank has an eighth of what it has where 8 do: gradients,
    # too, which are there at the end of the backward, wherever the peak of the GPU is.
    shared_by_64 = plan(64, 400, "parallel.offload=parameters").chosen.host_bytes
    shared_by_8 = plan(64, 400, "parallel.offload=parameters", "parallel.dp_shard=8").chosen
    assert shared_by_8.host_bytes == pytest.approx(8 * shared_by_64, rel=1e-2)
    assert shared_by_8.to_json()["host_bytes"] == shared_by_8.host_bytes
    assert "host_bytes" not in plan(64, 400).chosen.to_json()


def test_a_search_says_that_it_is_the_host_memory_that_no_layout_fits() -> None:
    cluster = Cluster(
        "cuda", 8, 80 * GIB, "h100-sxm", (9, 0), devices_per_node=8, host_memory_bytes=100 * GIB
    )
    keys = [*KEYS, "model.preset=llama3-70b", "parallel.offload=parameters", "parallel.ranks=8"]
    result = search_layouts(build_search_task(load_job(None, keys), cluster=cluster))
    assert (result.winner, result.failure_kind) == (None, "DOES NOT FIT")
    # 70.6 B parameters: weights, gradients and two moments in fp32, all on one node.
    assert result.smallest_host_bytes >= 16 * 70.5e9
    assert re.match(r"the least of \d+ layouts planned that fit their GPUs needs ", result.failure)
    assert result.failure.endswith(" of a node's host memory, and 100.0 GiB are there")
    assert result.refused[TOO_MUCH_HOST_MEMORY_REASON] > 0


def test_a_pipeline_offloads_what_its_fullest_rank_does() -> None:
    """Reference: the optimizer's two moments in fp32, of the parameters of each stage."""
    keys = ["model.preset=llama3.2-1b", "parallel.offload=optimizer", "parallel.pp=4"]
    pipelined = plan(4, 400, *keys, "parallel.zero_stage=1").chosen
    alone = plan(4, 400, *keys[:2], "parallel.zero_stage=1").chosen
    # Four stages together have all of it, and the first, with the embedding, most.
    assert alone.host_bytes < pipelined.host_bytes < 4 * alone.host_bytes


def test_a_search_says_that_nobody_knows_the_host_memory() -> None:
    cluster = Cluster("cuda", 8, 80 * GIB, "h100-sxm", (9, 0), devices_per_node=8)
    keys = [*KEYS, "parallel.offload=parameters", "parallel.ranks=8"]
    result = search_layouts(build_search_task(load_job(None, keys), cluster=cluster))
    assert result.winner is not None
    known = replace(cluster, host_memory_bytes=2000 * GIB)
    other = search_layouts(build_search_task(load_job(None, keys), cluster=known))
    words = "a node's host memory holds what is offloaded is not known"
    assert [words in " ".join(each.remarks) for each in (result, other)] == [True, False]
