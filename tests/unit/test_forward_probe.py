"""What verify sees of one forward of a module: rows that see each other, however little their mean
loss tells of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from phalanx.run.one_process.plain_loss import Batch
from phalanx.verify.forward_probe import probe_forward

NUM_ROWS, NUM_TOKENS, WIDTH, VOCAB = 4, 8, 16, 31


class Model(nn.Module):
    """Logits of tokens; with `centred` less the mean over all tokens of all rows, with `branches`
    scaled by what the first row of the batch begins with."""

    def __init__(
        self, *, centred: bool = False, narrow: bool = False, branches: bool = False
    ) -> None:
        super().__init__()
        self.centred, self.narrow, self.branches = centred, narrow, branches
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.narrow:
            x = x.float().tanh().to(x.dtype)
        if self.centred:
            x = x - x.mean((0, 1))
        if self.branches:
            # Large enough to move the loss by itself.
            return 10 * self.head(x) * (1 + tokens[0, 0])  # type: ignore[no-any-return]
        # As at the start of a training, when no token is likelier than another.
        logits: torch.Tensor = 1e-4 * self.head(x)
        return logits


class Loss:
    def compute_outputs(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        outputs: torch.Tensor = module(batch["inputs"])
        return outputs

    def __call__(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.compute_outputs(module, batch).flatten(0, 1)
        total = nn.functional.cross_entropy(logits, batch["targets"].flatten(), reduction="sum")
        return total, torch.tensor(batch["targets"].numel())


def build(*, dtype: torch.dtype = torch.float64, **how: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Model(**how).to(dtype)

    return make


def make_batch() -> Batch:
    tokens = torch.randint(VOCAB, (2, NUM_ROWS, NUM_TOKENS), generator=torch.manual_seed(1))
    return {"inputs": tokens[0], "targets": tokens[1]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_that_see_each_other_show_in_outputs_before_the_loss(dtype: torch.dtype) -> None:
    model, batch = build(centred=True, dtype=dtype), make_batch()
    probe = probe_forward(model, Loss(), batch, 0, is_users_own=True)
    assert (probe.mixes_rows, probe.mixed_by) == (True, "model")
    # Layouts make up for what phalanx's own models do with a batch.
    assert not probe_forward(model, Loss(), batch, 0).mixes_rows


def test_a_branch_by_the_first_row_is_the_models_and_not_the_objectives() -> None:
    """The first row is in the first half: its outputs stay when the last rows are others."""
    batch = make_batch()
    assert batch["inputs"][0, 0] != batch["inputs"][NUM_ROWS // 2, 0]
    probe = probe_forward(build(branches=True), Loss(), batch, 0, is_users_own=True)
    assert (probe.mixes_rows, probe.mixed_by) == (True, "model")


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_of_their_own_are_not_taken_for_mixed(dtype: torch.dtype, narrow: bool) -> None:
    model = build(centred=False, narrow=narrow, dtype=dtype)
    probe = probe_forward(model, Loss(), make_batch(), 0, is_users_own=True)
    assert not probe.mixes_rows
    rounds = narrow and dtype is torch.float64
    assert probe.narrows == ("float32" if rounds else "")
