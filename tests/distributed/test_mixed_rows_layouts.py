"""A loss that needs other rows: plan and train warn, verify names it; a buffer that a forward
moves is named, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from commands import events, run
from phalanx.observe.events import Note

SUPPORT = Path(__file__).parents[1] / "support"
COMMON = (
    "model.kind=mixing:encoder",
    "data.source=mixing:views",
    "data.seq_len=1",
    "data.workers=0",
    "train.global_batch_size=8",
    "parallel.ranks=2",
    "observe.sinks=[]",
)


def judged(tmp_path: Path, *overrides: str) -> tuple[int, dict[str, Any]]:
    """(exit code, the row in float64) of two copies of the model."""
    done = run(
        "verify", *COMMON, *overrides, "--layouts", "ddp", "--ranks", "2", "--json", cwd=tmp_path
    )
    return done.code, json.loads(done.out.splitlines()[0])


@pytest.fixture(autouse=True)
def importable(tmp_path: Path) -> None:
    shutil.copy(SUPPORT / "mixing.py", tmp_path)


@pytest.mark.long
def test_plan_train_and_verify_name_an_objective_that_mixes_rows(tmp_path: Path) -> None:
    objective = "model.objective=mixing:contrastive"
    planned = run("plan", *COMMON, objective, "--json", cwd=tmp_path)
    assert planned.code == 0, planned.err
    (warning,) = [
        one for one in json.loads(planned.out)["warnings"] if one["code"] == "rows_are_mixed"
    ]
    trained = run(
        "train", *COMMON, objective, "train.steps=2", "run.dir=run", "eval.tokens=0", cwd=tmp_path
    )
    assert trained.code == 0, trained.err
    notes = [envelope.event for envelope in events(tmp_path / "run", Note)]
    texts = [
        note.facts["text"] for note in notes if isinstance(note, Note) and note.code == "warning"
    ]
    assert warning["text"] in texts, "train says what plan said"
    assert trained.out.count(warning["text"][:60]) == 1, (
        "before the ranks start, and nothing is tried in them"
    )
    code, row = judged(tmp_path, objective)
    assert (code, row["ok"]) == (11, False)
    assert "the objective lets the rows of a batch see each other" in row["first"]["cause"]


@pytest.mark.long
def test_an_objective_that_gathers_by_itself_is_refused_by_name(tmp_path: Path) -> None:
    objective = "model.objective=mixing:gathering"
    code, row = judged(tmp_path, objective)
    assert (code, row["ok"], row["crashed"]) == (3, None, "")
    assert (
        "a collective of torch.distributed is called in the loss: all_gather (mixing.py:"
        in row["refused"]
    )
    planned = run("plan", *COMMON, objective, cwd=tmp_path)
    assert planned.code == 0, planned.err
    assert "warn    the loss calls all_gather (mixing.py:" in planned.out


@pytest.mark.parametrize("persistent", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_buffer_that_the_forward_moves_is_named(tmp_path: Path, persistent: bool) -> None:
    code, row = judged(
        tmp_path,
        "model.kind=mixing:remembers",
        f"model.args={{persistent={str(persistent).lower()}}}",
        "model.objective=mixing:by_rows",
    )
    assert (code, row["ok"]) == (11, False)
    assert "changes the buffer level" in row["first"]["cause"]
