"""Pipelines of a job: schedule and microbatches as they are chosen, said and refused."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster
from phalanx.plan.explain import describe_plan, format_counts
from phalanx.plan.layout import Layout
from phalanx.plan.pipeline.bubble import MAX_BUBBLE_WITHOUT_WARNING, predict_bubble_of_schedule
from phalanx.plan.pipeline.closed_forms import closed_form_bubble as closed_form
from phalanx.plan.pipeline.cut import StageCut
from phalanx.plan.pipeline.generate import SCHEDULE_NAMES, can_run_microbatches, generate_schedule
from phalanx.plan.pipeline.pipeline_plan import build_named_pipeline
from phalanx.plan.pipeline.schedule import save_schedule_csv
from phalanx.plan.pipeline.simulate import StageCosts, simulate_timeline
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from pipeline_plans import GIB, UNIFORM, pipeline_of, plan, refusal

# What is chosen


def test_without_pp_there_is_no_pipeline() -> None:
    assert plan(pp=1, ranks=4).pipeline is None
    assert plan(pp=1, ranks=4).to_json()["pipeline"] is None


def test_ranks_that_the_degrees_alone_decide_are_said_to_be_that() -> None:
    job = Job.model_validate({"train": {"global_batch_size": 2}, "parallel": {"pp": 4}})
    assert (
        "4 ranks: as many as pp=4 takes"
        in make_plan(job, cluster=Cluster("cpu", 2, 8 * GIB)).reasons
    )


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
    # of one pipeline: the fewest microbatches that are at least 4 (p - 1), divide the batch and can
    # be scheduled
    [
        (4, 32, "1f1b", 16),
        (
            2,
            32,
            "1f1b",
            8,
        ),  # 4 would wait a fifth of equal stages, and the head makes the last one longer
        (4, 8, "1f1b", 8),  # there are no more
        (4, 18, "interleaved", 6),  # 9 and 18 do not divide into rounds of 4
        (4, 24, "interleaved", 12),
        (2, 4, "dualpipe-v", 4),
        (4, 24, "dualpipe-v", 12),
    ],
)
def test_microbatches_where_the_job_is_silent(
    pp: int, batch: int, schedule: str, wanted: int
) -> None:
    found = plan(pp, batch=batch, schedule=schedule)
    assert (found.num_microbatches, found.micro_batch_size) == (wanted, batch // wanted)
    legal = [
        m for m in range(1, batch + 1) if batch % m == 0 and can_run_microbatches(schedule, pp, m)
    ]

    def waits(count: int) -> float:
        timeline = pipeline_of(
            plan(pp, batch=batch, schedule=schedule, micro=batch // count)
        ).timeline()
        assert timeline is not None
        return float(timeline.bubble)

    assert wanted == min(
        [m for m in legal if m >= 4 * (pp - 1) and waits(m) <= MAX_BUBBLE_WITHOUT_WARNING],
        default=legal[-1],
    )


def test_four_times_as_many_microbatches_as_hops_wait_a_fifth() -> None:
    assert closed_form("1f1b", 5, 16, 1, UNIFORM) == pytest.approx(MAX_BUBBLE_WITHOUT_WARNING)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_what_can_run_is_what_is_generated(name: str) -> None:
    for num_ranks in (2, 3, 4):
        for num_microbatches in range(1, 20):
            try:
                generate_schedule(name, num_ranks, num_microbatches)
                is_there = True
            except LayoutError:
                is_there = False
            assert can_run_microbatches(name, num_ranks, num_microbatches) == is_there


def test_data_parallel_ranks_have_pipelines_of_their_own() -> None:
    found = plan(2, ranks=8, dp_shard=2, tp=2, batch=32)
    assert found.layout == Layout(pp=2, dp_shard=2, tp=2)
    assert found.chosen.name == "zero3"
    assert (found.num_microbatches, found.micro_batch_size) == (8, 2)
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
        (
            {"tp": 8, "pp": 4, "dp_shard": 2},
            Layout(pp=4, dp_shard=2, tp=8),
            20,
            512,
            {"tp": 1, "dp": 8, "pp": 16},
        ),
        (
            {"tp": 4, "pp": 2, "zero_stage": 3},
            Layout(pp=2, dp_shard=8, tp=4),
            40,
            128,
            {"tp": 1, "dp": 4, "pp": 32},
        ),
        ({"tp": 8, "pp": 8}, Layout(pp=8, tp=8), 10, 1024, {"tp": 1, "dp": 8, "pp": 8}),
    ],
)
def test_three_plans_of_64_ranks(
    parallel: dict[str, Any],
    layout: Layout,
    blocks: int,
    num_microbatches: int,
    strides: dict[str, int],
) -> None:
    """TP8 x PP4 x DP2, DP8 x (PP2 x TP4), TP8 x PP8: tensor-parallel ranks are neighbours,
    stages farthest apart."""
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
    """An eighth of a block's matrices and both norms: 8192 (8 + 8 + 1 + 1) 128 + 3 · 8192 · 3584
    + 2 · 8192 numbers."""
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
    """7 / 1031 is what the literature gives for equal stages; here the last one has the head as
    well, a third of a block, and the others wait for it: the mean rank has 80 1/3 / 8 blocks of
    work to the last one's 10 1/3."""
    found = of_64(tp=8, pp=8)
    timeline = pipeline_of(found).timeline()
    assert timeline is not None
    uniform = float(closed_form("1f1b", 8, 1024, 1, UNIFORM))  # type: ignore[arg-type]
    assert uniform == pytest.approx(7 / 1031)
    costs = [
        float(sum((c.forward_s, c.backward_input_s, c.backward_weight_s)))
        for c in pipeline_of(found).costs
    ]
    idle = 1 - sum(costs) / (8 * max(costs))
    assert idle < timeline.bubble < idle + uniform
    assert not any(warning.code == "pipeline_bubble" for warning in found.warnings)
    # A middle rank hands on activations and gradients of 1,024 microbatches: 4096 x 8192 in bf16,
    # an eighth each of tp.
    assert 16 * GIB == 2 * 1024 * 4096 * 8192 * 2 // 8
    assert "pp: a rank sends up to 16.0 GiB to other stages in a step" in found.reasons


