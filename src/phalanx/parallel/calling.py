"""How a batch reaches a module that phalanx has never seen."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def call_with_batch(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs): `batch["inputs"]` first, then each other entry except "targets" that forward names."""
    if "inputs" not in batch:
        raise KeyError(f"a batch needs 'inputs'; it has {sorted(batch)}")
    known = _parameter_names(module)
    extras = {key: value for key, value in batch.items() if key not in ("inputs", "targets") and key in known}
    return (batch["inputs"],), extras


def _parameter_names(module: nn.Module) -> frozenset[str]:
    cached = module.__dict__.get("_phalanx_forward_names")
    if cached is None:
        cached = frozenset(inspect.signature(module.forward).parameters)
        module.__dict__["_phalanx_forward_names"] = cached
    return cached
