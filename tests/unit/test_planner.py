"""The planner chooses the simplest layout that fits, obeys the job, and refuses with the nearest
that would do."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from models import CPU
from phalanx.core.errors import DataError, ExitCode, LayoutError
from phalanx.job.nearest import format_nearest_values, list_divisors
from phalanx.job.schema import Job, Parallel
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.plan.cluster import CPU_HEADROOM, GPU_HEADROOM, Cluster, count_communicators
from phalanx.plan.explain import describe_plan
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.search.task import build_search_task

GIB = 2**30
CORES = Cluster("cpu", 8, 64 * GIB)
GPUS = Cluster("cuda", 8, 80 * GIB, "H100")


def plan(
    cluster: Cluster = CORES, *, num_ranks: int | None = None, **sections: dict[str, Any]
) -> Plan:
    return make_plan(
        Job.model_validate(sections), cluster=cluster, num_ranks=num_ranks, vocab_size=257
    )


def billions(gpus: int, **parallel: Any) -> Plan:
    """7 B parameters: 108 GiB of fp32 state. 128 sequences of 512 in microbatches of one."""
    model = {"dim": 4096, "num_layers": 32, "num_heads": 32, "ffn_dim": 11008, "vocab_size": 32000}
    train = {"global_batch_size": 1024, "micro_batch_size": 1, "recompute": "full"}
    cluster = Cluster("cuda", gpus, 80 * GIB, "H100")
    return plan(
        cluster,
        model=model,
        train=train,
        data={"seq_len": 512},
        parallel=parallel,
        precision={"compute": "bf16"},
    )


# The choice


def test_what_fits_is_not_sharded() -> None:
    found = plan(parallel={"ranks": 4})
    assert (found.chosen.name, found.layout) == ("ddp", Layout(dp_replicate=4))
    assert [c.name for c in found.alternatives] == ["ddp", "zero1", "zero2", "zero3"]
    assert [c.name for c in found.alternatives if c.chosen] == ["ddp"]
    assert all(c.why for c in found.alternatives)


def test_sharding_is_chosen_when_needed_and_no_more_than_needed() -> None:
    """As memory shrinks: ddp, zero1, zero2, zero3, refusal; at each size the choice fits and the
    simpler did not."""
    names = []
    for gib in (200, 120, 80, 60, 45, 40, 30, 25, 20, 15, 8):
        cluster = Cluster("cuda", 8, gib * GIB)
        model = {
            "dim": 4096,
            "num_layers": 32,
            "num_heads": 32,
            "ffn_dim": 11008,
            "vocab_size": 32000,
        }
        sections: dict[str, Any] = {
            "model": model,
            "train": {"global_batch_size": 8, "recompute": "full"},
            "precision": {"compute": "bf16"},
        }
        try:
            found = plan(cluster, **sections)
        except LayoutError as error:
            names.append("refused" if "GiB are there" in str(error) else str(error))
            continue
        names.append(found.chosen.name)
        assert found.chosen.total_bytes <= found.capacity_bytes <= GPU_HEADROOM.share * gib * GIB
        simpler = found.alternatives[: found.alternatives.index(found.chosen)]
        assert not any(c.fits for c in simpler)
    assert names == sorted(names, key=["ddp", "zero1", "zero2", "zero3", "refused"].index)
    assert set(names) == {"ddp", "zero1", "zero2", "zero3", "refused"}


@pytest.mark.parametrize(
    ("parallel", "name", "layout"),
    [
        ({"ranks": 4, "dp_shard": 4}, "zero3", Layout(dp_shard=4)),
        ({"ranks": 4, "dp_shard": 4, "zero_stage": 2}, "zero2", Layout(dp_shard=4)),
        ({"ranks": 4, "zero_stage": 1}, "zero1", Layout(dp_shard=4)),
        ({"ranks": 4, "dp_shard": 2, "zero_stage": 1}, "zero1", Layout(dp_replicate=2, dp_shard=2)),
        ({"ranks": 4, "dp_shard": 2}, "zero3", Layout(dp_replicate=2, dp_shard=2)),
        ({"ranks": 4, "dp_replicate": 2}, "zero3", Layout(dp_replicate=2, dp_shard=2)),
        ({"dp_replicate": 2, "dp_shard": 2}, "zero3", Layout(dp_replicate=2, dp_shard=2)),
        ({"ranks": 4, "dp_replicate": 4}, "ddp", Layout(dp_replicate=4)),
        ({"ranks": 4, "dp_shard": 1}, "ddp", Layout(dp_replicate=4)),
        ({"ranks": 4, "dp_replicate": 1}, "zero3", Layout(dp_shard=4)),
        ({"ranks": 1}, "one", Layout()),
        ({"ranks": 1, "dp_shard": 1, "dp_replicate": 1}, "one", Layout()),
    ],
)
def test_what_the_job_pins_wins(parallel: dict[str, Any], name: str, layout: Layout) -> None:
    found = plan(parallel=parallel)
    assert (found.chosen.name, found.layout) == (name, layout)


@pytest.mark.parametrize(
    "parallel", [{"ranks": 1}, {"ranks": 2, "dp_replicate": 2}, {"ranks": 2, "zero_stage": 1}]
)
def test_whole_parameters_cannot_wait_on_the_host(parallel: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="offload=parameters needs shards"):
        plan(parallel=parallel | {"offload": "parameters"})
    assert plan(parallel={"ranks": 2, "offload": "parameters"}).chosen.name == "zero2"


def test_ranks_are_the_most_that_divide_the_batch() -> None:
    assert plan(train={"global_batch_size": 12}).world_size == 6
    assert plan(train={"global_batch_size": 12, "micro_batch_size": 4}).world_size == 3
    assert plan(Cluster("cpu", 1, 8 * GIB)).world_size == 2  # distributed even on one core
    assert plan(Cluster("cpu", 64, 256 * GIB), train={"global_batch_size": 64}).world_size == 8
    assert plan(GPUS, train={"global_batch_size": 64}).world_size == 8
    assert plan(num_ranks=4).world_size == 4


def test_the_batch_is_split_without_a_rest() -> None:
    found = plan(
        train={"global_batch_size": 48, "micro_batch_size": 4},
        parallel={"ranks": 3},
        data={"seq_len": 10},
    )
    assert (found.micro_batch_size, found.num_microbatches) == (4, 4)
    assert found.targets_per_rank == 160
    assert (
        found.micro_batch_size * found.num_microbatches * found.world_size
        == found.global_batch_size
    )


# Refusals


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"train": {"global_batch_size": 30}, "parallel": {"ranks": 4}},
            ["nearest batch: 28 or 32", "nearest ranks: 3 or 5"],
        ),
        (
            {"train": {"global_batch_size": 2}, "parallel": {"ranks": 4}},
            ["nearest batch: 4;", "nearest ranks: 2"],
        ),
        (
            {"train": {"global_batch_size": 32, "micro_batch_size": 3}, "parallel": {"ranks": 4}},
            ["micro_batch_size 3 does not divide the 8", "nearest: 2 or 4"],
        ),
        (
            {"parallel": {"ranks": 8, "dp_shard": 3}},
            ["dp_shard 3 does not divide the 8 ranks", "nearest: 2 or 4"],
        ),
        ({"parallel": {"ranks": 8, "dp_replicate": 16}}, ["dp_replicate 16", "nearest: 8"]),
        (
            {"parallel": {"ranks": 8, "dp_replicate": 2, "dp_shard": 2}},
            ["makes 4 ranks", "parallel.ranks is 8"],
        ),
        # How many there are, the machine says.
        ({"resilience": {"min_ranks": 100}}, ["min_ranks is 100", "parallel.ranks to 100 or more"]),
        (
            {"train": {"global_batch_size": 7, "micro_batch_size": 7}, "parallel": {"dp_shard": 2}},
            ["multiple of 2"],
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(
    sections: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(LayoutError) as caught:
        plan(**sections)
    assert caught.value.exit_code == ExitCode.JOB
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_ranks_that_run_already_must_be_those_of_the_job() -> None:
    with pytest.raises(LayoutError, match=r"asks for 4 ranks and 2 are running.*parallel.ranks=2"):
        plan(num_ranks=2, parallel={"ranks": 4})
    with pytest.raises(LayoutError, match="16 ranks were asked for and there are 8 GPUs"):
        plan(GPUS, parallel={"ranks": 16}, train={"global_batch_size": 16})


def test_what_cannot_fit_is_refused_with_what_would() -> None:
    with pytest.raises(LayoutError) as caught:
        billions(8, dp_replicate=8)
    assert "ddp needs" in str(caught.value)
    assert "80" not in str(caught.value).partition("needs")[0]
    assert "would fit" in str(caught.value)
    with pytest.raises(
        LayoutError, match=r"use more ranks \(2 with as much memory each: zero3 fits there\)"
    ):
        billions(1)


def test_activations_that_do_not_fit_are_named_as_the_largest_part() -> None:
    with pytest.raises(LayoutError, match=r"largest part is activations.*micro_batch_size"):
        plan(
            Cluster("cuda", 1, 8 * GIB),
            train={"global_batch_size": 4096},
            data={"seq_len": 4096},
            model={"dim": 256, "num_layers": 4},
        )


# The plan as data


@pytest.mark.parametrize("ranks", [1, 4])
def test_json_comes_back_as_the_same_plan(ranks: int) -> None:
    found = plan(parallel={"ranks": ranks})
    text = json.dumps(found.to_json())
    assert Plan.from_json(json.loads(text)) == found
    assert json.dumps(Plan.from_json(json.loads(text)).to_json()) == text


def test_a_users_own_module_is_planned_from_its_parameter_count() -> None:
    shape = MeasuredModule("pkg:model", 3, 1_000_000, 900_000, 200_000, 600_000)
    found = make_plan(Job(), cluster=CORES, shape=shape, num_ranks=2)
    assert found.flops_per_token is None
    assert found.chosen.predicted_bytes["activations"] == 0
    assert any("not predicted" in reason for reason in found.reasons)
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("num_params", "said"),
    [
        (1_000_000, "'pkg:model' has nothing to train: its 1.00 M parameters are all frozen"),
        (0, "'pkg:model' has no parameters"),
    ],
)
def test_a_model_with_nothing_to_train_is_refused(num_params: int, said: str) -> None:
    shape = MeasuredModule("pkg:model", 3, num_params, 0, num_params // 4, num_params)
    with pytest.raises(LayoutError, match=said):
        make_plan(Job(), cluster=CORES, shape=shape, num_ranks=2)
    with pytest.raises(LayoutError, match=said):
        build_search_task(Job(), cluster=CORES, shape=shape)


def test_a_published_shape_is_planned_and_what_follows_from_a_change_is_said() -> None:
    model = {"preset": "llama3-8b", "dim": 2048, "num_layers": 2}
    found = plan(GPUS, model=model)
    assert found.vocab_size == 128256
    assert "ffn_dim 7168 follows from model.dim (llama3-8b has 14336)" in found.reasons
    assert not found.chosen.why.startswith("ffn_dim")


def test_experts_are_planned_with_all_their_weights_and_the_work_of_a_few() -> None:
    found = plan(
        Cluster("cuda", 64, 80 * GIB),
        model={"preset": "mixtral-8x7b"},
        train={"global_batch_size": 64},
    )
    assert found.num_params == 46_702_792_704
    assert found.chosen.predicted_bytes["parameters"] == round(
        found.num_params * 4 / found.layout.dp_shard
    )
    assert found.flops_per_token is not None
    assert found.flops_per_token < 6 * 14e9
    assert "12.9 B of them active" in describe_plan(found)[0]


def test_images_have_their_own_length_and_one_target() -> None:
    found = plan(model={"preset": "vit-b16"}, parallel={"ranks": 2}, train={"micro_batch_size": 2})
    assert (found.seq_len, found.vocab_size, found.targets_per_rank) == (197, 0, 8)
    assert "16 images x 197 tokens per step" in describe_plan(found)[1]


def test_document_masks_cost_memory() -> None:
    plain, masked = (
        plan(data={"document_masks": on, "seq_len": 512}, parallel={"ranks": 2})
        for on in (False, True)
    )
    more = (
        masked.chosen.predicted_bytes["activations"] - plain.chosen.predicted_bytes["activations"]
    )
    assert more == 8 * 512 * 512 * 4


def test_masks_of_long_sequences_pass_block_by_block() -> None:
    """Twice the tokens take twice the memory for masks, and a window takes the same for any
    length."""

    def activations(seq_len: int, **model: Any) -> int:
        documents = not model
        found = plan(
            model=model,
            data={"document_masks": documents, "seq_len": seq_len},
            parallel={"ranks": 2},
        )
        return found.chosen.predicted_bytes["activations"]

    def masks(seq_len: int, window: int = 0) -> int:
        masked = activations(seq_len, sliding_window=window) if window else activations(seq_len)
        return masked - activations(seq_len, sliding_window=seq_len)  # a window that hides nothing

    batch, element = 8, 4 + 1  # the mask in fp32 and the booleans that it is made of
    assert [masks(length) for length in (2048, 4096)] == [
        batch * 1024 * length * element for length in (2048, 4096)
    ]
    assert masks(2048, 100) == masks(4096, 100) == 1024 * (1024 + 99) * element


@pytest.mark.parametrize(
    ("sections", "is_copied"),
    [
        ({"checkpoint": {"every_steps": 10}}, True),
        ({"checkpoint": {"every": "auto", "mtbf_hours": 5.0}}, True),
        ({"eval": {"keep_best": True}}, True),
        ({"checkpoint": {"every_steps": 10, "asynchronous": False}}, False),
        ({}, False),  # the save at the end is waited for
    ],
)
def test_a_copy_of_the_state_is_planned_where_saves_are_written_from_one(
    sections: dict[str, Any], is_copied: bool
) -> None:
    """Weights and two moments, an equal part on each rank in every layout, in the host's memory."""
    found = plan(parallel={"ranks": 4}, **sections)
    for candidate in found.alternatives:
        expected = round(12 * found.num_params / 4) if is_copied else None
        assert candidate.predicted_bytes.get("staging") == expected
    assert (
        any("training goes on while it is saved" in reason for reason in found.reasons) == is_copied
    )
    on_gpus = plan(GPUS, **sections)
    assert "staging" not in on_gpus.chosen.predicted_bytes
    assert (
        any("of pinned host memory per rank" in reason for reason in on_gpus.reasons) == is_copied
    )


