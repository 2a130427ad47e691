"""MissingGradients: a parameter without a gradient on every rank is left alone, as by one process.

Ranks add up tensors of one length, so a reduction takes zeros for a gradient that a rank lacks; an
optimizer would then decay a parameter that nobody used. One number in the step's reduction says how
many ranks lack some gradient. Only where they are enough for one that nobody has do the ranks ask
each other which these are.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
import torch.distributed as dist
from torch import nn

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import full_name
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.optimizer_params import OptimizerParameterMap


class MissingGradients:
    """Parameters of this rank's module whose gradient of a step is zeros in place of none."""

    def __init__(self) -> None:
        self._found: set[nn.Parameter] = set()
        self._lacked: set[nn.Parameter] = set()

    def begin_step(self) -> None:
        self._found.clear()
        self._lacked.clear()

    def note_after_backward(self, parameter: nn.Parameter, has_gradient: bool) -> None:
        """Whether a backward has left a gradient, which one microbatch of a step is enough for."""
        (self._found if has_gradient else self._lacked).add(parameter)

    def note_before_reduction(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before a reduction of the step's gradients fills in zeros; another one may have done so
        already."""
        self._lacked.update(parameter for parameter in parameters if parameter.grad is None)

    @property
    def is_any(self) -> bool:
        """True if this rank lacks the gradient of some parameter."""
        return not self._lacked <= self._found

    @torch.no_grad()
    def remove_those_that_all_ranks_lack(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        params: OptimizerParameterMap,
        mesh: Mesh,
        phases: PhaseTimer,
        *,
        copies: Container[str],
    ) -> None:
        """Set gradients to None that no rank has. `named`: what an optimizer updates; `copies`:
        names of those that several stages hold. Collective.

        The host waits for the device, where ranks lack gradients.
        """
        lacked = {params.find_optimizer_parameter(p) for p in self._lacked - self._found}
        trained = {full_name(name): p for name, p in named if p.requires_grad}
        has_gradient = [float(p.grad is not None and p not in lacked) for p in trained.values()]
        counts = torch.tensor(has_gradient, dtype=torch.float32, device=mesh.device)
        layout = mesh.layout.gradient_reduction_layout
        with phases("collective", "all_reduce which gradients there are", axis="dp"):
            # One after the other: no group of both axes is opened for a sum so rare.
            for axis in ("dp_replicate", "dp_shard"):
                if getattr(layout, axis) > 1:
                    dist.all_reduce(counts, group=mesh.submesh(axis).get_group())
            num_ranks = dict(zip(trained, counts.tolist(), strict=True))
        for name, parameter in trained.items():
            # What several stages hold (embedding and head) is used by one of them at least.
            if not num_ranks[name] and name not in copies:
                parameter.grad = None
