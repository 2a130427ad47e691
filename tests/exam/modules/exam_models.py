"""Modules of a user's own that plants and tests need: with dropout of several
kinds, with BatchNorm, with a buffer that its forward changes, with a parameter without dimensions,
with a padding token, with a layer before the blocks, with a layer that is called several times;
images, samples without targets, and an objective."""

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


class WithUnusedLayer(nn.Module):
    """A layer without a part in the loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.unused = nn.Embedding(256, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


class WithRareLayer(WithUnusedLayer):
    """A layer besides that one sequence in six goes through, so that some ranks have none of these
    in a step."""

    def __init__(self):
        super().__init__()
        self.rare = nn.Linear(16, 16)

    def forward(self, tokens):
        hidden, is_rare = self.embed(tokens), tokens[:, :1] % 6 == 0
        if bool(is_rare.any()):
            hidden = hidden + is_rare[..., None] * self.rare(hidden)
        return self.head(torch.tanh(hidden))


class FrozenFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def forward(self, hidden):
        return self.down(torch.tanh(self.up(hidden)))


class AdaptedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ffn = FrozenFeedForward()
        self.a, self.b = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, hidden):
        return hidden + self.ffn(hidden) + self.b(self.a(hidden))


class WithFrozenColumns(nn.Module):
    """Adapters beside frozen matrices, which tp cuts."""

    def __init__(self):
        super().__init__()
        self.shard_rules = {
            "blocks.*.ffn": "region",
            "blocks.*.ffn.up": "column",
            "blocks.*.ffn.down": "row",
        }
        self.embed = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(2))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class WithOddHead(nn.Module):
    """A head whose features four ranks do not divide, put together again behind it."""

    def __init__(self):
        super().__init__()
        self.shard_rules = {"head": "column gather"}
        self.embed, self.linear = nn.Embedding(254, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 254)

    def forward(self, tokens):
        return self.head(torch.tanh(self.linear(self.embed(tokens))))


class AlphaBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.AlphaDropout(0.2)

    def forward(self, hidden):
        return hidden + self.drop(F.selu(self.linear(hidden)))


class WithAlphaDropout(WithDropout):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(AlphaBlock() for _ in range(2))


class NormBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, hidden):
        return hidden + self.norm(self.linear(hidden).transpose(1, 2)).relu().transpose(1, 2)


class WithNormBlocks(nn.Module):
    """BatchNorm inside of blocks, which may be recomputed."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = (
            nn.Embedding(256, 16),
            nn.ModuleList(NormBlock() for _ in range(2)),
        )
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class WithFrozenNorm(WithBatchNorm):
    """A BatchNorm that its owner keeps in evaluation mode, as in fine-tuning."""

    def __init__(self):
        super().__init__()
        self.norm.eval()
        for parameter in self.norm.parameters():
            parameter.requires_grad_(False)


class WithTransposedWeight(nn.Module):
    """A parameter that does not lie in the order of its dimensions."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.mix = nn.Parameter(torch.randn(24, 16).mul(0.2).T)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.head(hidden + torch.tanh(hidden @ self.mix) @ self.mix.T)


def build_slow_blocks(groups, optim):
    """AdamW in which all but the tables of tokens have half of the rate."""
    tables, rest = [], []
    for parameter in groups.parameters():
        (tables if parameter.ndim == 2 and parameter.shape[0] > 200 else rest).append(parameter)
    rate = float(optim.lr)
    made = [{"params": tables, "lr": rate}, {"params": rest, "lr": rate / 2}]
    return torch.optim.AdamW([group for group in made if group["params"]], weight_decay=0.1)


class WithTokensFirst(nn.Module):
    """torch's own encoder layers, with the batch in the second dimension."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2) for _ in range(2)
        )
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        hidden = self.embed(tokens).transpose(0, 1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.transpose(0, 1))


class FunctionalDropoutBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden):
        return hidden + F.dropout(torch.tanh(self.linear(hidden)), 0.2, self.training)


class WithFunctionalDropout(nn.Module):
    """Dropout by the function, inside of blocks that may be recomputed."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(FunctionalDropoutBlock() for _ in range(2))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class WithChannelDropout(nn.Module):
    """Whole features of a sequence are dropped."""

    def __init__(self):
        super().__init__()
        self.embed, self.linear = nn.Embedding(256, 16), nn.Linear(16, 16)
        self.drop, self.head = nn.Dropout1d(0.3), nn.Linear(16, 256)

    def forward(self, tokens):
        hidden = self.linear(self.embed(tokens)).transpose(1, 2)
        return self.head(torch.tanh(self.drop(hidden)).transpose(1, 2))


class TwoNormBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden):
        normed = self.first(hidden.transpose(1, 2)).transpose(1, 2)
        return hidden + self.second(self.linear(normed.relu()).transpose(1, 2)).transpose(1, 2)


class WithTwoNorms(nn.Module):
    """Two BatchNorms in each block."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(TwoNormBlock() for _ in range(2))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class WithPadding(nn.Module):
    """torch sets the row of the padding token to zeros after it has drawn the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16, padding_idx=255), nn.Linear(16, 256)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


def tempered_loss(outputs, batch):
    """Cross-entropy at another temperature, of logits as the model returns them."""
    targets = batch["targets"].flatten()
    logits = outputs.flatten(0, -2) / 1.5
    loss_sum = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return loss_sum, (targets != -100).sum()
