"""Finds the module whose backward makes the first gradient that is not finite, while a step that
was not finite is computed again.

The nodes of autograd's graph are looked at when they have run: nothing is put into the graph, no
tensor is changed and none is replaced, so that the gradients have the bits that they have without
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from phalanx.mesh.c10d_calls import HandlerDepth, Operator, handling_c10d_calls
from phalanx.mesh.logical import full_name, get_local_tensor
from phalanx.parallel.model import ParallelModel

# In place of the number of an origin: the gradient came from the next stage of a pipeline.
_GIVEN = 1 << 62
OBJECTIVE = "the objective"


@dataclass
class NonFiniteGradient:
    """The first gradient of a rank's backwards that is not finite and reaches a parameter.

    `order` counts the operations of its microbatch's backward in its stage. `operation` is
    autograd's name. `is_sum`: what came to the operation's output was finite one by one, and the
    sum is not. `may_be_of_others`: ranks exchanged something since the operation before. Rows are
    those of the microbatch, none where no tensor between modules has them.
    """

    microbatch: int
    stage: int
    order: int
    module: str
    operation: str
    is_sum: bool
    may_be_of_others: bool
    rows: list[int] = field(default_factory=list)


class BackwardWatch:
    """Looks at all backwards inside of `watching`. `first`: what it has found, and of several the
    one that the others may have come from."""

    def __init__(self, model: ParallelModel) -> None:
        self.first: NonFiniteGradient | None = None
        self._model = model
        self._stages = None if model.pipeline is None else model.pipeline.staged.stage_forward
        self._forward: _WatchedForward | None = None
        self._handles: list[Any] = []
        self._collectives = _CollectiveCalls()

    @contextmanager
    def watching(self) -> Iterator[None]:
        root = self._model.module_with_objective
        self._handles.append(root.register_forward_pre_hook(self._begin_forward))
        for name, module in _iterate_modules_outside_compiled_code(self._model.module, "", set()):
            enter = functools.partial(self._enter_module, full_name(name))
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave_module))
        self._handles.append(root.register_forward_hook(self._end_forward))
        try:
            with handling_c10d_calls(self._collectives, HandlerDepth.WATCHES):
                yield
        finally:
            # Those of the graph as well: a cast of a weight may be in that of a later step.
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._forward = None

    def _begin_forward(self, root: nn.Module, inputs: Any) -> None:
        self._forward, stage = None, 0
        if self._stages is not None:
            if self._stages.is_inferring_shapes:
                return
            stage = self._stages.running_stage
        microbatch = self._model.phases.microbatch
        is_last = self._stages is None or self._stages.is_last_stage
        self._forward = _WatchedForward(microbatch, stage, is_last)

    # Hooks of the forward must compute nothing: a selective recomputation counts operations, and
    # a recomputation calls modules, and so hooks, once more.

    def _enter_module(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._forward is not None:
            self._forward.enter_module(name, module, (args, kwargs))

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._forward is not None:
            self._forward.leave_module(module, output)

    def _end_forward(self, root: nn.Module, inputs: Any, output: Any) -> None:
        forward, self._forward = self._forward, None
        if forward is None:
            return
        forward.leave_all_modules()
        for node, watched in forward.list_graph(output):
            look = functools.partial(self._look_at_node, forward, watched)
            self._handles.append(node.register_hook(look))

    def _look_at_node(
        self,
        forward: _WatchedForward,
        node: _WatchedNode,
        gradients_to_inputs: Sequence[torch.Tensor | None],
        gradients_of_outputs: Sequence[torch.Tensor | None],
    ) -> None:
        # Microbatches of a pipeline share the casts of weights.
        if self._model.phases.microbatch != forward.microbatch:
            return
        num_rows = self._model.plan.micro_batch_size
        forward.count_operation(may_be_of_others=self._collectives.take_count() > 0)
        given = forward.trace_outputs(node, gradients_of_outputs, num_rows)
        found = forward.trace_inputs(node, gradients_to_inputs, given)
        if found is not None and (self.first is None or _sort_key(found) < _sort_key(self.first)):
            self.first = found


class _CollectiveCalls:
    """Counts the collectives that this rank takes part in."""

    def __init__(self) -> None:
        self._num_calls = 0

    def handle(self, operator: Operator, args: Sequence[Any], proceed: Callable[[], Any]) -> Any:
        self._num_calls += 1
        return proceed()

    def take_count(self) -> int:
        """Those since the last time that it was asked for."""
        num_calls, self._num_calls = self._num_calls, 0
        return num_calls


@dataclass(frozen=True)
class _ModuleCall:
    """A call of a module: autograd's nodes [begin, end) were made in it."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class _WatchedNode:
    """A node of the graph. `sequence` numbers nodes as they are made. `edges`: for each input the
    node that its gradient goes to, and which of that node's outputs it is of; a number of None for
    a parameter, or another tensor that nothing has computed."""

    number: int
    sequence: int
    operation: str
    edges: tuple[tuple[int | None, int] | None, ...]
    is_root: bool
    outputs_between_modules: frozenset[int]


