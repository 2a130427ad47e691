"""Names what memory was refused for: how much, by which operation, in which module.

The frames of the error say it and, where autograd's own code asked, what is left of its graph:
nothing is recorded in steps that have memory.
"""

from __future__ import annotations

import heapq
import linecache
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from phalanx.core.units import format_bytes
from phalanx.mesh.logical import full_name
from phalanx.parallel.model import ParallelModel

# The words of torch's allocators, that of the CPU and those of GPUs, and of numpy.
_REQUEST = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTPE]iB)\b", re.IGNORECASE)
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
# Of torch, the caller of autograd's engine: below it there is no Python.
_ENGINE_CALLER, _ROOTS_OF_GRAPH = "_engine_run_backward", "t_outputs"
_OPERATION_HANDLERS = ("__torch_dispatch__", "__torch_function__")
# What keeps torch's compiler away from handlers, and calls them.
_TORCH_WRAPPER = re.compile(r"/torch/(_dynamo/|_compile\.py|_ops\.py|utils/_python_dispatch\.py)")
_MAX_OPERATION_CHARS = 80
_MAX_NODES_TO_PARAMETER = 200
# The innermost frames, in which a local variable may be the parameter that memory is for.
_NUM_FRAMES_WITH_PARAMETER = 3


@dataclass(frozen=True)
class MemoryRequest:
    """`operation`: the expression of Python, or the name of autograd's node. `owner`: where in the
    model that is, in words. Both are empty, and `num_bytes` is None, where nothing tells."""

    num_bytes: int | None
    operation: str
    owner: str

    def describe(self) -> str:
        """ "for 1.0 GiB by F.linear(input, self.weight, self.bias) in blocks.0.up"."""
        words = []
        if self.num_bytes is not None:
            words.append(f"for {format_bytes(self.num_bytes)}")
        if self.operation:
            words.append(f"by {self.operation}")
        if self.owner:
            words.append(self.owner)
        return " ".join(words)


def find_memory_request(error: BaseException, model: ParallelModel | None) -> MemoryRequest:
    """What `error` says was asked for; its modules and parameters are those of `model`."""
    calls = list_calls(error.__traceback__)
    num_bytes = _read_num_bytes(str(error))
    if not calls:
        return MemoryRequest(num_bytes, "", "")
    frames = [frame for frame, _ in calls]
    innermost, summary = calls[-1]
    if innermost.f_code.co_name == _ENGINE_CALLER:
        node = _find_refused_node(innermost.f_locals.get(_ROOTS_OF_GRAPH, ()))
        if node is not None:
            parameter = _find_parameter_behind_node(node, model)
            owner = f"in the backward beside {parameter}" if parameter else "in the backward"
            return MemoryRequest(num_bytes, node.name(), owner)
    return MemoryRequest(num_bytes, _read_expression(summary), _describe_owner(frames, model))


def list_calls(trace: TracebackType | None) -> list[tuple[FrameType, traceback.FrameSummary]]:
    """The frames of a traceback down to the one that called an operation of torch's: not those that
    handle operations, for a tensor subclass or to note them."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    calls = list(zip(frames, traceback.extract_tb(trace), strict=True))
    for number, frame in enumerate(frames):
        if frame.f_code.co_name in _OPERATION_HANDLERS:
            while number > 1 and _TORCH_WRAPPER.search(frames[number - 1].f_code.co_filename):
                number -= 1
            return calls[: max(number, 1)]
    return calls


def _read_num_bytes(message: str) -> int | None:
    request = _REQUEST.search(message)
    if request is None:
        return None
    power = [unit.lower() for unit in _UNITS].index(request[2].lower())
    return int(float(request[1]) * 1024**power)


def _read_expression(frame: traceback.FrameSummary) -> str:
    """The source of the call that a frame is in, shortened; empty where it is not known."""
    if frame.lineno is None or frame.colno is None or frame.end_colno is None:
        return ""
    # Columns count bytes.
    line = linecache.getline(frame.filename, frame.lineno).rstrip().encode()
    if frame.end_lineno == frame.lineno:
        text = line[frame.colno : frame.end_colno].decode()
    else:
        text = line[frame.colno :].decode().partition("(")[0] + "(...)"
    if len(text) > _MAX_OPERATION_CHARS:
        text = f"{text[:_MAX_OPERATION_CHARS]}..."
    return text


def _describe_owner(frames: Sequence[FrameType], model: ParallelModel | None) -> str:
    """The innermost module of `model` whose code is in `frames`, or the parameter that they work
    on."""
    if model is None:
        return ""
    modules = {id(module): name for name, module in model.module.named_modules()}
    for frame in reversed(frames):
        for name in ("self", "module"):
            value = frame.f_locals.get(name)
            if isinstance(value, nn.Module) and id(value) in modules:
                return f"in {full_name(modules[id(value)]) or 'the model'}"
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    for frame in reversed(frames[-_NUM_FRAMES_WITH_PARAMETER:]):
        for value in frame.f_locals.values():
            if isinstance(value, torch.Tensor) and id(value) in parameters:
                return f"for {full_name(parameters[id(value)])}"
    return ""


def _find_refused_node(roots: Sequence[torch.Tensor]) -> Any:
    """The node that autograd's engine had come to when it was refused memory; None if it is not
    known.

    A node gives its saved tensors back when it has run: the first one in the engine's order that
    holds any has not. One that never saves any, which needs little memory, counts as run.
    """
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    num_awaited = _count_gradients_to_await(nodes)
    # The engine runs the newest node first of those that have all of their gradients.
    ready = [(-node._sequence_nr(), number, node) for number, node in enumerate(nodes)]
    heapq.heapify(ready)
    number = len(ready)
    while ready:
        node = heapq.heappop(ready)[-1]
        if _holds_saved_tensors(node):
            return node
        for into, _ in node.next_functions:
            if into is None:
                continue
            num_awaited[into] -= 1
            if num_awaited[into] == 0:
                number += 1
                heapq.heappush(ready, (-into._sequence_nr(), number, into))
    return None


def _count_gradients_to_await(roots: Sequence[Any]) -> dict[Any, int]:
    num_awaited: dict[Any, int] = {}
    visited, pending = set(roots), list(roots)
    while pending:
        for into, _ in pending.pop().next_functions:
            if into is None:
                continue
            num_awaited[into] = num_awaited.get(into, 0) + 1
            if into not in visited:
                visited.add(into)
                pending.append(into)
    return num_awaited


def _holds_saved_tensors(node: Any) -> bool:
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:
            # A node in Python says so that it has run.
            continue
        for each in saved if isinstance(saved, tuple | list) else (saved,):
            # Not unpacked: hooks would bring it from elsewhere, or compute it again.
            if getattr(each, "data", None) is not None:
                return True
    return False


def _find_parameter_behind_node(node: Any, model: ParallelModel | None) -> str:
    """The name of the nearest parameter that the gradients of `node` go to; empty without one."""
    if model is None:
        return ""
    names = {id(parameter): full_name(name) for name, parameter in model.named_parameters()}
    for variable in _iterate_leaves_behind(node):
        if id(variable) in names:
            return names[id(variable)]
    return ""


def _iterate_leaves_behind(node: Any) -> Iterator[torch.Tensor]:
    pending, visited = [node], {node}
    for _ in range(_MAX_NODES_TO_PARAMETER):
        if not pending:
            return
        current = pending.pop(0)
        if type(current).__name__ == "AccumulateGrad":
            yield current.variable
        for into, _ in current.next_functions:
            if into is not None and into not in visited:
                visited.add(into)
                pending.append(into)
