"""How the next token is chosen: greedy, by temperature, among the likeliest."""

from __future__ import annotations

import pytest
import torch

from phalanx.core.errors import NumericsError
from phalanx.train.generate import SamplingRule, _draw_next_token

LOGITS = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64).log()
DRAWS = 4000


def frequencies(how: SamplingRule, logits: torch.Tensor = LOGITS) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    counts = torch.bincount(
        torch.tensor([_draw_next_token(logits, how, generator) for _ in range(DRAWS)]), minlength=5
    )
    found: list[float] = (counts / DRAWS).tolist()
    return found


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (SamplingRule(temperature=1.0), [0.5, 0.2, 0.15, 0.1, 0.05]),
        (SamplingRule(temperature=1.0, top_k=2), [5 / 7, 2 / 7, 0, 0, 0]),
        (SamplingRule(temperature=1.0, top_k=9), [0.5, 0.2, 0.15, 0.1, 0.05]),
        (
            SamplingRule(temperature=1.0, top_p=0.6),
            [5 / 7, 2 / 7, 0, 0, 0],
        ),  # the token that crosses 0.6 belongs to them
        (SamplingRule(temperature=1.0, top_p=0.45), [1, 0, 0, 0, 0]),
        (SamplingRule(temperature=1.0, top_p=0.0), [1, 0, 0, 0, 0]),
        (
            SamplingRule(temperature=1.0, top_k=3, top_p=0.8),
            [5 / 7, 2 / 7, 0, 0, 0],
        ),  # of three: 0.59, 0.24, 0.18
        (SamplingRule(temperature=1.0, num_choices=2), [5 / 7, 2 / 7, 0, 0, 0]),
        (
            SamplingRule(temperature=0.5),
            [0.25 / 0.325, 0.04 / 0.325, 0.0225 / 0.325, 0.01 / 0.325, 0.0025 / 0.325],
        ),
        (SamplingRule(temperature=0.0), [1, 0, 0, 0, 0]),
    ],
)
def test_how_often_each_token_is_chosen(how: SamplingRule, expected: list[float]) -> None:
    """Within four standard deviations of 4000 draws, which a seed fixes; what is left out never
    comes."""
    for found, wanted in zip(frequencies(how), expected, strict=True):
        assert abs(found - wanted) <= 4 * (wanted * (1 - wanted) / DRAWS) ** 0.5


def test_the_usual_way_draws_as_it_always_did() -> None:
    """What a run's own sample is drawn by, of which curves and pages have bits."""
    ours = [
        _draw_next_token(LOGITS, SamplingRule(), torch.Generator().manual_seed(seed))
        for seed in range(50)
    ]
    wanted = [
        int(
            torch.multinomial(
                (LOGITS / 0.8).softmax(-1), 1, generator=torch.Generator().manual_seed(seed)
            )
        )
        for seed in range(50)
    ]
    assert ours == wanted


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(NumericsError, match="not finite"):
        _draw_next_token(torch.tensor([1.0, torch.nan]), SamplingRule(), torch.Generator())
    assert (
        _draw_next_token(
            torch.tensor([1.0, -torch.inf]), SamplingRule(), torch.Generator().manual_seed(0)
        )
        == 0
    )
