"""Killed, without power, or without space at any operation: the newest checkpoint is the old one or
the new, whole.

The operations are counted by a disk that records them. `make test` takes a sample of the power
losses; `-m long` all.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from counted import show
from disks import CountingDisk, Died, DyingDisk, FailingDisk, PoweredDisk, copy_tree
from phalanx.checkpoint.best import read_best_step, record_best_step
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.ownership.fencing_token import (
    read_fencing_token_number,
    write_next_fencing_token,
)
from phalanx.checkpoint.reading.load import load_checkpoint_into_shards
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.checkpoint.writing.retention import RetentionRule, prune_checkpoints
from phalanx.checkpoint.writing.write import RankSnapshot, write_checkpoint
from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.core.disk import Disk
from phalanx.core.errors import CheckpointError, ResourceError
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import Box, LogicalShard, get_dtype_name
from phalanx.mesh.mesh import Mesh
from phalanx.plan.layout import Layout
from plants import some

ONE = Mesh(Layout(), 0, 0, torch.device("cpu"))
Tensors = dict[str, torch.Tensor]


def tensors(value: int) -> Tensors:
    """`frozen` never changes and is large enough to be kept apart, by `small_blocks`."""
    return {
        "frozen": torch.arange(2000, dtype=torch.float32),
        "trained": torch.arange(40.0) + value,
        "half": torch.full((7, 3), value, dtype=torch.bfloat16),
        "count": torch.tensor(value),
    }


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """A state of a few kilobytes is cut into files as one of gigabytes is."""
    with use_block_sizes(BlockSizes(reusable_file_bytes=4000, reusable_block_bytes=1000)):
        yield


def shards(whole: Tensors) -> dict[str, LogicalShard]:
    found = {}
    for name, tensor in whole.items():
        origin, size = (0,) * tensor.dim(), tuple(tensor.shape)
        found[name] = LogicalShard(
            name, size, get_dtype_name(tensor.dtype), (Box(origin, origin, size),), tensor
        )
    return found


def save_step(run_dir: Path, step: int, value: int, disk: Disk | None = None) -> None:
    """`value` is all that there is to tell one state from another."""
    write_checkpoint(
        LocalStore(run_dir / "checkpoints", disk),
        RankSnapshot(step, shards(tensors(value)), {"tied": "frozen"}, {"value": value}),
        job_digest="",
        group=ONE,
        phases=PhaseTimer(),
    )


@dataclass(frozen=True)
class Case:
    """`prepare` makes what is there before; `act` is what fails.

    `old` and `new` are (step, value) of the newest.
    """

    prepare: Callable[[Path], None]
    act: Callable[[Path, Disk], object]
    old: tuple[int, int] | None
    new: tuple[int, int] | None


def nothing(run_dir: Path) -> None:
    pass


def one_saved(run_dir: Path) -> None:
    save_step(run_dir, 1, 1)


def three_saved(run_dir: Path) -> None:
    for step in (1, 2, 3):
        save_step(run_dir, step, step)


def one_saved_and_one_killed(run_dir: Path) -> None:
    """What a death in the middle of a save of the same step, of another, and of a removal leave."""
    save_step(run_dir, 1, 1)
    save_step(run_dir, 2, 2)
    root = run_dir / "checkpoints"
    for name in (".step-3.0123abcd.partial", ".step-9.removed", ".step-1.replaced"):
        shutil.copytree(root / "step-1", root / name)
    (root / ".step-3.0123abcd.partial" / "manifest.json").unlink()


def one_caught_while_replaced(run_dir: Path) -> None:
    save_step(run_dir, 1, 1)
    (run_dir / "checkpoints" / "step-1").rename(run_dir / "checkpoints" / ".step-1.replaced")


def prune_to_one(run_dir: Path, disk: Disk) -> object:
    return prune_checkpoints(LocalStore(run_dir / "checkpoints", disk), RetentionRule(keep_last=1))


def remove_leftovers(run_dir: Path, disk: Disk) -> object:
    return LocalStore(run_dir / "checkpoints", disk).remove_leftovers()


def best(run_dir: Path, disk: Disk) -> object:
    return record_best_step(run_dir, step=3, loss=0.5, num_targets=10, disk=disk)


def epoch(run_dir: Path, disk: Disk) -> object:
    return write_next_fencing_token(run_dir, disk)


def saving(step: int, value: int) -> Callable[[Path, Disk], object]:
    return lambda run_dir, disk: save_step(run_dir, step, value, disk)


CASES = {
    "the first save": Case(nothing, saving(1, 1), None, (1, 1)),
    "a save after another": Case(one_saved, saving(2, 2), (1, 1), (2, 2)),
    "a save that links": Case(three_saved, saving(4, 4), (3, 3), (4, 4)),
    "a save in which nothing is new": Case(three_saved, saving(4, 3), (3, 3), (4, 3)),
    "the same step again": Case(one_saved, saving(1, 7), (1, 1), (1, 7)),
    "the same step again, with links": Case(three_saved, saving(3, 7), (3, 3), (3, 7)),
    "a save after a killed one": Case(one_saved_and_one_killed, saving(3, 3), (2, 2), (3, 3)),
    "a save after one that was replaced": Case(
        one_caught_while_replaced, saving(2, 2), (1, 1), (2, 2)
    ),
    "retention": Case(three_saved, prune_to_one, (3, 3), (3, 3)),
    "cleaning up": Case(one_saved_and_one_killed, remove_leftovers, (2, 2), (2, 2)),
    "best.json": Case(three_saved, best, (3, 3), (3, 3)),
    "the epoch": Case(three_saved, epoch, (3, 3), (3, 3)),
}
SAVING = [
    case.act
    for case in CASES.values()
    if case.act not in (best, epoch, prune_to_one, remove_leftovers)
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def prepare(name: str) -> Path:
        run_dir = tmp_path_factory.mktemp("prepared") / "run"
        run_dir.mkdir()
        CASES[name].prepare(run_dir)
        record_best_step(run_dir, step=1, loss=1.0, num_targets=10)
        write_next_fencing_token(run_dir)
        return run_dir

    return prepare


@functools.cache
def operations(name: str, run_dir: Path, scratch: Path) -> tuple[str, ...]:
    """What an act does to the disk, in order: "create", "write", ..."""
    found: list[str] = []
    CASES[name].act(
        copy_tree(run_dir, scratch), CountingDisk(lambda number, kind, path: found.append(kind))
    )
    return tuple(found)


def newest(run_dir: Path) -> tuple[int, int] | None:
    """(step, value) of the newest checkpoint as the next job finds it: whole, and bit-equal to
    what was saved."""
    store = LocalStore(run_dir / "checkpoints")
    store.remove_leftovers()
    folders = store.folders()
    for folder in folders:
        assert find_checkpoint_problems(folder) == []
    assert hidden(run_dir / "checkpoints") == []
    if not folders:
        return None
    manifest = read_manifest(folders[-1])
    reference = tensors(manifest.facts["value"])
    found = {name: torch.zeros_like(tensor) for name, tensor in reference.items()}
    load_checkpoint_into_shards(folders[-1], shards(found), group=ONE, phases=PhaseTimer())
    assert all(torch.equal(found[name], reference[name]) for name in reference)
    best, its_epoch = read_best_step(run_dir), read_fencing_token_number(run_dir)
    assert best is not None
    assert best.loss in (0.5, 1.0)
    assert its_epoch in (1, 2, 3)
    return folders[-1].step, manifest.facts["value"]


def hidden(directory: Path) -> list[str]:
    """What is there besides checkpoints, or besides a run's own files."""
    return sorted(path.name for path in directory.glob(".*"))