def test_a_copy_that_does_not_fit_is_refused() -> None:
    model = {"dim": 1024, "num_layers": 8, "num_heads": 8, "vocab_size": 32000}
    sections: dict[str, Any] = {
        "model": model,
        "parallel": {"ranks": 1},
        "train": {"global_batch_size": 1},
    }
    sections["optim"] = {"kind": "sgd", "momentum": 0.0}
    whole = plan(**sections).chosen.total_bytes
    cluster = Cluster("cpu", 1, round(1.1 * whole + 450 * 2**20))
    assert plan(cluster, **sections).chosen.fits
    with pytest.raises(LayoutError, match="are there"):
        plan(cluster, checkpoint={"every_steps": 10}, **sections)


def test_a_vocabulary_larger_than_the_models_is_refused() -> None:
    with pytest.raises(
        DataError,
        match=r"vocabulary of 257 tokens and the model one of 100; set model\.vocab_size=257",
    ):
        plan(model={"vocab_size": 100})


def test_a_thousand_ranks_are_planned() -> None:
    found = billions(1024, dp_shard=64)
    assert found.layout == Layout(dp_replicate=16, dp_shard=64)
    assert found.num_microbatches == 1


def test_divisors_and_nearest() -> None:
    assert list_divisors(12) == [1, 2, 3, 4, 6, 12]
    assert format_nearest_values(5, list_divisors(12)) == "4 or 6"
    assert format_nearest_values(1, [1]) == "none"


