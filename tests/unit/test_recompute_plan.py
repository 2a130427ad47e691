"""What a plan says of recompute: blocks by budget, reasons, what is proposed where nothing fits,
what is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from phalanx.core.errors import JobError, LayoutError
from phalanx.core.units import format_bytes
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.job.shapes.stored import parse_stored_shape
from phalanx.plan.cluster import Cluster
from phalanx.plan.memory import activation_bytes
from phalanx.plan.memory_phases import predict_rank_memory_by_phase
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.workload import Workload, shard_shape

GIB = 2**30
MODEL = {"dim": 1024, "num_layers": 12, "num_heads": 16, "ffn_dim": 2752, "vocab_size": 32000}
CPU = Cluster("cpu", 8, 512 * GIB)


def plan(cluster: Cluster = CPU, **train: Any) -> Plan:
    job = Job.model_validate(
        {
            "model": MODEL,
            "data": {"seq_len": 512},
            "train": {"global_batch_size": 8, **train},
            "parallel": {"ranks": 1},
        }
    )
    return make_plan(job, cluster=cluster)


def activations(a_plan: Plan) -> int:
    """Bytes of activations at their worst moment, which need not be that of all memory."""
    shape, tp = a_plan.model_shape, a_plan.layout.tp
    work = Workload(
        a_plan.micro_batch_size,
        a_plan.seq_len,
        a_plan.precision,
        "none",
        2048,
        tp=tp,
        cuts_sequence=tp > 1,
        segments=a_plan.activations.recompute_segments,
    )
    return activation_bytes(shard_shape(shape, tp), work)


def with_budget(gib: float) -> Plan:
    return plan(recompute="budget", recompute_budget_gib=gib)


def test_a_budget_is_kept_to_with_as_few_blocks_as_can_be() -> None:
    """Less and less budget: more and more blocks, selectively as long as that is enough, each
    said with its reason."""
    least, most = activations(plan(recompute="full")), activations(plan())
    numbers, kinds = [], []
    for part in range(11):
        budget = least + (most - least) * part // 10
        found = with_budget(budget / GIB)
        assert activations(found) <= budget + 1
        numbers.append(len(found.activations.recompute_segments))
        kinds.append({segment.mode for segment in found.activations.recompute_segments})
        (reason,) = [reason for reason in found.reasons if reason.startswith("recompute:")]
        assert (
            f"activations {format_bytes(activations(found))} of the {format_bytes(budget)} asked"
            in reason
        )
        assert "of 12 blocks" in reason
        assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert numbers == sorted(numbers, reverse=True)
    assert (numbers[0], numbers[-1]) == (12, 0)
    assert kinds[0] == {"full"}
    assert {"selective"} in kinds


def test_a_budget_that_nothing_keeps_to_is_refused_with_the_least_there_is() -> None:
    with pytest.raises(LayoutError, match=r"with every block recomputed activations take") as error:
        with_budget(0.01)
    allowed = float(str(error.value).split("allow ")[1].split()[0])
    assert with_budget(allowed).activations.recompute_segments, "what it says to allow is enough"


def test_a_budget_under_tp_is_of_what_one_rank_holds() -> None:
    """The reason says what a rank keeps, and fewer blocks are redone than one rank alone would
    have to."""
    train = {"recompute": "budget", "recompute_budget_gib": 0.03}
    numbers = []
    for tp in (1, 2):
        job = Job.model_validate({"train": train, "parallel": {"ranks": tp, "tp": tp}})
        found = make_plan(job, cluster=CPU)
        size = format_bytes(activations(found))
        assert any(
            f"activations {size} of the 30.7 MiB asked" in reason for reason in found.reasons
        )
        numbers.append(len(found.activations.recompute_segments))
    assert numbers[1] <= numbers[0]
    body = {"train": {**train, "recompute_budget_gib": 0.001}, "parallel": {"ranks": 2, "tp": 2}}
    with pytest.raises(LayoutError, match=r"; allow 0\.0\d+ GiB"):
        make_plan(Job.model_validate(body), cluster=CPU)


def test_a_budget_for_a_module_of_your_own_is_refused() -> None:
    job = Job.model_validate(
        {"train": {"recompute": "budget", "recompute_budget_gib": 1}, "parallel": {"ranks": 1}}
    )
    with pytest.raises(LayoutError, match="your own module cannot"):
        make_plan(job, cluster=CPU, shape=MeasuredModule("mine:Model", 6, 1000, 1000, 100, 600))


def test_the_blocks_of_a_module_of_your_own_are_in_the_plan() -> None:
    job = Job.model_validate({"train": {"recompute": "sqrt"}, "parallel": {"ranks": 1}})
    found = make_plan(job, cluster=CPU, shape=MeasuredModule("mine:Model", 6, 1000, 1000, 100, 600))
    assert [(segment.start, segment.stop) for segment in found.activations.recompute_segments] == [
        (0, 3),
        (3, 6),
    ]
    assert "recompute: 6 blocks in 2 segments of 3 at most" in found.reasons


def test_where_activations_do_not_fit_the_cheapest_mode_that_helps_is_proposed() -> None:
    """And it does fit, when it is taken."""
    roomy = Cluster("cuda", 1, 400 * GIB)
    totals = {
        mode: plan(roomy, recompute=mode).chosen.total_bytes
        for mode in ("none", "selective", "full")
    }
    for cheaper, mode in itertools.pairwise(totals):
        between = (totals[cheaper] + totals[mode]) // 2
        cluster = Cluster("cuda", 1, round((between + 450 * 2**20) / 0.94))
        with pytest.raises(LayoutError, match=f"set train.recompute={mode} "):
            plan(cluster)
        assert plan(cluster, recompute=mode).chosen.fits


def test_segments_over_sharded_units_count_their_gathered_weights() -> None:
    """A segment is redone with all of its blocks gathered."""
    shape = parse_stored_shape(plan().shape)
    work = Workload(1, 512, "fp32", "sqrt", 1024)
    one = replace(work, segments=plan(recompute="full").activations.recompute_segments)
    four = replace(work, segments=plan(recompute="sqrt").activations.recompute_segments)
    by_mode = []
    for w in (one, four):
        by_mode.append(
            predict_rank_memory_by_phase(shape, w, 3, 8, "cuda", 8)["backward"]["communication"]
        )
    # With one block in a segment two are whole: the next one is fetched.
    assert by_mode[1] - by_mode[0] == 2 * shape.block_params * 4


def test_offloaded_activations_leave_a_gpu_and_not_a_cpu() -> None:
    gpu = Cluster("cuda", 1, 400 * GIB)
    there, here = plan(gpu, offload_activations=True), plan(offload_activations=True)
    kept = [found.chosen.predicted_bytes["activations"] for found in (there, plan(gpu))]
    assert kept[0] < 0.3 * kept[1]
    assert here.chosen.predicted_bytes == plan().chosen.predicted_bytes
    assert any(
        "pinned host memory" in reason and "activations" in reason for reason in there.reasons
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.recompute=every-k"], ["train.recompute", "needs train.recompute_every"]),
        (["train.recompute=budget"], ["train.recompute", "needs train.recompute_budget_gib"]),
        (["train.recompute_every=2"], ["train.recompute_every", 'train.recompute = "every-k"']),
        (
            ["train.recompute=full", "train.recompute_budget_gib=1"],
            ["train.recompute_budget_gib", "budget"],
        ),
        (["train.recompute=all"], ["train.recompute", "selective"]),
    ],
)
def test_keys_that_do_not_go_together(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(JobError) as error:
        load_job(None, overrides)
    assert [word for word in words if word not in str(error.value)] == []


def test_every_k_beyond_the_blocks_is_refused() -> None:
    with pytest.raises(LayoutError, match="12 blocks"):
        plan(recompute="every-k", recompute_every=13)
