"""Evaluations between steps: which are done, which was the best, and the state that training
must find unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import nn

from phalanx.mesh.mesh import Mesh
from phalanx.observe.events import EvalFinished
from phalanx.observe.tail import recorded
from phalanx.parallel.model import Batch, ParallelModel
from phalanx.train.randomness import own_generators

# What is evaluated: batches by source ("" where there is only one). Iterated once per evaluation;
# every rank must yield equally many batches of each.
HeldOut = Mapping[str, Iterable[Batch]]


LOSS = "loss"  # what is judged by, unless eval.metric names another


@dataclass(frozen=True)
class Evaluation:
    """Loss per target over all ranks, of each source and of all together (see `over_sources`).

    `metrics`: means of what the objective measures besides, by name.
    """

    step: int
    loss: float
    num_targets: int
    loss_by_source: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)

    def value_of(self, metric: str) -> float:
        """The loss or a metric; NaN where it was not measured."""
        return self.loss if metric == LOSS else self.metrics.get(metric, math.nan)


@dataclass(frozen=True)
class Judged:
    """What is kept of an evaluation to find the best. `value` is that of eval.metric."""

    loss: float
    num_targets: int
    value: float


def over_sources(losses: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """One loss per target for all sources together: the mean of theirs by weight.

    NaN if there are none.

    A source that is not in `losses`, because nothing of it is held out, leaves its part to the
    others.
    """
    if len(losses) <= 1:
        return next(iter(losses.values()), math.nan)
    total = sum(weights[source] for source in losses)
    return sum(weights[source] * loss for source, loss in losses.items()) / total


class EvalRecord:
    """The evaluations of a run so far, the same on every rank."""

    def __init__(self, done: Mapping[int, Judged] | None = None) -> None:
        self._done = dict(done or {})

    def has(self, step: int) -> bool:
        return step in self._done

    def of(self, step: int) -> Judged:
        return self._done[step]

    def add(self, step: int, judged: Judged) -> None:
        self._done[step] = judged

    def best(self, num_targets: int, mode: str = "min") -> tuple[int, Judged]:
        """The step with the lowest value (`mode` "max": the highest), the first of equals; (0, NaN)
        if there is none.

        Only evaluations of `num_targets` targets: a value over other data cannot be compared.
        """
        sign = -1.0 if mode == "max" else 1.0
        finite = [
            (sign * judged.value, step)
            for step, judged in self._done.items()
            if judged.num_targets == num_targets and math.isfinite(judged.value)
        ]
        if not finite:
            return 0, Judged(math.nan, num_targets, math.nan)
        _, step = min(finite)
        return step, self._done[step]


def read_record(run_dir: Path | None, step: int, mesh: Mesh, metric: str = LOSS) -> EvalRecord:
    """What rank 0's event files say of evaluations up to `step`, for all ranks.

    Those of later steps are done again.
    """
    done: list[tuple[int, float, int, float]] = []
    if run_dir is not None and step > 0 and mesh.rank == 0:
        found = [envelope.event for envelope in recorded(run_dir, EvalFinished)]
        done = [
            (int(e.step), e.loss, int(e.num_targets), e.value_of(metric))
            for e in found
            if isinstance(e, EvalFinished) and e.step <= step and not math.isnan(e.loss)
        ]
    return EvalRecord(
        {int(s): Judged(float(x), int(n), float(v)) for s, x, n, v in mesh.gather_json(done)[0]}
    )


@contextmanager
def undisturbed(model: ParallelModel, mesh: Mesh, seed: int) -> Iterator[None]:
    """Inside, modules are in evaluation mode, their buffers (running statistics) are rank 0's, and
    what they draw is the same each time.

    Training notices nothing. In a pipeline buffers are those of the first of the ranks that hold
    the same stages: the others have other ones.

    A module that its owner put into evaluation mode (a frozen BatchNorm, say) is in it afterwards,
    too.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.module.buffers()]
    modes: list[tuple[nn.Module, bool]] = [
        (module, module.training) for module in model.module.modules()
    ]
    with own_generators("evaluate", seed, mesh.data_parallel_rank, device=mesh.device):
        model.train(False)
        try:
            if mesh.device_mesh is not None:
                group = mesh.data_parallel_group() if mesh.layout.pp > 1 else None
                for buffer, _ in buffers:
                    dist.broadcast(
                        buffer, 0 if group is None else dist.get_global_rank(group, 0), group=group
                    )
            yield
        finally:
            model.train(True)
            for module, is_training in modes:
                module.training = is_training
            for buffer, before in buffers:
                buffer.copy_(before)