def test_planning_imports_neither_torch_nor_what_measures_other_modules() -> None:
    code = (
        "import sys; from phalanx.job.schema import Job; from phalanx.plan.planner import"
        " make_plan\nfrom phalanx.plan.cluster import Cluster\njob = Job.model_validate({'train':"
        " {'global_batch_size': 1024}})\nmake_plan(job, cluster=Cluster('cuda', 1024, 80 * 2**30),"
        " num_ranks=1024)\nprint([name for name in ('torch', 'numpy', 'phalanx.job.module_probe',"
        " 'phalanx.job.shapes.measured') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() == "[]"


@pytest.mark.parametrize(
    ("parallel", "line"),
    [
        (
            {"ranks": 2, "accumulate": "sharded", "prefetch": 1},
            "parallel.accumulate, parallel.prefetch have no effect under ddp",
        ),
        (
            {"ranks": 2, "zero_stage": 1, "blocks_per_unit": "all"},
            "parallel.blocks_per_unit has no effect under zero1",
        ),
        (
            {"ranks": 2, "zero_stage": 3, "static_graph": True},
            "parallel.static_graph has no effect under zero3",
        ),
        (
            {"ranks": 1, "keep_whole_below": 9},
            "parallel.keep_whole_below has no effect under one rank",
        ),
        (
            {"ranks": 2, "rules": {"embed": "vocab"}},
            "parallel.rules has no effect without parallel.tp",
        ),
        ({"ranks": 2, "zero_stage": 3, "accumulate": "sharded", "prefetch": 1}, None),
        ({"ranks": 2, "static_graph": True}, None),
    ],
)
def test_keys_that_the_layout_does_not_read_are_named(
    parallel: dict[str, object], line: str | None
) -> None:
    found = make_plan(Job.model_validate({"parallel": parallel}), cluster=CPU)
    assert [reason for reason in found.reasons if "no effect" in reason] == ([line] if line else [])


@pytest.mark.parametrize(
    ("parallel", "model", "how"),
    [
        ({}, {}, "cut between regions (sequence parallelism)"),
        ({"sequence_parallel": False}, {}, "whole on every rank, as the job says"),
        ({}, {"kind": "vit"}, "whole on every rank: a vit cannot do with a part of it"),
    ],
)
def test_a_plan_with_tp_says_what_becomes_of_the_sequence(
    parallel: dict[str, object], model: dict[str, object], how: str
) -> None:
    job = Job.model_validate({"parallel": {"ranks": 2, "tp": 2, **parallel}, "model": model})
    assert f"tp: the sequence is {how}" in make_plan(job, cluster=CPU).reasons


def test_a_vit_cannot_cut_its_sequence() -> None:
    body = {"parallel": {"ranks": 2, "tp": 2, "sequence_parallel": True}, "model": {"kind": "vit"}}
    with pytest.raises(LayoutError, match="a vit cannot do with a part of its sequence"):
        make_plan(Job.model_validate(body), cluster=CPU)


COMMUNICATORS = {
    "one": (1, {}, 0),
    "ddp": (8, {"dp_replicate": 8}, 1),
    "tp": (8, {"tp": 8}, 1),
    "hsdp": (8, {"dp_replicate": 2, "dp_shard": 4}, 3),
    "tp and data": (8, {"tp": 2}, 3),
    "pairs of a pipeline": (4, {"pp": 4}, 5),
    "ep": (8, {"dp_shard": 8, "ep": 4}, 4),
    "tp, cp and data": (8, {"tp": 2, "cp": 2}, 4),
}


@pytest.mark.parametrize("name", COMMUNICATORS)
def test_communicators_of_a_rank_are_counted(name: str) -> None:
    ranks, parallel, count = COMMUNICATORS[name]
    assert count_communicators(Parallel(ranks=ranks, **parallel), ranks) == count


def test_a_plan_for_gpus_leaves_room_for_communicators_and_says_so() -> None:
    """An 80 GiB card: nine tenths, less 614 MiB, and 200 MiB for each communicator.

    A CPU's plan is without.
    """
    cards, cores = Cluster("cuda", 8, 80 * GIB), Cluster("cpu", 8, 80 * GIB)
    found = plan(cards, parallel={"tp": 2, "ranks": 8}, train={"global_batch_size": 8})
    assert found.capacity_bytes == round(0.9 * 80 * GIB) - (614 + 3 * 200) * 2**20
    (line,) = [reason for reason in found.reasons if reason.startswith("memory: ")]
    assert (
        "90% of a GPU's 80.0 GiB, less 614.0 MiB of its context and 3 x 200.0 MiB of communicators"
        in line
    )
    on_cpu = plan(cores, parallel={"tp": 2, "ranks": 8}, train={"global_batch_size": 8})
    assert (
        on_cpu.capacity_bytes == round(CPU_HEADROOM.share * cores.memory_per_rank(8)) - 450 * 2**20
    )
    assert not any(reason.startswith("memory: ") for reason in on_cpu.reasons)
