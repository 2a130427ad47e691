"""Inputs for a module of which nobody gives samples: by the first layer that says what it takes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from phalanx.verify.reference import Batch

NUM_ROWS = 2
SIDE, LENGTH = 32, 8  # of an image, of a sequence


def fitting_batches(module: nn.Module) -> Iterator[Batch]:
    """Numbers that the module's first layer with parameters takes, as a row of features, a sequence of them or an
    image. Nothing where that layer does not say what it takes.
    """
    for part in module.modules():
        shapes = _shapes_for(part)
        for shape in shapes:
            generator = torch.Generator().manual_seed(11)
            yield {"inputs": torch.randn(NUM_ROWS, *shape, generator=generator)}
        if shapes:
            return


def _shapes_for(part: nn.Module) -> list[tuple[int, ...]]:
    if isinstance(part, _ConvNd):
        return [(part.in_channels, *(SIDE,) * len(part.kernel_size))]
    if isinstance(part, nn.Linear):
        return [(part.in_features,), (LENGTH, part.in_features)]
    if isinstance(part, nn.RNNBase):
        return [(LENGTH, part.input_size)]
    return []
