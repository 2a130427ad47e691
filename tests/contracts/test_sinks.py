"""What every sink must do, and what the bus does for those that do not.

A new file in the folder is covered at once.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from commands import wait_until
from phalanx.core.errors import EnvironmentProblem, ExitCode
from phalanx.core.registry import import_object_of_kind, list_modules_of_registry
from phalanx.job.schema import Job, Observe
from phalanx.observe.bus import CLOSE_TIMEOUT_S, Bus, OpenSink, build_event_file_path
from phalanx.observe.events import (
    EVENT_CLASS_OF_KIND,
    CheckpointSaved,
    Envelope,
    EvalFinished,
    Event,
    ExpertsLoaded,
    InvariantChecked,
    Note,
    RunStarted,
    StepFinished,
    StepSkipped,
    StopRequested,
)
from phalanx.observe.sink_process import ProcessSink, SinkProcessError
from phalanx.observe.sinks._metrics import EventMetricsExtractor, extract_metric_values
from phalanx.run.needs import list_sink_openers, require_packages
from sink_readers import CURVES, mlflow_run, tensorboard_curves, wandb_runs

PACKAGE = "phalanx.observe.sinks"
SINKS = list_modules_of_registry(PACKAGE)
PATIENCE_S = 60.0
ORDINARY: dict[str, Any] = {
    "str": "text",
    "int": 3,
    "float": 0.5,
    "dict[str, int]": {"parameters": 4},
    "dict[str, float]": {"forward": 0.1},
    "dict[str, list[int]]": {"blocks.0": [3, 5]},
    "dict[str, Any]": {"deep": [1, {"x": None}]},
    "list[int]": [1, 2],
    "list[str]": ["blocks.0.norm.weight", "text"],
    "bool": True,
    "list[list[float]]": [[0.1, 0.2], [0.3, 0.4]],
    "list[list[list[Any]]]": [[["0F0", 0.0, 0.1]], [["1F0", 0.1, 0.2]]],
}


def example(kind: str, values: dict[str, Any]) -> Event:
    cls = EVENT_CLASS_OF_KIND[kind]
    return cls(**{item.name: values[str(item.type)] for item in fields(cls)})


def started(at: int, total: int = 4) -> RunStarted:
    return RunStarted("r", "d", 1, at, total, "cpu", {})


def step(number: int, loss: float = 2.0) -> StepFinished:
    return StepFinished(
        number, loss, 64, 64 * number, 1e-3, 0.5, 0.1, 640.0, {"forward": 0.06}, 0.04, 2**30
    )


def files_below(directory: Path) -> set[Path]:
    return {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()}


def missing(kind: str) -> list[str]:
    return [
        name
        for name in import_object_of_kind(kind, PACKAGE, "REQUIRES")
        if importlib.util.find_spec(name) is None
    ]


@pytest.fixture(params=SINKS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    if missing(name):
        pytest.skip(f"{', '.join(missing(name))} is not installed: pip install 'phalanx[{name}]'")
    for variable in (
        "WANDB_MODE",
        "WANDB_API_KEY",
        "WANDB_RUN_ID",
        "WANDB_BASE_URL",
        "MLFLOW_TRACKING_URI",
    ):
        monkeypatch.delenv(variable, raising=False)
    return name


def opener(kind: str, run_dir: Path) -> OpenSink:
    """As a rank does it: in a process of its own where the sink asks for one."""
    ((_, open_sink),) = list_sink_openers(Job(observe=Observe(sinks=(kind,))), run_dir)
    return open_sink


def record(kind: str, run_dir: Path, attempt: int, found: list[Event]) -> list[dict[str, Any]]:
    """One attempt of rank 0 with this sink; what its event file then says of sinks."""
    bus = Bus(rank=0, attempt=attempt, run_dir=run_dir, sinks=[(kind, opener(kind, run_dir))])
    for event in found:
        bus.emit(event)
    bus.close(PATIENCE_S)
    lines = build_event_file_path(run_dir, 0, attempt).read_text().splitlines()
    return [body for body in map(json.loads, lines) if body["event"] == "sink_dropped"]


def test_the_folder_has_sinks() -> None:
    assert set(CURVES) <= set(SINKS)


def test_says_what_it_needs_and_has_an_extra_of_its_name(kind: str) -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert import_object_of_kind(kind, PACKAGE, "REQUIRES")
    assert pyproject["project"]["optional-dependencies"][kind]
    for attribute in ("PRELOAD", "IS_APART", "open_sink"):
        import_object_of_kind(kind, PACKAGE, attribute)


def test_takes_every_event_closes_twice_and_writes_only_inside_the_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, run_dir = tmp_path / "elsewhere", tmp_path / "run"
    for directory in (elsewhere, run_dir):
        directory.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(elsewhere))
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    sink = opener(kind, run_dir)()
    ordinary = [(0.5, rank) for rank in (-1, 0, 1)]
    for number, rank in [*ordinary, (math.nan, 0), (math.inf, 0), (-math.inf, 0)]:
        for name in sorted(EVENT_CLASS_OF_KIND):
            sink.write(Envelope(example(name, ORDINARY | {"float": number}), rank, 0, 1.0))
    sink.close()
    sink.close()
    assert files_below(run_dir)
    assert files_below(elsewhere) == set()


@pytest.mark.long
def test_needs_no_torch(kind: str, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from phalanx.core.registry import import_object_of_kind;"
        f"import_object_of_kind({kind!r}, {PACKAGE!r}, 'open_sink')(Path({str(tmp_path)!r})).close();"
        "sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # in a thread of tensorboard's
def test_a_directory_that_disappears_stops_nobody(kind: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    bus = Bus(rank=0, run_dir=run_dir, sinks=[(kind, opener(kind, run_dir))])
    bus.emit(started(0))
    wait_until(lambda: files_below(run_dir / kind))
    shutil.rmtree(run_dir, ignore_errors=True)
    for number in range(1, 200):
        bus.emit(step(number))
    began = time.monotonic()
    bus.close()
    assert time.monotonic() - began < CLOSE_TIMEOUT_S + 5


@pytest.mark.long
def test_a_resumed_run_adds_to_the_same_curves(kind: str, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"run": {"name": "r"}, "optim": {"lr": 0.25}}))
    evaluation = EvalFinished(4, 2.5, 100, 1.0, {"a/b": 2.25}, metrics={"top 5": 0.75})
    assert not record(
        kind, tmp_path, 0, [started(0), *(step(number, loss=1 / number) for number in (1, 2, 3))]
    )
    again = [
        started(2),
        step(3, loss=1 / 3),
        StepSkipped(4, "no_targets", 0.0, 0, 32),
        step(4, loss=1 / 4),
        evaluation,
    ]
    assert not record(kind, tmp_path, 1, again)
    curves = CURVES[kind](tmp_path)
    assert curves["train/loss"] == pytest.approx({1: 1, 2: 1 / 2, 3: 1 / 3, 4: 1 / 4})
    assert curves["eval/loss"] == {4: 2.5}
    assert curves["eval/loss/a_b"] == {4: 2.25}
    assert curves["eval/top_5"] == {4: 0.75}
    assert curves["train/skipped"] == {4: 1.0}
    at_two = {name: values[2] for name, values in curves.items() if 2 in values}
    assert at_two == pytest.approx(
        {
            "train/loss": 0.5,
            "train/learning_rate": 1e-3,
            "train/grad_norm": 0.5,
            "train/tokens_seen": 128,
            "throughput/tokens_per_s": 640.0,
            "time/step_s": 0.1,
            "time/forward_s": 0.06,
            "time/unaccounted_s": 0.04,
            "memory/rss_gib": 1.0,
        }
    )
    IS_ONE_RUN[kind](tmp_path)


@pytest.mark.long
def test_what_is_done_first_after_a_restart_joins_what_stands(kind: str, tmp_path: Path) -> None:
    """The evaluation of the step that is continued from: it is drawn, and the step itself stays."""
    record(kind, tmp_path, 0, [started(0), step(1, loss=1.0), step(2, loss=0.5)])
    record(kind, tmp_path, 1, [started(2), EvalFinished(2, 2.5, 100, 1.0), step(3, loss=0.25)])
    curves = CURVES[kind](tmp_path)
    assert curves["train/loss"] == {1: 1.0, 2: 0.5, 3: 0.25}
    assert curves["eval/loss"] == {2: 2.5}


def one_tensorboard_directory(run_dir: Path) -> None:
    assert {path.parent for path in (run_dir / "tensorboard").rglob("*")} == {
        run_dir / "tensorboard"
    }


def one_wandb_run(run_dir: Path) -> None:
    """Its id is kept; its config is the job; nothing of the machine, the code or the output is
    there."""
    runs = wandb_runs(run_dir)
    assert {run.run_id for run in runs} == {(run_dir / "wandb" / "run-id").read_text().strip()}
    for run in runs:
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["optim"] == {"lr": 0.25}
        assert (run.host, run.git.commit) == ("", "")
    kept = {path.name for path in (run_dir / "wandb").rglob("*") if path.is_file()}
    assert not kept & {"wandb-metadata.json", "requirements.txt", "output.log"}


def one_mlflow_run(run_dir: Path) -> None:
    """Its id is kept; its parameters are the job; it ended well in the end."""
    _, run = mlflow_run(run_dir)
    assert run.info.run_id == (run_dir / "mlflow" / "run-id").read_text().strip()
    assert run.data.params == {"run.name": "r", "optim.lr": "0.25"}
    assert run.info.status == "FINISHED"


IS_ONE_RUN = {
    "tensorboard": one_tensorboard_directory,
    "wandb": one_wandb_run,
    "mlflow": one_mlflow_run,
}


class Hidden:
    """A finder for which a package is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_without_its_package_a_job_is_refused_with_the_extra(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = import_object_of_kind(kind, PACKAGE, "REQUIRES")[0]
    monkeypatch.setattr(sys, "meta_path", [Hidden(package), *sys.meta_path])
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(EnvironmentProblem) as caught:
        require_packages(Job(observe=Observe(sinks=(kind,))), "cpu")
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert f"pip install 'phalanx[{kind}]'" in str(caught.value)


# --- one by one -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ([started(0, total=2), step(1), step(2)], "finished"),
        ([started(0, total=2), step(1), StopRequested(1, "sigterm")], "stopped"),
        ([started(0, total=2), step(1)], "failed"),
        ([started(2, total=2)], "finished"),
        ([], "failed"),
    ],
)
def test_how_a_run_ended_is_known_from_what_it_said(found: list[Event], status: str) -> None:
    metrics = EventMetricsExtractor()
    for event in found:
        metrics.extract_metric_point(Envelope(event, 0, 0, 1.0))
    assert metrics.final_status == status


