"""Compressed gradients by their paper's definition: which elements should be sent."""

from __future__ import annotations

import torch


def plain_topk_excess(gradient: torch.Tensor, kept: torch.Tensor, fraction: float) -> float:
    """How much larger the largest element that stays behind is than the smallest that is sent,
    relative to the largest of all; at most 0 where the largest are sent (Lin et al. 2018).

    `gradient`: with what was kept before. Infinite where another number of elements is sent than
    `fraction` of them, at least one.
    """
    flat, rest = gradient.flatten().abs(), kept.flatten()
    is_sent = (rest == 0) & (flat != 0)
    num_sent = int(is_sent.sum())
    num_expected = min(max(1, round(fraction * len(flat))), int((flat != 0).sum()))
    if num_sent != num_expected:
        return float("inf")
    if num_sent == 0 or num_sent == len(flat):
        return 0.0
    excess = flat[~is_sent].max() - flat[is_sent].min()
    return float(excess / flat.max())
