"""What the page says of targets: -100 counts for nothing in loss, gradient and count; the
dataset shifts by one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.data.tokenizer import ByteTokenizer
from phalanx.data.user_dataset import UserSamples
from phalanx.nn.objective import (
    CausalOutput,
    Objective,
    build_logits_cross_entropy,
    causal_cross_entropy,
)

ANSWERS = Path(__file__).parents[2] / "examples" / "answers.py"


@pytest.fixture(scope="module")
def answers() -> Any:
    spec = importlib.util.spec_from_file_location("answers", ANSWERS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_learns_answers_alone(answers: Any) -> None:
    sample = answers.dataset("train")[0]
    (question, answer), bytes_ = answers.QUESTIONS[1], ByteTokenizer()
    counted = np.flatnonzero(sample["targets"] != answers.IGNORED)
    assert bytes_.decode(sample["inputs"][: counted[0] + 1]) == question
    assert bytes_.decode(sample["targets"][counted[:-1]]) == answer
    assert sample["targets"][counted[-1]] == bytes_.end_of_document
    shifted = sample["inputs"][counted[1:]]
    assert np.array_equal(shifted, sample["targets"][counted[:-1]]), (
        "target i is the token after input i"
    )


def outputs(vocab: int, batch: dict[str, torch.Tensor]) -> tuple[CausalOutput, torch.Tensor]:
    """Hidden states with a head, and the same as logits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(
        *batch["inputs"].shape, 8, generator=generator, dtype=torch.float64, requires_grad=True
    )
    head = torch.randn(vocab, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    return CausalOutput(hidden, head), hidden @ head.T


@pytest.mark.parametrize("objective", [causal_cross_entropy(7), build_logits_cross_entropy(1000)])
@pytest.mark.parametrize("as_logits", [False, True])
def test_a_target_of_minus_100_has_no_part_in_the_loss(
    answers: Any, objective: Objective, as_logits: bool
) -> None:
    samples = UserSamples(answers.dataset("train"), "answers:dataset", seed=0)
    batch = {key: torch.from_numpy(array) for key, array in samples.take(np.arange(4)).items()}
    causal, logits = outputs(257, batch)
    loss_sum, count = objective(logits if as_logits else causal, batch)
    counted = batch["targets"] != -100
    wanted = F.cross_entropy(logits[counted], batch["targets"][counted], reduction="sum")
    torch.testing.assert_close(loss_sum, wanted)
    assert int(count) == int(counted.sum()) < counted.numel()
    (gradient,) = torch.autograd.grad(loss_sum, causal.hidden_BTD)
    assert not gradient[~counted].any(), "nothing is learned where the target is -100"
    assert gradient[counted].any(dim=-1).all()
