"""Modules as people write them, to be cut into stages: some can be, some must be refused.

Eight blocks each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import VOCAB

DIM, NUM_BLOCKS, SEQ_LEN = 12, 8, 8
CHOOSY_ABOVE = -0.2  # one microbatch of the second step, in test_pipeline_hard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, 20),
            nn.Linear(20, DIM, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = y + y.cumsum(1) / SEQ_LEN  # tokens see those before
        return x + self.down(F.gelu(self.up(y)))


class Lm(nn.Module):
    """Embedding, blocks, norm, head: what the others here change a part of."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, inputs: torch.Tensor) -> Any:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# What can be cut


class SequentialAtRoot(nn.Module):
    """Sequential blocks, called at once; parameters of the module itself: positions, and a token
    before all others."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.zeros(1, SEQ_LEN + 1, DIM))
        self.cls = nn.Parameter(torch.zeros(1, 1, DIM))
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.out = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = torch.cat((self.cls.expand(len(inputs), -1, -1), self.embed(inputs)), dim=1)
        x = self.layers(x + self.pos_embedding[:, : x.shape[1]])
        return self.out(x)[:, 1:]


class InPlaceBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.down(F.gelu(self.up(self.norm(1.0 * x))))  # a residual stream in place
        return x


def in_place() -> nn.Module:
    return Lm(InPlaceBlock)


class NormedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


def batch_norm() -> nn.Module:
    return Lm(NormedBlock)


class DroppedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(super().forward(x)) + F.dropout(x, 0.1, self.training)


class Dropped(Lm):
    def __init__(self) -> None:
        super().__init__(DroppedBlock)
        self.first, self.last = nn.Dropout(0.1), nn.Dropout(0.3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(inputs))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(self.norm(x)))


class TiedByHand(Lm):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def frozen(*prefixes: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = Lm()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(prefixes))
        return module

    return build


class ChoosyBlock(Block):
    """Uses a matrix, if it has one, for microbatches whose first number is large."""

    def __init__(self) -> None:
        super().__init__()
        self.at_times: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.at_times is None or float(x.detach()[0, 0, 0]) < CHOOSY_ABOVE:
            return x
        return x + self.at_times(x)


class Unused(Lm):
    """Parameters that no loss depends on, in a block and behind the blocks; and some of which one
    microbatch makes use."""

    def __init__(self) -> None:
        super().__init__(ChoosyBlock)
        self.blocks[5].spare = nn.Linear(DIM, DIM)
        self.blocks[6].at_times = nn.Linear(DIM, DIM)
        self.spare = nn.Parameter(torch.zeros(3))


class SharedInAStage(Lm):
    """Two blocks of one stage share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


class BlockHasEmbedding(Lm):
    """The embedding is a part of what a later stage's block reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[6].table = self.embed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 6:
                x = x * 1.5
        return self.head(self.norm(x))


class HeadFirst(nn.Module):
    """Registered in the order in which nobody would compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(DIM, VOCAB), nn.LayerNorm(DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.embed = nn.Embedding(VOCAB, DIM)

    forward = Lm.forward


class TorchEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 20, 0.0, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.encoder = nn.TransformerEncoder(
            layer, NUM_BLOCKS, nn.LayerNorm(DIM), enable_nested_tensor=False
        )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            inputs.shape[1], dtype=self.head.weight.dtype
        )
        return self.head(self.encoder(self.embed(inputs), mask=mask))


class ScaledBlock(Block):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) if scale is None else super().forward(x) * scale


class Arguments(Lm):
    """What blocks get besides hidden states is made of the inputs, and of a buffer."""

    def __init__(self) -> None:
        super().__init__(ScaledBlock)
        self.register_buffer("slope", torch.linspace(0.9, 1.1, SEQ_LEN))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        scale = (1 + inputs / 100) * self.slope
        for block in self.blocks:
            x = 0.9 * block(x, scale=scale[..., None].to(x.dtype))  # and something between them
        return self.head(self.norm(x))


class Angles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1.0, DIM), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.arange(x.shape[1])[:, None] * self.frequencies)


