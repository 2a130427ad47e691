"""In which layouts `verify` runs the trainer, and what rows of other layouts say."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.job.schema import Job
from phalanx.plan.layout import Layout
from phalanx.verify.cases import TRAINER_ROW_PREFIX
from phalanx.verify.choose import select_layout_cases
from phalanx.verify.trainer_cases import (
    has_trainer_row_of_combination,
    list_axes_without_trainer_row,
    list_trainer_layouts,
)


@pytest.mark.parametrize(
    ("degrees", "axes"),
    [
        ({"dp_replicate": 4}, []),
        ({"dp_replicate": 2, "dp_shard": 2}, []),
        ({"dp_shard": 4, "ep": 2}, []),
        ({"dp_shard": 2, "tp": 2}, []),
        ({"pp": 2, "tp": 2}, []),
        ({"dp_shard": 2, "cp": 2}, ["cp"]),
        # An odd number of ranks has rows of data parallelism alone.
        ({"tp": 3}, ["tp"]),
        ({"dp_shard": 3}, []),
    ],
)
def test_axes_that_no_row_of_the_trainer_has(degrees: dict[str, Any], axes: list[str]) -> None:
    assert list_axes_without_trainer_row(Layout(**degrees)) == axes


@pytest.mark.parametrize(
    ("degrees", "zero_stage", "has_row"),
    [
        ({"dp_replicate": 4}, 0, True),
        # State lies as in zero1, and in the second where another run is resumed in it.
        ({"dp_shard": 4}, 2, True),
        ({"dp_replicate": 2, "tp": 2}, 0, True),
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 0, True),
        ({"dp_shard": 4, "ep": 2}, 3, True),
        ({"dp_shard": 2, "tp": 2}, 3, True),
        ({"dp_shard": 2, "tp": 2}, 1, False),
        ({"dp_replicate": 2, "dp_shard": 2}, 1, False),
        ({"pp": 2, "tp": 2}, 0, False),
        ({"pp": 2, "dp_replicate": 2}, 0, False),
        ({"dp_shard": 2, "tp": 2, "ep": 2}, 3, False),
    ],
)
def test_axes_that_no_row_of_the_trainer_has_together(
    degrees: dict[str, Any], zero_stage: int, has_row: bool
) -> None:
    assert has_trainer_row_of_combination(Layout(**degrees), zero_stage) is has_row


@pytest.mark.parametrize(("preset", "has_experts"), [("small", False), ("small-mixtral", True)])
def test_models_with_experts_have_runs_with_ep(preset: str, has_experts: bool) -> None:
    job = Job.model_validate({"model": {"preset": preset}})
    selection = select_layout_cases(job, "all", ranks=4, steps=1, shrink=True)
    runs = {
        case.name.removeprefix(TRAINER_ROW_PREFIX)
        for case in selection.planned
        if case.other_plan is not None
    }
    wanted = {name for name, _ in list_trainer_layouts(4, experts=has_experts)}
    assert wanted <= runs
    assert ("zero3-ep2" in runs) is has_experts
    assert "hsdp2x2-zero3" in runs
    # What the model cannot have is no row that was refused.
    assert not any("ep2" in row.layout for row in selection.refused_rows if not has_experts)
