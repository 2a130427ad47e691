"""Saves that link what did not change: whatever changes, in whatever layout, every checkpoint is
whole by itself."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoints import ThreadRank, run_threads
from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.reading.load import load_checkpoint_into_shards
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.shard_file import VerifiedSafetensorsFile
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.checkpoint.writing import incremental
from phalanx.checkpoint.writing.write import RankSnapshot, WrittenCheckpoint, write_checkpoint
from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import Box, LogicalShard, get_dtype_name
from phalanx.plan.layout import Layout

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    """A state of a few kilobytes is cut into files as one of gigabytes is."""
    with use_block_sizes(BlockSizes(reusable_file_bytes=400, reusable_block_bytes=100)):
        yield


def state(num_tensors: int = 8) -> Tensors:
    dice = torch.Generator().manual_seed(5)
    whole = {f"layer.{n}": torch.randn(12, 10, generator=dice) for n in range(num_tensors)}
    return whole | {"half": torch.randn(64, generator=dice).bfloat16(), "count": torch.tensor(0)}


def rows_of(whole: Tensors, rank: int, num_ranks: int) -> dict[str, LogicalShard]:
    """Each rank holds a part of the rows; what has none is held by all."""
    found = {}
    for name, tensor in whole.items():
        size = tuple(tensor.shape)
        if not size:
            found[name] = LogicalShard(
                name,
                size,
                get_dtype_name(tensor.dtype),
                (Box((), (), ()),),
                tensor,
                rank,
                num_ranks,
            )
            continue
        begin, end = size[0] * rank // num_ranks, size[0] * (rank + 1) // num_ranks
        rest = (0,) * (len(size) - 1)
        box = Box((begin, *rest), (begin, *rest), (end - begin, *size[1:]))
        found[name] = LogicalShard(name, size, get_dtype_name(tensor.dtype), (box,), tensor)
    return found


def save_step(
    store: LocalStore, step: int, whole: Tensors, num_ranks: int = 2
) -> WrittenCheckpoint:
    def on_rank(group: ThreadRank) -> WrittenCheckpoint:
        mine = rows_of(whole, group.rank, num_ranks)
        snapshot = RankSnapshot(step, mine, aliases={}, facts={})
        return write_checkpoint(store, snapshot, job_digest="", group=group, phases=PhaseTimer())

    return run_threads(Layout(dp_shard=num_ranks), on_rank)[0]  # type: ignore[no-any-return]


def require_whole(folder: CheckpointFolder, reference: Tensors) -> None:
    """It verifies, is bit-equal to the reference, and no file holds a byte that the manifest
    does not speak of."""
    assert find_checkpoint_problems(folder) == []
    found = {name: torch.full_like(tensor, 7) for name, tensor in reference.items()}
    run_threads(
        Layout(),
        lambda group: load_checkpoint_into_shards(
            folder, rows_of(found, 0, 1), group=group, phases=PhaseTimer()
        ),
    )
    assert [name for name in reference if not torch.equal(found[name], reference[name])] == []
    manifest = read_manifest(folder)
    listed = {(p.file, p.key) for tensor in manifest.tensors.values() for p in tensor.pieces}
    for name, stored in manifest.files.items():
        with VerifiedSafetensorsFile(folder, name, stored) as file:
            assert {(name, key) for key in file.entries} <= listed


@pytest.mark.parametrize("seed", range(6))
def test_any_changes_under_any_layouts(seed: int, tmp_path: Path) -> None:
    """Tensors change at random, ranks come and go, steps are saved again, checkpoints are
    removed in any order."""
    dice, store, whole = random.Random(seed), LocalStore(tmp_path), state()
    saved: dict[int, Tensors] = {}
    for _ in range(14):
        for name in dice.sample(sorted(whole), dice.randint(0, 4)):
            whole[name] = whole[name] + 1
        step = dice.randint(1, 40)
        save_step(store, step, whole, dice.choice([1, 2, 2, 2, 3]))
        saved[step] = dict(whole)
        if dice.random() < 0.3:
            gone = dice.choice(store.folders())
            store.remove(gone)
            del saved[gone.step]
    assert [folder.step for folder in store.folders()] == sorted(saved)
    for folder in store.folders():
        require_whole(folder, saved[folder.step])


def test_blocks_without_elements_that_several_files_hold_are_taken_over_once(
    tmp_path: Path,
) -> None:
    """Of a tensor with one row two of three ranks hold none: the same block, as far as one can
    tell."""
    store, whole = LocalStore(tmp_path), {"row": torch.ones(1, 10), "none": torch.ones(0, 3)}
    for step, num_ranks in enumerate((3, 3, 3, 1, 2), 1):
        save_step(store, step, whole, num_ranks)
        require_whole(store.folders()[-1], whole)
        assert len(read_manifest(store.folders()[-1]).files) <= 2 * num_ranks


def test_what_is_linked_costs_no_space_and_the_last_link_keeps_it(tmp_path: Path) -> None:
    store, whole = LocalStore(tmp_path), state()
    for step in (1, 2, 3, 4):
        whole["count"] = whole["count"] + 1
        saved = save_step(store, step, whole)
    assert saved.num_new_bytes < 0.3 * saved.num_bytes  # headers and a number
    linked = [path for path in (tmp_path / "step-4").iterdir() if "-kept-" in path.name]
    assert len(linked) == 2  # one of each rank
    # From step 2 on of the rank that also has what changes, from step 1 on of the other.
    assert {os.stat(path).st_nlink for path in linked} == {3, 4}
    for folder in store.folders()[:-1]:
        store.remove(folder)
    assert {os.stat(path).st_nlink for path in linked} == {1}
    require_whole(store.folders()[0], whole)


def test_where_there_are_no_links_everything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, whole = LocalStore(tmp_path), state()
    save_step(store, 1, whole)

    def no_link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    assert save_step(store, 2, whole).num_new_bytes >= sum(
        t.numel() * t.element_size() for t in whole.values()
    )
    require_whole(store.folders()[-1], whole)


def test_files_do_not_become_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor changes at a time, so each save leaves another file of those that did not."""
    monkeypatch.setattr(incremental, "MAX_REUSED_FILES", 3)
    store, whole = LocalStore(tmp_path), state(12)
    for step in range(1, 16):
        name = f"layer.{step % 12}"
        whole[name] = whole[name] + 1
        saved = save_step(store, step, whole, 1)
        assert (
            len(saved.folder.file_sizes()) <= 3 + 3
        )  # taken over, what changed, what did not, the manifest
    require_whole(store.folders()[-1], whole)


