"""Plans of models with experts: what parallel.ep holds, gathers and sends, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from models import CPU
from phalanx.core.errors import JobError, LayoutError
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster
from phalanx.plan.communication import ep_buffer_bytes, ep_sent_bytes_per_step
from phalanx.plan.explain import describe_plan
from phalanx.plan.layout import Layout
from phalanx.plan.memory import (
    StateBytes,
    compute_excess_expert_share,
    count_rank_params,
    predict_model_state_bytes,
)
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.workload import Workload

GIB = 2**30
MIXTRAL = {"preset": "mixtral-8x7b"}
GPUS = Cluster("cuda", 64, 80 * GIB)
SMALL = {"preset": "small-mixtral"}


def plan(model: dict[str, Any] = SMALL, cluster: Cluster = CPU, **sections: dict[str, Any]) -> Plan:
    return make_plan(
        Job.model_validate({"model": model, **sections}), cluster=cluster, vocab_size=256
    )


def mixtral(gpus: int = 64, **parallel: Any) -> Plan:
    sections: dict[str, Any] = {"data": {"seq_len": 4096}, "precision": {"compute": "bf16"}}
    sections["train"] = {"global_batch_size": gpus, "recompute": "full"}
    return plan(
        MIXTRAL, Cluster("cuda", gpus, 80 * GIB), parallel={"ranks": gpus, **parallel}, **sections
    )


def test_experts_are_held_in_parts_and_the_rest_whole() -> None:
    whole, spread = plan(parallel={"ranks": 4}), plan(parallel={"ranks": 4, "ep": 4})
    assert spread.layout == Layout(dp_shard=4, ep=4)
    assert (whole.chosen.name, spread.chosen.name) == ("ddp", "ddp")
    elsewhere = 4 * 3 * 6 * 128 * 192  # of 4 layers 6 of 8 experts with 3 matrices each
    for kind, size in (("parameters", 4), ("gradients", 4), ("optimizer", 8)):
        saved = whole.chosen.predicted_bytes[kind] - spread.chosen.predicted_bytes[kind]
        assert saved == size * elsewhere, kind
    assert count_rank_params(whole.model_shape, 4) == whole.num_params - elsewhere


@pytest.mark.parametrize(
    ("parallel", "name", "layout"),
    [
        ({"ranks": 8, "ep": 2}, "ddp", Layout(dp_replicate=4, dp_shard=2, ep=2)),
        ({"ranks": 8, "ep": 4, "cp": 2}, "ddp", Layout(dp_replicate=2, dp_shard=2, cp=2, ep=4)),
        ({"ranks": 8, "ep": 2, "cp": 4}, "ddp", Layout(dp_replicate=2, cp=4, ep=2)),
        ({"ranks": 8, "ep": 4, "dp_shard": 8}, "zero3", Layout(dp_shard=8, ep=4)),
        ({"ranks": 8, "ep": 2, "zero_stage": 2}, "zero2", Layout(dp_shard=8, ep=2)),
        (
            {"ranks": 8, "ep": 2, "dp_shard": 2, "tp": 2},
            "zero3",
            Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2),
        ),
        ({"ranks": 8, "ep": 4, "pp": 2}, "ddp", Layout(pp=2, dp_shard=4, ep=4)),
        ({"ep": 8}, "ddp", Layout(dp_shard=8, ep=8)),
    ],
)
def test_ep_folds_over_dp_shard_and_cp(parallel: dict[str, Any], name: str, layout: Layout) -> None:
    found = plan(parallel=parallel)
    assert (found.chosen.name, found.layout) == (name, layout)
    assert [c.name for c in found.alternatives] == ["ddp", "zero2", "zero3"]
    assert Plan.from_json(found.to_json()) == found


def test_where_no_dimension_of_experts_divides_the_rank_that_has_most_is_planned_for() -> None:
    """zero1 cuts between experts: of 8 on 64 ranks 8 ranks have the state of one each, the
    others of none."""
    found = mixtral()
    zero1 = next(candidate for candidate in found.alternatives if candidate.name == "zero1")
    even = predict_model_state_bytes(found.num_params, 1, 64, StateBytes())["optimizer"]
    beyond = found.model_shape.experts.count_chosen_params() * (1 / 8 - 1 / 64)
    assert zero1.predicted_bytes["optimizer"] == round(even + 8 * beyond)
    odd = replace(found.model_shape, dim=4095, expert_ffn_dim=14335)
    assert compute_excess_expert_share(odd, 3, 64, 8) == 1 / 8 - 1 / 64
    assert compute_excess_expert_share(found.model_shape, 3, 64, 8) == 0


def test_shards_are_as_large_and_gathered_ones_smaller() -> None:
    """Of ZeRO-3: experts are cut over ep, and the rest of the ranks; of a block only a rank's
    own are gathered."""
    whole, spread = mixtral(zero_stage=3), mixtral(zero_stage=3, ep=8)
    before, after = whole.chosen.phases, spread.chosen.phases
    for kind in ("parameters", "gradients", "optimizer", "activations", "loss"):
        assert before["forward"][kind] == after["forward"][kind]
    elsewhere = whole.model_shape.count_experts_params() * 7 // 8
    # Of the one unit of blocks that is whole where the loss is made, in bf16.
    saved = before["forward"]["communication"] - after["forward"]["communication"]
    assert saved == elsewhere * 2
    # In the backward there are two, the gradient of a unit on its way, and rows of both choices of
    # a token, which leave and come.
    under_way = 2 * 4096 * 2 * 4096 * 2
    first = 14336 * 4096 * 7 * 2
    saved = before["backward"]["communication"] - after["backward"]["communication"]
    assert saved == elsewhere * (2 * 2 + 4) + first - under_way


def test_mixtral_on_64_gpus_says_what_experts_take_and_send() -> None:
    whole, spread = "\n".join(describe_plan(mixtral())), "\n".join(describe_plan(mixtral(ep=8)))
    assert "zero3 (dp_shard=64)" in whole
    assert "experts: each rank gathers all 8 of a block" in whole
    assert "parallel.ep=8 would save" in whole
    assert "zero2 (dp_shard=64 x ep=8)" in spread
    assert "ep: each of 8 ranks has 1 of a block's 8 experts, split over 8 ranks" in spread
    assert "7.0 GiB per rank and step where experts get equally many" in spread
    assert (
        "zero1 is left out: with ep, experts are reduced over other ranks than the rest" in spread
    )


def test_rows_are_sent_four_times_for_each_layer_and_microbatch() -> None:
    shape = replace(plan().model_shape, num_dense_layers=1)
    work = Workload(3, 64, "bf16", "none", 64, 5, ep=4)
    rows = 3 * 64 * 2 * 3 // 4  # of 2 experts per token 3 of 4 lie on other ranks
    assert ep_sent_bytes_per_step(shape, work) == 4 * 3 * 5 * rows * 128 * 2
    assert ep_sent_bytes_per_step(shape, replace(work, ep=1)) == 0
    assert ep_buffer_bytes(shape, work) == 2 * 3 * 64 * 2 * 128 * 2


def test_stages_of_a_pipeline_hold_parts_of_their_experts() -> None:
    whole, spread = (
        plan(parallel={"ranks": 4, "pp": 2}),
        plan(parallel={"ranks": 4, "pp": 2, "ep": 2}),
    )
    assert whole.pipeline is not None
    assert spread.pipeline is not None
    for before, after in zip(whole.pipeline.rank_memory, spread.pipeline.rank_memory, strict=True):
        assert before["parameters"] - after["parameters"] == 2 * 4 * 4 * 3 * 128 * 192


def test_what_does_not_fit_is_told_that_ep_would() -> None:
    """Experts that are gathered whole are most of what a rank needs, and recompute is at its
    end."""
    with pytest.raises(
        LayoutError, match=r"set parallel\.ep=\d: each rank then has \d of the experts"
    ):
        plan(
            MIXTRAL | {"num_layers": 4},
            Cluster("cuda", 64, 10 * GIB),
            parallel={"ranks": 64},
            data={"seq_len": 512},
            train={"global_batch_size": 64, "recompute": "full"},
            precision={"compute": "bf16"},
        )


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"parallel": {"ranks": 4, "ep": 3}},
            "parallel.ep 3 does not divide the 8 experts; nearest: 2 or 4",
        ),
        (
            {"parallel": {"ranks": 4, "ep": 8}},
            "does not divide the 4 ranks that hold the same part .*nearest: 4",
        ),
        (
            {"parallel": {"ranks": 4, "ep": 4, "dp_shard": 2}},
            "ep 4 does not divide dp_shard 2; nearest: 2",
        ),
        (
            {"parallel": {"ranks": 4, "ep": 4, "dp_replicate": 2}},
            "divide dp_shard 2, what dp_replicate 2 leaves",
        ),
        (
            {"parallel": {"ranks": 4, "ep": 2, "zero_stage": 1}},
            "parallel.zero_stage: 1 is not for .*reduced over other",
        ),
        (
            {"parallel": {"ranks": 4, "ep": 2, "compress": "int8"}},
            "parallel.compress: not with parallel.ep",
        ),
        (
            {"parallel": {"ranks": 4, "ep": 2}, "train": {"compile": True}},
            "train.compile: not with parallel.ep",
        ),
        (
            {"parallel": {"ranks": 4, "ep": 2}, "model": {}},
            "spreads experts over ranks, and the model has none",
        ),
    ],
)
def test_what_ep_cannot_do_is_refused_with_why(
    sections: dict[str, dict[str, Any]], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        plan(**{"model": SMALL, **sections})


BASE = ("model.preset=small-mixtral", "train.global_batch_size=32")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("parallel.ep=3", "parallel.ep: ep 3 does not divide the 8 experts; nearest: 2 or 4"),
        (
            "model.preset=small parallel.ep=2",
            "parallel.ep: ep 2 spreads experts over ranks, and the model has none",
        ),
        (
            "model.preset=none model.kind=a.b:c parallel.ep=2",
            "parallel.ep: ep 2 spreads the experts of phalanx's own",
        ),
        (
            "parallel.ranks=8 parallel.tp=2 parallel.ep=8",
            "parallel.ep: ep 8 does not divide the 4 ranks that hold",
        ),
        (
            "parallel.dp_shard=2 parallel.ep=4",
            "parallel.ep: ep 4 does not divide dp_shard 2; nearest: 2",
        ),
        (
            "parallel.dp_shard=2 parallel.cp=2 parallel.ep=8",
            "parallel.ep: ep 8 does not divide dp_shard 2 x cp 2; near",
        ),
        (
            "model.preset=small-mixtral parallel.ep=2 parallel.pp=2 parallel.ranks=2",
            (
                "parallel.ranks: ep 2 does not divide the 1 rank that holds the same part of the"
                " model; nearest: 1, or parallel.ranks=4"
            ),
        ),
        (
            # the model has no part in it
            "parallel.ranks=2 parallel.pp=2 parallel.ep=2 model.preset=small-mixtral",
            "override: parallel.ep: ep 2 does not divide the 1 rank that holds",
        ),
        (
            "parallel.ranks=4 parallel.ep=4 parallel.dp_shard=2",
            "ep 4 does not divide dp_shard 2; nearest: 2, or parallel.dp_shard=4",
        ),
        (
            "parallel.ranks=8 parallel.cp=2 parallel.dp_replicate=2 parallel.ep=8",
            (
                "ep 8 does not divide dp_shard 2 x cp 2, what dp_replicate 2 leaves of the ranks;"
                " nearest: 4, or parallel.ranks=16"
            ),
        ),
        (
            "parallel.ep=2 parallel.zero_stage=1",
            "parallel.zero_stage: 1 is not for parallel.ep: experts are reduced",
        ),
        (
            "parallel.ep=2 parallel.compress=int8",
            "parallel.compress: not with parallel.ep: experts are reduced over",
        ),
        ("parallel.ep=2 train.compile=true", "train.compile: not with parallel.ep"),
    ],
)
def test_it_is_refused_at_the_door(overrides: str, line: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(None, (*BASE, *overrides.split()))
    assert any(line in found for found in str(caught.value).split("\n")), str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "parallel.ep=2 parallel.pp=2 parallel.ranks=4",
        "parallel.ranks=4 parallel.ep=4 parallel.dp_shard=4",
        "parallel.ranks=16 parallel.cp=2 parallel.dp_replicate=2 parallel.ep=8",
        "parallel.ep=8",
        "parallel.ep=1 model.preset=small",
        "parallel.cp=4 parallel.ep=4",
    ],
)
def test_what_can_be_is_let_in(overrides: str) -> None:
    assert load_job(None, (*BASE, *overrides.split())).parallel.ep
