"""What users bring: models and objectives, good ones and others.

Imported by name in the tests' runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.nn.objective import causal_cross_entropy


class Bigram(nn.Module):
    """Token ids to logits of the next token."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.lookup = nn.Embedding(vocab_size, 16)
        self.out = nn.Linear(16, vocab_size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.lookup(inputs))


class BreaksInForward(Bigram):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.lookup(inputs).reshape(-1, 7))  # the user's mistake


def bigram(vocab_size: int = 257) -> nn.Module:
    return Bigram(vocab_size)


def breaks_in_forward(vocab_size: int = 257) -> nn.Module:
    return BreaksInForward(vocab_size)


def breaks_in_factory() -> nn.Module:
    raise ValueError("the factory's own\nmistake")


def breaks_on_real_weights() -> nn.Module:
    module = Bigram(257)
    if module.out.weight.device.type != "meta":
        raise ValueError("only when it is for real")
    return module


def no_module() -> Any:
    return {"weights": 1}


def squared_tensor_error(
    logits: torch.Tensor, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """An objective of the user's own: the probability of the target should be 1."""
    chosen = logits.softmax(-1).gather(-1, batch["targets"][..., None])
    return (1 - chosen).square().sum(), torch.tensor(batch["targets"].numel())


_batches: list[bytes] = []


def poisoned(outputs: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy, except that rank 1 returns NaN at the steps POISON names ("3,4"), also where a
    step is computed again: one batch is one step."""
    targets = batch["targets"].numpy().tobytes()
    if targets not in _batches:
        _batches.append(targets)
    step = _batches.index(targets) + 1
    loss, count = causal_cross_entropy(64)(outputs, batch)
    if os.environ["RANK"] == "1" and str(step) in os.environ["POISON"].split(","):
        loss = loss * float("nan")
    return loss, count


class Slow(Bigram):
    """Says that it is in its forward, and stays there: in a rank, not where a plan tries what it
    does."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if "RANK" in os.environ:
            Path("slow").touch()
            time.sleep(60)
        return super().forward(inputs)


def slow(vocab_size: int = 257) -> nn.Module:
    return Slow(vocab_size)


class Total(Bigram):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).sum()


def total(vocab_size: int = 257) -> nn.Module:
    return Total(vocab_size)


class Noisy(Bigram):
    """Adds noise of torch's own to what it looked up."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.noise = Noise()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.noise(self.lookup(inputs)))


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.01 * torch.rand_like(x)


def noisy(vocab_size: int = 257) -> nn.Module:
    return Noisy(vocab_size)


class Bend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Bent(Bigram):
    """With blocks of which a compiler makes the fewest kernels."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.blocks = nn.ModuleList([Bend(), Bend()])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.lookup(inputs)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def bent(vocab_size: int = 257) -> nn.Module:
    return Bent(vocab_size)


def stand_still() -> None:
    """A fault: what this thread does, a write say, never ends."""
    threading.Event().wait()
