"""Handwritten digits of scikit-learn: a dataset, a small convolutional net with BatchNorm, and an
objective.

Everything that `job.toml` names is here: `digits:dataset`, `digits:build`, `digits:cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

EVERY = 6  # each sixth image is held out


# [dataset]
class Digits:
    """A map-style dataset: `len()`, and `[i]` gives a dict.

    `inputs` goes to forward, the rest to the objective.
    """

    def __init__(self, split: str, *, shift: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        number = np.arange(len(labels))
        chosen = (number % EVERY == 0) == (split == "held_out")
        self.images = images[chosen].reshape(-1, 1, 8, 8).astype(np.float32) / 16
        self.labels = labels[chosen].astype(np.int64)
        self.shift = shift and split == "train"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, np.ndarray | int]:
        image = self.images[index]
        if (
            self.shift
        ):  # phalanx seeds numpy for each sample, so that a resumed run sees the same images
            image = np.roll(image, np.random.randint(-1, 2, size=2), axis=(1, 2))
        return {"inputs": image, "labels": self.labels[index]}


def dataset(split: str, shift: bool = False) -> Digits:
    """`split` is "train" or "held_out"; the other arguments come from [data.args] of the job."""
    return Digits(split, shift=shift)


# [/dataset]


# [model]
class Block(nn.Sequential):
    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW + super().forward(x_BCHW)


class ConvNet(nn.Module):
    """[B, 1, 8, 8] grey values to [B, 10] logits.

    The ModuleList is what phalanx shards and recomputes by block.
    """

    def __init__(self, channels: int, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.blocks = nn.ModuleList(Block(channels) for _ in range(num_blocks))
        self.head = nn.Linear(channels, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x_BCHW = F.max_pool2d(self.stem(inputs), 2)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return self.head(x_BCHW.mean(dim=(2, 3)))


def build(channels: int = 32, num_blocks: int = 3) -> nn.Module:
    return ConvNet(channels, num_blocks)


# [/model]


# [objective]
Pair = tuple[torch.Tensor, torch.Tensor]


class CrossEntropy:
    def __call__(self, outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> Pair:
        """A sum over the samples and how many there are, so that averages are exact whatever
        ranks hold."""
        return F.cross_entropy(outputs, batch["labels"], reduction="sum"), torch.tensor(
            len(outputs)
        )

    def metrics(self, outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> dict[str, Pair]:
        """Of evaluations: by name, again a sum and how many there are."""
        num_right = (outputs.argmax(dim=1) == batch["labels"]).sum()
        return {"accuracy": (num_right, torch.tensor(len(outputs)))}


cross_entropy = CrossEntropy()


# [/objective]