def told(
    metrics: EventMetricsExtractor, run_dir: Path, attempt: int, found: list[Event]
) -> dict[int, dict[str, float]]:
    """The points of an attempt by step; its events are on record, as a rank's are."""
    bus = Bus(rank=0, attempt=attempt, run_dir=run_dir)
    for event in found:
        bus.emit(event)
    bus.close()
    points = [metrics.extract_metric_point(Envelope(event, 0, attempt, 1.0)) for event in found]
    return {point.step: point.values for point in points if point is not None}


def test_facts_that_come_late_are_points_of_the_newest_step() -> None:
    """What a save took is known steps later; W&B takes nothing of steps before."""
    metrics = EventMetricsExtractor()
    found = [
        started(0),
        replace(step(3), phases_s={"forward": 0.04, "collective": 0.05}, cpu_s=0.07),
        ExpertsLoaded(3, {"blocks.0": [30, 10]}, {"blocks.0": 4}),
        CheckpointSaved(1, "checkpoints/step-1", 2**31, 4.0, 0.5, 2**30),
        InvariantChecked(3, "replicas_equal", True, is_summary=True, num_checks=2),
    ]
    points = [metrics.extract_metric_point(Envelope(event, 0, 0, 1.0)) for event in found]
    told_points = [point for point in points if point is not None]
    assert [point.step for point in told_points] == [3, 3, 3, 3]
    of_step, of_experts, of_save, of_check = (point.values for point in told_points)
    assert of_step["time/wait_s"] == pytest.approx(0.05)
    assert of_step["time/self_s"] == pytest.approx(0.05)
    assert of_step["time/cpu_s"] == 0.07
    assert of_experts == {"experts/busiest_ratio": 1.5, "experts/dropped_ratio": 0.1}
    assert of_save == {
        "checkpoint/save_s": 4.0,
        "checkpoint/stall_s": 0.5,
        "checkpoint/size_gib": 2.0,
        "checkpoint/written_gib": 1.0,
    }
    assert of_check == {"invariants/replicas_equal_failed": 0}


