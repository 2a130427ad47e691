"""Metrics of an objective besides its loss: sums and counts over all ranks, so that every mean is
exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from phalanx.core.errors import LayoutError
from phalanx.mesh.mesh import Mesh
from phalanx.mesh.transfer import create_fp64_on_device
from phalanx.parallel.executor import Batch, Objective
from phalanx.train.evaluation import LOSS_METRIC, compute_weighted_mean_loss

SumAndCount = tuple[float, float]
METRICS_FIX = (
    'return {"accuracy": (how many are right, how many there are)}: two numbers or tensors of no'
    " dimensions for each"
)


class MetricAccumulator:
    """An objective that also adds up the results of its `metrics(outputs, batch)`, if it has that.

    For one evaluation.

    Called instead of the objective, so that outputs are seen while a sharded model's outermost
    weights are whole.
    """

    def __init__(self, objective: Objective, mesh: Mesh) -> None:
        self._objective, self._mesh = objective, mesh
        self._measure: Callable[[Any, Batch], Any] | None = getattr(objective, "metrics", None)
        self._sums: dict[str, torch.Tensor] = {}
        # Of a pipeline only the last stage does.
        self._saw_outputs = False

    def __call__(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        self._saw_outputs = True
        if self._measure is not None:
            for name, pair in _require_valid_metrics(self._measure(outputs, batch)).items():
                numbers = torch.stack(
                    [_convert_to_fp64_scalar(number, self._mesh.device) for number in pair]
                )
                if name in self._sums:
                    numbers = self._sums[name] + numbers
                self._sums[name] = numbers
        return self._objective(outputs, batch)

    def reduce_over_ranks(self) -> dict[str, SumAndCount]:
        """(sum, count) over all ranks, by name.

        Collective. Raises LayoutError if ranks have other names.
        """
        if self._measure is None:
            return {}
        names = self._require_same_names_on_ranks()
        if not names:
            return {}
        # Ranks of other stages saw no outputs and add nothing. All metrics go in one collective.
        zeros = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        sums = torch.cat([self._sums.get(name, zeros) for name in names])
        # Tensor-parallel ranks have the same samples: one of them counts. All take part in the sum.
        if not self._mesh.is_tp_leader:
            sums = torch.zeros_like(sums)
        flat = self._mesh.all_reduce_sum(sums).tolist()
        return dict(zip(names, zip(flat[0::2], flat[1::2], strict=True), strict=True))

    def _require_same_names_on_ranks(self) -> list[str]:
        """The metrics' names, which must be the same on all ranks that saw outputs; collective."""
        own_names = None
        if self._saw_outputs:
            own_names = list(self._sums)
        first_rank, names = None, []
        for rank, rank_names in enumerate(self._mesh.gather_json(own_names)):
            # It saw no outputs: an earlier stage of a pipeline.
            if rank_names is None:
                continue
            if first_rank is None:
                first_rank, names = rank, rank_names
            if rank_names != names:
                on_other = f"{_join_names_or_none(rank_names)} on rank {rank}"
                raise LayoutError(
                    "the objective's metrics have other names on other ranks",
                    why=f"{_join_names_or_none(names)} on rank {first_rank}, {on_other}",
                    fix=(
                        "return the same names for every batch; of what a batch has none of, (0, 0)"
                    ),
                )
        return names


def average_metrics_over_sources(
    by_source: Mapping[str, Mapping[str, SumAndCount]], weights: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The mean of each metric over all sources: by `weights` of the sources as the loss is, without
    them by their counts.

    A metric that was counted nowhere has no mean and is left out, and so is one that is not finite.
    """
    means: dict[str, float] = {}
    # A set that keeps the order in which objectives name them.
    names: dict[str, None] = {}
    for metrics in by_source.values():
        names |= dict.fromkeys(metrics)
    for name in names:
        counts: dict[str, float] = {}
        source_means: dict[str, float] = {}
        for source, metrics in by_source.items():
            total, count = metrics.get(name, (0.0, 0.0))
            if count:
                counts[source], source_means[source] = count, total / count
        value = compute_weighted_mean_loss(source_means, weights or counts)
        if math.isfinite(value):
            means[name] = value
    return means


def require_known_metric(metric: str, names: list[str]) -> None:
    """Raise LayoutError (exit 3) if evaluations have no metric of the name in eval.metric."""
    if metric == LOSS_METRIC or metric in names:
        return
    fix = f"set eval.metric to one of {_join_names_or_none([LOSS_METRIC, *names])}"
    if not names:
        fix = (
            "give model.objective a metrics(outputs, batch), see docs/own-code.md, or leave"
            " eval.metric out"
        )
    raise LayoutError(f'evaluations have no metric "{metric}"', where="eval.metric", fix=fix)


def _require_valid_metrics(metrics: Any) -> dict[str, tuple[Any, Any]]:
    """A user's metrics. Raises LayoutError if they are not pairs of numbers by name."""
    if not isinstance(metrics, Mapping):
        raise LayoutError(
            f"the objective's metrics returned a {type(metrics).__name__}", fix=METRICS_FIX
        )
    for name, pair in metrics.items():
        # "loss" would be taken for the loss itself in eval.metric.
        if not isinstance(name, str) or not name.strip() or name == LOSS_METRIC:
            raise LayoutError(
                f"the objective's metrics have a metric named {name!r}",
                fix='any other name than "loss"',
            )
        if (
            not isinstance(pair, tuple | list)
            or len(pair) != 2
            or not all(map(_is_number_or_scalar_tensor, pair))
        ):
            raise LayoutError(
                f'the objective\'s metric "{name}" is no pair of a sum and a count', fix=METRICS_FIX
            )
    return dict(metrics)


def _convert_to_fp64_scalar(number: Any, device: torch.device) -> torch.Tensor:
    """`number` as a 0-d fp64 tensor on `device`; one of the host is not copied in a way that waits
    for the GPU."""
    if isinstance(number, torch.Tensor) and number.device.type == device.type:
        return number.to(torch.float64)
    return create_fp64_on_device((float(number),), device)[0]


def _is_number_or_scalar_tensor(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def _join_names_or_none(names: list[str]) -> str:
    return ", ".join(names) or "none"
