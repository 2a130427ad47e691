"""That an evaluation leaves the weights that the model trains as they were.

Bits decide, and not how often a tensor was written: weights that are swapped for others and put
back are as they were, and no counter of torch sees a write through `.data`.
"""

from __future__ import annotations

import torch
from torch import nn

from phalanx.mesh.bit_digest import compute_bit_digest, list_unequal_digests
from phalanx.mesh.logical import full_name, get_local_tensor
from phalanx.parallel.model import ParallelModel


class EvaluationChecks:
    """Digests this rank's part of the trained weights of `model` before an evaluation, and once
    more after it.

    `num_digested`: tensors of the last evaluation. `not_looked_at`: what else it read, in words.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._digests: dict[str, torch.Tensor] = {}
        self._replaced: list[str] = []
        # While one of its places has another in it, a tied parameter has two names.
        self._aliases = model.aliases()
        self.num_digested = 0
        self.not_looked_at: list[str] = []
        if model.gathers_weights:
            self.not_looked_at.append(
                "gathered copies of weights, which are freed after the evaluation"
            )

    @torch.no_grad()
    def digest_before_evaluation(self) -> None:
        # Frozen ones may be the model's own to write, as a codebook that follows its inputs.
        trained = {name: p for name, p in self._map_parameters().items() if p.requires_grad}
        self._digests = _digest_parameters(trained)
        self.num_digested = len(trained)
        self._replaced = self._model.list_replaced_parameters()

    @torch.no_grad()
    def find_changed_weights(self) -> list[str]:
        """Names of weights that have other bits than before, or are no longer there. Waits for the
        device.

        Not those of which FSDP puts its own back in the forward: no evaluation has done that.
        """
        before, self._digests = self._digests, {}
        parameters = self._map_parameters()
        after = _digest_parameters({name: p for name, p in parameters.items() if name in before})
        changed = {*list_unequal_digests(before, after), *(before.keys() - after.keys())}
        replaced = {*self._replaced, *self._model.list_replaced_parameters()}
        stored = set(map(self._name_as_stored, replaced))
        return [n for n in before if n in changed and self._name_as_stored(n) not in stored]

    def _name_as_stored(self, name: str) -> str:
        return self._aliases.get(name, name)

    def _map_parameters(self) -> dict[str, nn.Parameter]:
        """By full name, what this rank's module has; tied ones once."""
        # First, because it brings a sharded model to rest.
        self._model.named_parameters()
        return {full_name(name): p for name, p in self._model.module.named_parameters()}


def _digest_parameters(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {
        name: compute_bit_digest(get_local_tensor(p.detach())) for name, p in parameters.items()
    }
