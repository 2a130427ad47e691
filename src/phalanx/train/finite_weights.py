"""Whether trained weights are finite: of others no step is ever applied again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from phalanx.mesh.logical import full_name, get_local_tensor
from phalanx.parallel.model import ParallelModel


class FiniteWeights:
    """Finds trained weights of `model` that became NaN or infinite.

    A model may have infinities by design, in a mask that is a parameter, say: those of when
    `remember_infinities` was first called are none. A NaN always is one.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._infinite: frozenset[str] | None = None

    def remember_infinities(self) -> None:
        """Take the infinities of now as the model's own; before the first step. Later calls do
        nothing."""
        if self._infinite is None:
            largest = self._measure_largest()
            self._infinite = frozenset(name for name in largest if math.isinf(largest[name]))

    def list_broken(self) -> list[str]:
        """Names of the parameters of which this rank's part is broken, in the model's order. Waits
        for the device."""
        self.remember_infinities()
        assert self._infinite is not None
        broken = []
        for name, number in self._measure_largest().items():
            if math.isnan(number) or (math.isinf(number) and name not in self._infinite):
                broken.append(name)
        return broken

    def gather_broken(self) -> Mapping[int, Sequence[str]]:
        """By rank that has any: those of `list_broken`. Collective."""
        by_rank = self._model.mesh.gather_json(self.list_broken())
        return {rank: names for rank, names in enumerate(by_rank) if names}

    def _measure_largest(self) -> dict[str, float]:
        """The largest magnitude of this rank's part of each trained parameter; NaN if there is
        one."""
        held = {}
        for name, parameter in self._model.named_parameters():
            tensor = get_local_tensor(parameter.detach())
            if parameter.requires_grad and tensor.numel():
                held[full_name(name)] = tensor
        if not held:
            return {}
        # One number of each, without a tensor of its size.
        norms = [norm.double() for norm in torch._foreach_norm([*held.values()], math.inf)]
        return dict(zip(held, torch.stack(norms).tolist(), strict=True))


def describe_broken_weights(names: Sequence[str]) -> str:
    """ "embedding.weight and 3 more are not finite"."""
    if len(names) == 1:
        return f"{names[0]} is not finite"
    return f"{names[0]} and {len(names) - 1} more are not finite"
