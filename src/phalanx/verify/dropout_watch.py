"""Looks at the dropout layers of a layout's module: does each drop what the definition of masks
says?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.run.one_process.dropout_masks import DropoutMasks


class DropoutMaskChecker:
    """Looks at the dropout layers of a layout's module: does each drop what the definition says,
    for this rank's rows?

    `wrong`: (step, name) -> the fraction of elements that it should have kept and dropped, or the
    other way round.
    """

    def __init__(self, module: nn.Module, seed: int, *, share: int, shares: int) -> None:
        self.wrong: dict[tuple[int, str], float] = {}
        self._definition, self._place = DropoutMasks(module, seed), (share, shares)
        self._step, self._rows, self._places = 0, 0, dict[int, int]()
        module.register_forward_pre_hook(self._find_rows_of_forward, prepend=True, with_kwargs=True)
        for name, part in module.named_modules():
            if (
                isinstance(part, nn.Dropout)
                and 0 < part.p < 1
                and not part.inplace
                and not _is_user_defined_class(type(part))
            ):
                part.register_forward_hook(
                    # `name` is bound here: a closure would see the last one of the loop.
                    lambda part, args, out, name=name: self._check_dropout_mask(
                        name, part, args, out
                    )
                )

    def begin_step(self, step: int, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """`microbatches`: this rank's.

        Which of them a forward is of is told by what it is given: a pipeline goes through them in
        an order of its own, stage by stage.
        """
        self._step, self._rows = step, len(next(iter(microbatches[0].values())))
        self._places = {
            t.data_ptr(): index for index, batch in enumerate(microbatches) for t in batch.values()
        }

    def _find_rows_of_forward(
        self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        index = next(
            (self._places[t.data_ptr()] for t in tensors if t.data_ptr() in self._places), 0
        )
        # A step's rows: microbatch after microbatch, in each one rank's share after another's.
        share, shares = self._place
        self._definition.begin_forward_of_rows(
            self._step, (index * shares + share) * self._rows, self._rows
        )

    def _check_dropout_mask(self, name: str, part: nn.Dropout, args: Any, output: Any) -> None:
        # Inside a backward this is a recomputation: its gradients show what it drew.
        if torch._C._current_graph_task_id() != -1:
            return
        mask = self._definition.draw_next_mask(name, 1 - part.p, args[0].shape)
        # NaN stands in for the hidden states before a later stage's blocks; it is thrown away.
        is_stand_in = part.training and bool(args[0].isnan().any())
        if mask is not None and part.training and not is_stand_in:
            # Where the input is zero, the output does not show whether it was dropped.
            mask = mask.to(output.device)
            off = (((output != 0) != mask) & (args[0] != 0)).double().mean().item()
            if off:
                self.wrong.setdefault((self._step, name), off)


def _is_user_defined_class(kind: type) -> bool:
    """A user's class, which may make something else of what it drops."""
    return any(
        "forward" in vars(base) and base.__module__.split(".")[0] not in ("torch", "phalanx")
        for base in kind.__mro__
    )
