"""What `phalanx bench` says of sections that it cannot measure, and of its seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest
from typer.models import OptionInfo

from phalanx.bench.drive import BenchRequest
from phalanx.bench.items import SECTION_BUDGET_S
from phalanx.cli._bench import describe_place_of_profile
from phalanx.cli.bench import Seconds


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_is_not_told_to_measure_collectives(ranks: int) -> None:
    request = BenchRequest(("storage", "gemm", "comm"), "cpu", ranks)
    profile: Any = SimpleNamespace(sections={"storage": 0, "gemm": 0})
    (line,) = describe_place_of_profile(request, profile, None)
    assert ("one rank has no collectives" in line) == (ranks == 1)
    assert ("phalanx bench all" in line) == (ranks == 2)


def test_the_help_has_the_seconds_that_are_taken() -> None:
    option = next(
        part
        for each in (Seconds, *get_args(Seconds))
        for part in getattr(each, "__metadata__", ())
        if isinstance(part, OptionInfo)
    )
    gemm_s, comm_s = SECTION_BUDGET_S["gemm"], SECTION_BUDGET_S["comm"]
    assert f"default {gemm_s:g} for products, {comm_s:g} for collectives" in str(option.help)
