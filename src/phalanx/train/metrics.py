"""What an objective measures besides its loss: sums and counts over all ranks, so that every
mean is exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from phalanx.core.errors import LayoutError
from phalanx.mesh.mesh import Mesh
from phalanx.mesh.transfer import filled
from phalanx.parallel.model import Batch, Objective
from phalanx.train.evaluation import LOSS, over_sources

SumAndCount = tuple[float, float]
FIX = (
    'return {"accuracy": (how many are right, how many there are)}: two numbers or tensors of no'
    " dimensions for each"
)


class MetricSums:
    """An objective that also adds up what its `metrics(outputs, batch)` gives, if it has that.

    For one evaluation.

    Called instead of the objective, so that outputs are seen while a sharded model's outermost
    weights are whole.
    """

    def __init__(self, objective: Objective, mesh: Mesh) -> None:
        self._objective, self._mesh = objective, mesh
        self._measure: Callable[[Any, Batch], Any] | None = getattr(objective, "metrics", None)
        self._sums: dict[str, torch.Tensor] = {}
        self._saw_outputs = False  # of a pipeline only the last stage does

    def __call__(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        self._saw_outputs = True
        if self._measure is not None:
            for name, pair in _checked(self._measure(outputs, batch)).items():
                here = torch.stack([_as_scalar(number, self._mesh.device) for number in pair])
                self._sums[name] = self._sums[name] + here if name in self._sums else here
        return self._objective(outputs, batch)

    def reduced(self) -> dict[str, SumAndCount]:
        """(sum, count) over all ranks, by name.

        Collective. Raises LayoutError if ranks have other names.
        """
        if self._measure is None:
            return {}
        every = self._mesh.gather_json(list(self._sums) if self._saw_outputs else None)
        told = [(rank, names) for rank, names in enumerate(every) if names is not None]
        first, names = told[0] if told else (0, [])
        for rank, others in told:
            if others != names:
                raise LayoutError(
                    "the objective's metrics have other names on other ranks",
                    why=f"{_listed(names)} on rank {first}, {_listed(others)} on rank {rank}",
                    fix=(
                        "return the same names for every batch; of what a batch has none of, (0, 0)"
                    ),
                )
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        here = torch.cat([self._sums.get(name, nothing) for name in names])
        flat = self._mesh.all_reduce_sum(
            here if self._mesh.counts_samples else torch.zeros_like(here)
        ).tolist()
        return {name: (flat[2 * number], flat[2 * number + 1]) for number, name in enumerate(names)}


def means(
    by_source: Mapping[str, Mapping[str, SumAndCount]], weights: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Each metric over all sources: by `weights` of the sources as the loss is, without them by
    what they count.

    What was counted nowhere has no mean and is left out, and so is what is not finite.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in by_source.values() for name in metrics):
        pairs = {
            source: metrics[name]
            for source, metrics in by_source.items()
            if metrics.get(name, (0, 0))[1]
        }
        counts = {source: count for source, (_, count) in pairs.items()}
        value = over_sources(
            {source: total / count for source, (total, count) in pairs.items()}, weights or counts
        )
        if math.isfinite(value):
            found[name] = value
    return found


def require_metric(wanted: str, names: list[str]) -> None:
    """Raises LayoutError (exit 3) if evaluations have no metric of the name in eval.metric."""
    if wanted == LOSS or wanted in names:
        return
    fix = f"set eval.metric to one of {_listed([LOSS, *names])}"
    if not names:
        fix = (
            "give model.objective a metrics(outputs, batch), see docs/own-code.md, or leave"
            " eval.metric out"
        )
    raise LayoutError(f'evaluations have no metric "{wanted}"', where="eval.metric", fix=fix)


def _checked(found: Any) -> dict[str, tuple[Any, Any]]:
    """A user's metrics, or a LayoutError that says what they should be."""
    if not isinstance(found, Mapping):
        raise LayoutError(f"the objective's metrics returned a {type(found).__name__}", fix=FIX)
    for name, pair in found.items():
        if not isinstance(name, str) or not name.strip() or name == LOSS:
            raise LayoutError(
                f"the objective's metrics have a metric named {name!r}",
                fix='any other name than "loss"',
            )
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(_is_number, pair)):
            raise LayoutError(
                f'the objective\'s metric "{name}" is no pair of a sum and a count', fix=FIX
            )
    return dict(found)


def _as_scalar(number: Any, device: torch.device) -> torch.Tensor:
    """0-d fp64 on `device`; a number of the host is no copy that a GPU would be waited for."""
    if isinstance(number, torch.Tensor) and number.device.type == device.type:
        return number.to(torch.float64)
    return filled((float(number),), device)[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.ndim == 0)


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
