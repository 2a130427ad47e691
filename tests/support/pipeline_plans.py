"""Plans of small jobs with a pipeline, for tests."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.core.errors import ExitCode, LayoutError
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.plan.cluster import Cluster
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.simulate import StageCosts
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan

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
    shape: DecoderShape | None = None,
    recompute: dict[str, Any] | None = None,
    **parallel: Any,
) -> Plan:
    model: dict[str, Any] = {"num_layers": layers} if shape is None else {"kind": shape.kind}
    train = {"global_batch_size": batch, "micro_batch_size": micro, **(recompute or {})}
    sections = {
        "model": model,
        "train": train,
        "parallel": {"pp": pp, "ranks": ranks or pp, **parallel},
    }
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
