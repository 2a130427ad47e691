"""Every key of [parallel] in a plan: its value, its reason, and how it is stored."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from phalanx.job.schema import Job, Parallel
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import _MOVED_FIELD_PATHS, Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.resolved_parallel import ResolvedParallel

CPU = Cluster("cpu", 4, 2**35)


def plan_of(**parallel: Any) -> Plan:
    document = {"train": {"global_batch_size": 8}, "parallel": parallel}
    return make_plan(Job.model_validate(document), cluster=CPU)


def test_a_plan_has_every_key_of_the_section_and_leaves_none_open() -> None:
    assert ResolvedParallel.model_fields.keys() == Parallel.model_fields.keys() | {"reasons"}
    for key, field in ResolvedParallel.model_fields.items():
        assert type(None) not in get_args(field.annotation), key
    assert plan_of().parallel.reasons.keys() == Parallel.model_fields.keys()


@pytest.mark.parametrize(
    ("parallel", "key", "value", "reason"),
    [
        ({}, "ranks", 4, "4 ranks: the most that divide the batch of 8 on 4 CPU cores"),
        ({"ranks": 2}, "ranks", 2, "as the job says"),
        ({}, "tp", 1, "the default"),
        ({"ranks": 2, "tp": 2}, "tp", 2, "as the job says"),
        ({}, "bucket_mb", 25.0, "the default"),
        ({}, "zero_stage", 0, "nothing is sharded"),
        ({"dp_shard": 2}, "zero_stage", 3, "zero3 over dp_replicate=2 x dp_shard=2, as"),
        ({"dp_shard": 2}, "dp_shard", 2, "as the job says"),
        ({}, "dp_replicate", 4, "4 ranks"),
        ({}, "dp_shard", 1, "nothing is sharded"),
        ({"tp": 2}, "dp_replicate", 2, "4 ranks / tp 2"),
        ({"tp": 2, "zero_stage": 3}, "dp_shard", 2, "4 ranks / tp 2"),
        ({"dp_shard": 2}, "dp_replicate", 2, "4 ranks / dp_shard 2"),
        ({"ranks": 2, "tp": 2}, "dp_shard", 1, "nothing is sharded"),
        ({"ranks": 1}, "dp_replicate", 1, "1 rank"),
        ({}, "sequence_parallel", "auto", "the module says"),
        ({"ranks": 2, "pp": 2}, "schedule", "1f1b", "the default of a pipeline"),
        ({"ranks": 2, "pp": 2, "schedule": "gpipe"}, "schedule", "gpipe", "as the job says"),
        ({"ranks": 2, "pp": 2}, "stages_per_rank", 1, "what 1f1b has"),
        ({"ranks": 2, "pp": 2}, "stage_blocks", (2, 2), "cut by FLOPs so that the busiest rank"),
        ({"ranks": 2, "pp": 2, "stage_blocks": (1, 3)}, "stage_blocks", (1, 3), "as the job says"),
        ({}, "schedule", "", "there is no pipeline"),
        ({"ranks": 2, "cp": 2}, "cp_load_balance", "zigzag", "the default"),
        ({}, "collectives", "auto", "shared memory between ranks of one host"),
        ({"ranks": 1}, "collectives", "auto", "one rank has nobody to talk to"),
        ({"collectives": "gloo"}, "collectives", "gloo", "as the job says"),
        (
            {"ranks": 2, "cp": 2, "cp_attention": "ulysses"},
            "cp_load_balance",
            "none",
            "ulysses computes on whole sequences",
        ),
    ],
)
def test_a_value_has_its_reason(
    parallel: dict[str, Any], key: str, value: object, reason: str
) -> None:
    resolved = plan_of(**parallel).parallel
    assert getattr(resolved, key) == value
    assert resolved.reasons[key].startswith(reason)


GPU = Cluster("cuda", 4, 2**36, "a GPU", (9, 0))
OPEN_KEYS = {
    "train.micro_batch_size": 1,
    "precision.compute": "fp32",
    "cluster.device": "cpu",
    "cluster.memory_gib": 16,
}


def value_reasons(cluster: Cluster, *keys: str, **parallel: Any) -> dict[str, str]:
    """The reasons of a plan's values outside [parallel], for a job that sets `keys` alone."""
    document: dict[str, Any] = {"train": {"global_batch_size": 8}, "parallel": parallel}
    for key in keys:
        section, _, name = key.partition(".")
        document.setdefault(section, {})[name] = OPEN_KEYS[key]
    return make_plan(Job.model_validate(document), cluster=cluster).value_reasons


