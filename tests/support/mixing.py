"""Models and objectives whose rows see each other, and some that look as if they did: by name,
as a job names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Batch = Mapping[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
WIDTH = 8


class Encoder(nn.Module):
    """Two views of a sample in, an embedding of each out."""

    def __init__(self, norm: str = "", centred: bool = False, noise: float = 0.0) -> None:
        super().__init__()
        norms = {"batch": nn.BatchNorm1d(WIDTH), "layer": nn.LayerNorm(WIDTH)}
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = norms.get(norm, nn.Identity()), nn.Dropout(0.2)
        self.centred, self.noise = centred, noise

    def forward(self, inputs: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
        views = [
            self.second(self.dropout(self.norm(self.first(x))).relu()) for x in (inputs, other)
        ]
        if self.centred:
            views[0] = views[0] - views[0].mean(dim=0)
        if self.noise and self.training:
            views[0] = views[0] + self.noise * torch.randn_like(views[0])
        return {"left": views[0], "right": views[1]}


class Remembers(nn.Module):
    """Its forward moves buffers by what it makes of its rows, and uses them."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("level", torch.zeros(WIDTH), persistent=persistent)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made = self.linear(inputs)
        with torch.no_grad():
            self.level.mul_(0.5).add_(made.mean(dim=0), alpha=0.5)
        return made - self.level


def contrastive(outputs: dict[str, torch.Tensor], batch: Batch) -> Pair:
    """Each left must find its right among those of the batch."""
    logits = F.normalize(outputs["left"], dim=-1) @ F.normalize(outputs["right"], dim=-1).T
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum"), torch.tensor(
        len(logits)
    )


def like_to_like(outputs: dict[str, torch.Tensor], batch: Batch) -> Pair:
    """Rows of one label attract each other; of a few rows all may have labels of their own, and
    the loss is 0."""
    distance = torch.cdist(outputs["left"], outputs["left"]).square()
    alike = batch["label"][:, None] == batch["label"]
    return (distance * alike).sum(), torch.tensor(len(alike))


def mean_of_those_with_a_like(outputs: dict[str, torch.Tensor], batch: Batch) -> Pair:
    """As supervised contrastive losses are written: a row that has no like in the batch is no
    target."""
    alike = (batch["label"][:, None] == batch["label"]).fill_diagonal_(False)
    scores = (outputs["left"] @ outputs["left"].T).fill_diagonal_(-1e4).log_softmax(-1)
    has_like = alike.any(1)
    return -(scores * alike).sum(1)[has_like].sum(), has_like.sum()


def hinge_of_triples(outputs: dict[str, torch.Tensor], batch: Batch) -> Pair:
    """Each row is nearer to its like than to others, by a margin."""
    distance = torch.cdist(outputs["left"], outputs["left"])
    alike = batch["label"][:, None] == batch["label"]
    triples = alike[:, :, None] & ~alike[:, None, :]
    hinges = (distance[:, :, None] - distance[:, None, :] + 1.0).clamp(min=0.0)
    return (hinges * triples).sum(), torch.tensor(len(alike))


def by_rows(outputs: Any, batch: Batch) -> Pair:
    made, wanted = (
        (outputs["left"], outputs["right"])
        if isinstance(outputs, dict)
        else (outputs, batch["inputs"])
    )
    return (made - wanted).square().sum(), torch.tensor(made.numel())


def mean_of_rows(outputs: dict[str, torch.Tensor], batch: Batch) -> Pair:
    """A mean that counts as one: of equal parts the same as a sum over rows."""
    return (outputs["left"] - outputs["right"]).square().mean(), torch.tensor(1)


def gathering(outputs: dict[str, torch.Tensor], batch: Batch) -> Pair:
    """As people write it where ranks are theirs to know: negatives of all ranks."""
    left, right = outputs["left"], outputs["right"]
    place = 0
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [torch.zeros_like(right) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, right.detach().contiguous())
        right, place = torch.cat(parts), dist.get_rank() * len(left)
    logits = left @ right.T
    return F.cross_entropy(logits, torch.arange(len(left)) + place, reduction="sum"), torch.tensor(
        len(left)
    )


def encoder(**args: Any) -> nn.Module:
    return Encoder(**args)


def synchronised(**args: Any) -> nn.Module:
    """Waits for the other ranks once, as factories do that download."""
    if dist.is_initialized():
        dist.barrier()
    return Encoder(**args)


def remembers(**args: Any) -> nn.Module:
    return Remembers(**args)


class Views:
    """Two noisy views of each of 128 points, with a label of ten if `labels`."""

    def __init__(self, label: Callable[[int], int] | None = None) -> None:
        self._label = label

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = np.random.default_rng(index)
        point = noise.normal(size=WIDTH).astype(np.float32)
        sample = {
            "inputs": point,
            "other": point + 0.1 * noise.normal(size=WIDTH).astype(np.float32),
        }
        return sample | ({"label": self._label(index)} if self._label is not None else {})


def views(split: str) -> Views:
    return Views()


def labelled(split: str) -> Views:
    return Views(lambda index: index % 10)


def sorted_by_label(split: str) -> Views:
    return Views(lambda index: index // 13)
