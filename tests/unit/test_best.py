"""RUN/best.json: whole or absent, and whatever lies there instead is no answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.checkpoint.best import BEST_FILE_NAME, BestStepRecord, read_best_step, record_best_step
from phalanx.core.files import read_json


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_best_step(tmp_path) is None
    record_best_step(tmp_path, step=300, loss=1.25, num_targets=900)
    assert read_best_step(tmp_path) == BestStepRecord(
        300, 1.25, 900, "checkpoints/step-300", "loss", 1.25
    )
    assert read_json(tmp_path / BEST_FILE_NAME)["format"] == 1
    record_best_step(tmp_path, step=400, loss=0.1 + 0.2, num_targets=900)
    best = read_best_step(tmp_path)
    assert best is not None
    assert (best.step, best.loss) == (400, 0.1 + 0.2)
    assert [path.name for path in tmp_path.iterdir()] == [BEST_FILE_NAME]


def test_the_metric_that_it_is_the_best_by_is_kept_and_older_files_have_the_loss(
    tmp_path: Path,
) -> None:
    record_best_step(tmp_path, step=3, loss=1.25, num_targets=9, metric="accuracy", value=0.75)
    assert read_best_step(tmp_path) == BestStepRecord(
        3, 1.25, 9, "checkpoints/step-3", "accuracy", 0.75
    )
    (tmp_path / BEST_FILE_NAME).write_text(
        '{"format": 1, "step": 3, "loss": 1.25, "num_targets": 9, "checkpoint": "x"}'
    )
    assert read_best_step(tmp_path) == BestStepRecord(3, 1.25, 9, "x", "loss", 1.25)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"step": "x", "loss": 1, "num_targets": 1}',
        '{"step": 1e999, "loss": 1, "num_targets": 1, "checkpoint": "x"}',
    ],
)
def test_a_damaged_file_is_no_best(tmp_path: Path, text: str) -> None:
    (tmp_path / BEST_FILE_NAME).write_text(text)
    assert read_best_step(tmp_path) is None
