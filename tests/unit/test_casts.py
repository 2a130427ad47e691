"""Casts of weights that are shared outlive regions of autocast in other threads, as the backward
on a GPU has them."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from phalanx.mesh.attend_blocks import compute_attention_by_blocks
from phalanx.mesh.casts import sharing_casts_between_autocast_regions

WEIGHT = nn.Parameter(torch.ones(8, 8))


class Casts(TorchDispatchMode):
    """Counts how often WEIGHT is cast."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += "_to_copy" in str(func) and args[0] is WEIGHT
        return func(*args, **(kwargs or {}))


def attention() -> torch.Tensor:
    heads = torch.ones(1, 2, 8, 4, requires_grad=True)
    documents = torch.arange(8)[None] // 4
    return compute_attention_by_blocks(
        heads, heads, heads, documents, window=0, is_causal=True, block=4
    )


def recomputed() -> torch.Tensor:
    out = checkpoint(nn.Linear(8, 8), torch.ones(2, 8, requires_grad=True), use_reentrant=False)
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("region", [attention, recomputed])
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_backward_in_another_thread_forgets_no_shared_cast(region: Any, is_shared: bool) -> None:
    """Else a pipeline holds a copy of its weights for each microbatch in flight."""
    with Casts() as casts:
        for _ in range(2):  # what is shared ends with the step: weights change after it
            with sharing_casts_between_autocast_regions() if is_shared else nullcontext():
                for _ in range(3):
                    with torch.autocast("cpu", torch.bfloat16):
                        other = region().float().sum()
                        F.linear(torch.ones(2, 8), WEIGHT)
                    backward = threading.Thread(target=other.backward)
                    backward.start()
                    backward.join()
    assert casts.num == (2 if is_shared else 6)
