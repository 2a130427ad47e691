"""FSDP's hooks inside of a block that is recomputed in part: the recomputation must not count what
they do, and whatever else follows operations must see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from phalanx.mesh.compat import hide_fsdp_hooks_from_recompute
from phalanx.parallel.recompute.contexts import make_selective_contexts


class OperatorNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class FSDPState:
    """As torch's class of this name: its methods are a unit's hooks."""

    def __init__(self) -> None:
        self.modes: list[TorchDispatchMode] = []

    def pre_forward(self, module: nn.Module, args: Any) -> None:
        self.modes = _get_current_dispatch_mode_stack()
        torch.ones(2).cumsum(0)


def test_other_modes_see_what_hooks_of_fsdp_do_in_a_recomputed_block() -> None:
    unit, state = nn.Linear(2, 2), FSDPState()
    unit.register_forward_pre_hook(state.pre_forward)
    hide_fsdp_hooks_from_recompute(unit)
    outer, inner = OperatorNames(), OperatorNames()
    first, _ = make_selective_contexts()
    with outer, first, inner:
        before = _get_current_dispatch_mode_stack()
        unit(torch.zeros(2, 2))
        assert _get_current_dispatch_mode_stack() == before
    # Those around the mode of recomputation and within it, in their order.
    assert state.modes == [outer, inner]
    assert "aten::cumsum" in outer.names
    assert "aten::cumsum" in inner.names


def test_modes_are_back_after_a_hook_that_fails() -> None:
    class FailingState(FSDPState):
        def pre_forward(self, module: nn.Module, args: Any) -> None:
            raise ValueError("no")

    FailingState.__name__ = "FSDPState"
    unit = nn.Linear(2, 2)
    unit.register_forward_pre_hook(FailingState().pre_forward)
    hide_fsdp_hooks_from_recompute(unit)
    first, _ = make_selective_contexts()
    with first:
        before = _get_current_dispatch_mode_stack()
        with pytest.raises(ValueError, match=r"^no$"):
            unit(torch.zeros(2, 2))
        assert _get_current_dispatch_mode_stack() == before
