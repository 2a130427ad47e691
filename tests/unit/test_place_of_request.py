"""Where a rank asked for memory that was not there: the line that its owner can change."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from phalanx.run.out_of_memory import describe_place_of_request, is_out_of_memory


def ask_in_library() -> None:
    torch.nn.Linear(1 << 30, 1 << 20)


def ask_here() -> None:
    torch.empty(1 << 52)


@pytest.mark.parametrize(
    ("ask", "pattern"),
    [
        (ask_in_library, r"test_place_of_request\.py:\d+ \(in __init__, linear\.py:\d+\)"),
        (ask_here, r"test_place_of_request\.py:\d+ in ask_here"),
    ],
)
def test_the_users_own_line_is_named_before_what_it_called(
    ask: Callable[[], None], pattern: str
) -> None:
    with pytest.raises(RuntimeError) as caught:
        ask()
    assert is_out_of_memory(caught.value)
    assert re.fullmatch(pattern, describe_place_of_request(caught.value.__traceback__))


def test_without_a_line_of_the_user_the_innermost_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(1 << 30, 1 << 20)
    inside = caught.value.__traceback__
    assert inside is not None
    inside = inside.tb_next
    assert re.fullmatch(r"linear\.py:\d+ in __init__", describe_place_of_request(inside))
