"""Pipelines of a job: schedule, microbatches and cuts as they are chosen, said, refused and cut again."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from commands import run
from phalanx.core.errors import ExitCode, LayoutError
from phalanx.job.foreign import probe_foreign_shape
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.observe.events import Envelope, PipelineMeasured
from phalanx.plan.cluster import Cluster
from phalanx.plan.describe import describe
from phalanx.plan.layout import Layout
from phalanx.plan.pipeline.closed_forms import bubble as closed_form
from phalanx.plan.pipeline.csv_file import write_schedule
from phalanx.plan.pipeline.cut import LayerCosts, Stages, cut
from phalanx.plan.pipeline.generate import SCHEDULE_NAMES, can_run, generate
from phalanx.plan.pipeline.parts import part_params
from phalanx.plan.pipeline.planned import Pipeline, named_pipeline, placement_of
from phalanx.plan.pipeline.recut import recut
from phalanx.plan.pipeline.remedies import LIMIT, bubble_of
from phalanx.plan.pipeline.simulate import StageCosts
from phalanx.plan.pipeline.spread import cut_for_ranks
from phalanx.plan.pipeline.stages import recomputed_blocks, within_stages
from phalanx.plan.pipeline.words import listed
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.segments import Segment, segments_of

GIB = 2**30
CORES = Cluster("cpu", 8, 64 * GIB)
UNIFORM = StageCosts(1.0, 1.0, 1.0)


def plan(
    pp: int = 4,
    *,
    ranks: int | None = None,
    batch: int = 32,
    micro: int | None = None,
    layers: int = 8,
    shape: ModelShape | None = None,
    recompute: dict[str, Any] | None = None,
    **parallel: Any,
) -> Plan:
    model: dict[str, Any] = {"num_layers": layers} if shape is None else {"kind": shape.kind}
    train = {"global_batch_size": batch, "micro_batch_size": micro, **(recompute or {})}
    sections = {"model": model, "train": train, "parallel": {"pp": pp, "ranks": ranks or pp, **parallel}}
    return make_plan(Job.model_validate(sections), cluster=CORES, shape=shape)


def pipeline_of(found: Plan) -> Pipeline:
    assert found.pipeline is not None
    return found.pipeline


def refusal(**asked: Any) -> str:
    with pytest.raises(LayoutError) as caught:
        plan(**asked)
    assert caught.value.exit_code == ExitCode.JOB
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What is chosen


def test_without_pp_there_is_no_pipeline() -> None:
    assert plan(pp=1, ranks=4).pipeline is None
    assert plan(pp=1, ranks=4).to_json()["pipeline"] is None


def test_defaults() -> None:
    found = plan()
    pipeline = pipeline_of(found)
    assert found.layout == Layout(pp=4)
    assert found.chosen.name == "pp"
    assert (pipeline.schedule_name, pipeline.stages.num_blocks) == ("1f1b", (2, 2, 2, 2))
    assert pipeline.num_microbatches == found.num_microbatches
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("pp", "batch", "schedule", "wanted"),
    [  # of one pipeline: the fewest microbatches that are at least 4 (p - 1), divide the batch and can be scheduled
        (4, 32, "1f1b", 16),
        (2, 32, "1f1b", 4),
        (4, 8, "1f1b", 8),  # there are no more
        (4, 18, "interleaved", 6),  # 9 and 18 do not divide into rounds of 4
        (4, 24, "interleaved", 12),
        (2, 4, "dualpipe-v", 4),
        (4, 24, "dualpipe-v", 12),
    ],
)
def test_microbatches_where_the_job_is_silent(pp: int, batch: int, schedule: str, wanted: int) -> None:
    found = plan(pp, batch=batch, schedule=schedule)
    assert (found.num_microbatches, found.micro_batch_size) == (wanted, batch // wanted)
    least = 4 * (pp - 1)
    legal = [m for m in range(1, batch + 1) if batch % m == 0 and can_run(schedule, pp, m)]
    assert wanted == min([m for m in legal if m >= least], default=legal[-1])


def test_four_times_as_many_microbatches_as_hops_wait_a_fifth() -> None:
    assert closed_form("1f1b", 5, 16, 1, UNIFORM) == pytest.approx(LIMIT)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_what_can_run_is_what_is_generated(name: str) -> None:
    for num_ranks in (2, 3, 4):
        for num_microbatches in range(1, 20):
            try:
                generate(name, num_ranks, num_microbatches)
                is_there = True
            except LayoutError:
                is_there = False
            assert can_run(name, num_ranks, num_microbatches) == is_there


def test_data_parallel_ranks_have_pipelines_of_their_own() -> None:
    found = plan(2, ranks=8, dp_shard=2, tp=2, batch=32)
    assert found.layout == Layout(pp=2, dp_shard=2, tp=2)
    assert found.chosen.name == "zero3"
    assert (found.num_microbatches, found.micro_batch_size) == (4, 4)
    assert [c.name for c in found.alternatives] == ["ddp", "zero1", "zero2", "zero3"]
    assert {c.layout.pp for c in found.alternatives} == {2}


# 64 ranks (Llama-2-70B's sizes: 80 blocks of 8192, 64 heads)

SEVENTY = {
    "dim": 8192,
    "num_layers": 80,
    "num_heads": 64,
    "num_kv_heads": 8,
    "ffn_dim": 28672,
    "vocab_size": 32000,
    "tie_embeddings": False,
}


def of_64(**parallel: Any) -> Plan:
    job = Job.model_validate(
        {
            "model": SEVENTY,
            "data": {"seq_len": 4096},
            "train": {"global_batch_size": 1024, "micro_batch_size": 1, "recompute": "full"},
            "optim": {"lr": 1.5e-4, "min_lr_ratio": 0.1, "warmup_steps": 2000},
            "parallel": parallel,
            "precision": {"compute": "bf16"},
        }
    )
    return make_plan(job, cluster=Cluster("cuda", 64, 80 * GIB, "H100"), num_ranks=64)


@pytest.mark.parametrize(
    ("parallel", "layout", "blocks", "num_microbatches", "strides"),
    [
        ({"tp": 8, "pp": 4, "dp_shard": 2}, Layout(pp=4, dp_shard=2, tp=8), 20, 512, {"tp": 1, "dp": 8, "pp": 16}),
        ({"tp": 4, "pp": 2, "zero_stage": 3}, Layout(pp=2, dp_shard=8, tp=4), 40, 128, {"tp": 1, "dp": 4, "pp": 32}),
        ({"tp": 8, "pp": 8}, Layout(pp=8, tp=8), 10, 1024, {"tp": 1, "dp": 8, "pp": 8}),
    ],
)
def test_three_plans_of_64_ranks(
    parallel: dict[str, Any], layout: Layout, blocks: int, num_microbatches: int, strides: dict[str, int]
) -> None:
    """TP8 x PP4 x DP2, DP8 x (PP2 x TP4), TP8 x PP8: tensor-parallel ranks are neighbours, stages farthest apart."""
    found = of_64(**parallel)
    assert found.layout == layout
    assert found.num_microbatches == num_microbatches
    assert pipeline_of(found).stages.num_blocks == (blocks,) * layout.pp
    for rank in range(64):
        place = layout.coordinates(rank)
        assert place["tp"] == rank % layout.tp
        assert layout.data_parallel_rank(rank) == rank // strides["dp"] % layout.data_parallel_size
        assert place["pp"] == rank // strides["pp"]


def test_memory_of_70b_on_tp8_x_pp8() -> None:
    """An eighth of a block's matrices and both norms: 8192 (8 + 8 + 1 + 1) 128 + 3 · 8192 · 3584 + 2 · 8192 numbers."""
    block = 8192 * 128 * 18 + 3 * 8192 * 3584 + 2 * 8192
    table = 32000 // 8 * 8192
    pipeline = pipeline_of(of_64(tp=8, pp=8))
    parameters = [memory["parameters"] // 4 for memory in pipeline.rank_memory]
    assert parameters == [10 * block + table, *[10 * block] * 6, 10 * block + table + 8192]
    # 8 to 1 microbatches in flight
    activations = [memory["activations"] for memory in pipeline.rank_memory[:7]]
    assert activations == sorted(activations, reverse=True)
    step = {round(a - b, -6) for a, b in pairwise(activations[1:])}
    assert len(step) == 1


def test_bubble_of_70b_on_tp8_x_pp8() -> None:
    """7 / 1031 is what the literature gives for equal stages; here the last one has the head as well, a third of a
    block, and the others wait for it: the mean rank has 80 1/3 / 8 blocks of work to the last one's 10 1/3."""
    found = of_64(tp=8, pp=8)
    timeline = pipeline_of(found).timeline()
    assert timeline is not None
    uniform = float(closed_form("1f1b", 8, 1024, 1, UNIFORM))  # type: ignore[arg-type]
    assert uniform == pytest.approx(7 / 1031)
    costs = [float(sum((c.forward_s, c.backward_input_s, c.backward_weight_s))) for c in pipeline_of(found).costs]
    idle = 1 - sum(costs) / (8 * max(costs))
    assert idle < timeline.bubble < idle + uniform
    assert not any(warning.code == "pipeline_bubble" for warning in found.warnings)
    # A middle rank hands on activations and gradients of 1,024 microbatches: 4096 x 8192 in bf16, an eighth each of tp.
    assert 16 * GIB == 2 * 1024 * 4096 * 8192 * 2 // 8
    assert "pp: a rank sends up to 16.0 GiB to other stages in a step" in found.reasons


# What is refused


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"pp": 3, "ranks": 8}, "pp 3 does not divide the 8 ranks; nearest: pp=4"),
        ({"pp": 3, "ranks": 8, "tp": 4}, "pp 3 x tp 4 = 12 does not divide the 8 ranks; nearest: pp=2 x tp=4"),
        (
            {"pp": 2, "ranks": 8, "dp_replicate": 3, "dp_shard": 2},
            "parallel.dp_replicate 3 x dp_shard 2 x pp 2 makes 12 ranks, and parallel.ranks is 8",
        ),
        (
            {"pp": 4, "layers": 4, "schedule": "zb-v"},
            "4 blocks cannot be cut into the 8 stages of parallel.pp 4 x 2 stages per rank; nearest: parallel.pp=2",
        ),
        ({"pp": 4, "layers": 2}, "2 blocks cannot be cut into the 4 stages of parallel.pp 4; nearest: parallel.pp=2"),
        (
            {"schedule": "1f1b", "stages_per_rank": 2},
            "schedule 1f1b cannot have 2 stages per rank; nearest: 1, or schedule interleaved",
        ),
        (
            {"schedule": "dualpipe-v", "batch": 6},
            "schedule dualpipe-v on 4 ranks needs 8 microbatches, and a pipeline has 6 sequences; "
            "nearest train.global_batch_size: 8",
        ),
        (
            {"schedule": "interleaved", "batch": 18, "micro": 1},
            "train.micro_batch_size 1 makes 18 microbatches of the 18 sequences of a pipeline, which schedule "
            "interleaved on 4 ranks cannot run; nearest: 3",
        ),
        ({"micro": 5}, "train.micro_batch_size 5 does not divide the 32 sequences of each of 1 pipelines; nearest: 4"),
        ({"ranks": 12}, "3 pipelines do not divide train.global_batch_size 32; nearest batch: 30 or 33"),
        ({"stage_blocks": (2, 2, 2)}, "blocks are given for 3 stages (2, 2, 2), and there are 4"),
        (
            {"stage_blocks": (3, 2, 2, 2)},
            "stages of 3, 2, 2, 2 blocks make 9, and the model has 8; nearest: 2, 2, 2, 2",
        ),
        ({"stage_blocks": (4, 0, 2, 2)}, "stage 1 of 4, 0, 2, 2 blocks would have 0"),
        ({"first_stage": ("nor",)}, "parallel.first_stage: the model has no 'nor'; did you mean \"norm\"?"),
        ({"last_stage": ("blocks.1",)}, "parallel.last_stage: 'blocks.1' is a part of the blocks"),
        ({"last_stage": ("blocks.1.attention",)}, "parallel.last_stage: 'blocks.1.attention' is a part of the blocks"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest(asked: dict[str, Any], line: str) -> None:
    assert line in refusal(**asked)


def test_a_batch_with_no_legal_split_names_one_that_has() -> None:
    """18 = 2 x 9 sequences: 9 are no multiple of anything from 8 on but 9, which dualpipe-v can run."""
    found = plan(4, ranks=8, batch=18, schedule="dualpipe-v")
    assert found.num_microbatches == 9


# Cuts


def test_the_head_counts() -> None:
    """32,000 rows of 128 are about three blocks of the default model: the last stage has fewer of them."""
    small, large = (
        plan(layers=12),
        make_plan(
            Job.model_validate(
                {
                    "model": {"num_layers": 12, "vocab_size": 8000},
                    "train": {"global_batch_size": 32},
                    "parallel": {"pp": 4, "ranks": 4},
                }
            ),
            cluster=CORES,
        ),
    )
    assert pipeline_of(small).stages.num_blocks == (3, 3, 3, 3)
    *others, last = pipeline_of(large).stages.num_blocks
    assert last < min(others)
    assert any("the head is the work of" in reason for reason in large.reasons)


def test_cuts_and_modules_as_the_user_says() -> None:
    found = pipeline_of(plan(stage_blocks=(3, 2, 2, 1), first_stage=("embed",), last_stage=("norm",)))
    assert found.stages == Stages((3, 2, 2, 1))
    assert (found.first_stage, found.last_stage) == (("embed",), ("norm",))
    assert "stages of 3, 2, 2, 1 blocks, as the job says" in " ".join(plan(stage_blocks=(3, 2, 2, 1)).reasons)


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
@pytest.mark.parametrize(
    "costs",
    [
        LayerCosts(0, (1,) * 9, 0.2),
        LayerCosts(0, (1,) * 11, 0.5),
        LayerCosts(0, (1, 1, 2, 3, 1, 1, 2, 1, 1), 2.5),
    ],
)
def test_ranks_with_several_stages_are_even(name: str, costs: LayerCosts) -> None:
    """Against every cut there is: no rank has less to do at most; `cut` alone looks at stages only."""
    placement = placement_of(name, 3, 2)

    def busiest(stages: Stages) -> float:
        work = [0.0] * 3
        for rank, cost in zip(placement, costs.of_stages(stages), strict=True):
            work[rank] += float(cost)
        return max(work)

    num_blocks, found = len(costs.blocks), cut_for_ranks(costs, placement)
    borders = combinations(range(num_blocks + 1), 5)  # the last stage may have none, the head being its work
    every = []
    for ends in borders:
        counts = [b - a for a, b in zip((0, *ends), (*ends, num_blocks), strict=True)]
        if all(counts[:-1]):
            every.append(Stages(tuple(counts)))
    assert found in every
    assert busiest(found) == pytest.approx(min(map(busiest, every)))
    assert busiest(found) <= busiest(cut(costs, 6)) + 1e-9


def test_one_stage_per_rank_is_the_plain_cut() -> None:
    costs = LayerCosts(0, (1, 1, 2, 3, 1, 1, 2, 1, 1), 2.5)
    assert cut_for_ranks(costs, (0, 1, 2)) == cut(costs, 3)


def test_segments_of_recompute_end_where_stages_do() -> None:
    segments = segments_of("sqrt", 9)
    assert [(s.start, s.stop) for s in segments] == [(0, 3), (3, 6), (6, 9)]
    found = within_stages(segments, Stages((4, 4, 1)))
    assert [(s.start, s.stop) for s in found] == [(0, 3), (3, 4), (4, 6), (6, 8), (8, 9)]
    assert {s.mode for s in found} == {"full"}
    assert within_stages(segments, Stages((0, 9, 0))) == segments
    assert recomputed_blocks((Segment(1, 3, "full"), Segment(3, 4, "selective"))) == {1, 2}
    assert plan(recompute={"recompute": "full"}).recompute_segments == segments_of("full", 8)


def test_recompute_moves_blocks_away_from_those_that_are_redone() -> None:
    """The first half of 12 blocks is redone: 4 instead of 3 each. 12 blocks on two ranks: 42 / 2, not 24 and 18."""
    costs = pipeline_of(plan(2, layers=12, recompute={"recompute": "every-k", "recompute_every": 2})).costs
    plain = pipeline_of(plan(2, layers=12)).costs
    assert float(costs[0].backward_input_s) == pytest.approx(1.5 * float(plain[0].backward_input_s), rel=0.2)
    assert float(costs[0].forward_s) == pytest.approx(float(plain[0].forward_s))


def test_a_budget_is_kept_to_by_each_rank_with_as_little_as_it_must() -> None:
    """The first rank has four microbatches in flight and the last has one: only those that must recompute."""
    needed = [memory["activations"] for memory in pipeline_of(plan(layers=12)).rank_memory]
    assert needed[0] > 2 * needed[3]
    budget = {"recompute": "budget", "recompute_budget_gib": needed[2] / GIB}
    found = plan(layers=12, recompute=budget)
    kept = [memory["activations"] for memory in pipeline_of(found).rank_memory]
    assert max(kept) <= round(needed[2])
    assert kept[2:] == needed[2:]
    blocks = {s.start for s in found.recompute_segments}
    assert blocks
    assert max(blocks) < 6
    reason = next(reason for reason in found.reasons if reason.startswith("recompute:"))
    assert f"{len(blocks)} of 12 blocks" in reason
    assert "per rank, and train.recompute_budget_gib allows" in refusal(
        layers=12, recompute={"recompute": "budget", "recompute_budget_gib": 0.001}
    )


# A schedule of one's own


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    written = generate("zb-v", 4, 8)
    file = tmp_path / "mine.csv"
    write_schedule(written, file)
    found = plan(layers=12, batch=16, schedule_file=str(file))
    pipeline = pipeline_of(found)
    assert (pipeline.schedule_name, pipeline.num_microbatches, found.micro_batch_size) == ("file", 8, 2)
    assert pipeline.rank_of_stage == written.rank_of_stage
    assert pipeline.schedule().actions == written.actions
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found
    # The same as the named one: its stages, memory and bubble.
    named = pipeline_of(plan(layers=12, batch=16, micro=2, schedule="zb-v"))
    assert named.stages == pipeline.stages
    assert named.rank_bytes == pipeline.rank_bytes
    mine, theirs = pipeline.timeline(), named.timeline()
    assert mine is not None
    assert theirs is not None
    assert mine.bubble == theirs.bubble
    assert f"schedule {file} with 8 microbatches of 2" in " ".join(found.reasons)


def test_a_schedule_that_is_not_for_the_job_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    write_schedule(generate("1f1b", 2, 8), file)
    assert "the schedule is for 2 ranks, and parallel.pp is 4; set parallel.pp=2" in refusal(schedule_file=str(file))
    assert "has 8 microbatches, which do not divide the 36 sequences of a pipeline" in refusal(
        pp=2, batch=36, schedule_file=str(file)
    )
    assert "nearest train.global_batch_size: 32 or 40" in refusal(pp=2, batch=36, schedule_file=str(file))
    file.write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n")
    assert "cannot run" in refusal(pp=2, schedule_file=str(file))
    assert "the schedule cannot be read" in refusal(pp=2, schedule_file=str(tmp_path / "absent.csv"))


# Models of one's own

OWN = """
from torch import nn


class Own(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.stem = nn.Linear(16, 16, bias=False)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=n == 2) for n in range(6))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def build(tied=False):
    return Own(tied)


def flat():
    return nn.Linear(3, 3)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_stages.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda factory="build", **args: probe_foreign_shape(f"own_stages:{factory}", args)


def test_parts_of_a_module_of_ones_own(own: Any) -> None:
    """A tied head is work, and on another rank memory, too; modules that both ends need are there twice."""
    shape = own()
    assert [size for _, size in shape.measured.blocks] == [256, 256, 272, 256, 256, 256]
    assert ModelShape.from_json(json.loads(json.dumps(shape.to_json()))) == shape
    parts = part_params(shape)
    assert (parts.before, parts.looked_up, parts.after, parts.both) == (800 + 256, 800, 32 + 800, 0)
    assert parts.layer_costs == LayerCosts(256, (256, 256, 272, 256, 256, 256), 832)
    tied = part_params(own(tied=True))
    assert (tied.before, tied.after, tied.both) == (1056, 832, 800)
    assert tied.of_stages(Stages((3, 3)), (0, 1)) == own(tied=True).num_params
    moved = part_params(shape, ["norm"], ["st*"])
    assert (moved.before, moved.after, moved.both) == (1056 + 32, 832 + 256, 256 + 32)
    assert moved.of_stages(Stages((3, 3)), (0, 1)) == shape.num_params


def test_a_module_of_ones_own_is_cut_by_parameters(own: Any) -> None:
    """Stem 256, blocks of 256 (the third 272), norm and head 832: 3, 3 and no blocks come to 1,040, 768 and 832; 2, 4
    and none to 768, 1,040 and 832, as well, with fewer blocks where more microbatches are in flight."""
    found = plan(3, batch=24, shape=own())
    pipeline = pipeline_of(found)
    assert pipeline.stages.num_blocks == (2, 4, 0)
    assert [memory["parameters"] // 4 for memory in pipeline.rank_memory] == [800 + 768, 1040, 832]
    assert any("cut by parameters" in reason for reason in found.reasons)
    ratios = [float(cost.forward_s) / float(pipeline.costs[2].forward_s) for cost in pipeline.costs]
    assert ratios == pytest.approx([768 / 832, 1040 / 832, 1])


def test_a_module_without_blocks_is_refused_with_what_is_missing(own: Any) -> None:
    line = refusal(pp=2, shape=own("flat"))
    assert "own_stages:flat shows no repeated blocks, and parallel.pp cuts between blocks" in line
    assert 'block_pattern = "layers.*"' in line


# What is said


def test_the_plan_says_why() -> None:
    found = plan(layers=12)
    text = "\n".join(describe(found))
    for line in (
        "plan    2.44 M parameters",
        "4 cpu ranks: pp (pp=4)",
        "= 1 x pp 4 ranks x 16 x 2",
        "pp: 4 stages of 3 blocks, cut by FLOPs so that the busiest rank has least to do (the head is the work of",
        "pp: schedule 1f1b, the default, with 16 microbatches of 2: predicted bubble",
        "pp: 4, 3, 2, 1 microbatches of a stage in flight by rank; rank 0 (stage 0) needs most memory, with 4 in",
        "pp: a rank sends up to 4.0 MiB to other stages in a step",
        "predicted on the rank that needs most",
        "by pipeline rank: ",
    ):
        assert line in text
    # 16 microbatches of 2 x 128 x 128 in fp32, forth and back
    assert 2 * 16 * 2 * 128 * 128 * 4 == 4 * 2**20


def test_no_effect_is_said() -> None:
    options = {"prefetch": 1, "static_graph": True, "unused_parameters": "allow", "blocks_per_unit": 2}
    found = plan(2, ranks=4, dp_shard=2, **options)
    line = next(reason for reason in found.reasons if "no effect" in reason)
    assert line.endswith("have no effect under zero3 with pp")
    assert all(f"parallel.{key}" in line for key in options)
    kept = plan(2, ranks=4, dp_shard=2, keep_whole_below=5)
    assert not any("no effect" in reason for reason in kept.reasons)


def test_a_long_bubble_is_a_warning_with_what_helps() -> None:
    """Equal stages would wait 3 / 7, which is 43 %; the head makes it 44."""
    found = plan(layers=12, micro=8)
    (text,) = (warning.text for warning in found.warnings if warning.code == "pipeline_bubble")
    assert text.startswith("ranks wait 44% of each step for other stages, with 4 microbatches on 4 ranks; set ")
    assert "train.micro_batch_size=2 (16 microbatches: 18%)" in text
    assert "parallel.schedule=interleaved (" in text
    for better in ({"micro": 2}, {"micro": 2, "schedule": "interleaved"}):
        assert not any(w.code == "pipeline_bubble" for w in plan(layers=12, **better).warnings)
    # With nothing left to divide: more samples.
    alone = plan(layers=12, micro=1, batch=4)
    (text,) = (warning.text for warning in alone.warnings if warning.code == "pipeline_bubble")
    assert "train.global_batch_size=16 with train.micro_batch_size=1 (16 microbatches: 18%)" in text
    assert not any(w.code == "pipeline_bubble" for w in plan(layers=12, micro=1, batch=16).warnings)


def test_uneven_stages_are_named() -> None:
    (text,) = (w.text for w in plan(stage_blocks=(5, 1, 1, 1)).warnings if w.code == "pipeline_bubble")
    assert "; rank 0 has 2.4" in text
    assert "leave parallel.stage_blocks out" in text
    (text,) = (w.text for w in plan(4, layers=5, schedule="gpipe").warnings if w.code == "pipeline_bubble")
    assert "rank 2 has 1.5" in text
    assert "use fewer pipeline ranks (parallel.pp)" in text


@pytest.mark.parametrize(
    ("counts", "text"),
    [((10,) * 8, "10"), ((3, 3, 2), "3, 3, 2"), ((10,) * 63 + (9,), "63 times 10, 9"), ((1,), "1")],
)
def test_lists_are_short(counts: tuple[int, ...], text: str) -> None:
    assert listed(counts) == text


def test_bubbles_are_those_of_the_literature() -> None:
    for name, per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        found = bubble_of(name, 4, 16, per_rank, [UNIFORM] * 4 * per_rank)
        assert found == pytest.approx(float(closed_form(name, 4, 16, per_rank, UNIFORM)))  # type: ignore[arg-type]
    assert bubble_of("interleaved", 4, 18, 2, [UNIFORM] * 8) is None
    assert bubble_of("1f1b", 64, 10_000, 1, [UNIFORM] * 64) is None


# Cut again


def test_a_cut_by_what_was_measured() -> None:
    """Twelve equal blocks, of which the last three really take twice as long: 15 instead of 12 in all."""
    weights = LayerCosts(0, (1,) * 12, 0)
    pipeline = named_pipeline("1f1b", 4, 8, Stages((3, 3, 3, 3)))
    seconds = [StageCosts(1.0, 1.0, 1.0)] * 3 + [StageCosts(2.0, 2.0, 2.0)]
    found = recut(pipeline, pipeline.stages, seconds, weights)
    true = LayerCosts(0, (1.0,) * 9 + (2.0,) * 3, 0)
    assert found.stages == cut(true, 4)
    assert max(true.of_stages(found.stages)) == 4.0
    assert found.is_worth_it
    # A step is bound by the slowest stage: 6 seconds a microbatch before, 4 now.
    assert 0.2 < found.gain <= 1 - 4 / 6
    assert found.measured_step_s == pytest.approx(8 * 6 + 9)


def test_head_and_embedding_take_their_share_of_what_was_measured() -> None:
    """The last stage's 6 seconds are a block's 3 and as much of a head that weighs the same."""
    pipeline = named_pipeline("1f1b", 2, 8, Stages((3, 1)))
    seconds = [StageCosts(3.0, 3.0, 3.0), StageCosts(2.0, 2.0, 2.0)]
    found = recut(pipeline, pipeline.stages, seconds, LayerCosts(0, (1,) * 4, 1))
    assert max(LayerCosts(0, (3,) * 4, 3).of_stages(found.stages)) == 9  # as it is: 3, 1 and 2, 2 take as long
    assert not found.is_worth_it
    heavier = recut(pipeline, pipeline.stages, [StageCosts(6.0, 6.0, 6.0), seconds[1]], LayerCosts(0, (1,) * 4, 1))
    assert heavier.stages.num_blocks == (2, 2)


def test_a_measurement_of_another_pipeline_is_refused() -> None:
    pipeline = named_pipeline("1f1b", 2, 8, Stages((3, 1)))
    with pytest.raises(LayoutError, match="3 stages were measured, and the job has 2"):
        recut(pipeline, Stages((1, 1, 2)), [UNIFORM] * 3, LayerCosts(0, (1,) * 4, 1))
    with pytest.raises(LayoutError, match="stages of 5 blocks were measured, and the model has 4"):
        recut(pipeline, Stages((3, 2)), [UNIFORM] * 2, LayerCosts(0, (1,) * 4, 1))


def write_run(run: Path, num_blocks: list[int], stage_seconds: list[list[float]]) -> None:
    event = PipelineMeasured(5, "1f1b", num_blocks, stage_seconds, False, [], 0.3, 0.2, 0.2, [2, 1])
    (run / "events").mkdir(parents=True)
    (run / "events" / "rank-0-attempt-0.jsonl").write_text(Envelope(event, 0, 0, 1.0).to_line() + "\n")


def test_recut_from_a_run(tmp_path: Path) -> None:
    job = ("parallel.pp=2", "model.num_layers=6", "cluster.memory_gib=4")
    write_run(tmp_path / "slow", [3, 3], [[0.1, 0.2, 0.0], [0.3, 0.6, 0.0]])
    done = run("plan", *job, "--recut", "slow", cwd=tmp_path)
    assert done.code == 0
    assert "stages of 3, 3 blocks took 300, 900 ms of a microbatch in step 5 (1f1b)" in done.out
    assert "recut     parallel.stage_blocks=[4, 2]: a step takes" in done.out
    as_json = json.loads(run("plan", *job, "--recut", "slow", "--json", cwd=tmp_path).out)
    assert as_json["schema"] == "phalanx.recut/1"
    assert (as_json["stage_blocks"], as_json["is_best"]) == ([4, 2], False)
    write_run(tmp_path / "even", [3, 3], [[0.1, 0.2, 0.0], [0.11, 0.21, 0.0]])
    assert "the cut is already the best there is" in run("plan", *job, "--recut", "even", cwd=tmp_path).out
    nothing = run("plan", *job, "--recut", ".", cwd=tmp_path)
    assert nothing.code == ExitCode.USAGE
    assert "has no measured pipeline" in nothing.problem
    flat = run("plan", "--recut", "slow", cwd=tmp_path)
    assert "--recut is for pipelines, and parallel.pp is 1" in flat.problem
