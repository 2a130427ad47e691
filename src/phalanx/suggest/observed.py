"""A module under study: its parts by name, a batch that it takes, and which of its layers feed
which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from phalanx.mesh.logical import full_name
from phalanx.parallel.call.bind_batch import build_forward_arguments
from phalanx.run.one_process.plain_loss import Batch
from phalanx.suggest.flow import ForwardFlow, record_forward_flow


class ObservedModule:
    """A module with the flow of one forward. Constructing it runs that forward."""

    def __init__(self, module: nn.Module, batch: Batch) -> None:
        self.module, self.batch = module, batch
        self.parts = {full_name(name): part for name, part in module.named_modules()}
        self.flow: ForwardFlow = record_forward_flow(module, self.run_forward)

    def run_forward(self) -> Any:
        """The module's output for its batch."""
        args, kwargs = build_forward_arguments(self.module, self.batch)
        return self.module(*args, **kwargs)

    def find_weight_holders(self, weight: torch.Tensor) -> list[str]:
        """Names of all modules that hold `weight`: more than one if it is tied."""
        # torch names a tied parameter once unless it is asked for duplicates.
        parameters = self.module.named_parameters(remove_duplicate=False)
        return [
            full_name(name).rpartition(".")[0]
            for name, parameter in parameters
            if parameter is weight
        ]

    def has_tied_parameter(self, names: Sequence[str]) -> bool:
        """True if a parameter of the named parts has more than one name in the module."""
        parameters = [p for _, p in self.module.named_parameters(remove_duplicate=False)]
        for name in names:
            for parameter in self.parts[name].parameters():
                if sum(parameter is other for other in parameters) > 1:
                    return True
        return False
