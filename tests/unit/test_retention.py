"""What stays and what goes, and that nothing goes before something that stays is known to be
whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.best import BEST_FILE_NAME, record_best_step
from phalanx.checkpoint.manifest import (
    MANIFEST_FILE_NAME,
    Manifest,
    StoredPiece,
    StoredTensorPieces,
)
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.checkpoint.shard_file import TensorToWrite, write_safetensors
from phalanx.checkpoint.stores.local import REMOVED, LocalStore
from phalanx.checkpoint.writing.pruner import CheckpointPruner
from phalanx.checkpoint.writing.retention import RetentionRule, prune_checkpoints
from phalanx.job.schema import Checkpoint
from phalanx.observe.events import Event, Note


def save(run_dir: Path, step: int, facts: dict[str, Any] | None = None) -> Path:
    directory = run_dir / "checkpoints" / f"step-{step}"
    directory.mkdir(parents=True)
    data = np.full(8, step, np.float32)
    stored = write_safetensors(
        directory / "a.safetensors",
        [TensorToWrite("w#0", "float32", (8,), lambda: data.view(np.uint8))],
    )
    tensor = StoredTensorPieces((8,), "float32", (StoredPiece("a.safetensors", "w#0", (0,), (8,)),))
    manifest = Manifest(step, "", {}, facts or {}, {"w": tensor}, {}, {"a.safetensors": stored})
    (directory / MANIFEST_FILE_NAME).write_bytes(manifest.to_bytes())
    return directory


def store(run_dir: Path) -> LocalStore:
    return LocalStore(run_dir / "checkpoints")


def damage(directory: Path) -> None:
    file = directory / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def steps(run_dir: Path) -> list[int]:
    return [folder.step for folder in store(run_dir).folders()]


def test_the_last_milestones_and_the_best_stay() -> None:
    retention = RetentionRule(keep_last=2, keep_every=1000, protected_steps=frozenset({300}))
    assert retention.list_steps_to_remove([100, 200, 300, 900, 1000, 1100, 1200]) == [100, 200, 900]
    by_the_clock = RetentionRule(keep_last=1, keep_every=1000)
    assert by_the_clock.list_steps_to_remove([990, 1003, 1900, 2000, 2044, 4100, 4200, 4300]) == [
        990,
        1900,
        2044,
        4200,
    ]
    assert RetentionRule().list_steps_to_remove([1, 2, 3]) == []
    assert RetentionRule(keep_last=5).list_steps_to_remove([1, 2, 3]) == []


@given(
    st.sets(st.integers(1, 500), min_size=1),
    st.integers(1, 5),
    st.none() | st.integers(1, 50),
    st.sets(st.integers()),
)
def test_the_newest_always_stays(
    found: set[int], last: int, every: int | None, kept: set[int]
) -> None:
    going = RetentionRule(last, every, frozenset(kept)).list_steps_to_remove(found)
    assert max(found) not in going
    assert set(going) <= found - kept
    assert len(found) - len(going) >= min(last, len(found))


def test_what_goes_is_gone_and_what_stays_is_whole(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / f".step-10{REMOVED}" / "left").mkdir(
        parents=True
    )  # by a killed removal
    assert [
        folder.step for folder in prune_checkpoints(store(tmp_path), RetentionRule(keep_last=2))
    ] == [10, 20]
    assert steps(tmp_path) == [30, 40]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-30",
        "step-40",
    ]


def test_a_dry_run_removes_nothing(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert [
        folder.step
        for folder in prune_checkpoints(store(tmp_path), RetentionRule(keep_last=1), dry_run=True)
    ] == [
        1,
        2,
    ]
    assert steps(tmp_path) == [1, 2, 3]


def test_the_newest_that_verifies_is_never_removed(tmp_path: Path) -> None:
    """The two that would stay are damaged: the older ones are all there is."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    said: list[str] = []
    damage(tmp_path / "checkpoints" / "step-4")
    damage(tmp_path / "checkpoints" / "step-3")
    assert (
        prune_checkpoints(
            store(tmp_path), RetentionRule(keep_last=2), say=said.append, dry_run=True
        )
        == []
    )
    said_before = said.copy()
    said.clear()
    assert prune_checkpoints(store(tmp_path), RetentionRule(keep_last=2), say=said.append) == []
    assert said == said_before
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert "step-4 does not verify" in said[0]
    assert said[-1].endswith("nothing is removed")


def test_an_older_one_that_stays_does_not_stand_for_the_newest_that_verifies(
    tmp_path: Path,
) -> None:
    """A milestone or the best is whole, and would be all that is left of what was trained since."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    damage(tmp_path / "checkpoints" / "step-4")
    said: list[str] = []
    assert (
        prune_checkpoints(
            store(tmp_path),
            RetentionRule(keep_last=1, protected_steps=frozenset({1})),
            say=said.append,
        )
        == []
    )
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert said[-1] == "the newest that verifies is step-3, which would go: nothing is removed"


def test_one_that_stays_and_verifies_is_enough(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "checkpoints" / "step-3")
    assert [
        folder.step for folder in prune_checkpoints(store(tmp_path), RetentionRule(keep_last=2))
    ] == [1]


@pytest.mark.parametrize("text", ["", '{"step": 1', '{"step": 1}'])
def test_a_run_whose_best_cannot_be_read_removes_nothing(text: str, tmp_path: Path) -> None:
    """The one that would go may be the best."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    record_best_step(tmp_path, step=1, loss=1.0, num_targets=9)
    best = tmp_path / BEST_FILE_NAME
    whole = best.read_text()
    best.write_text(text)
    told: list[Event] = []
    storage = RunStorage(tmp_path, store(tmp_path))
    pruner = CheckpointPruner(storage, Checkpoint(keep_last=1), told.append)

    def prune() -> list[str]:
        pruner.start()
        pruner.join(60)
        pruner.raise_exception_of_thread()
        return [folder.name for folder in store(tmp_path).folders()]

    assert prune() == ["step-1", "step-2", "step-3"]
    (note,) = told
    assert isinstance(note, Note)
    assert note.code == "old_checkpoints_stay"
    assert "what the best checkpoint is cannot be read" in note.facts["why"]
    best.write_text(whole)
    assert prune() == ["step-1", "step-3"]
