"""A dataset of nested samples, a model that takes them as they are, and an objective that reads
them so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn


class Points:
    """Two views of different widths in a tuple, a weight two levels down, a target in a dict."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = np.random.default_rng(index)
        views = tuple(noise.normal(size=width).astype(np.float32) for width in (4, 6))
        of_sample = {"weight": float(1 + index % 3), "tags": [1, 2, 3]}
        return {"views": views, "of": {"sample": of_sample}, "targets": {"mean": views[0].mean()}}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(6, 8)
        self.out = nn.Linear(8, 1)

    def forward(
        self, views: list[torch.Tensor], of: dict[str, dict[str, torch.Tensor]]
    ) -> torch.Tensor:
        assert of["sample"]["tags"].shape == (len(views[0]), 3)
        made: torch.Tensor = self.out((self.first(views[0]) + self.second(views[1])).tanh())
        return made.squeeze(1)


def dataset(split: str) -> Points:
    return Points()


def build() -> nn.Module:
    return Model()


def objective(outputs: torch.Tensor, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    errors = (outputs - batch["targets"]["mean"]).square() * batch["of"]["sample"]["weight"]
    return errors.sum(), torch.tensor(len(errors))
