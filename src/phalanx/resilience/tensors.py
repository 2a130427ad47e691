"""Tensors of a rank that faults change: found by size, changed in their own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def find_first_leaf_module(module: nn.Module) -> nn.Module:
    """The first module without modules of its own, in the order in which they were made."""
    return next(each for each in module.modules() if not list(each.children()))


def find_largest_parameter(module: nn.Module) -> nn.Parameter:
    """The largest parameter that trains; the first of several."""
    return max(
        (each for each in module.parameters() if each.requires_grad), key=lambda each: each.numel()
    )


def find_largest_optimizer_tensor(optimizer: torch.optim.Optimizer) -> Any:
    """The largest tensor of the optimizer's state; the first of several."""
    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if hasattr(value, "numel")
    ]
    return max(tensors, key=lambda each: each.numel())


def flip_bit(tensor: Any, *, bit: int) -> None:
    """Flip one bit of the middle element of a tensor of 32-bit numbers, on any device; of a sharded
    one, of this rank's part."""
    element = _find_middle_element(tensor)
    # On a CPU the same memory, of a GPU a copy.
    on_host = element.cpu()
    on_host.numpy().reshape(1).view("uint32")[0] ^= 1 << bit
    element.copy_(on_host)


def fill_first_element(tensor: Any, value: float) -> None:
    """Write `value` into the first element of a tensor's own memory."""
    tensor.detach().view(-1)[0] = value


def _find_middle_element(tensor: Any) -> Any:
    """A view of one element; autograd does not see what is written there."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    index, rest = [], tensor.numel() // 2
    for size in reversed(tensor.shape):
        rest, place = divmod(rest, size)
        index.append(place)
    return tensor.data[tuple(reversed(index))]
