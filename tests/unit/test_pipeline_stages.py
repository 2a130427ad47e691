"""Which blocks stages have: by cost, as the user says, of a module of one's own, and cut again
by a run."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from commands import run
from phalanx.core.errors import ExitCode, LayoutError
from phalanx.job.module_probe import probe_foreign_shape
from phalanx.job.schema import Job
from phalanx.job.shapes.stored import parse_stored_shape
from phalanx.observe.events import Envelope, PipelineMeasured
from phalanx.plan.pipeline.costs import ModelPartCosts, count_params_of_stages
from phalanx.plan.pipeline.cut import LayerCosts, StageCut, cut_stages, cut_stages_for_ranks
from phalanx.plan.pipeline.pipeline_plan import build_named_pipeline, map_stages_to_ranks
from phalanx.plan.pipeline.simulate import StageCosts
from phalanx.plan.pipeline.stages import list_fully_recomputed_blocks, split_segments_at_stages
from phalanx.plan.pipeline.trace import propose_cut_from_measurement
from phalanx.plan.planner import make_plan
from phalanx.plan.segments import Segment, list_recompute_segments
from pipeline_plans import CORES, GIB, UNIFORM, pipeline_of, plan, refusal

# Cuts


def test_the_head_counts() -> None:
    """32,000 rows of 128 are about three blocks of the default model: the last stage has fewer
    of them."""
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
    found = pipeline_of(
        plan(stage_blocks=(3, 2, 2, 1), first_stage=("embed",), last_stage=("norm",))
    )
    assert found.stages == StageCut((3, 2, 2, 1))
    assert (found.first_stage, found.last_stage) == (("embed",), ("norm",))
    assert "stages of 3, 2, 2, 1 blocks, as the job says" in " ".join(
        plan(stage_blocks=(3, 2, 2, 1)).reasons
    )


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
    """Against every cut there is: no rank has less to do at most; `cut_stages` alone looks at stages
    only."""
    placement = map_stages_to_ranks(name, 3, 2)

    def busiest(stages: StageCut) -> float:
        work = [0.0] * 3
        for rank, cost in zip(placement, costs.sum_by_stage(stages), strict=True):
            work[rank] += float(cost)
        return max(work)

    num_blocks, found = len(costs.blocks), cut_stages_for_ranks(costs, placement)
    borders = combinations(
        range(num_blocks + 1), 5
    )  # the last stage may have none, the head being its work
    every = []
    for ends in borders:
        counts = [b - a for a, b in zip((0, *ends), (*ends, num_blocks), strict=True)]
        if all(counts[:-1]):
            every.append(StageCut(tuple(counts)))
    assert found in every
    assert busiest(found) == pytest.approx(min(map(busiest, every)))
    assert busiest(found) <= busiest(cut_stages(costs, 6)) + 1e-9


def test_one_stage_per_rank_is_the_plain_cut() -> None:
    costs = LayerCosts(0, (1, 1, 2, 3, 1, 1, 2, 1, 1), 2.5)
    assert cut_stages_for_ranks(costs, (0, 1, 2)) == cut_stages(costs, 3)


def test_segments_of_recompute_end_where_stages_do() -> None:
    segments = list_recompute_segments("sqrt", 9)
    assert [(s.start, s.stop) for s in segments] == [(0, 3), (3, 6), (6, 9)]
    found = split_segments_at_stages(segments, StageCut((4, 4, 1)))
    assert [(s.start, s.stop) for s in found] == [(0, 3), (3, 4), (4, 6), (6, 8), (8, 9)]
    assert {s.mode for s in found} == {"full"}
    assert split_segments_at_stages(segments, StageCut((0, 9, 0))) == segments
    assert list_fully_recomputed_blocks((Segment(1, 3, "full"), Segment(3, 4, "selective"))) == {
        1,
        2,
    }
    assert plan(
        recompute={"recompute": "full"}
    ).activations.recompute_segments == list_recompute_segments("full", 8)


def test_recomputed_blocks_take_a_forward_more_in_the_backward() -> None:
    """Every second block of 12 is: three of the first stage's six, half of its forward."""
    costs = pipeline_of(
        plan(2, layers=12, recompute={"recompute": "every-k", "recompute_every": 2})
    ).costs
    plain = pipeline_of(plan(2, layers=12)).costs
    assert costs[0].backward_input_s - plain[0].backward_input_s == pytest.approx(
        0.5 * plain[0].forward_s
    )
    assert (costs[0].forward_s, costs[0].backward_weight_s) == (
        plain[0].forward_s,
        plain[0].backward_weight_s,
    )