@contextlib.contextmanager
def scratch(tmp_path: Path, source: Path) -> Iterator[Path]:
    yield copy_tree(source, tmp_path / "run")
    shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("tears", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", some(CASES, 3))
def test_killed_at_any_operation(
    name: str,
    tears: bool,
    prepared: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the middle of each write and before each other operation; the long part is what is
    left: before each write."""
    case, base = CASES[name], prepared(name)
    kinds = operations(name, base, tmp_path / "counted")
    assert len(kinds) > 3
    assert "write" in kinds or case.act in (prune_to_one, remove_leftovers)
    places = [number for number, kind in enumerate(kinds, 1) if tears or kind == "write"]
    for number in places:
        with scratch(tmp_path, base) as run_dir:
            with pytest.raises(Died):
                case.act(run_dir, DyingDisk(number, tears=tears))
            assert newest(run_dir) in (case.old, case.new), number
            case.act(run_dir, Disk())
            assert newest(run_dir) == case.new
            assert hidden(run_dir) == []
    show(
        capsys,
        f"{name}: {len(kinds)} operations, {kinds.count('write')} of them writes, {len(places)}"
        " deaths",
    )
    record_property("deaths", len(places))


@pytest.mark.parametrize("name", some(CASES, 3))
def test_power_lost_at_any_operation_in_a_few_ways(
    name: str,
    prepared: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    record_property("states", lose_power(name, prepared(name), tmp_path, capsys, seeds=range(3)))


@pytest.mark.long
@pytest.mark.parametrize("name", list(CASES))
def test_power_lost_at_any_operation_in_many_ways(
    name: str,
    prepared: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    record_property(
        "states", lose_power(name, prepared(name), tmp_path, capsys, seeds=range(1000, 1060))
    )


def lose_power(
    name: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], seeds: range
) -> int:
    """Data that was not synced is dropped, cut or zeroed, names that were not are old or new in any
    mixture.

    Before the act has ended the newest checkpoint is the old or the new one, after it the new one.
    """
    case = CASES[name]
    count = len(operations(name, base, tmp_path / "counted"))
    num_states = 0
    for number in range(1, count + 2):
        with scratch(tmp_path, base) as run_dir:
            disk = PoweredDisk(run_dir, number)
            with contextlib.suppress(Died):
                case.act(run_dir, disk)
            is_done = number > count
            for seed in seeds:
                after = tmp_path / "after" / "run"
                after.parent.mkdir()
                disk.after_power_loss(after, random.Random(f"{name} {number} {seed}"))
                found, place = newest(after), f"operation {number} of {count}, seed {seed}"
                assert found in ((case.new,) if is_done else (case.old, case.new)), place
                if is_done and case.act is best:
                    assert read_best_step(after).step == 3, place  # type: ignore[union-attr]
                if is_done and case.act is epoch:
                    assert read_fencing_token_number(after) == 2, place
                shutil.rmtree(after.parent)
                num_states += 1
    show(capsys, f"{name}: {num_states} states after a power loss, seeds {seeds[0]} to {seeds[-1]}")
    return num_states


ERRORS = [
    ("ENOSPC", True),
    ("EIO", False),
    *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("ENOSPC", False), ("EIO", True))),
    *(pytest.param("EDQUOT", lasts, marks=pytest.mark.long) for lasts in (True, False)),
]


@pytest.mark.parametrize(("kind", "lasts"), ERRORS)
@pytest.mark.parametrize("name", some(CASES, 3))
def test_an_error_at_any_operation(
    name: str,
    kind: str,
    lasts: bool,
    prepared: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One that passes, and a disk that stays full.

    What fails says so, leaves nothing, and works the next time.
    """
    case, base = CASES[name], prepared(name)
    count = len(operations(name, base, tmp_path / "counted"))
    for number in range(1, count + 1):
        with scratch(tmp_path, base) as run_dir:
            disk = FailingDisk(number, getattr(errno, kind), lasts=lasts)
            expected = (
                (CheckpointError,)
                if case.act in SAVING
                else (CheckpointError, ResourceError, OSError)
            )
            ended_well = False
            with contextlib.suppress(*expected):
                case.act(run_dir, disk)
                ended_well = True
            if not disk.failed.startswith(
                "remove"
            ):  # or something is left, which goes the next time
                assert [
                    entry for entry in hidden(run_dir / "checkpoints") if entry.endswith(".partial")
                ] == [], number
                assert hidden(run_dir) == []
            seen = [folder.step for folder in LocalStore(run_dir / "checkpoints").folders()]
            found = newest(run_dir)
            if (
                case.prepare is not one_caught_while_replaced
            ):  # it is there also before anybody has cleaned up
                assert seen[-1:] == ([found[0]] if found else []), number
            assert found == case.new if ended_well else found in (case.old, case.new), number
            case.act(run_dir, Disk())
            assert newest(run_dir) == case.new
    show(capsys, f"{name}: {count} errors, each {kind} that {'lasts' if lasts else 'passes'}")
    record_property("errors", count)
