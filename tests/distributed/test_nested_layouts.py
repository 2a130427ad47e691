"""Nested samples through loader workers, ranks and microbatches: trained, and judged equal to
one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from commands import run

COMMON = (
    "model.kind=nested:build",
    "model.objective=nested:objective",
    "data.source=nested:dataset",
    "data.seq_len=1",
    "observe.sinks=[]",
)


@pytest.mark.long
def test_nested_samples_are_trained_on_and_judged(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "support" / "nested.py", tmp_path)
    more = (
        "train.global_batch_size=8",
        "train.micro_batch_size=2",
        "parallel.ranks=2",
        "train.steps=3",
    )
    trained = run("train", *COMMON, *more, "run.dir=run", "optim.lr=0.01", cwd=tmp_path)
    assert trained.code == 0, trained.err
    assert "rows of a batch see each other" not in trained.out
    done = run(
        "verify",
        *COMMON,
        "--layouts",
        "ddp",
        "--ranks",
        "2",
        "--steps",
        "2",
        "--json",
        cwd=tmp_path,
    )
    assert done.code == 0, done.out
    assert [json.loads(line)["ok"] for line in done.out.splitlines()] == [True, True]