def test_bits_count_and_not_values(tmp_path: Path) -> None:
    """-0.0 equals 0.0 and NaN nothing; neither is what a save compares."""
    store = LocalStore(tmp_path)
    whole = {"zeros": torch.zeros(400), "nans": torch.full((400,), float("nan"))}
    save_step(store, 1, whole, 1)
    whole["zeros"] = -whole["zeros"]
    save_step(store, 2, whole, 1)
    found = {name: torch.ones_like(tensor) for name, tensor in whole.items()}
    newest = store.folders()[-1]
    run_threads(
        Layout(),
        lambda group: load_checkpoint_into_shards(
            newest, rows_of(found, 0, 1), group=group, phases=PhaseTimer()
        ),
    )
    assert bool(torch.signbit(found["zeros"]).all())
    pieces = [
        read_manifest(folder).tensors["nans"].pieces[0].xxh3_128 for folder in store.folders()
    ]
    assert len(set(pieces)) == 1


def test_damage_is_not_linked_into_the_next_checkpoint(tmp_path: Path) -> None:
    """A disk that rots costs the checkpoints that hold the bytes; the next save writes them
    anew, from memory."""
    store, whole = LocalStore(tmp_path / "checkpoints"), state()
    save_step(store, 1, whole)
    (linked,) = (tmp_path / "checkpoints" / "step-1").glob("rank-0000*.safetensors")
    with open(linked, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert find_checkpoint_problems(store.folder("step-1")) != []
    saved = save_step(store, 2, whole)
    assert saved.num_new_bytes >= linked.stat().st_size
    require_whole(store.folder("step-2"), whole)
