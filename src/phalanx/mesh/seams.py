"""The seam that context parallelism needs of a module: attention that can be swapped, and what
makes its masks."""

from __future__ import annotations

from typing import Any

from torch import nn


def find_modules_with_attention_core(module: nn.Module) -> list[tuple[nn.Module, Any]]:
    """(module that has it, `core`) of every attention that shows one."""
    cores = []
    for part in module.modules():
        core = getattr(part, "core", None)
        if core is not None:
            cores.append((part, core))
    return cores


def has_attention_seam(module: nn.Module, *, is_stage: bool = False) -> bool:
    """A stage of a pipeline may have no attention itself."""
    is_per_token = bool(getattr(module, "is_per_token_outside_regions", False))
    makes_masks = callable(getattr(module, "attention_mask", None))
    return (
        is_per_token
        and makes_masks
        and (is_stage or bool(find_modules_with_attention_core(module)))
    )
