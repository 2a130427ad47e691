"""Metrics of the user's objective: exact on every layout, the best is chosen by one, and what is
none is refused.

The reference of every mean is the formula over all held-out samples, in one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_evaluation import Batch, Moody, Outcome, Steps, batch_of, train

from models import CPU, LAYOUTS
from phalanx.checkpoint.best import read_best_step
from phalanx.core.errors import JobError, LayoutError
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.observe.bus import Bus
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.layout import Layout
from phalanx.plan.planner import make_plan
from phalanx.train.evaluation import EvalScore, Evaluation, EvaluationHistory
from phalanx.train.metrics import (
    MetricAccumulator,
    average_metrics_over_sources,
    require_known_metric,
)
from phalanx.train.state import TrainState
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData
from ranks import run_ranks

Pair = tuple[torch.Tensor, torch.Tensor]
ROWS = (3, 5)  # of the held-out batches: sources are of unequal size
OFTEN = {"every_steps": 1}
HIGH = {"every_steps": 1, "keep_best": True, "metric": "high", "mode": "max"}


class Errors:
    """Squared error, and what else one may want to know of it.

    `high` counts only targets above 1.
    """

    def __call__(self, outputs: torch.Tensor, batch: Batch) -> Pair:
        return (outputs - batch["targets"]).square().sum(), torch.tensor(len(outputs))

    def metrics(self, outputs: torch.Tensor, batch: Batch) -> Mapping[str, tuple[Any, Any]]:
        absolute, high = (outputs - batch["targets"]).abs(), batch["targets"] > 1
        return {
            "absolute": (absolute.sum(), len(outputs)),
            "high": (absolute[high].sum(), high.sum()),
            "none": (0, 0),
        }


class Seen(Errors):
    """Keeps what it was shown: enough for the formula."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.targets: list[float] = []

    def metrics(self, outputs: torch.Tensor, batch: Batch) -> Mapping[str, tuple[Any, Any]]:
        self.errors += (outputs - batch["targets"]).abs().tolist()
        self.targets += batch["targets"].tolist()
        return super().metrics(outputs, batch)


def shares(rank: int, num_ranks: int) -> Sequence[Batch]:
    """Eight held-out samples in batches of unequal size, of which each rank has some."""
    return [
        {key: value[rank::num_ranks] for key, value in batch_of(50 + number, rows).items()}
        for number, rows in enumerate(ROWS)
    ]


def evaluated(
    rank: int, num_ranks: int, objective: Errors, layout: Mapping[str, int]
) -> Evaluation:
    """Moody as it is before it is trained, on two sources of which the second counts three
    times."""
    first, second = shares(rank, num_ranks)
    job = Job.model_validate(
        {
            "data": {"seq_len": 1},
            "train": {"global_batch_size": 8},
            "parallel": {"ranks": num_ranks, **layout},
        }
    )
    plan = make_plan(job, cluster=CPU, num_ranks=num_ranks)
    with open_mesh(plan.layout, device="cpu") as mesh:
        model = parallelize(Moody(), plan, mesh)
        data = TrainingData(
            Steps(rank, num_ranks),
            objective,
            held_out={"first": [first], "second": [second, second]},
            source_weights={"first": 1.0, "second": 3.0},
        )
        state = TrainState(model, build_optimizer(model, job.optim), seed=7)
        return Trainer(job, plan, state, Bus(rank=rank), data).evaluate()


def judged(rank: int, num_ranks: int) -> dict[str, Mapping[str, float]]:
    return {
        name: evaluated(rank, num_ranks, Errors(), layout).metrics
        for name, layout in LAYOUTS[num_ranks].items()
    }


def judged_alone(rank: int) -> tuple[Mapping[str, float], list[float], list[float]]:
    """One rank, and what it saw."""
    objective = Seen()
    return evaluated(rank, 1, objective, {}).metrics, objective.errors, objective.targets


def mean(errors: list[float], targets: list[float], above: float) -> float:
    chosen = [error for error, target in zip(errors, targets, strict=True) if target > above]
    return sum(chosen) / len(chosen)


def test_means_are_those_of_all_samples_on_every_layout() -> None:
    ((alone, errors, targets),) = run_ranks(1, judged_alone)
    assert len(errors) == ROWS[0] + 2 * ROWS[1]
    first, second = slice(0, ROWS[0]), slice(ROWS[0], None)
    formula = {
        name: (
            mean(errors[first], targets[first], above) / 4
            + mean(errors[second], targets[second], above) * 3 / 4
        )
        for name, above in (("absolute", -math.inf), ("high", 1.0))
    }
    assert alone == pytest.approx(formula, rel=1e-6)  # a batch adds up in fp32
    for found in run_ranks(2, judged, 2):
        for name, metrics in found.items():
            assert metrics == pytest.approx(formula, rel=1e-6), name


def kept(rank: int, folder: str) -> list[Outcome]:
    """Judged by a metric and by the loss; and stopped after the third evaluation, then
    continued."""
    sources = {"": shares(0, 1)}
    run_dir, stopped = Path(folder) / "run", Path(folder) / "stopped"

    def stop(evaluation: int, batch: int, flags: Any) -> None:
        flags.sigterm = (
            flags.sigterm or evaluation == 5
        )  # the first one shows which metrics there are

    return [
        train(rank, 1, run_dir, HIGH, objective=Errors(), sources=sources),
        train(rank, 1, None, OFTEN, objective=Errors(), sources=sources),
        train(rank, 1, stopped, HIGH, objective=Errors(), before=stop),
        train(rank, 1, stopped, HIGH, objective=Errors(), attempt=1, resume=True),
        train(rank, 1, None, HIGH, objective=Errors()),
    ]