@pytest.mark.parametrize("cluster", [CPU, GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize("key", OPEN_KEYS)
def test_a_key_that_the_job_sets_has_no_reason_of_the_plan(cluster: Cluster, key: str) -> None:
    assert value_reasons(cluster).keys() == OPEN_KEYS.keys()
    assert value_reasons(cluster, key).keys() == OPEN_KEYS.keys() - {key}
    assert value_reasons(cluster, *OPEN_KEYS) == {}


def test_a_key_that_the_job_leaves_open_has_the_reason_of_its_value() -> None:
    on_cpu, on_gpus = value_reasons(CPU), value_reasons(GPU)
    assert on_cpu == {
        "train.micro_batch_size": "the whole share of a rank: 8 / 4 ranks",
        "precision.compute": "CPUs compute in it unless told otherwise",
        "cluster.device": "there is no GPU",
        "cluster.memory_gib": "this machine's / 4 ranks",
    }
    assert on_gpus["precision.compute"].startswith("GPUs of compute capability 9.0 multiply it")
    assert on_gpus["cluster.device"] == "there are GPUs"
    assert on_gpus["cluster.memory_gib"] == "a GPU's, of the one that has least"
    of_pipeline = value_reasons(CPU, ranks=2, pp=2)["train.micro_batch_size"]
    assert of_pipeline.endswith("microbatches for 2 ranks in a pipeline")


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"dp_shard": 2, "prefetch": 0, "blocks_per_unit": "all"},
        {"ranks": 2, "pp": 2},
        {"ranks": 2, "tp": 2, "sequence_parallel": False},
    ],
)
def test_stored_plans_keep_the_keys_that_they_had(parallel: dict[str, Any]) -> None:
    plan = plan_of(**parallel)
    body = plan.to_json()
    assert Plan.from_json(body) == plan
    assert body["sequence_parallel"] == parallel.get("sequence_parallel")
    assert body["data_parallel"]["prefetch"] == parallel.get("prefetch")
    assert body["data_parallel"]["blocks_per_unit"] == (0 if "blocks_per_unit" in parallel else 1)
    assert (body["zero_stage"], body["bucket_mb"]) == (plan.parallel.zero_stage, 25.0)
    del body["parallel"]  # as plans were before
    earlier = Plan.from_json(body).parallel
    assert earlier.degrees == plan.parallel.degrees
    for key in ("zero_stage", "sequence_parallel", "prefetch", "blocks_per_unit", "ranks"):
        assert getattr(earlier, key) == getattr(plan.parallel, key)
    assert earlier.reasons == {}


def test_fields_that_moved_still_answer_with_a_warning() -> None:
    plan = plan_of(dp_shard=2)
    for name, place in _MOVED_FIELD_PATHS.items():
        with pytest.warns(DeprecationWarning, match=rf"Plan.{name} is now Plan.{place}"):
            value = getattr(plan, name)
        noun, _, attribute = place.partition(".")
        found = getattr(plan, noun)
        assert value == (getattr(found, attribute) if attribute and found is not None else found)
    with pytest.warns(DeprecationWarning, match=r"Plan.predicted_of is now Plan.memory_of_rank"):
        assert plan.predicted_of(0) == plan.memory_of_rank(0)
    assert not hasattr(plan, "zero")
