"""What sharding rules can cut of a module: linear layers of torch and of transformers (Conv1D),
those of experts, transformers' experts, and embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from phalanx.core.shard_rules import ATTRIBUTE
from phalanx.job.shape import Holder
from phalanx.mesh.logical import full_name


def is_conv1d(part: nn.Module) -> bool:
    """transformers' Conv1D, whose weight is [inputs, outputs]."""
    return type(part).__name__ == "Conv1D" and hasattr(part, "nf")


def is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or is_conv1d(part)


def is_grouped(part: nn.Module) -> bool:
    """Linear layers of several experts in one: weight [experts, outputs, inputs], sorted rows
    in, with their counts."""
    weight = getattr(part, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 3 and hasattr(part, "in_features")


def is_stacked(part: nn.Module) -> bool:
    """transformers' experts: parameters [experts, outputs, inputs] of one module, up or gate and
    up, and down."""
    if getattr(part, "has_bias", True) or getattr(part, "is_transposed", True):
        return False
    own = part._parameters
    matrices = [own.get(first_of_stack(part)), own.get("down_proj")]
    is_whole = getattr(part, "is_concatenated", False) or not has_gate(part)
    return (
        is_whole
        and len(own) == 2
        and all(matrix is not None and matrix.ndim == 3 for matrix in matrices)
    )


def has_gate(part: nn.Module) -> bool:
    """Of transformers' experts."""
    return bool(getattr(part, "has_gate", True))


def first_of_stack(part: nn.Module) -> str:
    """The name of the parameter that rows of an expert meet first."""
    return "gate_up_proj" if has_gate(part) else "up_proj"


def output_dim(part: nn.Module) -> int:
    """Of the weight of a linear layer."""
    return 1 if is_conv1d(part) or is_grouped(part) else 0


def input_dim(part: nn.Module) -> int:
    return 2 if is_grouped(part) else 1 - output_dim(part)


def holders(module: nn.Module) -> Iterator[Holder]:
    """Every module that holds parameters itself; a tied one counts where it is met first."""
    seen: set[int] = set()
    inside = {
        id(inner)
        for part in module.modules()
        if isinstance(part, nn.MultiheadAttention)
        for inner in part.modules()
    }
    for name, part in module.named_modules():
        own = list(part.parameters(recurse=False))
        if not own:
            continue
        num_params = sum(p.numel() for p in own if id(p) not in seen)
        seen |= {id(p) for p in own}
        kind = kind_of(part, is_attention=id(part) in inside)
        outputs = inputs = 0
        if is_linear(part) or is_grouped(part):
            outputs, inputs = (
                part.weight.shape[output_dim(part)],
                part.weight.shape[input_dim(part)],
            )
        elif is_stacked(part):
            _, outputs, inputs = getattr(part, first_of_stack(part)).shape
        elif isinstance(part, nn.Embedding):
            outputs, inputs = part.weight.shape
        yield Holder(full_name(name), kind, num_params, int(outputs), int(inputs))


def kind_of(part: nn.Module, *, is_attention: bool) -> str:
    """As in `Holder`."""
    if is_attention:
        return "attention"
    if is_linear(part) or is_grouped(part):
        return "grouped" if is_grouped(part) else "linear"
    if is_stacked(part):
        return "stacked with gates" if has_gate(part) else "stacked"
    return "embedding" if isinstance(part, nn.Embedding) else type(part).__name__


def read_shard_rules(module: nn.Module) -> dict[str, str]:
    """What the module and the parts of it say of themselves, an outer one first; names of parts
    are within the part."""
    found: dict[str, str] = {}
    for name, part in module.named_modules():
        for pattern, text in (getattr(part, ATTRIBUTE, None) or {}).items():
            found.setdefault(".".join(filter(None, (full_name(name), pattern))), text)
    return found
