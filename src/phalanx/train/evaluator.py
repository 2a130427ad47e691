"""One evaluation between two steps: over all sources and all ranks, and training does not notice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Protocol

import torch

from phalanx.core.phases import Phases
from phalanx.mesh.mesh import Mesh
from phalanx.observe.events import Event
from phalanx.observe.progress import ProgressTeller
from phalanx.parallel.model import Batch, Objective, ParallelModel
from phalanx.train.evaluation import LOSS, Evaluation, HeldOut, over_sources, undisturbed
from phalanx.train.metrics import MetricSums, SumAndCount, means, require_metric
from phalanx.train.stop import StopAskedError, StopFlags


class EvaluatedState(Protocol):
    """What an evaluation reads of a TrainState: a model at a step needs no optimizer to be evaluated."""

    @property
    def model(self) -> ParallelModel: ...

    @property
    def seed(self) -> int: ...

    @property
    def step(self) -> int: ...


class Evaluator:
    """Evaluates a state on `held_out`. `source_weights`: see Trainer.

    All ranks may agree to `stop` inside: StopAskedError says what was asked.
    """

    def __init__(
        self,
        state: EvaluatedState,
        mesh: Mesh,
        *,
        objective: Objective,
        held_out: HeldOut,
        source_weights: Mapping[str, float] | None,
        stop: StopFlags,
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._emit = emit
        self._state, self._mesh, self._objective = state, mesh, objective
        self._held_out, self._source_weights, self._stop = held_out, source_weights, stop
        self._phases: Phases = state.model.phases

    def evaluate(self) -> Evaluation:
        """Loss and metrics on the held-out batches. Collective; training goes on as if it had not been."""
        loss_by_source: dict[str, float] = {}
        targets_by_source: dict[str, int] = {}
        metrics_by_source: dict[str, dict[str, SumAndCount]] = {}
        num_batches = [len(batches) if isinstance(batches, Sized) else 0 for batches in self._held_out.values()]
        total = sum(num_batches) if all(num_batches) else 0
        progress = ProgressTeller(self._emit, self._state.step, "evaluate", total)
        counted = itertools.count()
        with self._phases("evaluate"), undisturbed(self._state.model, self._mesh, self._state.seed):
            for source, batches in self._held_out.items():
                objective = MetricSums(self._objective, self._mesh)
                told = _telling(self._until_stopped(batches), progress, counted)
                sums = self._state.model.evaluate(told, objective)
                loss, num_targets = self._state.model.reduce_sums(sums)
                metrics_by_source[source] = objective.reduced()
                if num_targets:
                    loss_by_source[source], targets_by_source[source] = loss, num_targets
        loss = over_sources(loss_by_source, self._source_weights or targets_by_source)
        metrics = means(metrics_by_source, self._source_weights)
        return Evaluation(self._state.step, loss, sum(targets_by_source.values()), loss_by_source, metrics)

    def require_metric(self, metric: str) -> None:
        """Refuse a metric that there is not (LayoutError), before training: the first held-out batch shows it."""
        if metric == LOSS:
            return
        objective = MetricSums(self._objective, self._mesh)
        batches = next(iter(self._held_out.values()))
        with (
            self._phases.apart(),
            self._phases("evaluate"),
            undisturbed(self._state.model, self._mesh, self._state.seed),
        ):
            self._state.model.evaluate(itertools.islice(batches, 1), objective)
        require_metric(metric, list(objective.reduced()))

    def _until_stopped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches; before each, all ranks agree whether to go on: an evaluation may outlast a grace period."""
        for batch in batches:
            votes = torch.tensor([self._stop.sigterm, self._stop.sigint], dtype=torch.float64, device=self._mesh.device)
            with self._phases("collective", "all_reduce stop votes"):
                sigterm, sigint = self._mesh.all_reduce_sum(votes).tolist()
            if sigterm or sigint:
                raise StopAskedError("sigterm" if sigterm else "sigint")
            yield batch


def _telling(batches: Iterable[Batch], progress: ProgressTeller, counted: Iterator[int]) -> Iterator[Batch]:
    for batch in batches:
        progress.tell(next(counted))
        yield batch
