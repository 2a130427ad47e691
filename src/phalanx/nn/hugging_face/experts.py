"""How Hugging Face models compute their experts: by torch's grouped product, or by batched ones
of any dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

BATCHED, GROUPED = "batched_mm", "grouped_mm"


def use_batched_expert_products(module: nn.Module) -> bool:
    """From now on by batched products: the grouped one has no float64.

    False if no part of it uses that one.
    """
    parts = [part for part in module.modules() if _get_experts_implementation(part) == GROUPED]
    for part in parts:
        part.set_experts_implementation(BATCHED)  # type: ignore[operator]
    return bool(parts)


@contextmanager
def forcing_batched_expert_products(module: Any) -> Iterator[None]:
    """Compute experts by batched products in the body: the grouped product refuses float32 tensors
    without numbers (fake ones)."""
    implementation = _get_experts_implementation(module)
    if implementation is None:
        yield
        return
    module.set_experts_implementation(BATCHED)
    try:
        yield
    finally:
        module.set_experts_implementation(implementation)


def _get_experts_implementation(module: nn.Module) -> str | None:
    if not hasattr(module, "set_experts_implementation"):
        return None
    return getattr(getattr(module, "config", None), "_experts_implementation", None)
