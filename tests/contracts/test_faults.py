"""Every fault of the folder, on arrival: it can be written in a job, and strikes once, where it
was told to."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from phalanx.core.registry import list_modules_of_registry
from phalanx.job.load import load_job
from phalanx.resilience.fault import FAULTS_PACKAGE, build_fault_listener, parse_fault

NAMES = list_modules_of_registry(FAULTS_PACKAGE)


class Struck(Exception):
    """Instead of the real thing."""


def strike() -> None:
    """A fault of the user's own."""
    raise Struck


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_can_be_written_in_a_job(name: str) -> None:
    module = importlib.import_module(f"{FAULTS_PACKAGE}.{name}")
    assert module.__doc__
    for text in (name, f"{name}:rank=1", f"{name}:rank=1,step=7,phase=backward"):
        (kept,) = load_job(None, [f'resilience.inject=["{text}"]']).resilience.inject
        fault = parse_fault(kept)
        assert (fault.name, fault.inject) == (name, module.inject)
    assert fault.is_due_at(1, 7, "backward")
    assert not fault.is_due_at(0, 7, "backward")
    assert not fault.is_due_at(1, 8, "backward")
    assert not fault.is_due_at(1, 7, "forward")


def listener(run_dir: Path, *texts: str, rank: int = 1):
    return build_fault_listener(
        [f"{__name__}:strike{text}" for text in texts], rank=rank, run_dir=run_dir
    )


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return tmp_path


def test_a_fault_strikes_once_in_a_run_however_often_it_starts(run_dir: Path) -> None:
    for attempt in range(3):
        listen = listener(run_dir, ":rank=1,step=7,phase=backward")
        for step in range(1, 10):
            for phase in ("forward", "backward"):
                if (attempt, step, phase) == (0, 7, "backward"):
                    with pytest.raises(Struck):
                        listen(step, phase)
                else:
                    listen(step, phase)


def test_a_fault_is_met_by_its_rank_alone(run_dir: Path) -> None:
    listener(run_dir, ":rank=1,step=7", rank=0)(7, "forward")
    with pytest.raises(Struck):
        listener(run_dir, ":rank=1,step=7")(7, "forward")


def test_the_same_fault_twice_strikes_twice(run_dir: Path) -> None:
    listen = listener(run_dir, ":rank=1,phase=data", ":rank=1,phase=data")
    for _ in range(2):
        with pytest.raises(Struck):
            listen(1, "data")
    listen(1, "data")


def test_another_list_on_resuming_is_another_drill(run_dir: Path) -> None:
    with pytest.raises(Struck):
        listener(run_dir, ":rank=1,step=3")(3, "data")
    with pytest.raises(Struck):
        listener(run_dir, ":rank=1,step=5")(5, "data")
    listener(run_dir, ":rank=1,step=5", ":rank=1,step=3")(3, "data")
