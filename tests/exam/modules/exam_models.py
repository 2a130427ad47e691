"""Modules of a user's own that plants and tests need: with dropout, with BatchNorm, with a buffer
that its forward changes, with a parameter without dimensions, with a layer before the blocks, with a
layer that is called several times; images, and samples without targets."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(0.2)

    def forward(self, hidden):
        return hidden + self.drop(torch.tanh(self.linear(hidden)))


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(256, 16), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        hidden = F.dropout(self.embed(tokens), 0.1, self.training)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class WithRedrawnWeights(WithDropout):
    """Draws its embedding twice, as models do that initialize what their layers have drawn."""

    def __init__(self):
        super().__init__()
        nn.init.normal_(self.embed.weight, std=0.1)


class WithOneDropout(nn.Module):
    """Calls one dropout layer before its blocks, between them and behind."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = (
            nn.Embedding(256, 16),
            nn.ModuleList(nn.Linear(16, 16) for _ in range(2)),
        )
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(16, 256)

    def forward(self, tokens):
        hidden = self.drop(self.embed(tokens))
        for block in self.blocks:
            hidden = hidden + self.drop(torch.tanh(block(hidden)))
        return self.head(hidden)


class WithStem(nn.Module):
    """Pipelines refuse it: the stem is used before the blocks, and stands behind them."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(256, 16), nn.ModuleList(Block() for _ in range(2))
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 256)

    def forward(self, tokens):
        hidden = self.stem(self.embed(tokens))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class WithBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.linear = nn.Embedding(256, 16), nn.Linear(16, 16)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 256)

    def forward(self, tokens):
        hidden = self.linear(self.embed(tokens)).transpose(1, 2)
        return self.head(self.norm(hidden).relu().transpose(1, 2))


class WithAveragingBatchNorm(WithBatchNorm):
    def __init__(self):
        super().__init__()
        # Running statistics are means over all batches.
        self.norm.momentum = None


class WithGain(nn.Module):
    """A parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, tokens):
        return self.head(self.gain * torch.tanh(self.embed(tokens)))


class WithMovingScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        if self.training:
            with torch.no_grad():
                self.scale.lerp_(hidden.detach().abs().mean((0, 1)), 0.1)
        return self.head(hidden / self.scale)


def pictures(split, size):
    """Square images with a brighter band, which is the label."""
    images = []
    for index in range(480 if split == "train" else 24):
        image = torch.randn(3, size, size, generator=torch.Generator().manual_seed(index))
        image[:, index % 8] += 1.0
        images.append({"inputs": image.numpy(), "labels": index % 8})
    return images


def tokens_alone(split, size):
    """Sequences of tokens without targets, which no objective of phalanx's has a loss for."""
    samples = []
    for index in range(480 if split == "train" else 24):
        generator = torch.Generator().manual_seed(index)
        samples.append({"inputs": torch.randint(0, 200, (size,), generator=generator).numpy()})
    return samples
