"""Every fault of the folder, on arrival: it can be written in a job, and strikes once, where it
was told to."""

from __future__ import annotations

import contextlib
import importlib
import time
from pathlib import Path

import pytest

from phalanx.core.phases import PHASES
from phalanx.core.registry import list_modules_of_registry
from phalanx.job.load import load_job
from phalanx.resilience.expectation import Expectation
from phalanx.resilience.fault import (
    FAULTS_PACKAGE,
    FaultSite,
    build_fault_listener,
    parse_fault,
)
from phalanx.resilience.faults.crash import InjectedCrash
from phalanx.resilience.strikes import read_strikes

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
        assert fault.strikes_again == getattr(module, "STRIKES_AGAIN", False)
    assert isinstance(module.EXPECTATION, Expectation)
    assert set(module.EXPECTATION.phases) <= set(PHASES)
    assert fault.is_due_at(1, 7, "backward")
    assert not fault.is_due_at(0, 7, "backward")
    assert not fault.is_due_at(1, 8, "backward")
    assert not fault.is_due_at(1, 7, "forward")


def strike_site(site: FaultSite) -> None:
    """One that looks at where it is."""
    raise Struck(site.rank)


def listener(run_dir: Path, *texts: str, rank: int = 1, attempt: int = 0, name: str = "strike"):
    return build_fault_listener(
        [f"{__name__}:{name}{text}" for text in texts],
        rank=rank,
        run_dir=run_dir,
        attempt=attempt,
        site=FaultSite(rank, run_dir),
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


def test_strikes_are_on_record_where_and_when_they_struck(run_dir: Path) -> None:
    for _ in range(2):
        listen = listener(run_dir, ":rank=1,step=3")
        listen(2, "forward")
        with contextlib.suppress(Struck):
            listen(3, "data")
    (strike,) = read_strikes(run_dir)
    assert (strike.rank, strike.step, strike.phase) == (1, 3, "data")
    assert strike.fault.endswith(":strike")
    assert 0 < strike.monotonic_s <= time.monotonic()


def test_a_fault_of_a_later_attempt_waits_for_it(run_dir: Path) -> None:
    listener(run_dir, ":rank=1,step=0,attempt=1")(0, "startup")
    with pytest.raises(Struck):
        listener(run_dir, ":rank=1,step=0,attempt=1", attempt=1)(0, "startup")
    listener(run_dir, ":rank=1,step=0,attempt=1", attempt=2)(0, "startup")


def test_a_fault_that_strikes_again_meets_each_attempt(run_dir: Path) -> None:
    for attempt in range(3):
        listen = build_fault_listener(
            ["crash_loop:rank=1,step=3"], rank=1, run_dir=run_dir, attempt=attempt
        )
        with pytest.raises(InjectedCrash):
            listen(3, "data")
        listen(3, "forward")
    assert len(read_strikes(run_dir)) == 3


def test_a_fault_may_look_at_where_it_strikes(run_dir: Path) -> None:
    with pytest.raises(Struck, match="1"):
        listener(run_dir, ":rank=1", name="strike_site")(1, "data")