def skipped(at: int) -> StepSkipped:
    return StepSkipped(at, "no_targets", 0.0, 0, 32)


def test_skipped_steps_are_counted_over_all_attempts_and_those_done_again_once(
    tmp_path: Path,
) -> None:
    assert told(
        EventMetricsExtractor(tmp_path),
        tmp_path,
        0,
        [started(0), skipped(1), skipped(3), skipped(4)],
    ) == {
        1: {"train/skipped": 1},
        3: {"train/skipped": 2},
        4: {"train/skipped": 3},
    }
    assert told(EventMetricsExtractor(tmp_path), tmp_path, 1, [started(2), skipped(4)]) == {
        4: {"train/skipped": 2}
    }
    assert told(EventMetricsExtractor(tmp_path), tmp_path, 2, [started(4), skipped(5)]) == {
        5: {"train/skipped": 3}
    }


def test_sources_whose_names_look_alike_keep_their_own_curves(tmp_path: Path) -> None:
    """Whichever of them comes first after a restart."""

    def evaluation(at: int, losses: dict[str, float]) -> EvalFinished:
        return EvalFinished(at, 2.0, 100, 1.0, losses)

    first = told(
        EventMetricsExtractor(tmp_path),
        tmp_path,
        0,
        [started(0), evaluation(1, {"a/b": 1.0, "a_b": 2.0, "a.b": 3.0})],
    )[1]
    assert first["eval/loss/a_b"] == 1.0
    assert sorted(first.values()) == [1.0, 2.0, 2.0, 3.0]
    again = told(
        EventMetricsExtractor(tmp_path),
        tmp_path,
        1,
        [started(1), evaluation(2, {"a.b": 3.0, "a_b": 2.0})],
    )[2]
    assert again.items() <= first.items()
    assert sorted(again.values()) == [2.0, 2.0, 3.0]


