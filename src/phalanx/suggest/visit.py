"""Runs forwards of a module to see one group of layers at work: what enters it, and what drops
between its layers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from phalanx.suggest.layer_groups import LayerGroup
from phalanx.suggest.observed import ObservedModule


@dataclass
class RecordedModuleCall:
    """A call of one module in a forward, with some layers inside detached from what follows them.

    `entered` is its first argument of activations, detached from what made it; `row_output` is as
    the row made it.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    entered: torch.Tensor | None = None
    output: Any = None
    row_input: torch.Tensor | None = None
    row_output: torch.Tensor | None = None
    column_inputs: list[torch.Tensor] = field(default_factory=list)
    num_calls: int = 0


def record_module_call(observed: ObservedModule, group: LayerGroup) -> RecordedModuleCall:
    """The visit of the group's home, with its layers and what enters the home detached."""
    visit, home = RecordedModuleCall(), observed.parts[group.home]

    def enter_home(part: nn.Module, args: Any, kwargs: Any) -> Any:
        visit.num_calls += 1
        # Detached, for the trial calls the module with them again.
        visit.args = tuple(_detach_if_tensor(value) for value in args)
        visit.kwargs = {key: _detach_if_tensor(value) for key, value in kwargs.items()}
        args, kwargs = list(args), dict(kwargs)
        slots = [(args, index) for index in range(len(args))] + [(kwargs, key) for key in kwargs]
        for holder, key in slots:
            if _is_activation(holder[key]):
                # A leaf: gradients with respect to it say what depends on it.
                visit.entered = holder[key] = holder[key].detach().requires_grad_()
                break
        return tuple(args), kwargs

    def leave_home(part: nn.Module, args: Any, output: Any) -> None:
        visit.output = output

    def record_column(part: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        visit.column_inputs.append(args[0])
        return output.detach().requires_grad_()

    def record_row(part: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        visit.row_input, visit.row_output = args[0], output.detach()
        return output.detach().requires_grad_()

    handles = [observed.parts[name].register_forward_hook(record_column) for name in group.columns]
    handles.append(observed.parts[group.row].register_forward_hook(record_row))
    handles.append(home.register_forward_pre_hook(enter_home, with_kwargs=True))
    handles.append(home.register_forward_hook(leave_home))
    with _remove_hooks_at_exit(handles):
        observed.run_forward()
    return visit


def has_dropout_between(observed: ObservedModule, group: LayerGroup) -> bool:
    """True if a dropout layer may run between columns and row: masks of parts are not parts of
    the whole's."""
    dropping = [part for part in observed.parts[group.home].modules() if _is_dropout_layer(part)]
    layers = {observed.parts[name] for name in group.names}
    # Attention that drops by itself, say: where in its forward is out of sight.
    if any(layers & set(part.modules()) for part in dropping):
        return True
    open_columns: set[str] = set()
    drops: list[nn.Module] = []

    def open_column(name: str, *_: object) -> None:
        open_columns.add(name)

    def close_columns(*_: object) -> None:
        open_columns.clear()

    def record_drop(part: nn.Module, *_: object) -> None:
        # In evaluation mode nothing is dropped, but the layer is called.
        if open_columns:
            drops.append(part)

    handles = []
    for name in group.columns:
        hook = functools.partial(open_column, name)
        handles.append(observed.parts[name].register_forward_hook(hook))
    handles.append(observed.parts[group.row].register_forward_pre_hook(close_columns))
    handles += [part.register_forward_hook(record_drop) for part in dropping]
    with _remove_hooks_at_exit(handles):
        observed.run_forward()
    return bool(drops)


@contextmanager
def _remove_hooks_at_exit(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_dropout_layer(part: nn.Module) -> bool:
    # Other modules keep a probability as `dropout`: torch's attention and recurrent layers do.
    is_dropout = isinstance(part, nn.modules.dropout._DropoutNd)
    probability = getattr(part, "p" if is_dropout else "dropout", 0.0)
    return isinstance(probability, float) and probability > 0


def _detach_if_tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return value


def _is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim >= 2
