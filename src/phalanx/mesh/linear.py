"""What sharding rules can cut of a module: linear layers of torch and of transformers (Conv1D),
those of experts, transformers' experts, and embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from phalanx.core.shard_rules import SHARD_RULES_ATTRIBUTE
from phalanx.job.param_holder import ParamHolder
from phalanx.mesh.logical import full_name


def is_transformers_conv1d(part: nn.Module) -> bool:
    """transformers' Conv1D, whose weight is [inputs, outputs]."""
    # By its name, for transformers need not be installed.
    return type(part).__name__ == "Conv1D" and hasattr(part, "nf")


def is_linear_layer(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or is_transformers_conv1d(part)


def is_linear_of_several_experts(part: nn.Module) -> bool:
    """Linear layers of several experts in one: weight [experts, outputs, inputs], sorted rows
    in, with their counts."""
    weight = getattr(part, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 3 and hasattr(part, "in_features")


def is_transformers_experts(part: nn.Module) -> bool:
    """transformers' experts: parameters [experts, outputs, inputs] of one module, up or gate and
    up, and down."""
    # A module that does not say these is none of transformers' experts.
    if getattr(part, "has_bias", True) or getattr(part, "is_transposed", True):
        return False
    parameters = part._parameters
    matrices = [parameters.get(get_first_expert_parameter_name(part)), parameters.get("down_proj")]
    is_whole = getattr(part, "is_concatenated", False) or not has_gated_transformers_experts(part)
    return (
        is_whole
        and len(parameters) == 2
        and all(matrix is not None and matrix.ndim == 3 for matrix in matrices)
    )


def has_gated_transformers_experts(part: nn.Module) -> bool:
    """True for transformers' experts that have a gate."""
    return bool(getattr(part, "has_gate", True))


def get_first_expert_parameter_name(part: nn.Module) -> str:
    """The name of the parameter that rows of an expert meet first."""
    if has_gated_transformers_experts(part):
        return "gate_up_proj"
    return "up_proj"


def find_output_dim_of_weight(part: nn.Module) -> int:
    """The dimension of a linear layer's weight that holds its outputs."""
    if is_transformers_conv1d(part) or is_linear_of_several_experts(part):
        return 1
    return 0


def find_input_dim_of_weight(part: nn.Module) -> int:
    if is_linear_of_several_experts(part):
        return 2
    return 1 - find_output_dim_of_weight(part)


def iterate_parameter_holders(module: nn.Module) -> Iterator[ParamHolder]:
    """Every module that holds parameters itself; a tied one counts where it is met first."""
    counted: set[int] = set()
    inside_attention: set[int] = set()
    # Torch's attention multiplies by the weights of the layer inside of it, and never calls that
    # layer.
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention):
            inside_attention.update(id(inner) for inner in part.modules())
    for name, part in module.named_modules():
        parameters = list(part.parameters(recurse=False))
        if not parameters:
            continue
        num_params = sum(p.numel() for p in parameters if id(p) not in counted)
        counted |= {id(p) for p in parameters}
        kind = classify_parameter_holder(part, is_attention=id(part) in inside_attention)
        outputs = inputs = 0
        if is_linear_layer(part) or is_linear_of_several_experts(part):
            shape = part.weight.shape
            outputs, inputs = (
                shape[find_output_dim_of_weight(part)],
                shape[find_input_dim_of_weight(part)],
            )
        elif is_transformers_experts(part):
            _, outputs, inputs = getattr(part, get_first_expert_parameter_name(part)).shape
        elif isinstance(part, nn.Embedding):
            outputs, inputs = part.weight.shape
        yield ParamHolder(full_name(name), kind, num_params, int(outputs), int(inputs))


def classify_parameter_holder(part: nn.Module, *, is_attention: bool) -> str:
    """The kind of `part` as in `Holder.kind`."""
    if is_attention:
        return "attention"
    if is_linear_of_several_experts(part):
        return "grouped"
    if is_linear_layer(part):
        return "linear"
    if is_transformers_experts(part) and has_gated_transformers_experts(part):
        return "stacked with gates"
    if is_transformers_experts(part):
        return "stacked"
    if isinstance(part, nn.Embedding):
        return "embedding"
    return type(part).__name__


def collect_shard_rules_of_module(module: nn.Module) -> dict[str, str]:
    """The sharding rules that the module and its parts bring, an outer part's first; in a part's
    rules names are relative to it, in the result to the module."""
    rules: dict[str, str] = {}
    for name, part in module.named_modules():
        for pattern, text in (getattr(part, SHARD_RULES_ATTRIBUTE, None) or {}).items():
            rules.setdefault(".".join(filter(None, (full_name(name), pattern))), text)
    return rules
