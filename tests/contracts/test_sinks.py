"""What every sink must do, and what the bus does for those that do not. A new file in the folder is covered at once."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.registry import names, resolve
from phalanx.observe.bus import Bus, Sink, event_path
from phalanx.observe.events import EVENTS, Envelope, EvalFinished, Event, Note, RunStarted, StepFinished, StepSkipped

PACKAGE = "phalanx.observe.sinks"
SINKS = names(PACKAGE)
ORDINARY: dict[str, Any] = {
    "str": "text",
    "int": 3,
    "float": 0.5,
    "dict[str, int]": {"parameters": 4},
    "dict[str, float]": {"forward": 0.1},
    "dict[str, Any]": {"deep": [1, {"x": None}]},
    "list[int]": [1, 2],
}


def example(kind: str, values: dict[str, Any]) -> Event:
    cls = EVENTS[kind]
    return cls(**{item.name: values[str(item.type)] for item in fields(cls)})


def step(number: int, loss: float = 2.0) -> StepFinished:
    return StepFinished(number, loss, 64, 64 * number, 1e-3, 0.5, 0.1, 640.0, {"forward": 0.06}, 0.04, 2**30)


def files_below(directory: Path) -> set[Path]:
    return {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(params=SINKS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_sink(kind: str, run_dir: Path) -> Sink:
    sink: Sink = resolve(kind, PACKAGE, "open_sink")(run_dir)
    return sink


def test_the_folder_has_sinks() -> None:
    assert "tensorboard" in SINKS


@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_takes_every_event_and_closes_twice(kind: str, rank: int, tmp_path: Path) -> None:
    sink = open_sink(kind, tmp_path)
    for name in sorted(EVENTS):
        sink.write(Envelope(example(name, ORDINARY), rank, 0, 1.0))
    sink.close()
    sink.close()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_takes_numbers_that_are_none(kind: str, number: float, tmp_path: Path) -> None:
    sink = open_sink(kind, tmp_path)
    for name in sorted(EVENTS):
        sink.write(Envelope(example(name, ORDINARY | {"float": number}), 0, 0, 1.0))
    sink.close()


def test_writes_only_inside_the_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, run_dir = tmp_path / "elsewhere", tmp_path / "run"
    for directory in (elsewhere, run_dir):
        directory.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(elsewhere))
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    sink = open_sink(kind, run_dir)
    for number in (1, 2):
        sink.write(Envelope(step(number), 0, 0, 1.0))
    sink.close()
    assert files_below(tmp_path) == {Path("run") / path for path in files_below(run_dir)}


def test_needs_no_torch(kind: str, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from phalanx.core.registry import resolve;"
        f"resolve({kind!r}, {PACKAGE!r}, 'open_sink')(Path({str(tmp_path)!r})).close();"
        "sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- tensorboard ---------------------------------------------------------------------------------------------------


def read_back(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    sink = open_sink("tensorboard", tmp_path)
    sink.write(Envelope(step(7, loss=2.25), 0, 0, 123.5))
    sink.write(Envelope(step(7, loss=9.0), 1, 0, 123.5))
    for number in (8, 9):
        sink.write(Envelope(StepSkipped(number, "no_targets", 0.0, 0, 32), 0, 0, 124.0))
    sink.write(Envelope(EvalFinished(9, 2.5, 100, 1.0), 0, 0, 125.0))
    sink.close()
    scalars = read_back(tmp_path)
    wanted = {
        "train/loss": 2.25,
        "train/learning_rate": 1e-3,
        "train/grad_norm": 0.5,
        "throughput/tokens_per_s": 640.0,
        "time/step_s": 0.1,
        "time/forward_s": 0.06,
        "time/unaccounted_s": 0.04,
        "memory/rss_gib": 1.0,
    }
    for tag, value in wanted.items():
        (point,) = scalars.Scalars(tag)
        assert (point.step, point.wall_time) == (7, 123.5)
        assert point.value == pytest.approx(value)
    assert [(point.step, point.value) for point in scalars.Scalars("train/skipped")] == [(8, 1.0), (9, 2.0)]
    assert [(point.step, point.value) for point in scalars.Scalars("eval/loss")] == [(9, 2.5)]


def test_tensorboard_shows_the_last_attempt_of_a_step(tmp_path: Path) -> None:
    def started(at: int) -> RunStarted:
        return RunStarted("r", "d", 1, at, 10, "cpu", {})

    first = open_sink("tensorboard", tmp_path)
    first.write(Envelope(started(0), 0, 0, 1.0))
    for number in (1, 2, 3):
        first.write(Envelope(step(number, loss=1.0), 0, 0, 1.0 + number))
    first.close()
    again = open_sink("tensorboard", tmp_path)
    again.write(Envelope(started(1), 0, 1, 10.0))
    again.write(Envelope(step(2, loss=5.0), 0, 1, 11.0))
    again.close()
    assert [(point.step, point.value) for point in read_back(tmp_path).Scalars("train/loss")] == [(1, 1.0), (2, 5.0)]


# --- the bus -------------------------------------------------------------------------------------------------------


class Collecting:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def write(self, envelope: Envelope) -> None:
        self.seen.append(envelope.event)

    def close(self) -> None:
        pass


class Raising(Collecting):
    def write(self, envelope: Envelope) -> None:
        super().write(envelope)
        raise RuntimeError("no room")


class Waiting(Collecting):
    """Stands still in its first write until released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()

    def write(self, envelope: Envelope) -> None:
        super().write(envelope)
        self.entered.set()
        self.released.wait(30)


def in_file(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in event_path(run_dir, 0, 0).read_text().splitlines()]


def notes(found: list[dict[str, Any]]) -> list[str]:
    return [body["code"] for body in found if body["event"] == "note"]


def test_a_sink_that_raises_is_dropped_and_said_once(tmp_path: Path) -> None:
    bad, good = Raising(), Collecting()
    bus = Bus(rank=0, run_dir=tmp_path, sinks=[("bad", bad), ("good", good)])
    for number in range(5):
        bus.emit(Note(f"n{number}"))
    bus.close()
    found = in_file(tmp_path)
    dropped = [body for body in found if body["event"] == "sink_dropped"]
    assert [(body["sink"], body["reason"]) for body in dropped] == [("bad", "RuntimeError: no room")]
    assert notes(found) == [f"n{number}" for number in range(5)]
    assert good.seen == [Note(f"n{number}") for number in range(5)]
    assert len(bad.seen) == 1


def test_a_slow_sink_loses_events_which_are_counted_and_nobody_waits(tmp_path: Path) -> None:
    slow = Waiting()
    bus = Bus(rank=0, run_dir=tmp_path, sinks=[("slow", slow)], queue_size=4)
    bus.emit(Note("first"))
    assert slow.entered.wait(30)
    began = time.monotonic()
    for number in range(100):
        bus.emit(Note(f"n{number}"))
    assert time.monotonic() - began < 10  # it would be 30 if emit waited for the sink
    assert bus.num_lost == 96
    slow.released.set()
    bus.close()
    found = in_file(tmp_path)
    assert len(notes(found)) == 101, "the file has everything"
    assert [(body["sink"], body["num_dropped"]) for body in found if body["event"] == "sink_dropped"] == [("bus", 96)]
    assert len(slow.seen) == 5


def test_numbers_that_are_none_are_null_in_the_file(tmp_path: Path) -> None:
    bus = Bus(rank=0, run_dir=tmp_path)
    bus.emit(step(1, loss=math.nan))
    bus.close()
    assert in_file(tmp_path)[0]["loss"] is None