@pytest.mark.long
def test_mlflow_has_the_values_of_a_step_that_is_done_again(tmp_path: Path) -> None:
    """It can take none back: the later value follows, and the same value is not there twice."""
    pytest.importorskip("mlflow")
    record(
        "mlflow",
        tmp_path,
        0,
        [started(0), step(1), step(2, loss=2.0), EvalFinished(2, 2.5, 100, 1.0)],
    )
    record("mlflow", tmp_path, 1, [started(1), step(2, loss=1.5), EvalFinished(2, 2.25, 100, 1.0)])
    client, run = mlflow_run(tmp_path)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in history) == [(1, 2.0), (2, 1.5), (2, 2.0)]
    assert len(client.get_metric_history(run.info.run_id, "time/step_s")) == 2
    assert run.data.metrics["eval/loss"] == 2.25


def test_the_page_about_sinks_names_them_all_and_shows_the_example() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "sinks.md").read_text(encoding="utf-8")
    assert all(f"| `{kind}` |" in page for kind in SINKS)
    assert all(
        f"`{name}`" in page
        for name in extract_metric_values(step(1))
        if not name.startswith("time/forward")
    )
    assert (root / "examples" / "own_sink.py").read_text(encoding="utf-8") in page


def test_tensorboard_shows_the_last_attempt_of_a_step(tmp_path: Path) -> None:
    record(
        "tensorboard", tmp_path, 0, [started(0), *(step(number, loss=1.0) for number in (1, 2, 3))]
    )
    record("tensorboard", tmp_path, 1, [started(1), step(2, loss=5.0)])
    assert tensorboard_curves(tmp_path)["train/loss"] == {1: 1.0, 2: 5.0}


@pytest.mark.long
def test_wandb_writes_offline_where_its_server_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    said = record("wandb", tmp_path, 0, [started(0), step(1)])
    assert said == []
    assert CURVES["wandb"](tmp_path)["train/loss"] == {1: 2.0}
    assert (
        "offline, since the server cannot be used"
        in build_event_file_path(tmp_path, 0, 0).read_text()
    )


# --- the bus --------------------------------------------------------------------------------------


class Collecting:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def write(self, envelope: Envelope) -> None:
        self.seen.append(envelope.event)

    def close(self) -> None:
        pass


class Raising(Collecting):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def write(self, envelope: Envelope) -> None:
        super().write(envelope)
        raise self.error


class Waiting(Collecting):
    """Stands still, where it is told to, until released."""

    def __init__(self, where: str, released: threading.Event) -> None:
        self.entered, self.released, self.where = threading.Event(), released, where
        super().__init__()
        self.wait("opens")

    def wait(self, where: str) -> None:
        if where == self.where:
            self.entered.set()
            self.released.wait(PATIENCE_S)

    def write(self, envelope: Envelope) -> None:
        super().write(envelope)
        self.wait("writes")

    def close(self) -> None:
        self.wait("closes")


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def in_file(run_dir: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in build_event_file_path(run_dir, 0, 0).read_text().splitlines()
    ]


