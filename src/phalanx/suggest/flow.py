"""Which linear layers of a module feed which others, and which of their features: seen by
gradients, not by names.

A forward is run once with the output of each linear layer cut off from what made it. A gradient
from the input of one layer then reaches the outputs of those that feed it with no other layer
between, and of these the features it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from phalanx.mesh.linear import is_linear_layer
from phalanx.mesh.logical import full_name


@dataclass
class ForwardFlow:
    """One forward: the input and the detached output of each layer that was called once, by its
    name."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    called_often: set[str] = field(default_factory=set)
    looked_up: dict[str, torch.Tensor] = field(default_factory=dict)  # embedding -> ids
    result: Any = None

    def find_feeding_layers(self, tensor: torch.Tensor) -> set[str]:
        """Names of the layers (and embeddings) whose outputs reach `tensor` directly."""
        if not tensor.requires_grad or not self.outputs:
            return set()
        names = list(self.outputs)
        outputs = list(self.outputs.values())
        if any(tensor is output for output in outputs):
            return {name for name, output in self.outputs.items() if output is tensor}
        grads = torch.autograd.grad(
            sum_with_distinct_weights(tensor), outputs, allow_unused=True, retain_graph=True
        )
        feeders = set()
        for name, grad in zip(names, grads, strict=True):
            if grad is not None and bool(grad.any()):
                feeders.add(name)
        return feeders

    def find_layers_feeding_result(self) -> set[str]:
        """Names of the layers whose outputs reach what the module returns."""
        names: set[str] = set()
        for leaf in tree_leaves(self.result):
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, nn.Parameter):
                continue
            if leaf.is_floating_point() or leaf.is_complex():
                names |= self.find_feeding_layers(leaf)
        return names


def record_forward_flow(module: nn.Module, call: Callable[[], Any]) -> ForwardFlow:
    """The flow of `call`, a forward of `module`, with the output of each linear layer and
    embedding detached."""
    flow = ForwardFlow()

    def record_call(name: str, part: nn.Module, args: Any, output: Any) -> Any:
        if (
            name in flow.outputs
            or name in flow.called_often
            or not isinstance(output, torch.Tensor)
            or not args
        ):
            # Its first output stays known: whom it feeds must not pass for fed by others alone.
            flow.called_often.add(name)
            return None
        if isinstance(part, nn.Embedding):
            flow.looked_up[name] = args[0]
        else:
            flow.inputs[name] = args[0]
        # What a forward hook returns takes the place of the layer's output.
        flow.outputs[name] = output.detach().requires_grad_()
        return flow.outputs[name]

    with _register_hooks(
        module, lambda part: is_linear_layer(part) or isinstance(part, nn.Embedding), record_call
    ):
        flow.result = call()
    for name in flow.called_often:
        flow.inputs.pop(name, None)
    return flow


@contextmanager
def _register_hooks(
    module: nn.Module, is_watched: Callable[[nn.Module], bool], hook: Callable[..., Any]
) -> Iterator[None]:
    handles = [
        part.register_forward_hook(functools.partial(hook, full_name(name)))
        for name, part in module.named_modules()
        if is_watched(part)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sum_with_distinct_weights(tensor: torch.Tensor) -> torch.Tensor:
    """A sum of `tensor` with another weight for each element, so that nothing cancels."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    generator = torch.Generator().manual_seed(3)
    # From 0.5 to 1.5: no element has next to no weight.
    weights = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5
    return (tensor * weights.to(tensor.dtype)).sum()
