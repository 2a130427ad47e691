"""AbsentParameterPlaceholder: what stands in a module for the parameters that another stage
holds."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from phalanx.mesh.fake_tensors import is_fake_tensor
from phalanx.parallel.pipeline.stage_forward import RELEASED_SUBMODULES_ATTRIBUTE, StageForward


def release_tensors_of_absent_block(
    block: nn.Module,
    name: str,
    stage_forward: StageForward,
    device: torch.device,
    *,
    shared: Collection[nn.Module] = frozenset(),
) -> None:
    """Take all tensors out of a block of another stage.

    What else it says of itself (its kind, say) stays, also of its parts, which it no longer counts
    among its modules: for whoever looks, there are placeholders in them. Parts that are `shared`
    are somebody else's as well.
    """
    for prefix, part in block.named_modules():
        if part in shared:
            continue
        for tensors in (part._parameters, part._buffers):
            block_tensors = [(key, tensor) for key, tensor in tensors.items() if tensor is not None]
            tensors.clear()
            for key, tensor in block_tensors:
                full = ".".join(filter(None, (name, prefix, key)))
                setattr(
                    part,
                    key,
                    AbsentParameterPlaceholder.create_for_parameter(
                        tensor.detach(), full, stage_forward, device, in_block=True
                    ),
                )
    block.__dict__[RELEASED_SUBMODULES_ATTRIBUTE] = dict(block._modules)
    block._modules.clear()


# NaN, because whatever is computed of it is NaN too: shape inference, which runs the first
# microbatch, looks for it where it must not be. A model that cannot be cut is then refused, instead
# of computing something else.
class AbsentParameterPlaceholder(torch.Tensor):
    """A placeholder for a parameter of another stage: its shape and type, NaN, four bytes.

    See `StageForward.require_allowed_placeholder_use`.
    """

    _door: StageForward
    _name: str
    _in_block: bool

    @staticmethod
    def create_for_parameter(
        tensor: torch.Tensor,
        name: str,
        stage_forward: StageForward,
        device: torch.device,
        *,
        in_block: bool = False,
    ) -> AbsentParameterPlaceholder:
        # Integers have no NaN.
        nothing = math.nan if tensor.is_floating_point() else 0
        # In a dry run tensors are fake, and no fake one can be seen as a placeholder.
        with _disable_current_modes() if is_fake_tensor(tensor) else nullcontext():
            value = torch.full((), nothing, dtype=tensor.dtype, device=device).expand(tensor.shape)
            placeholder: AbsentParameterPlaceholder = value.as_subclass(AbsentParameterPlaceholder)
        placeholder._door, placeholder._name, placeholder._in_block = stage_forward, name, in_block
        return placeholder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
                # Shape, type and the like are those of what it stands for.
                return result
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, AbsentParameterPlaceholder):
                    leaf._door.require_allowed_placeholder_use(leaf._name, in_block=leaf._in_block)
        if isinstance(result, AbsentParameterPlaceholder):
            return result.as_subclass(torch.Tensor)
        return result
