"""Saves beside training: what is on disk is the state of the step, whatever training does
meanwhile; every rank decides alike; nothing that goes wrong in the thread is lost.

Real process groups and files. The disk is one that stands still, is full or is broken when a test
wants it to be.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from commands import wait_until
from phalanx.checkpoint.best import record_best_step
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.checkpoint.stores.local import REMOVED, LocalStore
from phalanx.checkpoint.writing import async_checkpointer, pruner
from phalanx.checkpoint.writing.async_checkpointer import (
    AsyncCheckpointer,
)
from phalanx.checkpoint.writing.checkpoint_schedule import RETRY_SAVE_STEPS, CheckpointSchedule
from phalanx.checkpoint.writing.staging import HostStagingMemory
from phalanx.checkpoint.writing.write import RankSnapshot, select_blocks_to_write
from phalanx.core.disk import Disk, DiskFile
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import PhaseTimer
from phalanx.job.schema import Checkpoint
from phalanx.mesh.logical import Box, LogicalShard
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.observe import events
from phalanx.observe.bus import Bus
from phalanx.plan.layout import Layout
from ranks import run_ranks

COLUMNS = 1000
DEADLINE_S = 300.0
MANY = 100_000  # steps


class ShyDisk(Disk):
    """Creates a tensor file only while `gate` is open, and raises `error` then, if there is one.

    A removal waits until `removals` is set; `removing` says that one does.
    """

    def __init__(self) -> None:
        self.gate, self.removals, self.removing = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.gate.set()
        self.removals.set()
        self.error: BaseException | None = None

    def rename(self, old: Path, new: Path) -> None:
        if new.name.endswith(REMOVED):
            self.removing.set()
            assert self.removals.wait(DEADLINE_S), "nobody let it be removed"
        super().rename(old, new)

    def create(self, path: Path) -> DiskFile:
        if path.suffix == ".safetensors":
            assert self.gate.wait(DEADLINE_S), "nobody opened the gate"
            if self.error is not None:
                raise self.error
        return super().create(path)


@dataclass
class State:
    """What is saved: a sharded tensor and a replicated one, all of whose elements are the step."""

    mesh: Mesh
    step: int = 0
    shards: dict[str, LogicalShard] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rank, ranks = self.mesh.rank, self.mesh.world_size
        mine = Box((rank, 0), (0, 0), (1, COLUMNS))
        whole = Box((0, 0), (0, 0), (2, COLUMNS))
        self.shards = {
            "mine": LogicalShard(
                "mine", (ranks, COLUMNS), "float32", (mine,), torch.zeros(1, COLUMNS)
            ),
            "all": LogicalShard(
                "all", (2, COLUMNS), "float32", (whole,), torch.zeros(2, COLUMNS), rank, ranks
            ),
        }

    def snapshot(self) -> RankSnapshot:
        return RankSnapshot(self.step, self.shards, {}, {"step": self.step})


class Run:
    """One rank that trains: the real votes, saves and threads around a state that only counts."""

    def __init__(
        self,
        mesh: Mesh,
        run_dir: Path,
        *,
        listener: Any = None,
        kept_best: int | None = None,
        **keys: Any,
    ) -> None:
        self.mesh, self.state, self.disk = mesh, State(mesh), ShyDisk()
        self.said: list[events.Event] = []
        self.recorded: list[int] = []
        kept = Checkpoint(**keys)
        bus = Bus(rank=mesh.rank)
        bus.emit = self.said.append  # type: ignore[method-assign]
        if kept_best is not None and mesh.rank == 0:
            record_best_step(run_dir, step=kept_best, loss=1.0, num_targets=1)
        storage = RunStorage(run_dir, LocalStore(run_dir / "checkpoints", self.disk))
        self.phases = PhaseTimer(None, (listener,) if listener else ())
        self.saver = AsyncCheckpointer(
            storage, kept, mesh, bus, self.phases, job_digest="", timeout_s=DEADLINE_S
        )
        self.saves = CheckpointSchedule(self.saver, kept, mesh, self.state, bus, record=self.record)

    def record(self) -> None:
        self.recorded.append(self.state.step)

    def votes(self) -> list[float]:
        """Those of all ranks: due, busy, failed."""
        return list(
            self.mesh.all_reduce_sum(
                torch.tensor(self.saves.status_flags(), dtype=torch.float64)
            ).tolist()
        )

    def step(self, **ends: bool) -> None:
        """What the trainer does around a step."""
        self.phases.step = self.state.step + 1
        votes = self.votes()
        self.state.step += 1
        for shard in self.state.shards.values():
            shard.tensor.fill_(self.state.step)
        self.saves.save_if_due(votes, **ends)

    def steps_until(self, condition: Callable[[], bool]) -> None:
        """Every rank must see the condition at the same step: it may only look at what all agree
        on."""
        for _ in range(MANY):
            if condition():
                return
            self.step()
        raise AssertionError("it never came")

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.said if isinstance(event, kind)]


def ranked(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(num_ranks, _in_mesh, num_ranks, function, *args)


def _in_mesh(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    with open_mesh(Layout(dp_replicate=num_ranks), device="cpu") as mesh:
        return function(mesh, *args)


def values(run_dir: Path) -> dict[int, set[float]]:
    """All that is in the tensors of each checkpoint, which must verify."""
    found = {}
    for path in list_checkpoint_paths_of_run(run_dir):
        assert find_checkpoint_problems(path) == []
        tensors = [
            tensor for file in path.glob("*.safetensors") for tensor in load_file(file).values()
        ]
        found[int(path.name.removeprefix("step-"))] = {
            float(x) for tensor in tensors for x in np.unique(tensor)
        }
    return found


def goes_on(mesh: Mesh, folder: str) -> tuple[list[events.Event], list[int], int]:
    run = Run(mesh, Path(folder), every_steps=2)
    if mesh.rank == 1:
        run.disk.gate.clear()  # rank 0's part is written long before
    for _ in range(5):  # a save begins after step 2; that of step 4 has to wait
        run.step()
    assert run.saves.saved_step == 0
    run.disk.gate.set()
    run.steps_until(lambda: run.saves.saved_step == 2)
    taken = run.state.step
    run.step()
    run.saves.wait_for_save()
    assert run.saves.saved_step == taken
    return run.said, run.recorded, taken


def test_training_goes_on_and_the_checkpoint_is_that_of_its_step(tmp_path: Path) -> None:
    """Training's collectives pass those of the save, tensors change under it, and what is due
    meanwhile comes later."""
    (said, recorded, taken), (other, *_) = ranked(2, goes_on, str(tmp_path))
    assert other == []
    saves = [event for event in said if isinstance(event, events.CheckpointSaved)]
    postponed = [event for event in said if isinstance(event, events.CheckpointPostponed)]
    assert (postponed[0].step, postponed[0].saving_step) == (4, 2)
    assert sum(event.saving_step == 2 for event in postponed) == 1
    assert [event.step for event in saves] == [2, taken]
    assert recorded == [2, taken]
    assert all(0 < event.stall_s <= event.wall_s for event in saves)
    assert values(tmp_path) == {2: {2.0}, taken: {float(taken)}}


def is_full(mesh: Mesh, folder: str) -> tuple[list[events.Event], list[str]]:
    run = Run(mesh, Path(folder), every_steps=2)
    run.disk.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if mesh.rank == 1 else None
    run.step()
    run.step()
    while run.votes()[1]:
        pass
    run.step()  # hears that it failed
    assert run.saves.saved_step == 0
    left = os.listdir(Path(folder) / "checkpoints")
    run.disk.error = None
    for _ in range(RETRY_SAVE_STEPS):
        run.step()
    run.saves.wait_for_save()
    return run.said, left


def test_a_full_disk_is_an_event_and_the_save_is_tried_again(tmp_path: Path) -> None:
    (said, left), (other, _) = ranked(2, is_full, str(tmp_path))
    assert left == other == []
    failed, saved = said
    assert isinstance(failed, events.CheckpointFailed)
    assert isinstance(saved, events.CheckpointSaved)
    assert failed.step == 2
    assert "rank 1: " in failed.reason
    assert "No space left on device" in failed.reason
    assert saved.step == failed.step + 1 + RETRY_SAVE_STEPS
    assert values(tmp_path) == {saved.step: {float(saved.step)}}
    assert os.listdir(tmp_path / "checkpoints") == [f"step-{saved.step}"]


def has_no_descriptors(mesh: Mesh, folder: str) -> list[events.Event]:
    run = Run(mesh, Path(folder), every_steps=2)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    run.step()
    run.step()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for _ in range(RETRY_SAVE_STEPS):
        run.step()
    run.saves.wait_for_save()
    return run.said


def test_a_rank_that_may_open_no_file_at_the_first_save_connects_later(tmp_path: Path) -> None:
    """Gloo ends such a process, or the others wait for it until their timeout."""
    said, _ = ranked(2, has_no_descriptors, str(tmp_path))
    failed, saved = said
    assert isinstance(failed, events.CheckpointFailed)
    assert "rank 1: Too many open files" in failed.reason
    assert "ulimit -n" in failed.reason
    assert isinstance(saved, events.CheckpointSaved)
    assert (failed.step, saved.step) == (2, 2 + RETRY_SAVE_STEPS)


def is_full_at_the_end(mesh: Mesh, folder: str) -> str:
    run = Run(mesh, Path(folder), every_steps=1)
    run.disk.error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)) if mesh.rank == 0 else None
    run.step()
    with pytest.raises(CheckpointError) as raised:
        run.step(is_end=True)
    return str(raised.value)


def test_where_there_is_no_later_the_error_is_raised_on_every_rank(tmp_path: Path) -> None:
    first, second = ranked(2, is_full_at_the_end, str(tmp_path))
    assert first == second
    assert "quota exceeded" in first
    assert os.listdir(tmp_path / "checkpoints") == []


def stops(mesh: Mesh, folder: str) -> list[events.Event]:
    """The disk answers only once training stands still for it."""

    def open_gate(step: int, phase: str) -> None:
        if phase == "ckpt_write" and threading.current_thread() is threading.main_thread():
            run.disk.gate.set()

    run = Run(mesh, Path(folder), every_steps=2, listener=open_gate)
    run.disk.gate.clear()
    for _ in range(2):
        run.step()
    run.step(is_stop=True)
    return run.said


def test_a_stop_waits_for_the_save_in_flight_and_saves_its_own_step(tmp_path: Path) -> None:
    said, _ = ranked(2, stops, str(tmp_path))
    assert [event.step for event in said if isinstance(event, events.CheckpointSaved)] == [2, 3]
    assert values(tmp_path) == {2: {2.0}, 3: {3.0}}


def stops_in_haste(mesh: Mesh, folder: str) -> list[events.Event]:
    """As `stops`, where the save in flight would be followed by a removal."""

    def open_gate(step: int, phase: str) -> None:
        if phase == "ckpt_write" and threading.current_thread() is threading.main_thread():
            run.disk.gate.set()

    run = Run(mesh, Path(folder), every_steps=1, keep_last=1, listener=open_gate)
    run.step()
    run.saves.wait_for_save()
    run.disk.gate.clear()
    run.step()
    run.step(is_stop=True)
    run.saves.wait_for_save()
    return run.said


def test_at_a_stop_there_is_no_time_for_old_checkpoints(tmp_path: Path) -> None:
    said, _ = ranked(2, stops_in_haste, str(tmp_path))
    assert {type(event) for event in said} == {events.CheckpointSaved}
    assert values(tmp_path) == {1: {1.0}, 2: {2.0}, 3: {3.0}}


def crashes(mesh: Mesh, folder: str) -> tuple[int, list[events.Event]]:
    run = Run(mesh, Path(folder), every_steps=1)
    run.disk.error = ZeroDivisionError("a bug")
    run.step()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run.steps_until(lambda: False)
    return run.saves.saved_step, run.of(events.CheckpointSaved)


def test_a_bug_in_the_thread_is_raised_in_training(tmp_path: Path) -> None:
    ((saved, said),) = ranked(1, crashes, str(tmp_path))
    assert (saved, said) == (0, [])


def training_fails(mesh: Mesh, folder: str) -> list[events.Event]:
    run = Run(mesh, Path(folder), every_steps=1)
    run.disk.gate.clear()
    run.step()
    run.saves.abandon(0.01)  # it does not end
    run.disk.gate.set()
    run.saves.abandon(DEADLINE_S)
    return run.said


def test_a_save_in_flight_outlives_an_error_of_training(tmp_path: Path) -> None:
    """For as long as it is given, and what was not done by then is said."""
    ((left, saved),) = ranked(1, training_fails, str(tmp_path))
    assert isinstance(left, events.Note)
    assert left.code == "save_left_behind"
    assert isinstance(saved, events.CheckpointSaved)
    assert values(tmp_path) == {1: {1.0}}


def kept_as_the_best(mesh: Mesh, folder: str) -> tuple[list[str], list[str]]:
    """What follows a save is done once it is there, also where another one had to end before."""
    done: list[str] = []
    run = Run(mesh, Path(folder))

    def there(step: int) -> Callable[[], None]:
        return lambda: done.append(
            f"{step} {(Path(folder) / f'checkpoints/step-{step}/manifest.json').exists()}"
        )

    for step in (1, 2):
        run.step()
        run.saves.save()
        run.saves.call_when_saved(there(step))
    run.saves.wait_for_save()
    run.saves.call_when_saved(there(2))  # there already
    run.disk.error = OSError(errno.EIO, os.strerror(errno.EIO))
    run.step()
    run.saves.save()
    run.saves.call_when_saved(there(3))
    run.saves.wait_for_save()
    return done, [type(event).__name__ for event in run.said]


def test_what_follows_a_save_waits_for_its_commit(tmp_path: Path) -> None:
    for rank, (done, said) in enumerate(ranked(2, kept_as_the_best, str(tmp_path))):
        assert done == ["1 True", "2 True", "2 True"]
        assert said == (
            ["CheckpointSaved", "CheckpointSaved", "CheckpointFailed"] if rank == 0 else []
        )


def retires(mesh: Mesh, folder: str, asynchronous: bool) -> list[events.Event]:
    run = Run(
        mesh,
        Path(folder),
        every_steps=1,
        keep_last=2,
        keep_every=4,
        kept_best=2,
        asynchronous=asynchronous,
    )
    for _ in range(7):
        run.step()
        run.saves.wait_for_save()
    return run.said


@pytest.mark.parametrize("asynchronous", [True, False])
def test_old_checkpoints_go_in_the_background(tmp_path: Path, asynchronous: bool) -> None:
    said, _ = ranked(2, retires, str(tmp_path), asynchronous)
    gone = [event.steps for event in said if isinstance(event, events.CheckpointsRemoved)]
    assert gone == [[1], [3], [5]]
    assert set(values(tmp_path)) == {2, 4, 6, 7}
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-2", "step-4", "step-6", "step-7"]


def waits_for_removals(mesh: Mesh, folder: str) -> list[list[events.Event]]:
    """Rank 0 removes until rank 1, which has nothing to do, has been asked five times whether it
    does."""
    async_checkpointer.POLL_INTERVAL_S = 0.01
    said = []
    for asynchronous in (True, False):
        place = Path(folder) / str(asynchronous)
        run = Run(mesh, place, every_steps=1, keep_last=1, asynchronous=asynchronous)
        run.step()
        run.saves.wait_for_save()
        run.disk.removals.clear()
        run.step()
        if mesh.rank == 0:
            waiter = threading.Thread(
                target=lambda place=place, run=run: release(place / "enough", run.disk.removals)
            )
            waiter.start()
        else:
            tell_when_asked(run, place / "enough", times=5)
        run.saves.wait_for_save()
        said.append(run.said)
    return said


def release(path: Path, gate: threading.Event) -> None:
    wait_until(path.exists, DEADLINE_S)
    gate.set()


def tell_when_asked(run: Run, path: Path, *, times: int) -> None:
    votes, asked = run.saver.status_flags, itertools.count(1)

    def counted() -> tuple[float, float]:
        if next(asked) == times:
            path.touch()
        return votes()

    run.saver.status_flags = counted  # type: ignore[method-assign]


def test_no_rank_stands_in_a_collective_while_another_removes(tmp_path: Path) -> None:
    """However long that takes at the end of a run: a collective has a time limit.

    With saves beside training or not.
    """
    for said in ranked(2, waits_for_removals, str(tmp_path))[0]:
        assert [event.steps for event in said if isinstance(event, events.CheckpointsRemoved)] == [
            [1]
        ]
    for name in ("True", "False"):
        assert values(tmp_path / name) == {2: {2.0}}


def ends_while_it_removes(
    mesh: Mesh, folder: str, is_end: bool
) -> tuple[list[events.Event], list[events.Event]]:
    """What was said when the last save was done, and at the very end."""
    pruner.INTERRUPTED_PRUNING_WAIT_S = 0.05
    run = Run(mesh, Path(folder), every_steps=1, keep_last=1)
    run.step()
    run.saves.wait_for_save()
    run.disk.removals.clear()
    run.step()
    assert mesh.rank != 0 or run.disk.removing.wait(DEADLINE_S)
    run.step(is_end=is_end, is_stop=not is_end)
    if not is_end:
        run.saves.wait_for_save(skip_pruning=True)
    before = list(run.said)
    run.disk.removals.set()
    run.saves.wait_for_save()
    return before, run.said


@pytest.mark.parametrize("is_end", [True, False])
def test_the_last_save_does_not_wait_for_a_removal(tmp_path: Path, is_end: bool) -> None:
    """Of the one before, which stands still.

    At the end both are done after it, at a stop nobody waits for the rest.
    """
    (before, said), _ = ranked(2, ends_while_it_removes, str(tmp_path), is_end)
    assert [type(event) for event in before] == [events.CheckpointSaved] * 3
    gone = [event.steps for event in said if isinstance(event, events.CheckpointsRemoved)]
    assert gone == ([[1], [2]] if is_end else [[1]])
    assert set(values(tmp_path)) == ({3} if is_end else {2, 3})


def staged(rank: int) -> list[str]:
    """A copy is bit-equal, of the blocks that this rank writes alone, and stays where it is."""
    wrong = []
    source = torch.arange(24.0).reshape(4, 6)
    shards = {
        "whole": LogicalShard(
            "whole", (4, 6), "float32", (Box((0, 0), (0, 0), (4, 6)),), source.t().contiguous().t()
        ),
        "rows": LogicalShard("rows", (8, 6), "float32", (Box((4, 0), (2, 0), (2, 6)),), source),
        "two": LogicalShard(
            "two",
            (8, 6),
            "float32",
            (Box((0, 0), (0, 0), (1, 6)), Box((6, 0), (2, 0), (2, 6))),
            source,
        ),
        "scalar": LogicalShard("scalar", (), "int64", (Box((), (), ()),), torch.tensor(7)),
        "odd": LogicalShard(
            "odd", (3,), "bfloat16", (Box((0,), (0,), (3,)),), torch.ones(3, dtype=torch.bfloat16)
        ),
        "theirs": LogicalShard("theirs", (4, 6), "float32", (), source),
    }
    staging = HostStagingMemory(torch.device("cpu"))
    wrong += ["memory before the first copy"] if staging.num_bytes else []
    places = []
    for _ in range(2):
        mine = select_blocks_to_write(shards)
        staging.reserve_for_shards(mine)
        copy = staging.copy_shards(mine)
        places.append([shard.tensor.data_ptr() for shard in copy.values() if shard.boxes])
        before = {name: blocks(shard) for name, shard in mine.items()}
        source.add_(1.0)
        wrong += [name for name, found in before.items() if found != blocks(copy[name])]
        source.sub_(1.0)
    wrong += ["moved"] if places[0] != places[1] else []
    wrong += ["storage of what others write"] if copy["theirs"].tensor.numel() else []
    wrong += (
        [f"{staging.num_bytes} bytes"]
        if staging.num_bytes > 4 * (24 + 12 + 24 + 2 + 2) + 5 * 64
        else []
    )
    return wrong


def blocks(shard: LogicalShard) -> list[Any]:
    spans = [
        [slice(o, o + n) for o, n in zip(box.local_offset, box.size, strict=True)]
        for box in shard.boxes
    ]
    return [shard.tensor[tuple(span)].tolist() for span in spans]


def test_staging_is_one_copy_of_what_a_rank_writes() -> None:
    assert run_ranks(1, staged) == [[]]


def without_memory(mesh: Mesh, folder: str) -> tuple[list[events.Event], int]:
    """From the second save on there are 68 MiB more to save, and rank 1 may not have half of
    that."""
    run = Run(mesh, Path(folder), every_steps=1)
    run.step()
    run.saves.wait_for_save()
    size = 17 << 20  # more than a reserve of the C library holds
    row = Box((mesh.rank, 0), (0, 0), (1, size))
    run.state.shards["large"] = LogicalShard(
        "large", (2, size), "float32", (row,), torch.zeros(1, size)
    )
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    if mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (16 << 20), resource.RLIM_INFINITY))
    for _ in range(2):
        run.step()
        run.saves.wait_for_save()
    return run.said, run.saver.staging_bytes


def test_where_there_is_no_memory_for_a_copy_training_waits(tmp_path: Path) -> None:
    (said, first_bytes), (_, second_bytes) = ranked(2, without_memory, str(tmp_path))
    kinds = [type(event).__name__ for event in said]
    assert kinds == ["CheckpointSaved", "Note", "CheckpointSaved", "CheckpointSaved"]
    note, after = said[1], said[2]
    assert isinstance(note, events.Note)
    assert isinstance(after, events.CheckpointSaved)
    assert "there is no memory for a copy of the state (rank 1: " in note.facts["why"]
    assert after.stall_s == after.wall_s
    assert (first_bytes, second_bytes) == (0, 0)  # nor is what there was of it kept
    assert values(tmp_path) == {step: {float(step)} for step in (1, 2, 3)}


def unsaveable(mesh: Mesh, folder: str) -> tuple[list[events.Event], int]:
    """Rank 1 has a tensor of a type that no checkpoint can hold."""
    run = Run(mesh, Path(folder), every_steps=1)
    box = Box((mesh.rank,), (0,), (1,))
    odd = torch.zeros(1, dtype=torch.complex128 if mesh.rank == 1 else torch.float32)
    run.state.shards["odd"] = LogicalShard(
        "odd", (2,), str(odd.dtype).removeprefix("torch."), (box,), odd
    )
    run.step()
    del run.state.shards["odd"]
    for _ in range(RETRY_SAVE_STEPS):
        run.step()
    run.saves.wait_for_save()
    return run.said, run.saves.saved_step


def test_what_cannot_be_copied_fails_on_all_ranks_and_training_goes_on(tmp_path: Path) -> None:
    (said, saved_step), (_, other_saved_step) = ranked(2, unsaveable, str(tmp_path))
    failed, saved = said
    assert isinstance(failed, events.CheckpointFailed)
    assert isinstance(saved, events.CheckpointSaved)
    assert "rank 1: odd is of type complex128" in failed.reason
    assert saved.step == saved_step == other_saved_step == 1 + RETRY_SAVE_STEPS


def refuses_on_one_rank(mesh: Mesh, folder: str) -> list[list[str]]:
    """Rank 1's state is of a kind that no checkpoint holds, at the first save and at the last."""
    found = []
    for asynchronous in (True, False):
        run = Run(mesh, Path(folder) / str(asynchronous), every_steps=1, asynchronous=asynchronous)
        snapshot = run.state.snapshot

        def refuse() -> RankSnapshot:
            raise CheckpointError("it keeps a set")

        if mesh.rank == 1:
            run.state.snapshot = refuse  # type: ignore[method-assign]
        run.step()
        with pytest.raises(CheckpointError) as raised:
            run.saves.save(is_last_chance=True)
        run.state.snapshot = snapshot  # type: ignore[method-assign]
        run.saves.save(is_last_chance=True)
        found.append([str(raised.value), *(type(event).__name__ for event in run.said)])
    return found


