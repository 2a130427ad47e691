"""The benchmark on a model of nothing: every contender runs, leaves a whole row, and learns."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import ExitCode
from phalanx.core.units import MIB
from phalanx.plan.pipeline.generate import SCHEDULE_NAMES
from throughput.__main__ import parse, run
from throughput.cases import BARE, CEILING, PHALANX, Case, Row

TINY = Case(
    dim=64,
    num_layers=1,
    vocab_size=256,
    precision="fp32",
    micro_batch_size=4,
    num_microbatches=2,
    seq_len=32,
)
WARMUP, STEPS = 2, 12


@pytest.mark.long
def test_every_contender_leaves_a_whole_row_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("throughput.__main__._warm_file_cache", lambda: None)
    rows = [Row(TINY, contender, 0) for contender in (PHALANX, BARE, CEILING)]
    options = parse(
        ["--steps", str(STEPS), "--warmup", str(WARMUP), "--out", str(tmp_path), "--label", "here"]
    )
    code = run(options, rows)
    said = capsys.readouterr().out
    assert code == ExitCode.OK, said
    (path,) = tmp_path.glob("*-here.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["contender"] for record in records] == [PHALANX, BARE, CEILING]
    for record in records:
        assert len(record["step_s"]) == STEPS
        assert min(record["step_s"]) > 0
        assert record["tokens_per_s"] == pytest.approx(
            TINY.tokens_per_step / record["median_step_s"]
        )
        assert 0 < record["first_step_s"] < record["wall_s"]
        assert len(record["peak_bytes"]) == 2
        assert min(record["peak_bytes"]) > 50 * MIB
        losses = record["losses"]
        assert len(losses) == WARMUP + STEPS
        assert losses[0] == pytest.approx(math.log(TINY.vocab_size), abs=0.2)
        assert losses[-1] < losses[0] - 0.3
    ends = [record["losses"][-1] for record in records]
    assert ends == pytest.approx(
        [ends[0]] * 3, abs=0.5
    )  # same model, optimizer and distribution of tokens
    assert "| 64x1-v256-fp32 |" in said


def test_a_contender_that_fails_is_a_row_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("throughput.__main__._warm_file_cache", lambda: None)
    monkeypatch.setattr("throughput.contenders.LEARNING_RATE", -1.0)
    options = parse(["--steps", "1", "--out", str(tmp_path), "--label", "here"])
    assert run(options, [Row(TINY, PHALANX, 0)]) == ExitCode.INTERNAL
    (path,) = tmp_path.glob("*-here.jsonl")
    assert "optim.lr" in json.loads(path.read_text())["error"]
    assert "FAILED: exit status 3" in capsys.readouterr().out


@pytest.mark.long
def test_checkpoints_are_measured_beside_dcp(tmp_path: Path) -> None:
    """Six mebibytes on two ranks: every contender saves, what can be loaded is, and each ratio
    is a number."""
    script = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"
    sizes = [
        "--mb",
        "6",
        "--ranks",
        "2",
        "--repeats",
        "1",
        "--dir",
        str(tmp_path),
        "--json",
        str(tmp_path / "rows"),
    ]
    done = subprocess.run(
        [sys.executable, str(script), *sizes], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "rows").read_text())
    assert found["ranks"] == 2
    assert len(found["seconds"]) == 17
    assert all(len(values) == 1 and values[0] >= 0 for values in found["seconds"].values())
    assert "nan" not in done.stdout
    assert "stall ÷ plain copy" in done.stdout


@pytest.mark.long
def test_pipelines_are_measured_beside_torchs(tmp_path: Path) -> None:
    """A model of nothing: both sides of every schedule train as one process does, and each has
    its numbers."""
    found = measured("pipeline.py", tmp_path / "found")
    for schedule, num_stages in (("1f1b", 2), ("gpipe", 2), ("interleaved", 4)):
        row = found[schedule]
        assert len(row["cut"]) == num_stages
        assert sum(row["cut"]) == 4
        assert len(row["ratios"]) == 2
        assert min(row["ratios"]) > 0
        assert row["loss_apart"] == pytest.approx({"phalanx": 0.0, "torch": 0.0}, abs=2e-6)
    assert set(found["tokens_per_s"]) > {"one process", "phalanx 1f1b", "torch 1f1b"}


@pytest.mark.long
def test_bubbles_are_measured_on_every_schedule(tmp_path: Path) -> None:
    """Blocks that wait a millisecond: every rank does the schedule's actions in order, and holds
    what it says."""
    rows = measured("pipeline_bubble.py", tmp_path / "found")
    assert [(row["stages"], row["schedule"]) for row in rows] == list(
        product(("even", "uneven"), SCHEDULE_NAMES)
    )
    for row in rows:
        assert row["measured_in_flight"] == row["predicted_in_flight"], row
        assert row["left_in_flight"] == [0] * 4, row
        assert all(
            0 < bubble < 1 for bubble in (row["predicted_bubble"], *row["measured_bubbles"])
        ), row


def measured(script: str, out: Path) -> Any:
    """What benchmarks/`script` --quick leaves in its file of numbers."""
    path = Path(__file__).parents[2] / "benchmarks" / script
    command = [sys.executable, str(path), "--quick", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "nan" not in done.stdout
    return json.loads(out.read_text())