def notes(found: list[dict[str, Any]]) -> list[str]:
    return [body["code"] for body in found if body["event"] == "note"]


def dropped(found: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    return [
        (body["sink"], body["num_dropped"], body["reason"])
        for body in found
        if body["event"] == "sink_dropped"
    ]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no room"), SystemExit("no room")],
    ids=lambda error: type(error).__name__,
)
def test_a_sink_that_raises_is_dropped_and_said_once(error: BaseException, tmp_path: Path) -> None:
    bad, good = Raising(error), Collecting()
    bus = Bus(rank=0, run_dir=tmp_path, sinks=[("bad", lambda: bad), ("good", lambda: good)])
    for number in range(5):
        bus.emit(Note(f"n{number}"))
    bus.close()
    found = in_file(tmp_path)
    assert dropped(found) == [("bad", 0, f"{type(error).__name__}: no room")]
    assert notes(found) == [f"n{number}" for number in range(5)]
    assert [event for event in good.seen if isinstance(event, Note)] == [
        Note(f"n{number}") for number in range(5)
    ]
    assert len(bad.seen) == 1


class _NoWords(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_NoWords(), "_NoWords: <its message cannot be printed>"),
        (ValueError("x" * 10_000_000), r"ValueError: x{8192} … 9,983,616 characters … x{8192}"),
    ],
)
def test_a_sink_whose_error_has_no_words_or_a_book_is_dropped_and_said(
    error: Exception, said: str, tmp_path: Path
) -> None:
    bus = Bus(rank=0, run_dir=tmp_path, sinks=[("bad", lambda: Raising(error))])
    bus.emit(Note("n"))
    bus.close()
    ((name, _, reason),) = dropped(in_file(tmp_path))
    assert name == "bad"
    assert re.fullmatch(said, reason)


def test_a_sink_that_cannot_open_is_dropped_and_said_once(tmp_path: Path) -> None:
    def fails() -> Collecting:
        raise EnvironmentProblem("no server", fix="start one")

    bus = Bus(rank=0, run_dir=tmp_path, sinks=[("bad", fails)])
    bus.emit(Note("n"))
    bus.close()
    assert dropped(in_file(tmp_path)) == [("bad", 0, "no server; start one")]


def test_a_slow_sink_loses_events_which_are_counted_and_nobody_waits(
    tmp_path: Path, released: threading.Event
) -> None:
    slow = Waiting("writes", released)
    bus = Bus(rank=0, run_dir=tmp_path, sinks=[("slow", lambda: slow)], queue_size=4)
    bus.emit(Note("first"))
    assert slow.entered.wait(PATIENCE_S)
    began = time.monotonic()
    for number in range(100):
        bus.emit(Note(f"n{number}"))
    assert (
        time.monotonic() - began < PATIENCE_S / 2
    )  # it would be PATIENCE_S if emit waited for the sink
    assert bus.num_lost == 96
    released.set()
    bus.close()
    found = in_file(tmp_path)
    assert notes(found).count("sink_is_slow") == 1, "said at once, and once"
    assert len(notes(found)) == 102, "the file has everything"
    assert dropped(found) == [("slow", 96, "it did not keep up")]
    assert len(slow.seen) == 5


@pytest.mark.parametrize("where", ["opens", "writes", "closes"])
def test_a_sink_that_stands_still_delays_neither_start_nor_end(
    where: str, tmp_path: Path, released: threading.Event
) -> None:
    began = time.monotonic()
    good, stuck = Collecting(), Waiting("nowhere", released)
    stuck.where = where

    def open_stuck() -> Waiting:
        stuck.wait("opens")
        return stuck

    bus = Bus(rank=0, run_dir=tmp_path, sinks=[("stuck", open_stuck), ("good", lambda: good)])
    for number in range(3):
        bus.emit(Note(f"n{number}"))
    # All that is waited for in the end is the other one.
    wait_until(lambda: len(good.seen) >= 3)
    # One that stands only in the end has written all before.
    wait_until(lambda: stuck.entered.is_set() or (where == "closes" and len(stuck.seen) >= 3))
    # In which the other one is closed.
    bus.close(timeout_s=1.0)
    assert time.monotonic() - began < PATIENCE_S / 2
    ((sink, num_lost, reason),) = dropped(in_file(tmp_path))
    # Whoever waits may get no processor when its time is over.
    told = re.match(rf"it still {where} after ([\d.]+) s", reason)
    assert told is not None, reason
    assert (sink, float(told[1]) >= 1.0) == ("stuck", True)
    assert num_lost == {"opens": 3, "writes": 3, "closes": 0}[where], (
        "the event it stands at is not written either"
    )
    assert len(good.seen) >= 3