# What is refused


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"pp": 3, "ranks": 8}, "pp 3 does not divide the 8 ranks; nearest: pp=4"),
        (
            {"pp": 3, "ranks": 8, "tp": 4},
            "pp 3 x tp 4 = 12 does not divide the 8 ranks; nearest: pp=2 x tp=4",
        ),
        (
            {"pp": 2, "ranks": 8, "dp_replicate": 3, "dp_shard": 2},
            "parallel.dp_replicate 3 x dp_shard 2 x pp 2 makes 12 ranks, and parallel.ranks is 8",
        ),
        (
            {"pp": 4, "layers": 4, "schedule": "zb-v"},
            (
                "4 blocks cannot be cut into the 8 stages of parallel.pp 4 x 2 stages per rank;"
                " nearest: parallel.pp=2"
            ),
        ),
        (
            {"pp": 2, "layers": 4, "schedule": "interleaved", "stages_per_rank": 4},
            (
                "4 blocks cannot be cut into the 8 stages of parallel.pp 2 x 4 stages per rank;"
                " nearest: parallel.stages_per_rank=2"
            ),
        ),
        (
            {"pp": 3, "ranks": 6, "batch": 36, "layers": 4, "schedule": "interleaved"},
            (
                "the 6 stages of parallel.pp 3 x 2 stages per rank; nearest: parallel.pp=2, or"
                " parallel.schedule=1f1b"
            ),
        ),
        (
            {"pp": 3, "layers": 4, "batch": 36, "schedule": "interleaved"},
            "the 6 stages of parallel.pp 3 x 2 stages per rank; nearest: parallel.schedule=1f1b",
        ),
        (
            {"pp": 4, "layers": 2},
            "2 blocks cannot be cut into the 4 stages of parallel.pp 4; nearest: parallel.pp=2",
        ),
        (
            {"schedule": "1f1b", "stages_per_rank": 2},
            "schedule 1f1b cannot have 2 stages per rank; nearest: 1, or schedule interleaved",
        ),
        (
            {"schedule": "dualpipe-v", "batch": 6},
            (
                "schedule dualpipe-v on 4 ranks needs 8 microbatches, and a pipeline has 6"
                " sequences; nearest train.global_batch_size: 8"
            ),
        ),
        (
            {"schedule": "interleaved", "batch": 18, "micro": 1},
            (
                "train.micro_batch_size 1 makes 18 microbatches of the 18 sequences of a pipeline,"
                " which schedule interleaved on 4 ranks cannot run; nearest: 3"
            ),
        ),
        (
            {"micro": 5},
            (
                "train.micro_batch_size 5 does not divide the 32 sequences of each of 1 pipelines;"
                " nearest: 4"
            ),
        ),
        (
            {"ranks": 12},
            "3 pipelines do not divide train.global_batch_size 32; nearest batch: 30 or 33",
        ),
        ({"stage_blocks": (2, 2, 2)}, "blocks are given for 3 stages (2, 2, 2), and there are 4"),
        (
            {"stage_blocks": (3, 2, 2, 2)},
            "stages of 3, 2, 2, 2 blocks make 9, and the model has 8; nearest: 2, 2, 2, 2",
        ),
        ({"stage_blocks": (4, 0, 2, 2)}, "stage 1 of 4, 0, 2, 2 blocks would have 0"),
        (
            {"first_stage": ("nor",)},
            "parallel.first_stage: the model has no 'nor'; did you mean \"norm\"?",
        ),
        ({"last_stage": ("blocks.1",)}, "parallel.last_stage: 'blocks.1' is a part of the blocks"),
        (
            {"last_stage": ("blocks.1.attention",)},
            "parallel.last_stage: 'blocks.1.attention' is a part of the blocks",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest(asked: dict[str, Any], line: str) -> None:
    assert line in refusal(**asked)


@pytest.mark.parametrize(
    "mended",
    [
        {"pp": 2, "layers": 4, "schedule": "interleaved", "stages_per_rank": 2},
        {"pp": 2, "ranks": 6, "batch": 36, "layers": 4, "schedule": "interleaved"},
        {"pp": 3, "batch": 36, "layers": 4, "schedule": "1f1b"},
    ],
)
def test_what_is_named_as_nearest_can_be_planned(mended: dict[str, Any]) -> None:
    assert plan(**mended).pipeline is not None


def test_a_batch_with_no_legal_split_names_one_that_has() -> None:
    """18 = 2 x 9 sequences: 9 are no multiple of anything from 8 on but 9, which dualpipe-v can
    run."""
    found = plan(4, ranks=8, batch=18, schedule="dualpipe-v")
    assert found.num_microbatches == 9


# A schedule of one's own


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    written = generate_schedule("zb-v", 4, 8)
    file = tmp_path / "mine.csv"
    save_schedule_csv(written, file)
    found = plan(layers=12, batch=16, schedule_file=str(file))
    pipeline = pipeline_of(found)
    assert (pipeline.schedule_name, pipeline.num_microbatches, found.micro_batch_size) == (
        "file",
        8,
        2,
    )
    assert pipeline.rank_of_stage == written.rank_of_stage
    assert pipeline.schedule().actions == written.actions
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found
    # The same as the named one: its stages, memory and bubble.
    named = pipeline_of(plan(layers=12, batch=16, micro=2, schedule="zb-v"))
    assert named.stages == pipeline.stages
    assert named.predicted_rank_bytes == pipeline.predicted_rank_bytes
    mine, theirs = pipeline.timeline(), named.timeline()
    assert mine is not None
    assert theirs is not None
    assert mine.bubble == theirs.bubble
    assert f"schedule {file} with 8 microbatches of 2" in " ".join(found.reasons)


def test_a_schedule_that_is_not_for_the_job_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    save_schedule_csv(generate_schedule("1f1b", 2, 8), file)
    assert "the schedule is for 2 ranks, and parallel.pp is 4; set parallel.pp=2" in refusal(
        schedule_file=str(file)
    )
    save_schedule_csv(generate_schedule("1f1b", 4, 8), eight := tmp_path / "eight.csv")
    assert f"makes 32 microbatches of the 32 sequences of a pipeline, and {eight} has 8" in refusal(
        schedule_file=str(eight), micro=1
    )
    (short := tmp_path / "short.csv").write_text(
        "0F0,0B0\n"
    )  # one rank is no pipeline, so parallel.pp=1 would be refused as well
    assert "write a line for each rank" in refusal(schedule_file=str(short))
    assert "has 8 microbatches, which do not divide the 36 sequences of a pipeline" in refusal(
        pp=2, batch=36, schedule_file=str(file)
    )
    assert "nearest train.global_batch_size: 32 or 40" in refusal(
        pp=2, batch=36, schedule_file=str(file)
    )
    file.write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n")
    assert "cannot run" in refusal(pp=2, schedule_file=str(file))
    assert "the schedule cannot be read" in refusal(
        pp=2, schedule_file=str(tmp_path / "absent.csv")
    )


# What is said


def test_the_plan_says_why() -> None:
    found = plan(layers=12)
    text = "\n".join(describe_plan(found))
    for line in (
        "plan    2.44 M parameters",
        "4 cpu ranks: pp (pp=4)",
        "= 1 x pp 4 ranks x 16 x 2",
        (
            "pp: 4 stages of 3 blocks, cut by FLOPs so that the busiest rank has least to do (the"
            " head is the work of"
        ),
        "pp: schedule 1f1b, the default of a pipeline, with 16 microbatches of 2: predicted bubble",
        (
            "pp: 4, 3, 2, 1 microbatches of a stage in flight by rank; rank 0 (stage 0) needs most"
            " memory, with 4 in"
        ),
        "pp: a rank sends up to 4.0 MiB to other stages in a step",
        "predicted on the rank that needs most",
        "by pipeline rank: ",
    ):
        assert line in text
    # 16 microbatches of 2 x 128 x 128 in fp32, forth and back
    assert 2 * 16 * 2 * 128 * 128 * 4 == 4 * 2**20


def test_no_effect_is_said() -> None:
    options = {
        "prefetch": 1,
        "static_graph": True,
        "unused_parameters": "allow",
        "blocks_per_unit": 2,
    }
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
    assert text.startswith(
        "ranks wait 44% of each step for other stages, with 4 microbatches on 4 ranks; set "
    )
    assert "train.micro_batch_size=2 (16 microbatches: 18%)" in text
    assert "parallel.schedule=interleaved (" in text
    for better in ({"micro": 2}, {"micro": 2, "schedule": "interleaved"}):
        assert not any(w.code == "pipeline_bubble" for w in plan(layers=12, **better).warnings)
    # With nothing left to divide: more samples.
    alone = plan(layers=12, micro=1, batch=4)
    (text,) = (warning.text for warning in alone.warnings if warning.code == "pipeline_bubble")
    assert "train.global_batch_size=16 with train.micro_batch_size=1 (16 microbatches: 18%)" in text
    assert not any(w.code == "pipeline_bubble" for w in plan(layers=12, micro=1, batch=16).warnings)


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v", "interleaved-zero-bubble"])
def test_compiled_blocks_leave_nothing_to_put_off(schedule: str) -> None:
    """What is waited for is the whole backward: as long as F and B of stages that do not split
    it."""
    split, whole = (
        plan(layers=16, micro=2, schedule=schedule, recompute={"compile": on})
        for on in (False, True)
    )
    for before, after in zip(pipeline_of(split).costs, pipeline_of(whole).costs, strict=True):
        assert after.backward_weight_s == 0
        assert after.backward_input_s == before.backward_input_s + before.backward_weight_s
        assert after.forward_s == before.forward_s
    bubbles = [
        float(timeline.bubble)
        for found in (split, whole)
        if (timeline := pipeline_of(found).timeline())
    ]
    assert bubbles[0] < bubbles[1]
    assert not any(warning.code == "pipeline_compiled" for warning in split.warnings)
    (text,) = (warning.text for warning in whole.warnings if warning.code == "pipeline_compiled")
    assert (
        f"schedule {schedule} puts off gradients of weights (W), and train.compile leaves nothing"
        in text
    )
    assert f"ranks wait {bubbles[1]:.0%} of each step" in text
    assert "compile" not in " ".join(
        w.text for w in plan(layers=16, schedule="1f1b", recompute={"compile": True}).warnings
    )
    kept = [
        max(memory["activations"] for memory in pipeline_of(found).rank_memory)
        for found in (split, whole)
    ]
    assert kept[1] <= kept[0]


def test_a_better_schedule_than_one_that_has_nothing_to_put_off_is_named() -> None:
    found = plan(layers=32, micro=4, schedule="zb-v", recompute={"compile": True})
    (text,) = (warning.text for warning in found.warnings if warning.code == "pipeline_compiled")
    better = plan(layers=32, micro=4, schedule="interleaved", recompute={"compile": True})
    timeline, now = pipeline_of(better).timeline(), pipeline_of(found).timeline()
    assert timeline is not None
    assert now is not None
    assert timeline.bubble < 0.9 * now.bubble
    assert f"; set parallel.schedule=interleaved ({float(timeline.bubble):.0%})" in text
    same = plan(layers=32, micro=4, schedule="interleaved-zero-bubble", recompute={"compile": True})
    (text,) = (warning.text for warning in same.warnings if warning.code == "pipeline_compiled")
    assert text.endswith("and neither 1f1b nor interleaved has them wait less")


def test_a_file_of_few_microbatches_is_told_to_have_more(tmp_path: Path) -> None:
    """Fewer ranks are not what helps: nothing but the file says how many microbatches there are."""
    file = tmp_path / "two.csv"
    save_schedule_csv(generate_schedule("1f1b", 2, 2), file)
    (text,) = (
        w.text
        for w in plan(2, layers=12, schedule_file=str(file)).warnings
        if w.code == "pipeline_bubble"
    )
    assert f"write more microbatches into {file} (1f1b with 8 would wait 12%)" in text
    assert "fewer pipeline ranks" not in text


def test_uneven_stages_are_named() -> None:
    (text,) = (
        w.text for w in plan(stage_blocks=(5, 1, 1, 1)).warnings if w.code == "pipeline_bubble"
    )
    assert "; rank 0 has 2.4" in text
    assert "leave parallel.stage_blocks out" in text
    (text,) = (
        w.text for w in plan(4, layers=5, schedule="gpipe").warnings if w.code == "pipeline_bubble"
    )
    assert "rank 2 has 1.5" in text
    assert "use fewer pipeline ranks (parallel.pp)" in text


@pytest.mark.parametrize(
    ("counts", "text"),
    [((10,) * 8, "10"), ((3, 3, 2), "3, 3, 2"), ((10,) * 63 + (9,), "63 times 10, 9"), ((1,), "1")],
)
def test_lists_are_short(counts: tuple[int, ...], text: str) -> None:
    assert format_counts(counts) == text


def test_bubbles_are_those_of_the_literature() -> None:
    for name, per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        found = predict_bubble_of_schedule(name, 4, 16, per_rank, [UNIFORM] * 4 * per_rank)
        assert found == pytest.approx(float(closed_form(name, 4, 16, per_rank, UNIFORM)))  # type: ignore[arg-type]
    assert predict_bubble_of_schedule("interleaved", 4, 18, 2, [UNIFORM] * 8) is None
    assert predict_bubble_of_schedule("1f1b", 64, 10_000, 1, [UNIFORM] * 64) is None


@pytest.mark.parametrize(
    ("name", "stages_per_rank"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved-zero-bubble", 2), ("zb-v", 2)],
)
def test_a_long_step_is_estimated_as_it_is_simulated(name: str, stages_per_rank: int) -> None:
    """Reference: the simulation of all microbatches. Stages are uneven, and a message between two
    takes up to 0.3 of a forward: with 1f1b ranks wait for each in every microbatch."""
    generator = random.Random(7)
    num_ranks, num_microbatches = 16, 320
    num_stages = num_ranks * stages_per_rank
    for spread, send_s in ((0.0, 0.0), (0.1, 0.1), (0.3, 0.3)):
        costs = []
        for _ in range(num_stages):
            costs.append(StageCosts(*(1 + spread * generator.random() for _ in range(3))))
        pipeline = build_named_pipeline(
            name, num_ranks, num_microbatches, StageCut((1,) * num_stages), costs=tuple(costs)
        )
        simulated = simulate_timeline(pipeline.schedule(), costs, send_s)
        estimated_s = pipeline.estimate_step_s(costs, num_microbatches, send_s)
        assert estimated_s == pytest.approx(float(simulated.step_s), rel=0.02), (spread, send_s)
        timeline = pipeline.timeline()
        assert timeline is not None
        assert pipeline.estimate_bubble() == pytest.approx(float(timeline.bubble), abs=0.02)
