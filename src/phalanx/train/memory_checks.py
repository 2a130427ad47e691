"""What training changes alone: parameters and the optimizer's state must have the same bits before
an update as after the one before it."""

from __future__ import annotations

import torch

from phalanx.mesh.bit_digest import compute_bit_digest, list_unequal_digests
from phalanx.mesh.logical import full_name, get_local_tensor
from phalanx.train.state import TrainState


class MemoryChecks:
    """Digests this rank's part of the state after a step, and once more before it is changed.

    Waits for the device when it compares.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._digests: dict[str, torch.Tensor] = {}
        self.digested_step = -1

    @torch.no_grad()
    def digest_after_step(self) -> None:
        """Digest the state as the step that is done has left it."""
        self._digests = self._digest_state()
        self.digested_step = self._state.step

    @torch.no_grad()
    def find_changed_tensors(self) -> list[str]:
        """Names of tensors that have other bits than after the last step, once; none if that was
        not digested."""
        before, self._digests = self._digests, {}
        if not before or self.digested_step != self._state.step:
            return []
        return list_unequal_digests(before, self._digest_state())

    def _digest_state(self) -> dict[str, torch.Tensor]:
        digests: dict[str, torch.Tensor] = {}
        optimizer = self._state.optimizer
        for raw_name, parameter in self._state.model.named_parameters():
            name = full_name(raw_name)
            digests[name] = compute_bit_digest(get_local_tensor(parameter.detach()))
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    digests[f"{name} {slot}"] = compute_bit_digest(get_local_tensor(value))
        return digests
