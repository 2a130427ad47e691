"""A layout's steps beside a trace: its module is built, trained and compared; each rank hands in what it saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.nn.build import build_objective
from phalanx.optim.build import build_optimizer
from phalanx.parallel.model import Batch, ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.plan import Plan
from phalanx.run.one_process.original_module import build_untouched
from phalanx.verify.flips import EVALUATION, optimizer_step, train_step
from phalanx.verify.follow import follow, follow_optimizer
from phalanx.verify.follow_lossy import digests_of, follow_lossy
from phalanx.verify.lossy import comparable, is_lossy
from phalanx.verify.routes import Watch, read_routes
from phalanx.verify.trace_facts import UPDATED, Trace


@dataclass
class Ran:
    """`seen`: what each rank saw. `apart`: what differs by design, and how much. `watch`: this rank's routers;
    `choices`: those of all ranks, in the form of `verify.routes`."""

    seen: list[Any]
    apart: dict[str, float]
    notes: tuple[str, ...]
    watch: Watch
    choices: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class LayoutRun:
    """One layout of a job."""

    job: Job
    plan: Plan
    _model: ParallelModel | None = None

    @property
    def is_amid_schedule(self) -> bool:
        return self._model is not None and self._model.is_amid_schedule

    def beside(self, whole: Trace, steps: Sequence[Sequence[Batch]], mesh: Mesh) -> Ran:
        """Train `steps`, this rank's microbatches of each. Collective."""
        compress, seed = self.plan.compress, self.job.run.seed
        trace, objective, watch = judged_part(whole, compress), build_objective(self.job), Watch()
        model, notes = self._built(whole, mesh)
        watch.attach(model, train_step)
        if is_lossy(compress):
            found = follow_lossy(model, objective, steps, whole)
        else:
            found = follow(model, objective, steps, trace, seed=seed)
        found.digests = digests_of(model) if compress != "none" else {}
        if UPDATED in trace.sizes:
            model, _ = self._built(whole, mesh)
            watch.attach(model, optimizer_step)
            optimizer = build_optimizer(model, self.job.optim)
            found.tensors[UPDATED] = follow_optimizer(model, optimizer, objective, steps, trace)
        seen = mesh.gather_json(found.to_json())
        judged = {key: choice for key, choice in read_routes(trace.directory).items() if _is_judged(key, trace)}
        return Ran(seen, found.apart, notes, watch, watch.of_all_ranks(judged))

    def _built(self, trace: Trace, mesh: Mesh) -> tuple[ParallelModel, tuple[str, ...]]:
        module, notes = build_untouched(self.job, self.plan, trace.dtype, materialize=False)
        self._model = parallelize(module, self.plan, mesh, seed=self.job.run.seed)
        return self._model, notes


def judged_part(whole: Trace, compress: str) -> Trace:
    """What of a trace a layout can be held to."""
    return whole if compress == "none" else comparable(whole, compress)


def _is_judged(key: str, trace: Trace) -> bool:
    phase = key.partition("/")[0]
    if phase == EVALUATION:
        return trace.evaluation is not None
    steps = range(len(trace.steps))
    return phase in map(train_step, steps) or (UPDATED in trace.sizes and phase in map(optimizer_step, steps))
