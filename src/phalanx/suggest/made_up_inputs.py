"""Makes up inputs for a module without samples, from the layers whose input shapes are known."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from phalanx.run.one_process.plain_loss import Batch

NUM_MADE_UP_SAMPLES = 2
MAX_TRIED_SHAPES = 12  # a module is built anew for each
SIDE, LENGTH = 32, 8  # of an image, of a sequence


def make_random_batches(module: nn.Module) -> Iterator[Batch]:
    """Batches of random numbers in the input shape of each layer: features, sequences or images.

    They come in the order in which the module has its layers, which need not be that of its
    forward.
    """
    tried: set[tuple[int, ...]] = set()
    for part in module.modules():
        for shape in _list_input_shapes(part):
            if shape in tried or len(tried) == MAX_TRIED_SHAPES:
                continue
            tried.add(shape)
            generator = torch.Generator().manual_seed(11)
            yield {"inputs": torch.randn(NUM_MADE_UP_SAMPLES, *shape, generator=generator)}


def _list_input_shapes(part: nn.Module) -> list[tuple[int, ...]]:
    if isinstance(part, _ConvNd):
        return [(part.in_channels, *(SIDE,) * len(part.kernel_size))]
    if isinstance(part, nn.Linear):
        return [(part.in_features,), (LENGTH, part.in_features)]
    if isinstance(part, nn.RNNBase):
        return [(LENGTH, part.input_size)]
    return []
