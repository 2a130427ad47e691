"""Inputs for a module of which nobody gives samples: by the layers that say what they take."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from phalanx.verify.reference import Batch

NUM_ROWS = 2
MAX_SHAPES = 12  # a module is built anew for each
SIDE, LENGTH = 32, 8  # of an image, of a sequence


def fitting_batches(module: nn.Module) -> Iterator[Batch]:
    """Numbers that a layer of the module takes, as a row of features, a sequence of them or an image: by the layers
    that say what they take, in the order in which the module has them, which need not be that of its forward.
    """
    tried: set[tuple[int, ...]] = set()
    for part in module.modules():
        for shape in _shapes_for(part):
            if shape in tried or len(tried) == MAX_SHAPES:
                continue
            tried.add(shape)
            generator = torch.Generator().manual_seed(11)
            yield {"inputs": torch.randn(NUM_ROWS, *shape, generator=generator)}


def _shapes_for(part: nn.Module) -> list[tuple[int, ...]]:
    if isinstance(part, _ConvNd):
        return [(part.in_channels, *(SIDE,) * len(part.kernel_size))]
    if isinstance(part, nn.Linear):
        return [(part.in_features,), (LENGTH, part.in_features)]
    if isinstance(part, nn.RNNBase):
        return [(LENGTH, part.input_size)]
    return []