def test_the_best_is_chosen_by_the_metric_also_after_a_stop(tmp_path: Path) -> None:
    ((by_metric, by_loss, stopped, continued, straight),) = run_ranks(1, kept, str(tmp_path))
    assert by_metric.losses == by_loss.losses, "training does not notice what it is judged by"
    values = {event.step: event.metrics["high"] for event in by_metric.evals}
    for event in by_metric.evals:
        so_far = {step: value for step, value in values.items() if step <= event.step}
        assert (event.best_step, event.best_value) == max(
            so_far.items(), key=lambda item: (item[1], -item[0])
        )
        assert (event.judged_by, event.best) == ("high", event.best_value)
    last = by_metric.evals[-1]
    assert last.best_step != by_loss.evals[-1].best_step, "else this shows nothing"
    best = read_best_step(tmp_path / "run")
    assert best is not None
    assert (best.step, best.metric, best.value) == (last.best_step, "high", last.best_value)
    assert stopped.ended == "sigterm"
    told = [(e.step, e.best_step, e.best_value) for e in stopped.evals + continued.evals]
    assert told == [(e.step, e.best_step, e.best_value) for e in straight.evals]


def refused(rank: int) -> list[str]:
    found = []
    for objective, metric in ((Errors(), "accuracy"), (Errors().__call__, "accuracy")):
        try:
            train(
                rank,
                1,
                None,
                {"metric": metric, "mode": "max"},
                objective=objective,
                sources={"": shares(0, 1)},
            )
        except LayoutError as error:
            found.append(str(error))
    return found


def test_a_metric_that_there_is_not_is_refused_with_those_there_are() -> None:
    ((named, nameless),) = run_ranks(1, refused)
    assert (
        named
        == 'eval.metric: evaluations have no metric "accuracy"; set eval.metric to one of loss,'
        " absolute, high, none"
    )
    assert "give model.objective a metrics(outputs, batch)" in nameless


class Given:
    """An objective whose metrics are what it was given."""

    def __init__(self, metrics: Any) -> None:
        self.given = metrics

    def __call__(self, outputs: Any, batch: Batch) -> Pair:
        return torch.zeros(()), torch.ones(())

    def metrics(self, outputs: Any, batch: Batch) -> Any:
        return self.given


BAD = [
    (0.5, "returned a float"),
    ({"accuracy": 0.5}, '"accuracy" is no pair of a sum and a count'),
    ({"accuracy": (torch.zeros(2), 2)}, '"accuracy" is no pair of a sum and a count'),
    ({"loss": (1, 2)}, "a metric named 'loss'"),
    ({3: (1, 2)}, "a metric named 3"),
]


def measure(mesh: Mesh, given: Any) -> dict[str, tuple[float, float]] | str:
    sums = MetricAccumulator(Given(given), mesh)
    try:
        sums(None, {})
        return sums.reduce_over_ranks()
    except LayoutError as error:
        return str(error)


def bad_and_unequal(rank: int) -> tuple[list[Any], Any]:
    with open_mesh(Layout(dp_replicate=2), device="cpu") as mesh:
        return [measure(mesh, given) for given, _ in BAD], measure(
            mesh, {"a" if rank else "b": (1, 2)}
        )


def test_what_is_no_metric_is_refused_on_every_rank() -> None:
    for rank, (bad, unequal) in enumerate(run_ranks(2, bad_and_unequal)):
        assert [why in said for said, (_, why) in zip(bad, BAD, strict=True)] == [True] * len(
            BAD
        ), bad
        assert "other names on other ranks" in unequal
        assert f"on rank {1 - rank}" in unequal


def test_sources_count_as_in_the_loss_and_what_counts_nothing_has_no_mean() -> None:
    by_source = {
        "a": {"x": (1.0, 4.0), "y": (0.0, 0.0)},
        "b": {"x": (3.0, 4.0)},
        "c": {"x": (0.0, 0.0)},
    }
    assert average_metrics_over_sources(by_source) == {"x": 0.5}
    assert average_metrics_over_sources(by_source, {"a": 3.0, "b": 1.0, "c": 9.0}) == {
        "x": (3 * 0.25 + 0.75) / 4
    }
    assert average_metrics_over_sources({"a": {"x": (math.inf, 1.0)}}) == {}
    require_known_metric("loss", [])
    require_known_metric("x", ["x"])


def test_the_first_of_equals_is_the_best_and_what_is_no_number_never() -> None:
    record = EvaluationHistory(
        {2: EvalScore(1.0, 9, 0.5), 4: EvalScore(0.9, 9, 0.5), 6: EvalScore(0.8, 9, math.nan)}
    )
    record.add_evaluation(8, EvalScore(0.1, 5, 0.9))  # over other data
    assert record.best(9, "max") == (2, EvalScore(1.0, 9, 0.5))
    assert record.best(7, "max")[0] == 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["eval.metric=accuracy", "eval.mode=max"], 'has the loss and nothing named "accuracy"'),
        (
            ["model.kind=a:b", "model.objective=a:c", "eval.metric=accuracy"],
            "a high or a low accuracy is better",
        ),
        (["eval.mode=max"], "the best loss is the lowest"),
        (["eval.metric="], "eval.metric"),
        (["eval.mode=most"], "eval.mode"),
    ],
)
def test_a_job_whose_best_cannot_be_told_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(JobError, match=said):
        load_job(None, overrides)
