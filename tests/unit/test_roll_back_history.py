"""Which checkpoints a run that has gone back has left behind: a later command tells it by attempts
and epochs, never by the clock, and what may be good work stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_retention import save

from phalanx.checkpoint.manifest import MANIFEST_FILE_NAME, read_manifest
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.core.roll_back import RollBack
from phalanx.mesh.mesh import open_mesh
from phalanx.observe import bus as bus_module
from phalanx.observe.bus import Bus
from phalanx.observe.events import CheckpointSaved, Event, Note, RolledBack
from phalanx.observe.tail import read_recorded_events
from phalanx.plan.layout import Layout
from phalanx.run.rank_run import RollBacks
from phalanx.run.roll_back_history import RollBackHistory
from phalanx.run.weights import list_checkpoints_newest_first


def went_back(epoch: int) -> RolledBack:
    return RolledBack(35, "corruption", "replicas differ", 15, -1, 1, epoch)


def saved(step: int) -> Event:
    return CheckpointSaved(step, f"step-{step}", 1, 0.1)


def write(run_dir: Path, rank: int, attempt: int, *events: Event) -> None:
    bus = Bus(rank=rank, attempt=attempt, run_dir=run_dir)
    for event in events:
        bus.emit(event)
    bus.close()


def save_with_epoch(run_dir: Path, step: int, epoch: int) -> None:
    folder = save(run_dir, step)
    manifest = replace(read_manifest(folder), epoch=epoch)
    (folder / MANIFEST_FILE_NAME).write_bytes(manifest.to_bytes())


def list_usable(run_dir: Path, roll_backs: RollBacks) -> tuple[list[str], list[str]]:
    """Names of the checkpoints that a start after `roll_backs` may use, and reasons why others are
    left out."""
    storage = RunStorage(run_dir, LocalStore(run_dir / "checkpoints"))
    told = Bus(rank=0, attempt=9, run_dir=run_dir)
    with open_mesh(Layout(), device="cpu") as mesh:
        names = list_checkpoints_newest_first(storage, mesh, roll_backs=roll_backs, bus=told)
    told.close()
    notes = [envelope.event for envelope in read_recorded_events(run_dir, Note)]
    return names, [note.facts["why"] for note in notes if isinstance(note, Note)]


@pytest.mark.parametrize("steps_s", [(-3600.0, 0.0), (3600.0, -7200.0)])
def test_a_clock_that_is_set_back_or_ahead_changes_nothing(
    steps_s: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1_900_000_000.0
    monkeypatch.setattr(bus_module.time, "time", lambda: now_s)
    write(tmp_path, 0, 0, saved(10), saved(20))
    now_s += steps_s[0]
    write(tmp_path, -1, 0, went_back(1))
    assert RollBackHistory(tmp_path).current.find_limit() == 15
    now_s += steps_s[1]
    write(tmp_path, 0, 1, saved(20))
    assert RollBackHistory(tmp_path).current.find_limit() is None


def test_what_was_saved_since_stays_where_its_events_are_lost(tmp_path: Path) -> None:
    for step, epoch in ((10, 1), (20, 2), (30, 3), (40, 1)):
        save_with_epoch(tmp_path, step, epoch)
    write(tmp_path, -1, 0, went_back(1))
    assert list_usable(tmp_path, RollBackHistory(tmp_path).current) == (
        ["step-30", "step-20", "step-10"],
        [],
    )
    # Saved before the run went back from step 35.
    assert not (tmp_path / "checkpoints" / "step-40").exists()


def test_what_may_have_been_saved_since_is_left_out_and_stays(tmp_path: Path) -> None:
    for step, epoch in ((10, 1), (20, 0), (30, 1)):
        save_with_epoch(tmp_path, step, epoch)
    (tmp_path / "checkpoints" / "step-30" / MANIFEST_FILE_NAME).write_text("{")
    history = RollBackHistory(tmp_path)
    history.add(RollBack("corruption", 35, 15, "replicas differ"), 1)
    names, reasons = list_usable(tmp_path, history.current)
    assert names == ["step-10"]
    assert len(reasons) == 2
    assert "step-30" in reasons[0]
    assert "manifest" in reasons[0]
    assert "its manifest has no epoch" in reasons[1]
    assert (tmp_path / "checkpoints" / "step-20").exists()
    assert (tmp_path / "checkpoints" / "step-30").exists()


def test_a_roll_back_of_which_the_epoch_is_not_recorded_removes_nothing(tmp_path: Path) -> None:
    save_with_epoch(tmp_path, 10, 1)
    save_with_epoch(tmp_path, 20, 1)
    write(tmp_path, -1, 0, went_back(0))
    names, reasons = list_usable(tmp_path, RollBackHistory(tmp_path).current)
    assert names == ["step-10"]
    assert "an earlier release did not record" in reasons[0]
    assert (tmp_path / "checkpoints" / "step-20").exists()
