"""What came to each expert in a step, over all ranks; and the biases that even it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import full_name
from phalanx.mesh.mesh import Mesh
from phalanx.mesh.transfer import start_copy_of_numbers_to_host


@dataclass(frozen=True)
class RouterStepLoad:
    """Load of one router in one step: choices of each expert by all tokens of the batch, and how
    many of them it dropped because the expert was full."""

    counts: tuple[int, ...]
    dropped: int


@dataclass
class ReducedRouterLoads:
    """The routers of this rank's stages.

    Found by what they have: `load`, `num_experts` and `move_bias`.
    """

    routers: dict[str, nn.Module]
    mesh: Mesh
    phases: PhaseTimer
    group: dist.ProcessGroup | None
    # By router: [E + 1] on the device, the last one is of dropped choices.
    _counts: dict[str, torch.Tensor] = field(default_factory=dict)
    _read: Callable[[], list[float]] | None = None
    # True while biases have yet to follow `_counts`.
    _is_due: bool = False

    @property
    def has_router_biases(self) -> bool:
        return any(getattr(router, "bias", None) is not None for router in self.routers.values())

    @classmethod
    def collect(
        cls, module: nn.Module, mesh: Mesh, phases: PhaseTimer, *, expected: bool
    ) -> ReducedRouterLoads:
        """`expected`: a stage of the model may have routers.

        Collective: ranks whose stages have none open the group, too, for torch counts the groups
        that each rank has opened.
        """
        routers = {
            full_name(name): part for name, part in module.named_modules() if is_router(part)
        }
        return cls(routers, mesh, phases, mesh.stage_group() if expected or routers else None)

    def reduce_counts_over_ranks(self) -> None:
        """`loads` becomes that of the step, by one all-reduce over the ranks with the same stages.

        On a GPU it is there once the device was waited for, which the reduction of the step's facts
        does next.
        """
        if not self.routers:
            return
        device = self.mesh.device
        parts = [router.load.take(router.num_experts, device) for router in self.routers.values()]  # type: ignore
        counts = torch.cat(parts)
        # Ranks of tp see the same tokens: one of them counts.
        if not self.mesh.is_tp_leader:
            counts = torch.zeros_like(counts)
        if self.group is not None:
            with self.phases("collective", "all_reduce loads of experts", axis="dp"):
                dist.all_reduce(counts, group=self.group)
        self._counts = dict(
            zip(self.routers, counts.split([len(part) for part in parts]), strict=True)
        )
        # Copied beside the step's reduction: reading it here would wait for the device.
        self._read = start_copy_of_numbers_to_host(counts)
        self._is_due = True

    @property
    def last_step_loads(self) -> dict[str, RouterStepLoad]:
        """Loads of each router's experts in the last step; empty before the first one."""
        if self._read is None:
            return {}
        numbers = iter(self._read())
        loads = {}
        for name, part in self._counts.items():
            *counts, dropped = (int(next(numbers)) for _ in part)
            loads[name] = RouterStepLoad(tuple(counts), dropped)
        return loads

    def update_router_biases_once(self) -> None:
        """After a step that is applied, once: a step that was reduced may be skipped."""
        if not self._is_due:
            return
        self._is_due = False
        for name, router in self.routers.items():
            if getattr(router, "bias", None) is not None:
                router.move_bias(self._counts[name][:-1])  # type: ignore[operator]


def is_router(part: nn.Module) -> bool:
    return all(hasattr(part, name) for name in ("load", "num_experts", "move_bias"))
