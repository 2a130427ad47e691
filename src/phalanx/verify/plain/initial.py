"""Initial weights of a decoder and of a vision transformer, as distributions: GPT-2's (Radford et
al. 2019, 2.3; arXiv 1909.08053, 5.1 has the numbers)."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.verify.plain.settings import BlockSettings

WEIGHT_STD = 0.02


@dataclass(frozen=True)
class InitialDistribution:
    """A normal distribution; with `std` 0 a constant."""

    mean: float
    std: float


def plain_initial_distribution(settings: BlockSettings, name: str) -> InitialDistribution:
    """The distribution of the elements of the parameter `name`."""
    parts = name.split(".")
    if parts[-1] == "bias":
        return InitialDistribution(0.0, 0.0)
    if len(parts) > 1 and parts[-2].endswith("norm"):
        # Where the forward adds 1 to it, it begins as 0.
        return InitialDistribution(0.0 if settings.norm_plus_one else 1.0, 0.0)
    if parts[-2:] == ["o", "weight"] or parts[-2:] == ["down", "weight"]:
        # Into the residual stream, to which each block adds twice: its variance stays bounded.
        return InitialDistribution(0.0, WEIGHT_STD / (2 * settings.num_layers) ** 0.5)
    return InitialDistribution(0.0, WEIGHT_STD)