def test_a_process_that_stands_still_is_killed(tmp_path: Path) -> None:
    sink = ProcessSink("tensorboard", tmp_path)
    wait_until(lambda: files_below(tmp_path / "tensorboard"))
    sink._process.send_signal(19)  # SIGSTOP
    bus = Bus(rank=0, run_dir=tmp_path, sinks=[("stopped", lambda: sink)])
    for number in (1, 2, 3):
        bus.emit(step(number))
    bus.close(timeout_s=0.2, more_s=PATIENCE_S)
    assert [(name, lost) for name, lost, _ in dropped(in_file(tmp_path))] == [("stopped", 3)], (
        "in the pipe is not written"
    )
    assert sink._process.wait(PATIENCE_S) == -9


def test_a_process_that_dies_is_dropped_and_said_once(tmp_path: Path) -> None:
    sink = ProcessSink("tensorboard", tmp_path)
    bus = Bus(rank=0, run_dir=tmp_path, sinks=[("dead", lambda: sink)])
    sink._process.kill()
    sink._process.wait()
    for number in range(50):
        bus.emit(step(number))
    bus.close()
    assert dropped(in_file(tmp_path)) == [
        ("dead", 0, "SinkProcessError: its process ended (killed by signal 9)")
    ]


@pytest.mark.parametrize("num_events", [0, 50])
def test_a_process_whose_sink_cannot_open_says_why(num_events: int, tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    bus = Bus(
        rank=0, run_dir=tmp_path, sinks=[("closed", lambda: ProcessSink("tensorboard", tmp_path))]
    )
    for number in range(num_events):
        bus.emit(step(number))
    bus.close(PATIENCE_S)
    ((name, num_lost, reason),) = dropped(in_file(tmp_path))
    assert name == "closed"
    assert num_lost <= num_events
    assert "FileExistsError" in reason


@pytest.mark.long
def test_mlflow_has_what_it_said_to_be_durable_when_it_is_killed(tmp_path: Path) -> None:
    """Without being closed: a run that leaves it behind loses the last seconds, not everything."""
    pytest.importorskip("mlflow")
    sink = ProcessSink("mlflow", tmp_path)
    for event in (started(0), step(1), step(2)):
        sink.write(Envelope(event, 0, 0, 1.0))
    assert sink.num_unwritten == 3
    wait_until(lambda: sink.num_unwritten == 0)
    sink.abandon()
    with pytest.raises(SinkProcessError):
        sink.close()
    client, run = mlflow_run(tmp_path)
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [
        1,
        2,
    ]


@pytest.mark.long
def test_a_sink_that_is_at_work_at_the_end_is_given_time(tmp_path: Path) -> None:
    """A run shorter than the start of its sink."""
    pytest.importorskip("mlflow")
    bus = Bus(rank=0, run_dir=tmp_path, sinks=[("mlflow", lambda: ProcessSink("mlflow", tmp_path))])
    for event in (started(0), *(step(number) for number in range(1, 5))):
        bus.emit(event)
    bus.close(timeout_s=0.1, more_s=PATIENCE_S)
    assert dropped(in_file(tmp_path)) == []
    assert len(CURVES["mlflow"](tmp_path)["train/loss"]) == 4


def test_numbers_that_are_none_are_null_in_the_file(tmp_path: Path) -> None:
    bus = Bus(rank=0, run_dir=tmp_path)
    bus.emit(step(1, loss=math.nan))
    bus.close()
    assert in_file(tmp_path)[0]["loss"] is None


def test_secrets_reach_neither_file_nor_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", 'tok"en-\\123')
    good = Collecting()
    bus = Bus(rank=0, run_dir=tmp_path, sinks=[("good", lambda: good)])
    monkeypatch.setenv("LATER_SECRET", "set-by-user-code")
    bus.emit(
        Note("n", {"why": 'sent tok"en-\\123', "deep": [{"set-by-user-code": "set-by-user-code!"}]})
    )
    bus.close()
    clean = {"why": "sent ***", "deep": [{"***": "***!"}]}
    assert good.seen == [Note("n", clean)]
    assert in_file(tmp_path)[0]["facts"] == clean
