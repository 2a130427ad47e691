"""A module's own forward runs in every stage, and computes only that stage's blocks.

A rank keeps the user's module, with the blocks of its own stages in it. What others hold of it is
emptied: blocks pass on what they are given, and parameters outside the blocks are placeholders. A
stage's forward begins as the user wrote it (masks, positions, tables of angles: cheap, and the same
on every rank), takes the hidden states that have arrived in place of the input of its first block,
and ends where the first block after its own would begin.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.core.errors import LayoutError
from phalanx.mesh.casts import disabling_cast_cache
from phalanx.mesh.logical import get_local_tensor

BEFORE, INSIDE, AFTER = "before", "between", "after"
# A block of another stage has the parts that it had under this attribute, emptied as well.
RELEASED_SUBMODULES_ATTRIBUTE = "_phalanx_released"


class StageBoundaryReached(BaseException):
    """Leaves a user's forward where the next stage goes on.

    No Exception: `except Exception` must not catch it.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class StageCallState:
    """The blocks [first, end) of one call, and what has arrived for the first of them (None: the
    first stage)."""

    stage: int
    first: int
    end: int
    arrived: torch.Tensor | None
    is_last: bool = False
    position: str = BEFORE
    enables_grad: bool = False
    keeps_casts: bool = True
    num_called: int = 0
    restore: Callable[[], None] = lambda: None
    """Undoes what shape inference did to parameters used before the blocks."""


