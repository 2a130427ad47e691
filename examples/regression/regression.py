"""Linear regression on scikit-learn's diabetes data: an objective of your own, and an answer that
can be computed.

Everything that `job.toml` names is here: `regression:dataset`, `regression:build`,
`regression:squared_error`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn

NUM_TRAIN, NUM_FEATURES = 342, 10


def table(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Features [n, 10] and targets [n, 1], standardised by the training split."""
    x, y = load_diabetes(return_X_y=True, scaled=False)
    order = np.random.RandomState(0).permutation(len(y))
    x, y = x[order], y[order, None]
    train = slice(None, NUM_TRAIN)
    x, y = (x - x[train].mean(0)) / x[train].std(0), (y - y[train].mean(0)) / y[train].std(0)
    rows = train if split == "train" else slice(NUM_TRAIN, None)
    return x[rows].astype(np.float32), y[rows].astype(np.float32)


def dataset(split: str) -> list[dict[str, np.ndarray]]:
    """Anything with `len()` and `[i]` is a dataset; here a list of dicts."""
    return [
        {"inputs": features, "targets": target}
        for features, target in zip(*table(split), strict=True)
    ]


def build() -> nn.Module:
    return nn.Linear(NUM_FEATURES, 1)


# [objective]
def squared_error(
    outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of squared errors, and how many there are."""
    errors = outputs - batch["targets"]
    return errors.square().sum(), torch.tensor(errors.numel())


# [/objective]
