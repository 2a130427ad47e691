"""Rotary positions (arXiv 2104.09864) and the usual ways to stretch them over longer sequences.

Shape suffixes: B batch, T sequence, H heads, E head width.
"""

from __future__ import annotations

import math

import torch

from phalanx.job.shapes.decoder import DecoderShape

# Turns within the original length: below, frequencies are scaled; above, left as they are.
# The low_freq_factor and high_freq_factor of Llama 3.1's config.
LLAMA3_LOW, LLAMA3_HIGH = 1.0, 4.0
# The same of YaRN: the paper's alpha and beta for Llama (arXiv 2309.00071, section 3.2).
YARN_SLOW, YARN_FAST = 1.0, 32.0


def compute_rotary_frequencies(
    shape: DecoderShape, dtype: torch.dtype, device: torch.device, *, local: bool = False
) -> torch.Tensor:
    """[E/2]: radians per position of each pair of a head.

    `local`: of blocks with a sliding window.
    """
    if local and shape.local_rope_theta:
        return _compute_unscaled_frequencies(
            shape.rotated_dim, shape.local_rope_theta, dtype, device
        )
    plain = _compute_unscaled_frequencies(
        shape.rotated_dim, _compute_rotary_base(shape), dtype, device
    )
    if shape.rope_scaling == "linear":
        return plain / shape.rope_factor
    if shape.rope_scaling == "llama3":
        return _interpolate_frequencies(plain, shape, _compute_llama3_kept_share(plain, shape))
    if shape.rope_scaling == "yarn":
        return _interpolate_frequencies(plain, shape, _compute_yarn_kept_share(plain, shape))
    return plain


def _compute_unscaled_frequencies(
    head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    exponent = torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim
    return theta**-exponent


def _compute_rotary_base(shape: DecoderShape) -> float:
    """NTK-aware scaling (bloc97 2023) takes a base with which the slowest pair turns rope_factor
    times slower."""
    if shape.rope_scaling != "ntk":
        return shape.rope_theta
    stretch: float = shape.rope_factor ** (shape.rotated_dim / (shape.rotated_dim - 2))
    return shape.rope_theta * stretch


def _interpolate_frequencies(
    plain: torch.Tensor, shape: DecoderShape, share: torch.Tensor
) -> torch.Tensor:
    """`share` of each frequency stays, the rest is divided by the factor."""
    return plain * share + plain / shape.rope_factor * (1 - share)


def _compute_llama3_kept_share(plain: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """Llama 3.1: by how often a pair turns within the original length."""
    turns = shape.rope_original_len * plain / (2 * math.pi)
    return ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0, 1)


def _compute_yarn_kept_share(plain: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3.2), with the ramp over the pairs' index between two
    whole numbers."""
    half, theta = shape.rotated_dim // 2, shape.rope_theta

    def pair_that_turns(times: float) -> float:
        return half * math.log(shape.rope_original_len / (times * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(pair_that_turns(YARN_FAST)), 0)
    high = min(math.ceil(pair_that_turns(YARN_SLOW)), shape.rotated_dim - 1)
    index = torch.arange(half, dtype=plain.dtype, device=plain.device)
    # Not 0, where both are the same pair.
    return 1 - ((index - low) / max(high - low, 0.001)).clamp(0, 1)


def make_rotary_table(
    positions_BT: torch.Tensor, shape: DecoderShape, dtype: torch.dtype, *, local: bool = False
) -> torch.Tensor:
    """[2, B, 1, T, E/2]: cosine and sine of position x frequency, in at least fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = compute_rotary_frequencies(shape, wide, positions_BT.device, local=local)
    angle_BTE = positions_BT[..., None].to(wide) * frequencies
    table = torch.stack((angle_BTE.cos(), angle_BTE.sin()))[:, :, None]
    # Latent attention has the temperature on whole queries and keys.
    if not shape.kv_rank:
        # On queries and keys alike: both are rotated by this table.
        table = table * compute_yarn_factor(shape, local=local)
    return table


def compute_yarn_factor(shape: DecoderShape, *, local: bool = False) -> float:
    """The factor of queries and keys under YaRN (arXiv 2309.00071, section 3.4); 1 without it.

    `local`: of blocks with a sliding window, which are unscaled if they have a base of their own.
    """
    if shape.rope_scaling != "yarn" or (local and shape.local_rope_theta):
        return 1.0
    return 0.1 * shape.rope_mscale * math.log(shape.rope_factor) + 1


def rotate(x_BHTE: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate each (first half, second half) pair by its position's angle."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return _rotate_by_table(first, second, table).to(x_BHTE.dtype)


def rotate_neighbouring_pairs(x_BHTE: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate each (even, odd) pair, as DeepSeek's weights lie.

    First members come out before the second ones, which is nothing to scores if queries and keys
    have it alike.
    """
    return _rotate_by_table(x_BHTE[..., 0::2], x_BHTE[..., 1::2], table).to(x_BHTE.dtype)


def _rotate_by_table(
    first: torch.Tensor, second: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    cos, sin = table
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