class _WatchedForward:
    """A forward of a microbatch in a stage, and the backward that follows it."""

    def __init__(self, microbatch: int, stage: int, is_last_stage: bool) -> None:
        self.microbatch = microbatch
        self._stage, self._is_last_stage = stage, is_last_stage
        self._calls: list[_ModuleCall] = []
        self._open_calls: list[tuple[nn.Module, str, int]] = []
        # Outputs of nodes that are handed to modules or returned by them.
        self._between_modules: dict[Any, set[int]] = {}
        self._order, self._may_be_of_others = 0, False
        # By number of a node and of its output: the first origin of what comes to it.
        self._tainted: dict[tuple[int, int], int] = {}
        self._origins: dict[int, NonFiniteGradient] = {}

    def enter_module(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._open_calls.append((module, name, torch._C._autograd._get_sequence_nr()))
        self._note_tensors_between_modules(inputs)

    def leave_module(self, module: nn.Module, output: Any) -> None:
        self._note_tensors_between_modules(output)
        # A forward that ended early, as that of a stage does, has left those inside as well.
        while self._open_calls and self._close_call() is not module:
            pass

    def leave_all_modules(self) -> None:
        while self._open_calls:
            self._close_call()

    def _close_call(self) -> nn.Module:
        module, name, begin = self._open_calls.pop()
        self._calls.append(_ModuleCall(name, begin, torch._C._autograd._get_sequence_nr()))
        return module

    def _note_tensors_between_modules(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                continue
            # To ask for the node of a view of what was changed in place makes a new one.
            if tensor._is_view() and tensor._version > 0:
                continue
            if tensor.grad_fn is not None:
                self._between_modules.setdefault(tensor.grad_fn, set()).add(tensor.output_nr)

    def list_graph(self, output: Any) -> list[tuple[Any, _WatchedNode]]:
        """All nodes behind `output` but for those that gather the gradients of leaves."""
        roots = [
            leaf.grad_fn
            for leaf in tree_leaves(output)
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
        ]
        numbers: dict[Any, int] = {}
        pending = list(roots)
        while pending:
            node = pending.pop()
            if node in numbers or _is_leaf(node):
                continue
            numbers[node] = len(numbers)
            pending += [into for into, _ in node.next_functions if into is not None]
        graph = []
        for node, number in numbers.items():
            edges = [
                None if into is None else (numbers.get(into), output_nr)
                for into, output_nr in node.next_functions
            ]
            between = frozenset(self._between_modules.get(node, ()))
            watched = _WatchedNode(
                number, node._sequence_nr(), node.name(), tuple(edges), node in roots, between
            )
            graph.append((node, watched))
        # They would keep the graph alive.
        self._between_modules.clear()
        return graph

    def count_operation(self, *, may_be_of_others: bool) -> None:
        """The next operation of the backward has run."""
        self._order += 1
        self._may_be_of_others = may_be_of_others

    def trace_outputs(
        self, node: _WatchedNode, gradients: Sequence[torch.Tensor | None], num_rows: int
    ) -> int | None:
        """The origin of what `node` is given, if that is not finite, and the rows of it."""
        first = None
        for index, gradient in enumerate(gradients):
            if gradient is None or is_finite(gradient):
                continue
            origin = self._tainted.get((node.number, index))
            if origin is None:
                is_given = node.is_root and not self._is_last_stage
                origin = _GIVEN if is_given else self._add_origin(node, is_sum=True)
            if index in node.outputs_between_modules and origin != _GIVEN:
                found = self._origins[origin]
                found.rows = found.rows or find_rows_not_finite(gradient, num_rows)
            first = origin if first is None else min(first, origin)
        return first

    def trace_inputs(
        self, node: _WatchedNode, gradients: Sequence[torch.Tensor | None], given: int | None
    ) -> NonFiniteGradient | None:
        """Hand on the origin `given`, or that a new one is here, to where gradients that are not
        finite go. Returns the origin if one of them is a parameter's."""
        origin, reaches_leaf = given, False
        for gradient, edge in zip(gradients, node.edges, strict=False):
            if edge is None:
                continue
            number, output_nr = edge
            if gradient is None:
                # The gradient of a weight that a pipeline makes later, of what is given here.
                reaches_leaf |= number is None and given is not None
                continue
            if is_finite(gradient):
                continue
            if origin is None:
                origin = self._add_origin(node, is_sum=False)
            if number is None:
                reaches_leaf = True
                continue
            key = (number, output_nr)
            self._tainted[key] = min(origin, self._tainted.get(key, origin))
        if not reaches_leaf or origin is None or origin == _GIVEN:
            return None
        return self._origins[origin]

    def _add_origin(self, node: _WatchedNode, *, is_sum: bool) -> int:
        self._origins[self._order] = NonFiniteGradient(
            self.microbatch,
            self._stage,
            self._order,
            self._find_module_of_node(node),
            node.operation,
            is_sum,
            self._may_be_of_others,
        )
        return self._order

    def _find_module_of_node(self, node: _WatchedNode) -> str:
        """The innermost one whose call has made it; the objective where that is none."""
        calls = [call for call in self._calls if call.begin <= node.sequence < call.end]
        if not calls:
            return OBJECTIVE
        return max(calls, key=lambda call: (call.begin, -call.end)).name or "the model"


def _sort_key(found: NonFiniteGradient) -> tuple[int, int, bool, int]:
    """What a stage of a pipeline is given in a backward, those after it have made; what comes out
    of a collective, mostly another rank."""
    return found.microbatch, -found.stage, found.may_be_of_others, found.order


def choose_first(by_rank: Sequence[NonFiniteGradient | None]) -> int | None:
    """The rank whose finding the others may have come from, None if there is none: ranks that
    exchange what is in a backward do the same operations, one after another."""
    keys = [(*_sort_key(each), rank) for rank, each in enumerate(by_rank) if each is not None]
    return min(keys)[-1] if keys else None


def find_rows_not_finite(tensor: torch.Tensor, num_rows: int) -> list[int]:
    """The rows of a tensor with a value that is not finite; none if its rows are not those of a
    microbatch."""
    local = get_local_tensor(tensor.detach())
    if local.dim() < 2 or local.shape[0] != num_rows:
        return []
    rows: list[int] = (~local.isfinite().flatten(1).all(dim=1)).nonzero().flatten().tolist()
    return rows


def is_finite(tensor: torch.Tensor) -> bool:
    """True if all of this rank's values are finite, and of tensors that have none to look at."""
    values = get_local_tensor(tensor.detach())
    is_plain = type(values) is torch.Tensor and values.layout is torch.strided
    if not is_plain or values.is_meta or values.numel() == 0:
        return True
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point():
        return True
    if values.itemsize == 1:
        # Comparisons are not made in fp8.
        values = values.float()
    # Both are NaN if one value is. `isfinite` would need memory for each value.
    least, largest = torch.aminmax(values)
    return bool(least.isfinite() & largest.isfinite())


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _iterate_modules_outside_compiled_code(
    module: nn.Module, name: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of all modules but for those that are compiled and those inside of them:
    with a hook they would be compiled anew, and round otherwise."""
    # By name: torch imports its compiler when somebody asks for the class.
    is_compiled = type(module).__name__ == "OptimizedModule"
    if module in seen or is_compiled or module._compiled_call_impl is not None:
        return
    seen.add(module)
    yield name, module
    for child_name, child in module.named_children():
        whole_name = f"{name}.{child_name}".removeprefix(".")
        yield from _iterate_modules_outside_compiled_code(child, whole_name, seen)