# Why not a module for each stage: torch's stages are modules that somebody must write for each
# model, or traces of it. With the user's own forward, names, hooks, rules, recompute, FSDP and
# checkpoints see the module that they know.
@dataclass
class StageForward:
    """State that blocks and placeholders of one rank's module read: which stage is being
    computed, and where it stands."""

    num_blocks: int
    num_stages: int
    window: StageCallState | None = None
    is_inferring_shapes: bool = False
    """Look whether anything but the hidden states goes from stage to stage: it would be NaN."""
    outside: tuple[tuple[nn.Module, str], ...] = ()
    """The parameters outside the blocks that this rank holds: modules, and names in them."""
    can_look: bool = True
    """False where blocks are compiled: their code is not to be looked into."""
    _classes: dict[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    _blocks: list[nn.Module] = field(default_factory=list)

    @property
    def is_last_stage(self) -> bool:
        """True if the stage that is being computed is the last one."""
        return self._require_running_stage().is_last

    @property
    def running_stage(self) -> int:
        """The stage that is being computed."""
        return self._require_running_stage().stage

    @property
    def is_computing_own_part(self) -> bool:
        """False where what is computed is none of the stage's numbers: shapes are inferred, or what
        only the first stage has is missing."""
        if self.window is None or self.is_inferring_shapes:
            return False
        return self.window.arrived is None or self.window.position != BEFORE

    @contextmanager
    def running_as_stage(
        self, stage: int, blocks: tuple[int, int], arrived: torch.Tensor | None
    ) -> Iterator[None]:
        """Inside, the module's forward is that of a stage."""
        is_last = stage + 1 == self.num_stages
        window = StageCallState(
            stage, *blocks, arrived, is_last, enables_grad=torch.is_grad_enabled()
        )
        window.keeps_casts = torch.is_autocast_cache_enabled()
        before, self.window = self.window, window
        if self.is_inferring_shapes and arrived is not None:
            window.restore = self._detach_parameters_outside_blocks()
        # What leads to the blocks has no gradient but in the first stage.
        looks = self.is_inferring_shapes and arrived is not None and self.can_look
        without = arrived is not None
        with (
            torch.set_grad_enabled(window.enables_grad and not without),
            disabling_cast_cache(without),
        ):
            try:
                with _RefuseDataDependentResultsMode(window) if looks else nullcontext():
                    yield
            finally:
                window.restore()
                self.window = before

    def _detach_parameters_outside_blocks(self) -> Callable[[], None]:
        """A rank may hold what comes before the blocks, for another stage: this one's gradients
        would not reach it."""
        hidden = [(part, key, part._parameters[key]) for part, key in self.outside]
        for part, key, parameter in hidden:
            assert parameter is not None
            nan = torch.full((), math.nan, dtype=parameter.dtype, device=parameter.device).expand(
                parameter.shape
            )
            part._parameters[key] = nn.Parameter(nan, requires_grad=False)

        def restore() -> None:
            # Called where the input arrives and once more at the end of the window, which then
            # finds nothing.
            while hidden:
                part, key, parameter = hidden.pop()
                part._parameters[key] = parameter

        return restore

    def intercept_block(self, block: nn.Module, index: int) -> None:
        """From now on calls of `block`, whose class becomes one derived from its own, go through
        `_call_block_of_stage_or_skip`."""
        self._blocks.append(block)
        block_type = type(block)
        if block_type not in self._classes:
            self._classes[block_type] = _derive_block_intercepting_class(block_type)
        block.__dict__["_phalanx_stage_forward"] = functools.partial(
            self._call_block_of_stage_or_skip, index, functools.partial(block_type.__call__, block)
        )
        block.__class__ = self._classes[block_type]

    def _call_block_of_stage_or_skip(
        self, index: int, compute: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        window = self._require_running_stage()
        if not args or not isinstance(args[0], torch.Tensor):
            raise LayoutError(
                f"block {index} is not given hidden states first, and a stage hands on nothing"
                " else",
                fix="call blocks with them as the first argument, by position",
            )
        self._require_block_called_in_order(window, index)
        hidden = args[0]
        if index >= window.end and not window.is_last:
            self._require_no_placeholder_use(hidden, f"what block {index} is given")
            raise StageBoundaryReached(hidden)
        # This stage is the head alone: the last block of another one is where it begins.
        if index == self.num_blocks - 1 and window.first == self.num_blocks:
            hidden = self._use_arrived_input(window, hidden)
            window.position = AFTER
            return hidden
        if index < window.first:
            return hidden
        if index == window.first:
            hidden = self._use_arrived_input(window, hidden)
            window.position = INSIDE
        for value in (hidden, *tree_leaves((args[1:], kwargs))) if self.is_inferring_shapes else ():
            self._require_no_placeholder_use(value, f"an argument of block {index}")
        output = compute(hidden, *args[1:], **kwargs)
        if not isinstance(output, torch.Tensor):
            raise LayoutError(
                f"block {index} returns {type(output).__name__}, and a stage hands on one tensor",
                fix="have blocks return the hidden states alone",
            )
        if index == self.num_blocks - 1:
            window.position = AFTER
            # The last stage is the head alone.
            if not window.is_last:
                self._require_no_placeholder_use(output, "the last block's output")
                raise StageBoundaryReached(output)
        return output

    def _use_arrived_input(self, window: StageCallState, hidden: torch.Tensor) -> torch.Tensor:
        if window.arrived is None:
            return hidden
        window.restore()
        # The context `open` restores what was before.
        torch.set_grad_enabled(window.enables_grad)
        torch.set_autocast_cache_enabled(window.keeps_casts)
        arrived: torch.Tensor = (
            _StageInputFunction.apply(window.arrived) if window.enables_grad else window.arrived
        )
        return arrived

    def _require_block_called_in_order(self, window: StageCallState, index: int) -> None:
        if index != window.num_called:
            if window.num_called < self.num_blocks:
                expected = f"block {window.num_called}"
            else:
                expected = "no other"
            raise LayoutError(
                f"block {index} is called where {expected} is due, and stages compute each block"
                " once, in order",
                fix=(
                    "call the blocks in the order in which they are registered, or do without"
                    " parallel.pp"
                ),
            )
        window.num_called += 1

    def require_all_blocks_called(self) -> None:
        """When a forward has returned that no later stage goes on with."""
        window = self.window
        if window is not None and window.num_called < self.num_blocks:
            raise LayoutError(
                f"the model's forward ended before block {window.num_called} of {self.num_blocks}",
                fix="have it call all of its blocks, in order",
            )

    def _require_running_stage(self) -> StageCallState:
        # 0 or more while a backward runs: then only a recomputation calls blocks.
        if self.window is None and torch._C._current_graph_task_id() >= 0:
            raise LayoutError(
                "the model's own forward recomputes its blocks (torch.utils.checkpoint), which"
                " stages cannot follow",
                fix="set train.recompute=full instead",
            )
        if self.window is None:
            raise LayoutError(
                "the model is cut into stages, and no rank can call it alone",
                fix=(
                    "call forward_backward, evaluate or call_then of what parallelize returned, on"
                    " every rank"
                ),
            )
        return self.window

    def _require_no_placeholder_use(self, value: Any, role: str) -> None:
        """A stage's placeholders are NaN, and so is all that is made of them."""
        if not self.is_inferring_shapes or self.window is None or self.window.arrived is None:
            return
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and bool(value.isnan().any())
        ):
            if self._has_nonfinite_input_or_weight(self.window.arrived):
                return
            raise LayoutError(
                f"{role} depends on what comes before the blocks, which stage {self.window.stage}"
                " does not have",
                why="stages hand on one tensor, the hidden states",
                fix="compute it from the inputs inside of each block, or do without parallel.pp",
            )

    def _has_nonfinite_input_or_weight(self, arrived: torch.Tensor) -> bool:
        """True if what arrived, or a weight, is not finite: training has diverged, and a NaN
        says nothing about the model."""
        tensors = (
            get_local_tensor(parameter)
            for block in self._blocks
            for parameter in block.parameters()
        )
        return any(not bool(tensor.isfinite().all()) for tensor in (arrived, *tensors))

    def require_outputs_without_placeholders(self, outputs: Any) -> None:
        """After shape inference of the last stage."""
        for leaf in tree_leaves(outputs):
            self._require_no_placeholder_use(leaf, "the model's output")

    def require_allowed_placeholder_use(self, name: str, *, in_block: bool = False) -> None:
        """A placeholder is used: right before the blocks of a later stage, whose result is thrown
        away."""
        window = self._require_running_stage()
        if window.arrived is not None and window.position == BEFORE:
            return
        key = "parallel.first_stage" if window.position == BEFORE else "parallel.last_stage"
        fix = f'set {key}=["{name.rpartition(".")[0] or name}"]'
        if in_block:
            fix = (
                "use a block's weights in the block's own forward alone, or do without parallel.pp"
            )
        elif window.position == INSIDE:
            fix = "make it a part of the blocks, or do without parallel.pp"
        raise LayoutError(
            f"{name} is used {window.position} the blocks, and stage {window.stage} does not"
            " hold it",
            fix=fix,
        )


class _RefuseDataDependentResultsMode(TorchDispatchMode):
    """A mode for shape inference, before a stage's input has arrived, that refuses to make numbers
    or booleans of what is not there.

    Whatever is computed of NaN is NaN, and is found; a comparison with it is simply false.
    """

    def __init__(self, window: StageCallState) -> None:
        super().__init__()
        self._window = window

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._window.position == BEFORE and _is_data_dependent_result(result):
            inputs = [
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            ]
            if any(t.is_floating_point() and bool(_contains_nan(t.detach()).any()) for t in inputs):
                raise LayoutError(
                    "before the blocks the model decides something by what stage"
                    f" {self._window.stage} does not have ({func})",
                    why="a later stage has neither the embedding nor what is made of it",
                    fix="decide by the inputs, or inside of a block, or do without parallel.pp",
                )
        return result


def _is_data_dependent_result(result: Any) -> bool:
    """True for a result with a number of Python, or with a tensor that is not of floats."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            if not leaf.is_floating_point():
                return True
        elif isinstance(leaf, bool | int | float):
            return True
    return False


def _contains_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor != tensor


class _StageInputFunction(torch.autograd.Function):
    """The input of a stage as a tensor that autograd has computed: a block may change it in
    place."""

    @staticmethod
    def forward(ctx: Any, arrived: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return arrived.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def _derive_block_intercepting_class(original: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._phalanx_stage_forward(*args, **kwargs)

    def find(self: nn.Module, name: str) -> Any:
        submodule = self.__dict__.get(RELEASED_SUBMODULES_ATTRIBUTE, {}).get(name)
        if submodule is None:
            return original.__getattr__(self, name)
        return submodule

    # On a class: Python looks `__call__` up in the type, never in the object.
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (original,), {"__call__": call, "__getattr__": find, **names})
