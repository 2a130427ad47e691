"""Attention a block of keys at a time, as docs/context-parallel.md explains it.

Knows nothing of phalanx.
"""

from __future__ import annotations

import torch


# begin reference
def attention_by_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, size: int
) -> torch.Tensor:
    """Of queries [T, E] over keys and values [S, E]; keep [T, S] says which query sees which
    key."""
    out, lse = torch.zeros_like(q), q.new_full((len(q),), -torch.inf)
    for start in range(0, len(k), size):
        here = slice(start, start + size)
        scores = (q @ k[here].T / q.shape[1] ** 0.5).masked_fill(~keep[:, here], -torch.inf)
        lse_here = scores.logsumexp(1)
        total = torch.logaddexp(lse, lse_here)  # the denominator over all keys so far
        shift = total.where(total > -torch.inf, 0.0)  # a query that has seen nothing yet
        out = out * (lse - shift).exp()[:, None] + (scores - shift[:, None]).exp() @ v[here]
        lse = total
    return out


# end reference
