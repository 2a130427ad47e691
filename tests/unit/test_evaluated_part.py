"""What `phalanx eval` says of data of which it evaluates a part."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli._eval_output import print_evaluation_task
from phalanx.job.load import load_job
from phalanx.observe.units import TEXT_METRIC_UNITS
from phalanx.run.scratch import open_scratch_directory
from phalanx.run.trained.evaluate import EvaluationResult, prepare_evaluation
from phalanx.run.trained.model import TrainedModel

ALL = "1,001 tokens, all of it"


@pytest.mark.parametrize(
    ("keys", "data", "split"),
    [
        ((), ALL, "all"),
        (("eval.tokens=1000",), ALL, "all"),
        (("eval.tokens=999",), "1,001 tokens, at most 999 of them", "part"),
        (
            ("data.held_out_fraction=0.5", "eval.tokens=10"),
            "tokens held out, at most 10 of them",
            "held_out",
        ),
    ],
)
def test_a_part_of_another_source_is_not_called_all_of_it(
    keys: tuple[str, ...],
    data: str,
    split: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "new.txt").write_text("a" * 1000)  # and the token that ends a document
    overrides = (f"data.source={tmp_path / 'new.txt'}", *keys)
    job = load_job(None, ["parallel.ranks=1", *overrides])
    model = TrainedModel("weights", job, None, None, None, None, overrides, 1, "as you asked")
    with open_scratch_directory("eval") as scratch:
        task = prepare_evaluation(model, scratch)
        print_evaluation_task(task)
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("data ")]
    assert line.endswith(data)
    facts = EvaluationResult(task, 1.0, {}, {}, 9, 0.1, None, TEXT_METRIC_UNITS).to_json()
    assert facts["split"] == split
    assert (facts["max_tokens"] is None) == (data == ALL)
