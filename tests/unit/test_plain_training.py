"""The loop that the trainer is compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from phalanx.verify.plain.training import HeldOutSource, evaluate_by_definition


class CountsItsCalls(nn.Module):
    """Moves its buffers in each forward, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("never_saved", torch.zeros(()), persistent=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.never_saved -= 1
        return numbers * self.calls


def test_an_evaluation_of_the_second_loop_leaves_modes_and_buffers() -> None:
    module = CountsItsCalls()
    module.calls.fill_(2)
    batches = [{"numbers": torch.ones(4)}, {"numbers": torch.ones(2)}]

    def sum_outputs(
        module: nn.Module, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert not module.training
        return module(batch["numbers"]).sum(), torch.tensor(len(batch["numbers"]))

    evaluation = evaluate_by_definition(module, sum_outputs, {"text": HeldOutSource(1.0, batches)})
    assert (evaluation.loss, evaluation.num_targets) == ((4 * 3 + 2 * 4) / 6, 6)
    assert (module.calls.item(), module.never_saved.item(), module.training) == (2, 0, True)