def test_a_budget_is_kept_to_by_each_rank_with_as_little_as_it_must() -> None:
    """The first rank has four microbatches in flight and the last has one: only those that must
    recompute."""
    needed = [memory["activations"] for memory in pipeline_of(plan(layers=12)).rank_memory]
    assert needed[0] > 2 * needed[3]
    budget = {"recompute": "budget", "recompute_budget_gib": needed[2] / GIB}
    found = plan(layers=12, recompute=budget)
    kept = [memory["activations"] for memory in pipeline_of(found).rank_memory]
    assert max(kept) <= round(needed[2])
    assert kept[2:] == needed[2:]
    blocks = {s.start for s in found.activations.recompute_segments}
    assert blocks
    assert max(blocks) < 6
    reason = next(reason for reason in found.reasons if reason.startswith("recompute:"))
    assert f"{len(blocks)} of 12 blocks" in reason
    assert "per rank, and train.recompute_budget_gib allows" in refusal(
        layers=12, recompute={"recompute": "budget", "recompute_budget_gib": 0.001}
    )


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
    """A tied head is work, and on another rank memory, too; modules that both ends need are
    there twice."""
    shape = own()
    assert [size for _, size in shape.blocks] == [256, 256, 272, 256, 256, 256]
    assert parse_stored_shape(json.loads(json.dumps(shape.to_json()))) == shape
    parts = shape.count_part_params()
    assert (parts.before, parts.looked_up, parts.after, parts.both) == (800 + 256, 800, 32 + 800, 0)
    assert ModelPartCosts(parts, None).layer_costs == LayerCosts(
        256, (256, 256, 272, 256, 256, 256), 832
    )
    tied = own(tied=True).count_part_params()
    assert (tied.before, tied.after, tied.both) == (1056, 832, 800)
    assert count_params_of_stages(tied, StageCut((3, 3)), (0, 1)) == own(tied=True).num_params
    moved = shape.count_part_params(["norm"], ["st*"])
    assert (moved.before, moved.after, moved.both) == (1056 + 32, 832 + 256, 256 + 32)
    assert count_params_of_stages(moved, StageCut((3, 3)), (0, 1)) == shape.num_params


def test_a_module_of_ones_own_is_cut_by_parameters(own: Any) -> None:
    """Stem 256, blocks of 256 (the third 272), norm and head 832: 3, 3 and no blocks come to 1,040,
    768 and 832; 2, 4 and none to 768, 1,040 and 832, as well, with fewer blocks where more
    microbatches are in flight."""
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


# Cut again


def test_a_cut_by_what_was_measured() -> None:
    """Twelve equal blocks, of which the last three really take twice as long: 15 instead of 12
    in all."""
    weights = LayerCosts(0, (1,) * 12, 0)
    pipeline = build_named_pipeline("1f1b", 4, 8, StageCut((3, 3, 3, 3)))
    seconds = [StageCosts(1.0, 1.0, 1.0)] * 3 + [StageCosts(2.0, 2.0, 2.0)]
    found = propose_cut_from_measurement(pipeline, pipeline.stages, seconds, weights)
    true = LayerCosts(0, (1.0,) * 9 + (2.0,) * 3, 0)
    assert found.stages == cut_stages(true, 4)
    assert max(true.sum_by_stage(found.stages)) == 4.0
    assert found.is_worth_it
    # A step is bound by the slowest stage: 6 seconds a microbatch before, 4 now.
    assert 0.2 < found.gain <= 1 - 4 / 6
    assert found.measured_step_s == pytest.approx(8 * 6 + 9)


def test_head_and_embedding_take_their_share_of_what_was_measured() -> None:
    """The last stage's 6 seconds are a block's 3 and as much of a head that weighs the same."""
    pipeline = build_named_pipeline("1f1b", 2, 8, StageCut((3, 1)))
    seconds = [StageCosts(3.0, 3.0, 3.0), StageCosts(2.0, 2.0, 2.0)]
    found = propose_cut_from_measurement(
        pipeline, pipeline.stages, seconds, LayerCosts(0, (1,) * 4, 1)
    )
    assert (
        max(LayerCosts(0, (3,) * 4, 3).sum_by_stage(found.stages)) == 9
    )  # as it is: 3, 1 and 2, 2 take as long
    assert not found.is_worth_it
    heavier = propose_cut_from_measurement(
        pipeline,
        pipeline.stages,
        [StageCosts(6.0, 6.0, 6.0), seconds[1]],
        LayerCosts(0, (1,) * 4, 1),
    )
    assert heavier.stages.num_blocks == (2, 2)


def test_a_measurement_of_another_pipeline_is_refused() -> None:
    pipeline = build_named_pipeline("1f1b", 2, 8, StageCut((3, 1)))
    with pytest.raises(LayoutError, match="3 stages were measured, and the job has 2"):
        propose_cut_from_measurement(
            pipeline, StageCut((1, 1, 2)), [UNIFORM] * 3, LayerCosts(0, (1,) * 4, 1)
        )
    with pytest.raises(LayoutError, match="stages of 5 blocks were measured, and the model has 4"):
        propose_cut_from_measurement(
            pipeline, StageCut((3, 2)), [UNIFORM] * 2, LayerCosts(0, (1,) * 4, 1)
        )


def write_run(run: Path, num_blocks: list[int], stage_seconds: list[list[float]]) -> None:
    event = PipelineMeasured(5, "1f1b", num_blocks, stage_seconds, False, [], 0.3, 0.2, 0.2, [2, 1])
    (run / "events").mkdir(parents=True)
    (run / "events" / "rank-0-attempt-0.jsonl").write_text(
        Envelope(event, 0, 0, 1.0).to_line() + "\n"
    )


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
    assert (
        "the cut is already the best there is"
        in run("plan", *job, "--recut", "even", cwd=tmp_path).out
    )
    nothing = run("plan", *job, "--recut", ".", cwd=tmp_path)
    assert nothing.code == ExitCode.USAGE
    assert "has no measured pipeline" in nothing.problem
    flat = run("plan", "--recut", "slow", cwd=tmp_path)
    assert "--recut is for pipelines, and parallel.pp is 1" in flat.problem
