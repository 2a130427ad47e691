"""Frees gathered embeddings and the head where the loss has read them, instead of at the end of the
backward, which reads neither: a table's rows are looked up, and the built-in objective makes the
head's gradient in the forward.

They are in the root's unit, which FSDP keeps whole until the backward ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from phalanx.mesh.compat import list_fsdp_groups

READ_IN_FORWARD_ONLY_ATTRIBUTE = "read_in_forward_only"
"""A model with this attribute names the modules whose weights no backward reads."""
FREES_HEAD_ATTRIBUTE = "frees_head"
"""An objective with this attribute calls `free_head` of a CausalOutput when it has read the head,
and has nothing of it read in the backward."""


class FreedHead:
    """The weights of `root` that are freed before the backward. `module`: the model in it."""

    def __init__(self, root: nn.Module, module: nn.Module) -> None:
        names = getattr(module, READ_IN_FORWARD_ONLY_ATTRIBUTE, ())
        holders = [getattr(module, name, None) for name in names]
        self._groups = list_fsdp_groups(root)
        self._parameters = [
            parameter
            for group in self._groups
            for parameter in group.fsdp_params
            if any(parameter._module_info.module is holder for holder in holders)
        ]
        self._is_freed = False
        # Before FSDP's own.
        root.register_forward_pre_hook(self._forget_freed_weights, prepend=True)

    def hand_to_objective(self, objective: Any, outputs: Any) -> Any:
        """`outputs` of the model, which let `objective` free the head if it can."""
        can_free = self._parameters and getattr(objective, FREES_HEAD_ATTRIBUTE, False)
        # Evaluations read the head again and again, gathered once.
        if not can_free or not torch.is_grad_enabled() or not hasattr(outputs, "free_head"):
            return outputs
        return outputs._replace(free_head=self._free)

    def _free(self) -> None:
        self._is_freed = True
        for parameter in self._parameters:
            parameter.free_unsharded_param()

    def _forget_freed_weights(self, *_: Any) -> None:
        """A forward whose backward never came, or failed, leaves a unit that FSDP believes to be
        whole, and would not gather."""
        if self._is_freed:
            self._is_freed = False
            for group in self._groups:
                group._to_sharded()
