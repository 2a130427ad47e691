"""Runs a layout: builds its module, trains it, compares it with a trace and gathers every rank's
observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.nn.build import build_objective
from phalanx.optim.build import build_optimizer
from phalanx.parallel.executor import Batch
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.plan import Plan
from phalanx.run.one_process.original_module import build_original_module
from phalanx.verify.flips import EVALUATION, optimizer_step, train_step
from phalanx.verify.follow import follow, follow_optimizer
from phalanx.verify.follow_lossy import digest_weights, follow_lossy
from phalanx.verify.lossy import is_lossy, keep_comparable
from phalanx.verify.routes import RouteWatch, read_routes
from phalanx.verify.trace_facts import UPDATED, Trace


@dataclass
class LayoutResult:
    """The result of one layout: `observations` of each rank, and `apart`, the errors by design.

    `watch`: this rank's routers; `choices`: those of all ranks, in the form of `verify.routes`.
    """

    observations: list[Any]
    apart: dict[str, float]
    notes: tuple[str, ...]
    watch: RouteWatch
    choices: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class LayoutRun:
    """One layout of a job."""

    job: Job
    plan: Plan
    _model: ParallelModel | None = None

    @property
    def is_amid_schedule(self) -> bool:
        pipeline = None if self._model is None else self._model.pipeline
        return pipeline is not None and pipeline.is_under_way

    def run(self, full_trace: Trace, steps: Sequence[Sequence[Batch]], mesh: Mesh) -> LayoutResult:
        """Train `steps`, this rank's microbatches of each. Collective."""
        compress, seed = self.plan.parallel.compress, self.job.run.seed
        trace, objective, watch = (
            keep_compared_part(full_trace, compress),
            build_objective(self.job),
            RouteWatch(),
        )
        model, notes = self._build(full_trace, mesh)
        watch.attach(model, train_step)
        if is_lossy(compress):
            observations = follow_lossy(model, objective, steps, full_trace)
        else:
            observations = follow(model, objective, steps, trace, seed=seed)
        observations.digests = digest_weights(model) if compress != "none" else {}
        if UPDATED in trace.sizes:
            # Built anew: the steps above have moved the weights.
            model, _ = self._build(full_trace, mesh)
            watch.attach(model, optimizer_step)
            optimizer = build_optimizer(model, self.job.optim)
            observations.tensors[UPDATED] = follow_optimizer(
                model, optimizer, objective, steps, trace
            )
        all_observations = mesh.gather_json(observations.to_json())
        compared = {
            key: choice
            for key, choice in read_routes(trace.directory).items()
            if _is_compared(key, trace)
        }
        return LayoutResult(
            all_observations, observations.apart, notes, watch, watch.gather(compared)
        )

    def _build(self, trace: Trace, mesh: Mesh) -> tuple[ParallelModel, tuple[str, ...]]:
        module, notes = build_original_module(self.job, self.plan, trace.dtype, materialize=False)
        self._model = parallelize(module, self.plan, mesh, seed=self.job.run.seed)
        return self._model, notes


def keep_compared_part(trace: Trace, compress: str) -> Trace:
    """The part of a trace that a layout with this compression is compared with."""
    if compress == "none":
        return trace
    return keep_comparable(trace, compress)


def _is_compared(key: str, trace: Trace) -> bool:
    phase = key.partition("/")[0]
    if phase == EVALUATION:
        return trace.evaluation is not None
    steps = range(len(trace.steps))
    return phase in map(train_step, steps) or (
        UPDATED in trace.sizes and phase in map(optimizer_step, steps)
    )