class AngledBlock(Block):
    angles: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.angles(x))


class SharedPart(Lm):
    """All blocks have the same module, with a buffer in it."""

    def __init__(self) -> None:
        super().__init__(AngledBlock)
        angles = Angles()
        for block in self.blocks:
            block.angles = angles


# What cannot


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = (
            nn.Embedding(VOCAB, DIM),
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, VOCAB),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(inputs)))


class FewBlocks(Lm):
    def __init__(self) -> None:
        super().__init__()
        del self.blocks[5:]


class TupleBlock(Block):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), None


class Tuples(Lm):
    def __init__(self) -> None:
        super().__init__(TupleBlock)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x))


class Skip(Lm):
    """The embedding goes around all blocks."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = start = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + start))


class Chooses(Lm):
    """The embedding decides what comes after the blocks, by a number or token by token."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        keep = (
            x.sum(-1, keepdim=True) > 0
            if self.by == "token"
            else torch.tensor(bool(x.std() > 1e-6))
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x * keep))


class TiedSkip(Skip):
    """... where the last stage has the embedding as well: what it makes of it would have no
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class BetweenBlock(Block):
    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + 0.1 * start


class ValueEmbeddings(Lm):
    def __init__(self) -> None:
        super().__init__(BetweenBlock)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = start = self.embed(inputs)
        for block in self.blocks:
            x = block(x, start)
        return self.head(self.norm(x))


class TiedValueEmbeddings(ValueEmbeddings):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class RememberingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * self.__dict__["shared"]["start"]


class ThroughTheBack(Lm):
    """Blocks read the embedding from a place that all of them know."""

    def __init__(self) -> None:
        super().__init__(RememberingBlock)
        self.shared: dict[str, Any] = {}
        for block in self.blocks:
            block.__dict__["shared"] = self.shared

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.shared["start"] = self.embed(inputs)
        x = self.shared["start"]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class UNet(Lm):
    """What the first half of the blocks gives is added in the second."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x, kept = self.embed(inputs), []
        for index, block in enumerate(self.blocks):
            x = block(x if index < NUM_BLOCKS // 2 else x + kept.pop())
            if index < NUM_BLOCKS // 2:
                kept.append(x)
        return self.head(self.norm(x))


class OuterNorms(Lm):
    def __init__(self) -> None:
        super().__init__()
        self.between = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(NUM_BLOCKS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block, norm in zip(self.blocks, self.between, strict=True):
            x = norm(block(x))
        return self.head(self.norm(x))


class OuterBatchNorm(Lm):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(DIM)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.statistics(self.embed(inputs).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SharedAcross(Lm):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[7].up.weight = self.blocks[0].up.weight


class OneObject(Lm):
    def __init__(self) -> None:
        super().__init__()
        half = list(self.blocks[: NUM_BLOCKS // 2])
        self.blocks = nn.ModuleList(half + half)


class ByKeyword(Lm):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x=x)
        return self.head(self.norm(x))


class InOrder(Lm):
    """Calls its blocks as `numbers` say."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for number in self.numbers:
            x = self.blocks[number](x)
        return self.head(self.norm(x))


ORDERS: dict[str, tuple[int, ...]] = {
    "backwards": tuple(reversed(range(NUM_BLOCKS))),
    "each twice": tuple(number for number in range(NUM_BLOCKS) for _ in range(2)),
    "all twice": tuple(range(NUM_BLOCKS)) * 2,
    "one left out": (0, 1, 2, 3, 5, 6, 7),
    "the last left out": tuple(range(NUM_BLOCKS - 1)),
    "the first left out": tuple(range(1, NUM_BLOCKS)),
    "two exchanged": (0, 1, 2, 4, 3, 5, 6, 7),
}


class AsksBlocks(Lm):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(block.norm(x))
        return self.head(self.norm(x))


class WeightsOfBlocks(Lm):
    """A penalty on the blocks' weights, computed behind them."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + sum(block.up.weight.mean() for block in self.blocks)


class OwnCheckpoint(Lm):
    """Recomputes its blocks itself."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))
