"""Plans that an earlier commit stored are read, and keep every key with its value.

Reference: the stored files (tests/golden/README.md).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.plan.plan import Plan

STORED = sorted((Path(__file__).parents[1] / "golden" / "plans-2026-11-23").glob("*.json"))
FLAT_KEYS = (
    *("zero_stage", "bucket_mb", "sync_batchnorm", "dropout", "tp_chunks", "rules", "compress"),
    *("compress_rank", "compress_fraction", "cp_attention", "cp_load_balance"),
)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_plan_is_read_and_written_with_the_same_keys(path: Path) -> None:
    stored: dict[str, Any] = json.loads(path.read_text())
    plan = Plan.from_json(stored)
    written = json.loads(json.dumps(plan.to_json()))
    assert {key: written.get(key) for key in stored} == stored
    assert Plan.from_json(written) == plan


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_plan_says_in_parallel_what_its_flat_keys_say(path: Path) -> None:
    stored = json.loads(path.read_text())
    plan = Plan.from_json(stored)
    parallel = plan.parallel.to_json()
    assert {key: parallel[key] for key in FLAT_KEYS} == {key: stored[key] for key in FLAT_KEYS}
    degrees = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    assert {axis: parallel[axis] for axis in degrees} == {
        axis: stored["layout"][axis] for axis in degrees
    }
    options = stored["data_parallel"]
    for key in ("accumulate", "keep_whole_below", "offload", "static_graph", "unused_parameters"):
        assert parallel[key] == options[key]
    assert plan.activations.recompute == stored["recompute"]
    assert plan.activations.recompute_every == stored["recompute_every"]
    assert plan.activations.offload == stored["offload_activations"]
    assert (plan.loss_scaling and plan.loss_scaling.initial) == stored["loss_scale"]


def test_there_are_plans_of_each_kind() -> None:
    assert len(STORED) == 5
