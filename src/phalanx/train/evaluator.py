"""The evaluator: evaluates between two steps, over all sources and all ranks; training does not
notice."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Protocol

from phalanx.checkpoint.ownership.fence import RunOwnershipWatch
from phalanx.core.phases import WORLD_AXIS, PhaseTimer
from phalanx.mesh.mesh import Mesh
from phalanx.observe.events import Event
from phalanx.observe.progress import ProgressEmitter
from phalanx.parallel.executor import Batch, Objective
from phalanx.parallel.model import ParallelModel
from phalanx.train.evaluation import (
    LOSS_METRIC,
    Evaluation,
    HeldOutBatches,
    compute_weighted_mean_loss,
    in_evaluation_mode,
)
from phalanx.train.metrics import (
    MetricAccumulator,
    SumAndCount,
    average_metrics_over_sources,
    require_known_metric,
)
from phalanx.train.stop import StopRequestedError, StopSignalFlags, agree_on_stop

# About how long an evaluation goes on after a stop was asked for.
STOP_AGREEMENT_INTERVAL_S = 0.5
# Batches may get slower: ranks never go on for longer without agreeing.
MAX_BATCHES_BETWEEN_AGREEMENTS = 64


def compute_batches_until_agreement(batches: int, took_s: float) -> int:
    """The number of batches before ranks agree again, after `batches` that took `took_s`."""
    if took_s > STOP_AGREEMENT_INTERVAL_S:
        return max(1, batches // 2)
    # Only far below: twice as many must not take too long at once.
    if took_s < STOP_AGREEMENT_INTERVAL_S / 4:
        return min(MAX_BATCHES_BETWEEN_AGREEMENTS, 2 * batches)
    return batches


class EvaluatedState(Protocol):
    """The part of a TrainState that an evaluation reads: a model at a step needs no optimizer to be
    evaluated."""

    @property
    def model(self) -> ParallelModel: ...

    @property
    def seed(self) -> int: ...

    @property
    def step(self) -> int: ...


class Evaluator:
    """Evaluates a state on `held_out`. `source_weights`: see Trainer.

    All ranks may agree to `stop` inside: StopRequestedError then names the signal.
    """

    def __init__(
        self,
        state: EvaluatedState,
        mesh: Mesh,
        *,
        objective: Objective,
        held_out: HeldOutBatches,
        source_weights: Mapping[str, float] | None,
        stop: StopSignalFlags,
        emit: Callable[[Event], None] = lambda event: None,
        fence: RunOwnershipWatch | None = None,
    ) -> None:
        self._emit = emit
        self._state, self._mesh, self._objective = state, mesh, objective
        self._held_out, self._source_weights, self._stop = held_out, source_weights, stop
        self._fence = fence
        self._phases: PhaseTimer = state.model.phases

    def evaluate(self) -> Evaluation:
        """Compute loss and metrics on the held-out batches.

        Collective; training goes on as if it had not been.
        """
        loss_by_source: dict[str, float] = {}
        targets_by_source: dict[str, int] = {}
        metrics_by_source: dict[str, dict[str, SumAndCount]] = {}
        num_batches = self._count_batches()
        progress = ProgressEmitter(self._emit, self._state.step, "evaluate", num_batches)
        counted = itertools.count()
        with (
            self._phases("evaluate"),
            in_evaluation_mode(self._state.model, self._mesh, self._state.seed),
        ):
            for source, batches in self._held_out.items():
                objective = MetricAccumulator(self._objective, self._mesh)
                watched = _report_progress_while_iterating(
                    self._iterate_until_agreed_stop(batches), progress, counted
                )
                sums = self._state.model.evaluate(watched, objective)
                loss, num_targets = self._state.model.reduce_sums(sums)
                # Of every source, with targets or without: it is a collective.
                metrics_by_source[source] = objective.reduce_over_ranks()
                # A source without targets has no mean.
                if num_targets:
                    loss_by_source[source], targets_by_source[source] = loss, num_targets
        # Weighted by targets, the mean is that of all targets together.
        loss = compute_weighted_mean_loss(loss_by_source, self._source_weights or targets_by_source)
        metrics = average_metrics_over_sources(metrics_by_source, self._source_weights)
        return Evaluation(
            self._state.step, loss, sum(targets_by_source.values()), loss_by_source, metrics
        )

    def _count_batches(self) -> int:
        """The number of batches of all sources; 0 if one does not tell how many it has."""
        total = 0
        for batches in self._held_out.values():
            if not isinstance(batches, Sized) or not len(batches):
                return 0
            total += len(batches)
        return total

    def require_known_metric(self, metric: str) -> None:
        """Raise LayoutError, before training, for a metric that the objective does not have: the
        first held-out batch shows it."""
        if metric == LOSS_METRIC:
            return
        objective = MetricAccumulator(self._objective, self._mesh)
        batches = next(iter(self._held_out.values()))
        with (
            # No step took its seconds.
            self._phases.exclude_from_step(),
            self._phases("evaluate"),
            in_evaluation_mode(self._state.model, self._mesh, self._state.seed),
        ):
            self._state.model.evaluate(itertools.islice(batches, 1), objective)
        require_known_metric(metric, list(objective.reduce_over_ranks()))

    def _iterate_until_agreed_stop(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches; all ranks agree from time to time whether to go on: an evaluation may
        outlast a grace period.

        A GPU is waited for then, and ranks for each other; so not before each batch, where batches
        are short. All of them learn the same mean of the time since they last agreed, and so count
        batches alike.
        """
        # Before the first batch as well: a stop may have come before the evaluation.
        wait, remaining, since = 1, 0, time.perf_counter()
        for batch in batches:
            if remaining == 0:
                now = time.perf_counter()
                wait = self._agree_whether_to_stop(wait, now - since)
                remaining, since = wait, now
            remaining -= 1
            yield batch

    def _agree_whether_to_stop(self, waited: int, took_s: float) -> int:
        """The number of batches before all ranks agree again, after `waited` that took `took_s` on
        this one.

        Raises the error with which they agree to end the evaluation.
        """
        # Rank 0 alone looks at the files: it is enough that one rank knows.
        is_fenced = self._fence is not None and self._mesh.rank == 0 and self._fence.is_lost()
        with self._phases("collective", "all_reduce stop flags", axis=WORLD_AXIS):
            reason, sums = agree_on_stop(self._stop, self._mesh, (is_fenced, took_s))
        fenced, total_s = sums
        if fenced and self._fence is not None:
            raise self._fence.run_taken_error()
        if reason is not None:
            raise StopRequestedError(reason)
        # A CPU is waited for anyway: its ranks agree before each batch.
        if self._mesh.device.type == "cpu":
            return 1
        # The sum is equal on all ranks, and so is what follows from it.
        return compute_batches_until_agreement(waited, total_s / self._mesh.world_size)


def _report_progress_while_iterating(
    batches: Iterable[Batch], progress: ProgressEmitter, counted: Iterator[int]
) -> Iterator[Batch]:
    for batch in batches:
        progress.report_progress(next(counted))
        yield batch
