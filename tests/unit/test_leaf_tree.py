"""The tree along which gradients are added: the same sum of the same leaves for any number of
ranks, and what a plan says and refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import phalanx
from models import CPU
from phalanx.core.errors import JobError, LayoutError
from phalanx.job.schema import Job
from phalanx.parallel.data_parallel.gradient_tree import PartialSums, add_rows_along_tree
from phalanx.plan.cluster import Cluster
from phalanx.plan.leaf_tree import LeafTree
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.run.autotune import rank_layouts_by_predicted_time
from phalanx.run.search_job import prepare_layout_search

LAYOUT_FREE = ["train.deterministic=layout-free", "train.micro_batch_size=2", "model.dim=64"]


def _add_as_defined(leaves: list[torch.Tensor]) -> torch.Tensor:
    """What the module's docstring says, word by word."""
    num_classes = 1
    while len(leaves) % (2 * num_classes) == 0:
        num_classes *= 2
    sums = []
    for number in range(num_classes):
        total = leaves[number]
        for leaf in leaves[number + num_classes :: num_classes]:
            total = total + leaf
        sums.append(total)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[i] + sums[i + half] for i in range(half)]
    return sums[0]


@pytest.mark.parametrize("num_leaves", [1, 2, 6, 8, 12, 16, 40])
def test_ranks_add_as_the_tree_is_defined(num_leaves: int) -> None:
    generator = torch.Generator().manual_seed(num_leaves)
    # Of many sizes, so that another order gives other digits.
    leaves = [
        torch.randn(64, generator=generator) * 10 ** torch.randn(64, generator=generator)
        for _ in range(num_leaves)
    ]
    expected = _add_as_defined(leaves)
    if num_leaves > 2:
        assert not torch.equal(sum(leaves[1:], leaves[0]), expected)
    tree = LeafTree(num_leaves)
    num_ranks = 1
    while num_leaves % num_ranks == 0:
        rows = []
        most = 0
        for rank in range(num_ranks):
            own = [leaf.clone() for leaf in leaves[rank::num_ranks]]
            sums = PartialSums(tree.leaves_per_class)
            for index in tree.order_microbatches(len(own)):
                # The one that comes is held besides.
                most = max(most, 1 + sums.num_held)
                sums.add([own[index]])
            rows += sums.take_total()
        assert torch.equal(add_rows_along_tree(torch.stack(rows)), expected)
        assert most == tree.count_gradient_copies(num_leaves // num_ranks)
        num_ranks *= 2


def _plan(num_ranks: int, *overrides: str, cluster: Cluster = CPU) -> Plan:
    job = phalanx.load_job(
        None,
        [*LAYOUT_FREE, "train.global_batch_size=16", f"parallel.ranks={num_ranks}", *overrides],
    )
    return make_plan(job, cluster=cluster, vocab_size=256)


def test_a_plan_counts_the_sets_of_gradients_and_says_what_is_sent() -> None:
    gradients = 4 * _plan(1).num_params
    for num_ranks, copies in ((1, 4), (2, 3), (4, 2), (8, 1)):
        plan = _plan(num_ranks)
        assert plan.is_layout_free
        assert Plan.from_json(plan.to_json()).is_layout_free
        (note,) = [reason for reason in plan.reasons if reason.startswith("layout-free")]
        assert f"{copies} set" in note
        assert ("each sends" in note) == (num_ranks > 1)
        if copies > 1:
            backward = plan.chosen.phases["backward"]["gradients"]
            assert (copies - 1) * gradients <= backward <= copies * gradients
    assert {candidate.zero_stage for candidate in _plan(2).alternatives} == {0}


@pytest.mark.parametrize("search", [prepare_layout_search, rank_layouts_by_predicted_time])
def test_layouts_are_not_searched(search: Callable[[Job], object]) -> None:
    job = phalanx.load_job(None, LAYOUT_FREE)
    with pytest.raises(LayoutError, match="there is nothing to search"):
        search(job)


def test_ranks_must_have_whole_branches() -> None:
    with pytest.raises(LayoutError, match="3 ranks cannot share the tree of 6 micro") as refusal:
        _plan(3, "train.global_batch_size=12")
    assert refusal.value.fix == "ranks: 1, 2"


@pytest.mark.parametrize(
    ("cluster", "overrides", "words"),
    [
        (Cluster("cuda", 2, 2**36), [], "proven on CPUs alone"),
        (
            CPU,
            ["model.num_experts=4", "model.expert_ffn_dim=32", "model.experts_per_token=2"],
            "not proven with experts",
        ),
    ],
)
def test_what_is_not_proven_is_refused_by_the_plan(
    cluster: Cluster, overrides: list[str], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        _plan(2, *overrides, cluster=cluster)


@pytest.mark.parametrize(
    "override",
    [
        "parallel.zero_stage=3",
        "parallel.dp_shard=2",
        "parallel.tp=2",
        "parallel.cp=2",
        "parallel.pp=2",
        "parallel.compress=fp16",
        "parallel.unused_parameters=allow",
        "parallel.dropout=local",
        "parallel.offload=optimizer",
        "train.compile=true",
        "precision.compute=fp16",
    ],
)
def test_what_is_not_proven_is_refused_by_the_job(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(JobError) as refusal:
        phalanx.load_job(None, [*LAYOUT_FREE, override])
    assert f'train.deterministic = "layout-free" is not proven with {key}' in str(refusal.value)
    phalanx.load_job(None, [*LAYOUT_FREE, override, "train.deterministic=true"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.deterministic=layout-free"], "set train.micro_batch_size"),
        ([*LAYOUT_FREE, "train.global_batch_size=15"], "2 does not divide train.global_batch_size"),
    ],
)
def test_microbatches_are_of_one_size(overrides: list[Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        phalanx.load_job(None, overrides)
