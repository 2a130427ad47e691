"""Count what autograd keeps from the forward to the backward: the activations that a plan
predicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from phalanx.plan.plan import Plan


def can_count_saved_bytes(plan: Plan) -> bool:
    """False where other hooks, or a compiler, take what autograd saves out of sight."""
    return not (plan.activations.recompute != "none" or plan.activations.offload or plan.compile)


class SavedBytesCounter:
    """Bytes of the storages that autograd saved, each once, without parameters and casts of
    them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._seen: set[int] = set()
        # Storages stay alive, or a freed address would be taken for one that was counted.
        self._alive: list[torch.UntypedStorage] = []

    @contextmanager
    def counting_saved_tensors(self) -> Iterator[None]:
        """Count what is saved inside. Tensors themselves are left as they are."""
        with torch.autograd.graph.saved_tensors_hooks(
            self._count_saved_tensor, lambda tensor: tensor
        ):
            yield
        self._alive.clear()

    def _count_saved_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # By the storage itself, and not its address: fake tensors have none.
        if not is_parameter_or_derived(tensor) and storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(storage)
            self.num_bytes += storage.nbytes()
        return tensor


def is_parameter_or_derived(tensor: torch.Tensor) -> bool:
    """A parameter, a view of one, or what autocast made of one."""
    owner = tensor if tensor._base is None else tensor._base
    if isinstance(owner, nn.Parameter):
        return True
    node = owner.grad_fn
    # A cast and a transposition have one input each; at the end stands the node that adds to
    # `.grad`, which alone names its variable.
    while (
        node is not None
        and len(node.next_functions) == 1
        and node.name() in ("ToCopyBackward0", "TBackward0")
    ):
        node = node.next_functions[0][0]
    return node is not None and isinstance(getattr(node, "variable", None), nn.Parameter)
