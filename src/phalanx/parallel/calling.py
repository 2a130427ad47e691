"""How a batch reaches a module that phalanx has never seen."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from phalanx.core.errors import LayoutError

ANY = "**"  # stands for a forward that takes any keyword


def call_with_batch(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs): `batch["inputs"]` first, then each other entry except "targets" that forward names."""
    if "inputs" not in batch:
        raise KeyError(f"a batch needs 'inputs'; it has {sorted(batch)}")
    known = _parameter_names(module)
    extras = {key: value for key, value in batch.items() if key not in ("inputs", "targets") and _takes(known, key)}
    if "document_ids" in batch and "document_ids" not in extras:
        raise LayoutError(
            f"{type(module).__name__} cannot keep documents apart: its forward takes no document_ids",
            fix="add the argument and mask attention with it, or leave document_ids out of the batch",
        )
    return (batch["inputs"],), extras


def _takes(known: frozenset[str], key: str) -> bool:
    return key in known or ANY in known


def _parameter_names(module: nn.Module) -> frozenset[str]:
    cached = module.__dict__.get("_phalanx_forward_names")
    if cached is None:
        parameters = inspect.signature(module.forward).parameters.values()
        cached = frozenset(ANY if p.kind is p.VAR_KEYWORD else p.name for p in parameters)
        module.__dict__["_phalanx_forward_names"] = cached
    return cached
