"""Whether trained weights are finite: of others no step is ever applied again."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from phalanx.mesh.logical import full_name, get_local_tensor
from phalanx.parallel.model import ParallelModel


class FiniteWeights:
    """Finds trained weights of `model` that became NaN or infinite.

    A model may have such values by design: in a mask that is a parameter, or in one that no forward
    uses. Those of the first call of `remember` are none that became so: of a run that begins at
    once, of one that goes on from the first step on that was finite.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._at_first: frozenset[str] | None = None
        self._by_design: frozenset[str] = frozenset()

    def remember(self, *, is_beginning: bool) -> None:
        """Remember what is not finite before the first step; later calls do nothing."""
        if self._at_first is None:
            self._at_first = frozenset(self._list_not_finite())
            if is_beginning:
                self._by_design = self._at_first

    def note_finite_step(self) -> None:
        """A step's loss and gradients were finite, with what is remembered."""
        # Not what is not finite now: that may have broken in this step, after it was read.
        self._by_design = self._at_first or frozenset()

    def list_broken(self) -> list[str]:
        """Names of the parameters of which this rank's part is broken, in the model's order. Waits
        for the device."""
        return [name for name in self._list_not_finite() if name not in self._by_design]

    def gather_broken(self) -> Mapping[int, Sequence[str]]:
        """By rank that has any: those of `list_broken`. Collective."""
        by_rank = self._model.mesh.gather_json(self.list_broken())
        return {rank: names for rank, names in enumerate(by_rank) if names}

    def _list_not_finite(self) -> list[str]:
        names: list[str] = []
        tensors: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        named: dict[torch.device, list[str]] = defaultdict(list)
        for name, parameter in self._model.named_parameters():
            tensor = get_local_tensor(parameter.detach())
            if parameter.requires_grad and tensor.numel():
                names.append(full_name(name))
                named[tensor.device].append(names[-1])
                # No norm is there for types of 8 bits.
                tensors[tensor.device].append(tensor if tensor.itemsize > 1 else tensor.float())
        not_finite = set[str]()
        for device, held in tensors.items():
            # One number of each, without a tensor of its size: it is NaN or infinite if one is.
            norms = [norm.double() for norm in torch._foreach_norm(held, math.inf)]
            are_finite = torch.stack(norms).isfinite().tolist()
            pairs = zip(named[device], are_finite, strict=True)
            not_finite |= {name for name, is_finite in pairs if not is_finite}
        return [name for name in names if name in not_finite]


def describe_broken_weights(names: Sequence[str]) -> str:
    """ "embedding.weight and 3 more are not finite"."""
    if len(names) == 1:
        return f"{names[0]} is not finite"
    return f"{names[0]} and {len(names) - 1} more are not finite"
