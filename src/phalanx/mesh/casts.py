"""Weights that autocast casts: once for all microbatches of a step.

Autocast forgets its casts where it ends, which is after each stage's forward. Autograd keeps those
of every microbatch in flight, so that a pipeline would hold as many copies of its weights as it
holds microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Casts that we make ourselves, by weight and type: innermost region last. The backward of one rank
# runs at a time.
_shared_casts_stack: list[dict[tuple[torch.Tensor, torch.dtype], torch.Tensor]] = []


@contextmanager
def sharing_casts_between_autocast_regions() -> Iterator[None]:
    """Inside, regions of autocast share their casts; weights must not change.

    Autocast is not enabled by it: a backward inside computes as it does outside. The gradient of a
    cast saves nothing, so that one node serves the backwards of all microbatches.
    """
    # Casts are forgotten where the outermost region of a thread ends, those of all threads. On a
    # GPU a backward has a thread of its own, and what it computes again has regions in there:
    # torch's checkpoint's, a user's.
    torch.autocast_increment_nesting()
    forget, torch.clear_autocast_cache = torch.clear_autocast_cache, _skip_clearing_autocast_cache
    _shared_casts_stack.append({})
    try:
        yield
    finally:
        _shared_casts_stack.pop()
        torch.clear_autocast_cache = forget
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def _skip_clearing_autocast_cache() -> None:
    """Replaces torch.clear_autocast_cache while casts are shared."""


@contextmanager
def disabling_cast_cache(is_wanted: bool = True) -> Iterator[None]:
    """Inside, weights are cast for each use.

    For what runs without gradients beside something that needs them: a cast that is made there has
    none, and would be found by what does.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(before and not is_wanted)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def cast_weight_through_cache(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight` as `dtype`, for products that autocast does not know: shared as it shares its
    own."""
    # Autocast's own rule for what it remembers: leaves that need a gradient, cast where gradients
    # are enabled.
    is_shared = (
        bool(_shared_casts_stack) and torch.is_grad_enabled() and torch.is_autocast_cache_enabled()
    )
    if weight.dtype is dtype or not is_shared or not (weight.is_leaf and weight.requires_grad):
        return weight.to(dtype)
    casts = _shared_casts_stack[-1]
    if (weight, dtype) not in casts:
        casts[weight, dtype] = weight.to(dtype)
    return casts[weight, dtype]