def test_what_one_rank_cannot_save_fails_on_all_before_anything_is_copied(tmp_path: Path) -> None:
    first, second = ranked(2, refuses_on_one_rank, str(tmp_path))
    for (message, *said), (other, *quiet) in zip(first, second, strict=True):
        assert "rank 1: it keeps a set" in message
        assert message == other
        assert (said, quiet) == (["CheckpointFailed", "CheckpointFailed", "CheckpointSaved"], [])


def test_the_clock_of_auto_is_told_what_saves_cost(tmp_path: Path) -> None:
    ((said,),) = ranked(1, automatic, str(tmp_path))
    chosen = [event for event in said if isinstance(event, events.CheckpointIntervalChosen)]
    saved = [event for event in said if isinstance(event, events.CheckpointSaved)]
    assert [event.step for event in saved] == [10]
    assert [(e.step, e.stall_s, e.save_s) for e in chosen] == [
        (10, saved[0].stall_s, saved[0].wall_s)
    ]
    assert chosen[0].interval_s == pytest.approx((2 * saved[0].stall_s * 3.6e6) ** 0.5)


def automatic_on_a_slow_disk(mesh: Mesh, folder: str) -> list[events.Event]:
    run = Run(mesh, Path(folder), every="auto", mtbf_hours=1000.0)
    run.disk.gate.clear()
    for _ in range(20):  # the first save is in flight from step 10 on
        run.step()
    run.disk.gate.set()
    run.steps_until(lambda: run.saves.saved_step == 10)
    run.step()
    run.saves.wait_for_save()
    return run.said


def test_auto_saves_once_to_measure_however_long_it_takes(tmp_path: Path) -> None:
    ((*said,),) = ranked(1, automatic_on_a_slow_disk, str(tmp_path))
    assert [(type(event).__name__, event.step) for event in said] == [
        ("CheckpointSaved", 10),
        ("CheckpointIntervalChosen", 10),
    ]


def automatic(mesh: Mesh, folder: str) -> tuple[list[events.Event]]:
    run = Run(mesh, Path(folder), every="auto", mtbf_hours=1000.0)
    for _ in range(30):
        run.step()
    run.saves.wait_for_save()
    return (run.said,)
