"""Model-state bytes, against every row of the ZeRO paper's table. Activations and the rest have tests of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.plan.memory import MIXED_FP16_ADAM, StateBytes, state_bytes

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "zero_memory.json").read_text())


def test_the_table_is_all_there() -> None:
    cases = {(row["params_b"], row["dp"], row["zero_stage"]) for row in ROWS}
    assert cases == {(p, n, s) for p in (7.5, 128, 1000) for n in (1, 4, 16, 64, 256, 1024) for s in (1, 2, 3)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['params_b']}B-dp{row['dp']}-stage{row['zero_stage']}")
def test_states_are_those_of_the_zero_paper(row: dict[str, Any]) -> None:
    """arXiv 1910.02054, Table 1: its formula to four decimals, and the printed number to the rounding of its print."""
    found = sum(state_bytes(row["params_b"] * 1e9, row["zero_stage"], row["dp"], MIXED_FP16_ADAM).values()) / 1e9
    assert found == pytest.approx(row["formula_gb"], abs=5.1e-5)
    assert found == pytest.approx(row["model_state_gb"], rel=0.004, abs=0.06)  # printed with 2 to 4 digits, or cut


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_splits_one_more_kind(stage: int) -> None:
    """Optimizer from stage 1, gradients from 2, parameters from 3 (section 5 of the paper), in phalanx's own bytes."""
    found = state_bytes(1000, stage, 8, StateBytes())
    assert found == {
        "optimizer": 8000 / (8 if stage >= 1 else 1),
        "gradients": 4000 / (8 if stage >= 2 else 1),
        "parameters": 4000 / (8 if stage >= 3 else 1),
    }
