"""Evaluations between steps: which are done, which was the best, and the state that training
must find unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.mesh.mesh import Mesh
from phalanx.observe.events import EvalFinished
from phalanx.observe.tail import read_recorded_events
from phalanx.parallel.executor import Batch
from phalanx.parallel.model import ParallelModel
from phalanx.train.randomness import separate_generators

# Batches to evaluate by source ("" where there is only one). Iterated once per evaluation;
# every rank must yield equally many batches of each.
HeldOutBatches = Mapping[str, Iterable[Batch]]


# The best step is found by it, unless eval.metric names another.
LOSS_METRIC = "loss"


@dataclass(frozen=True)
class Evaluation:
    """Loss per target over all ranks, of each source and of all together (see
    `compute_weighted_mean_loss`).

    `metrics`: means of the objective's other measures, by name.
    """

    step: int
    loss: float
    num_targets: int
    loss_by_source: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)

    def get_metric_value(self, metric: str) -> float:
        """The loss or a metric; NaN where it was not measured."""
        if metric == LOSS_METRIC:
            return self.loss
        return self.metrics.get(metric, math.nan)


@dataclass(frozen=True)
class EvalScore:
    """The numbers of an evaluation by which the best is found. `value` is that of eval.metric."""

    loss: float
    num_targets: int
    value: float


def compute_weighted_mean_loss(losses: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """One loss per target for all sources together: their weighted mean; NaN if there are none.

    A source that is not in `losses`, because it has no held-out data, leaves its weight to the
    others.
    """
    if len(losses) <= 1:
        return next(iter(losses.values()), math.nan)
    total = sum(weights[source] for source in losses)
    return sum(weights[source] * loss for source, loss in losses.items()) / total


class EvaluationHistory:
    """The evaluations of a run so far, the same on every rank."""

    def __init__(self, done: Mapping[int, EvalScore] | None = None) -> None:
        self._done = dict(done or {})

    def has_evaluation_of_step(self, step: int) -> bool:
        return step in self._done

    def get_score_of_step(self, step: int) -> EvalScore:
        return self._done[step]

    def add_evaluation(self, step: int, score: EvalScore) -> None:
        self._done[step] = score

    def best(self, num_targets: int, mode: str = "min") -> tuple[int, EvalScore]:
        """The step with the lowest value (`mode` "max": the highest), the first of equals; (0, NaN)
        if there is none.

        Only evaluations of `num_targets` targets: a value over other data cannot be compared.
        """
        sign = {"min": 1.0, "max": -1.0}[mode]
        finite = []
        # Only evaluations over as many targets: a value over other data cannot be compared.
        for step, score in self._done.items():
            if score.num_targets == num_targets and math.isfinite(score.value):
                finite.append((sign * score.value, step))
        if not finite:
            return 0, EvalScore(math.nan, num_targets, math.nan)
        # Of equal values the smaller step.
        _, best_step = min(finite)
        return best_step, self._done[best_step]


def read_evaluation_history(
    run_dir: Path | None, step: int, mesh: Mesh, metric: str = LOSS_METRIC
) -> EvaluationHistory:
    """The evaluations up to `step` in rank 0's event files, for all ranks.

    Evaluations of later steps are done again.
    """
    done: list[tuple[int, float, int, float]] = []
    if run_dir is not None and step > 0 and mesh.rank == 0:
        for envelope in read_recorded_events(run_dir, EvalFinished):
            event = envelope.event
            # NaN is no result: that evaluation is done again.
            if not isinstance(event, EvalFinished) or event.step > step or math.isnan(event.loss):
                continue
            value = event.value_of(metric)
            done.append((int(event.step), event.loss, int(event.num_targets), value))
    scores = {}
    for at_step, loss, num_targets, value in mesh.gather_json(done)[0]:
        scores[int(at_step)] = EvalScore(float(loss), int(num_targets), float(value))
    return EvaluationHistory(scores)


@contextmanager
def in_evaluation_mode(model: ParallelModel, mesh: Mesh, seed: int) -> Iterator[None]:
    """Put modules into evaluation mode inside, with rank 0's buffers (running statistics) and the
    same random numbers each time.

    Training notices nothing. In a pipeline buffers are those of the first of the ranks that hold
    the same stages: the others have other ones. A module that its owner put into evaluation mode (a
    frozen BatchNorm, say) is in it afterwards, too.
    """
    buffers = list(model.module.buffers())
    # Copies: the broadcast below writes into the buffers themselves.
    before = [buffer.clone() for buffer in buffers]
    modes = [(module, module.training) for module in model.module.modules()]
    # The same draws in each evaluation: losses of two steps differ by the weights alone.
    with separate_generators("evaluate", seed, mesh.data_parallel_rank, device=mesh.device):
        model.train(False)
        try:
            if mesh.device_mesh is not None:
                _broadcast_buffers_of_rank_zero(buffers, mesh)
            yield
        finally:
            model.train(True)
            # `train(True)` also reached modules that their owner keeps in evaluation mode.
            for module, is_training in modes:
                module.training = is_training
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _broadcast_buffers_of_rank_zero(buffers: Iterable[torch.Tensor], mesh: Mesh) -> None:
    """Give all ranks the buffers of rank 0; in a pipeline those of the first rank of each stage."""
    # A broadcast needs equal shapes: ranks of other stages hold other modules.
    group, source = None, 0
    if mesh.layout.pp > 1:
        group = mesh.data_parallel_group()
        source = dist.get_global_rank(group, 0)
    for buffer in buffers:
        dist.broadcast(buffer, source, group=group)
