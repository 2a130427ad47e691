"""Rotary positions (RoFormer, arXiv 2104.09864, section 3.2.2), stretched over longer sequences.

linear: positions are divided (arXiv 2306.15595). ntk: the base grows (bloc97, "NTK-aware scaled
RoPE", 2023). llama3: `apply_scaling` of Llama 3.1's published code, with its factors 1 and 4. yarn:
arXiv 2309.00071 with alpha 1 and beta 32, its ramp as in the authors' `find_correction_range`.

Shape suffixes: B batch, T sequence, P pairs of a head.
"""

from __future__ import annotations

import math

import torch

from phalanx.verify.plain.settings import PlainSettings


def compute_rotation_angles(
    settings: PlainSettings, positions_BT: torch.Tensor, dtype: torch.dtype, *, is_local: bool
) -> torch.Tensor:
    """[B, T, P]: the angle of each pair, in radians, in fp32 at least."""
    width = settings.rope_head_dim or settings.head_dim
    wide = torch.promote_types(dtype, torch.float32)
    rates = [_compute_pair_frequency(settings, pair, width, is_local) for pair in range(width // 2)]
    rates_P = torch.tensor(rates, dtype=wide, device=positions_BT.device)
    return torch.einsum("bt,p->btp", positions_BT.to(wide), rates_P)


def compute_yarn_attention_factor(settings: PlainSettings, *, is_local: bool) -> float:
    """The factor by which YaRN multiplies queries and keys (section 3.4): sqrt(1/t) = 0.1 ln(s) +
    1; with DeepSeek-V2's factor of the logarithm (`mscale`). 1 where positions are not
    stretched."""
    if settings.rope_scaling != "yarn" or _has_unscaled_base(settings, is_local):
        return 1.0
    return 1.0 + 0.1 * settings.rope_mscale * math.log(settings.rope_factor)


def _has_unscaled_base(settings: PlainSettings, is_local: bool) -> bool:
    """Gemma 3: blocks with a window keep the short base, unscaled."""
    return is_local and settings.local_rope_theta > 0


def _compute_pair_frequency(
    settings: PlainSettings, pair: int, width: int, is_local: bool
) -> float:
    """Radians per position."""
    if _has_unscaled_base(settings, is_local):
        return 1.0 / settings.local_rope_theta ** (2 * pair / width)
    theta, factor = settings.rope_theta, settings.rope_factor
    rate = 1.0 / theta ** (2 * pair / width)
    if settings.rope_scaling == "linear":
        return rate / factor
    if settings.rope_scaling == "ntk":
        return 1.0 / (theta * factor ** (width / (width - 2))) ** (2 * pair / width)
    if settings.rope_scaling == "llama3":
        return _scale_frequency_by_llama3(rate, factor, settings.rope_original_len)
    if settings.rope_scaling == "yarn":
        return _scale_frequency_by_yarn(rate, pair, width, settings)
    return rate


def _scale_frequency_by_llama3(rate: float, factor: float, original_len: int) -> float:
    low_factor, high_factor = 1.0, 4.0
    wavelength = 2 * math.pi / rate
    if wavelength < original_len / high_factor:
        return rate
    if wavelength > original_len / low_factor:
        return rate / factor
    smooth = (original_len / wavelength - low_factor) / (high_factor - low_factor)
    return (1 - smooth) * rate / factor + smooth * rate


def _scale_frequency_by_yarn(rate: float, pair: int, width: int, settings: PlainSettings) -> float:
    beta_fast, beta_slow = 32.0, 1.0

    def pair_with(turns: float) -> float:
        ratio = settings.rope_original_len / (turns * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(settings.rope_theta))

    low = float(max(math.floor(pair_with(beta_fast)), 0))
    high = float(min(math.ceil(pair_with(beta_slow)), width - 1))
    if low == high:
        high += 0.001
    interpolated = min(max((pair - low) / (high - low), 0.0), 1.0)
    return rate * (1 - interpolated) + rate / settings.rope_factor * interpolated


def rotate_halves(x_BTHE: torch.Tensor, angles_BTP: torch.Tensor) -> torch.Tensor:
    """Feature p is paired with feature p + E/2, as Llama's published weights lie."""
    half = x_BTHE.shape[-1] // 2
    first, second = x_BTHE[..., :half], x_BTHE[..., half:]
    cos, sin = angles_BTP.cos()[:, :, None], angles_BTP.sin()[:, :, None]
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.cat(turned, dim=-1).to(x_BTHE.dtype)


def rotate_pairs(x_BTHE: torch.Tensor, angles_BTP: torch.Tensor) -> torch.Tensor:
    """Feature 2p is paired with feature 2p + 1, as in RoFormer's equation 34 and DeepSeek's
    weights."""
    even, odd = x_BTHE[..., 0::2], x_BTHE[..., 1::2]
    cos, sin = angles_BTP.cos()[:, :, None], angles_BTP.sin()[:, :, None]
    turned = (even * cos - odd * sin, even * sin + odd * cos)
    return torch.stack(turned, dim=-1).flatten(-2).to(x_BTHE.dtype)
