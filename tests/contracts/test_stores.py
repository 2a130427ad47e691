"""What every place for checkpoints must do.

A new module in checkpoint/stores must be opened here, too.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from disks import CountingDisk
from phalanx.checkpoint.chunks import FileSizeAndChecksums
from phalanx.checkpoint.folder import CheckpointFolder, LocalCheckpointFolder
from phalanx.checkpoint.manifest import MANIFEST_FILE_NAME, read_manifest
from phalanx.checkpoint.ownership import store_owner as owner
from phalanx.checkpoint.ownership.fencing_token import write_next_fencing_token
from phalanx.checkpoint.reading.load import load_checkpoint_into_shards
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.stores import (
    find_checkpoint_at_or_newest,
    find_newest_readable_step,
    is_location_of_one_checkpoint,
    is_store_url,
    open_store_of_location,
    open_store_of_run,
)
from phalanx.checkpoint.stores._remote import RetryPolicy
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.checkpoint.stores.object import ObjectCheckpointFolder, ObjectStore
from phalanx.checkpoint.stores.protocol import Store
from phalanx.checkpoint.writing.retention import RetentionRule, prune_checkpoints
from phalanx.checkpoint.writing.write import RankSnapshot, WrittenCheckpoint, write_checkpoint
from phalanx.core.disk import DiskFile
from phalanx.core.errors import CheckpointError, EnvironmentProblem, RunLockedError, StoreTakenError
from phalanx.core.phases import PhaseTimer
from phalanx.core.registry import list_modules_of_registry
from phalanx.mesh.logical import Box, LogicalShard, get_dtype_name
from phalanx.mesh.mesh import Mesh
from phalanx.plan.layout import Layout
from s3_server import BUCKET, CREDENTIALS, Server, s3_server

ONE = Mesh(Layout(), 0, 0, torch.device("cpu"))
KINDS = {"local": "local", "file": "local", "memory": "object", "s3": "object"}
Tensors = dict[str, torch.Tensor]
_number = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as server:
        old = {name: os.environ.get(name) for name in server.env}
        os.environ.update(server.env)
        yield server
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(params=list(KINDS))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return new_store(request.param, tmp_path, request)


def new_store(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    """An empty one."""
    if kind == "s3":
        request.getfixturevalue("server")
    url = {
        "local": None,
        "file": f"file://{tmp_path}/a folder",
        "memory": f"memory://test/{next(_number)}",
        "s3": f"s3://{BUCKET}/run {next(_number)}",
    }[kind]
    return open_store_of_run(tmp_path, url)


def test_every_store_is_covered() -> None:
    assert set(KINDS.values()) == set(list_modules_of_registry("phalanx.checkpoint.stores")) - {
        "protocol"
    }


def tensors(seed: int = 0) -> Tensors:
    dice = torch.Generator().manual_seed(seed)
    return {
        "frozen": torch.randn(700, 500, generator=dice),
        "trained": torch.randn(64, 500, generator=dice),
        "count": torch.tensor(seed),
        "empty": torch.zeros(0, 3),
    }


def shards(whole: Tensors) -> dict[str, LogicalShard]:
    found = {}
    for name, tensor in whole.items():
        origin, size = (0,) * tensor.dim(), tuple(tensor.shape)
        found[name] = LogicalShard(
            name, size, get_dtype_name(tensor.dtype), (Box(origin, origin, size),), tensor
        )
    return found


def save_in(store: Store, step: int, whole: Tensors, **more: Any) -> WrittenCheckpoint:
    aliases = {"tied": "frozen"} if "frozen" in whole else {}
    snapshot = RankSnapshot(step, shards(whole), aliases, {"step": step})
    return write_checkpoint(store, snapshot, job_digest="", group=ONE, phases=PhaseTimer(), **more)


def loaded(folder: CheckpointFolder, like: Tensors) -> Tensors:
    found = {name: torch.full_like(tensor, 7) for name, tensor in like.items()}
    load_checkpoint_into_shards(folder, shards(found), group=ONE, phases=PhaseTimer())
    return found


def require_whole(folder: CheckpointFolder, reference: Tensors) -> None:
    """It verifies, and every tensor is bit-equal to the reference."""
    assert find_checkpoint_problems(folder) == []
    found = loaded(folder, reference)
    assert [name for name in reference if not torch.equal(found[name], reference[name])] == []


def overwrite(folder: CheckpointFolder, name: str, data: bytes) -> None:
    if isinstance(folder, LocalCheckpointFolder):
        (folder.path / name).unlink()  # the file of this folder alone, if it is linked
        (folder.path / name).write_bytes(data)
    else:
        assert isinstance(folder, ObjectCheckpointFolder)
        folder.remote.put_object(f"{folder.name}/{name}", data)


def steps(store: Store) -> list[int]:
    return [folder.step for folder in store.folders()]


def test_what_is_saved_is_found_and_read_back(store: Store) -> None:
    assert (store.folders(), find_newest_readable_step(store)) == ([], 0)
    store.require_writable()
    assert store.folders() == []
    for step in (100, 9, 20):
        saved = save_in(store, step, tensors(step))
        assert (
            saved.num_bytes
            == sum(saved.folder.file_sizes().values())
            - saved.folder.file_sizes()[MANIFEST_FILE_NAME]
        )
    assert (steps(store), find_newest_readable_step(store)) == ([9, 20, 100], 100)
    for folder in store.folders():
        require_whole(folder, tensors(folder.step))
        assert read_manifest(folder).facts == {"step": folder.step}
        assert folder.written_unix_s() > 1.7e9
        again = store.folder(folder.name)
        assert (again.url, again.step) == (folder.url, folder.step)
        place = folder.url if is_store_url(folder.url) else Path(folder.url)
        assert find_checkpoint_at_or_newest(place).url == folder.url


def test_a_step_can_be_saved_again(store: Store) -> None:
    save_in(store, 5, tensors(1))
    save_in(store, 6, tensors(1))
    save_in(store, 5, tensors(2))
    assert steps(store) == [5, 6]
    require_whole(store.folders()[0], tensors(2))
    require_whole(store.folders()[1], tensors(1))


def test_a_draft_is_no_checkpoint_and_leaves_nothing(store: Store) -> None:
    old = tensors(1)
    save_in(store, 1, old)
    draft = store.begin_draft(2)
    mine = store.join_draft(2, draft.token)
    saved = store.folders()[0]
    assert mine.reuse_file_of_checkpoint("rank-0000.safetensors", saved, "rank-0000.safetensors")
    assert steps(store) == [1]
    store.discard(draft)
    store.remove_leftovers()
    require_whole(store.folders()[0], old)
    lost = store.begin_draft(3)  # its process is killed
    assert store.join_draft(3, lost.token).reuse_file_of_checkpoint(
        "rank-0000.safetensors", saved, "rank-0000.safetensors"
    )
    save_in(store, 3, tensors(3))
    assert steps(store) == [1, 3]
    require_whole(store.folders()[1], tensors(3))
    assert draft.token not in everything(store)
    assert lost.token not in everything(store)


def test_a_run_below_a_folder_called_checkpoints_is_a_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "checkpoints" / "my-run"
    saved = save_in(open_store_of_run(run_dir, None), 3, tensors())
    assert find_checkpoint_at_or_newest(run_dir).url == saved.url
    (run_dir / "checkpoints" / "step-3" / MANIFEST_FILE_NAME).unlink()
    assert find_checkpoint_problems(
        find_checkpoint_at_or_newest(run_dir / "checkpoints" / "step-3")
    )  # no run, though it is not whole


def everything(store: Store) -> str:
    """All names in the store, as one text."""
    if isinstance(store, ObjectStore):
        return "\n".join(f"{store.url}/{key}" for key in store._remote.list_file_sizes())
    root = Path(store.url)
    return "\n".join(str(path) for path in root.rglob("*"))


def test_blocks_that_did_not_change_are_not_sent_again(store: Store) -> None:
    """And each checkpoint is whole by itself: whatever else goes, it stays."""
    whole = tensors()
    first = save_in(store, 1, whole)
    assert first.num_new_bytes == first.num_bytes
    new_bytes = []
    for step in (2, 3, 4):
        whole["trained"] += 1
        whole["count"] += 1
        new_bytes.append(save_in(store, step, whole).num_new_bytes)
    frozen_bytes = whole["frozen"].numel() * 4
    assert new_bytes[0] >= frozen_bytes  # once more, apart from what changes
    assert max(new_bytes[1:]) < first.num_bytes - frozen_bytes + 2000
    nothing_new = save_in(store, 5, whole)
    assert nothing_new.num_new_bytes == 0
    assert save_in(store, 6, whole, incremental=False).num_new_bytes >= first.num_bytes
    for folder in store.folders():
        if folder.step in (1, 2, 3):
            store.remove(folder)
    for folder in store.folders():
        require_whole(folder, whole)


def test_a_file_of_another_length_is_not_taken_over(store: Store) -> None:
    whole = tensors()
    first = save_in(store, 1, whole)
    name = "rank-0000.safetensors"
    overwrite(first.folder, name, first.folder.read(name) + b"x")
    assert save_in(store, 2, whole).num_new_bytes == first.num_bytes
    require_whole(store.folders()[-1], whole)


def test_a_checkpoint_whose_manifest_is_damaged_is_not_built_upon(store: Store) -> None:
    whole = tensors()
    first = save_in(store, 1, whole)
    overwrite(first.folder, MANIFEST_FILE_NAME, b"{}")
    assert save_in(store, 2, whole).num_new_bytes == first.num_bytes
    require_whole(store.folders()[-1], whole)


def test_what_is_pruned_is_gone_and_the_newest_that_verifies_stays(store: Store) -> None:
    for step in (1, 2, 3, 4):
        save_in(store, step, tensors(step))
    assert [
        folder.step
        for folder in prune_checkpoints(
            store, RetentionRule(keep_last=2, protected_steps=frozenset({1}))
        )
    ] == [2]
    name = "rank-0000.safetensors"
    for folder in store.folders()[1:]:
        data = folder.read(name)
        overwrite(folder, name, data[:-1] + bytes([data[-1] ^ 1]))
    assert prune_checkpoints(store, RetentionRule(keep_last=2)) == []
    assert steps(store) == [1, 3, 4]
    store.remove(store.folders()[1])
    assert steps(store) == [1, 4]
    assert "step-3" not in everything(store)


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "extra"])
def test_damage_is_found(store: Store, damage: str) -> None:
    folder = save_in(store, 1, tensors()).folder
    name = "rank-0000.safetensors"
    data = folder.read(name)
    if damage == "flip":
        overwrite(folder, name, data[:-2] + bytes([data[-2] ^ 4]) + data[-1:])
    elif damage == "cut":
        overwrite(folder, name, data[:-1])
    elif damage == "extra":
        folder_write(folder, "stray", b"")
    elif isinstance(folder, LocalCheckpointFolder):
        (folder.path / name).unlink()
    else:
        assert isinstance(folder, ObjectCheckpointFolder)
        folder.remote.remove(f"{folder.name}/{name}")
    problems = find_checkpoint_problems(folder)
    assert problems
    assert str(problems[0].where).startswith(folder.url)
    with pytest.raises(CheckpointError):
        loaded(folder, tensors())


def folder_write(folder: CheckpointFolder, name: str, data: bytes) -> None:
    if isinstance(folder, LocalCheckpointFolder):
        (folder.path / name).write_bytes(data)
    else:
        overwrite(folder, name, data)


def test_a_job_whose_run_was_taken_cannot_commit(store: Store, tmp_path: Path) -> None:
    """It was thought dead and woke up.

    Before its save, or in the middle of it, another job took the run.
    """
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    ours = write_next_fencing_token(run_dir)
    old = tensors(1)
    assert read_manifest(save_in(store, 1, old, fencing_token=ours).folder).epoch == 1
    with pytest.raises(CheckpointError, match="another job took this run"):
        save_in(
            store,
            2,
            tensors(2),
            fencing_token=ours,
            before_commit=lambda: write_next_fencing_token(run_dir),
        )
    assert steps(store) == [1]
    with pytest.raises(CheckpointError, match="its epoch is 2, not 1"):
        save_in(store, 1, tensors(3), fencing_token=ours)
    store.remove_leftovers()
    require_whole(store.folders()[0], old)
    assert "step-2" not in everything(store)


def test_a_job_whose_run_was_taken_removes_nothing(store: Store, tmp_path: Path) -> None:
    """Before its removal, or while it read the checkpoint that stays."""
    (tmp_path / "run").mkdir()
    ours = write_next_fencing_token(tmp_path / "run")
    for step in (1, 2):
        save_in(store, step, tensors(step))
    for meanwhile in (
        lambda num_bytes: write_next_fencing_token(tmp_path / "run"),
        lambda num_bytes: None,
    ):
        with pytest.raises(CheckpointError, match="another job took this run"):
            prune_checkpoints(
                store, RetentionRule(keep_last=1), fencing_token=ours, progress=meanwhile
            )
        assert steps(store) == [1, 2]
    assert [
        folder.step
        for folder in prune_checkpoints(
            store,
            RetentionRule(keep_last=1),
            fencing_token=write_next_fencing_token(tmp_path / "run"),
        )
    ] == [1]


def test_a_store_belongs_to_the_run_that_claimed_it(store: Store, tmp_path: Path) -> None:
    """Of an object store it is written down; of a directory nothing is, because it is locked."""
    first, moved, second = (made(tmp_path / name) for name in ("first", "moved", "second"))
    owner.claim_store(store, first)
    owner.claim_store(store, first)  # a later job of the same run
    token = write_next_fencing_token(first)
    save_in(store, 1, tensors(1), fencing_token=token)
    assert steps(store) == [1]
    require_whole(store.folders()[0], tensors(1))
    if store.owner is None:
        assert not (first / owner.OWNER_COPY_FILE_NAME).exists()
        return
    with pytest.raises(RunLockedError, match=r"belongs to the run 'first' of .* since 2"):
        owner.claim_store(store, second)
    owner.release_store(
        store, second
    )  # what was refused leaves nothing behind, and takes nothing away
    assert not (second / owner.OWNER_COPY_FILE_NAME).exists()
    (moved / owner.OWNER_COPY_FILE_NAME).write_bytes(
        (first / owner.OWNER_COPY_FILE_NAME).read_bytes()
    )
    owner.claim_store(store, moved)
    store.remove_leftovers()
    assert [
        folder.step
        for folder in prune_checkpoints(store, RetentionRule(keep_last=1), fencing_token=token)
    ] == []
    owner.release_store(store, moved)
    assert store.owner.read() is None


def test_a_store_of_before_there_were_owners_is_adopted_by_its_run(
    store: Store, tmp_path: Path
) -> None:
    run_dir, other = made(tmp_path / "run"), made(tmp_path / "other")
    save_in(store, 1, tensors(1))
    owner.claim_store(store, run_dir)
    assert owner.find_store_refusal_reason(store, run_dir) is None
    assert (owner.find_store_refusal_reason(store, other) is None) == (store.owner is None)
    save_in(store, 2, tensors(2), fencing_token=write_next_fencing_token(run_dir))
    assert steps(store) == [1, 2]


def test_of_two_runs_that_claimed_at_once_one_commits_nothing(store: Store, tmp_path: Path) -> None:
    """Neither saw the other's claim, in a store whose requests depend on nothing: the last
    writer has it."""
    if store.owner is None:
        return
    one, other = made(tmp_path / "one"), made(tmp_path / "other")
    owner.claim_store(store, one)
    claims = store.owner.read()
    store.owner.remove()
    owner.claim_store(store, other)
    ours, theirs = write_next_fencing_token(one), write_next_fencing_token(other)
    save_in(store, 1, tensors(1), fencing_token=theirs)
    with pytest.raises(StoreTakenError, match="belongs to the run 'other'"):
        save_in(store, 2, tensors(2), fencing_token=ours)
    with pytest.raises(StoreTakenError, match="belongs to the run 'other'"):
        prune_checkpoints(store, RetentionRule(keep_last=1), fencing_token=ours)

    def overwritten() -> None:
        store.owner.remove()
        store.owner.write(claims)

    with pytest.raises(StoreTakenError, match="belongs to the run 'one'"):
        save_in(store, 2, tensors(2), fencing_token=theirs, before_commit=overwritten)
    assert steps(store) == [1]


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"format": 2}', b'{"format": 1, "run_id": "\\u001b"}']
)
def test_an_owner_that_cannot_be_read_is_another_run(text: bytes, tmp_path: Path) -> None:
    store = open_store_of_run(tmp_path, f"memory://test/{next(_number)}")
    assert store.owner is not None
    store.owner.write(text)
    with pytest.raises(
        RunLockedError, match=r"whose name cannot be read; .* remove memory://test/\d+/owner.json"
    ):
        owner.claim_store(store, made(tmp_path / "run"))
    (tmp_path / "run" / owner.OWNER_COPY_FILE_NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match="whose the checkpoints are cannot be read"):
        owner.claim_store(store, tmp_path / "run")


@pytest.mark.parametrize("name", ["my\u3000run", "my\u00a0run", "my\u200drun", "my\x1b[1mrun"])
def test_a_run_of_any_name_claims_a_store_and_lets_it_go(name: str, tmp_path: Path) -> None:
    """A refused run must not keep the URL for good because its name cannot be printed."""
    store = open_store_of_run(tmp_path, f"memory://test/{next(_number)}")
    assert store.owner is not None
    run_dir, other = made(tmp_path / name), made(tmp_path / "other")
    owner.claim_store(store, run_dir)
    owner.claim_store(store, run_dir)
    with pytest.raises(RunLockedError, match="belongs to the run 'my") as caught:
        owner.claim_store(store, other)
    assert str(caught.value).splitlines()[0].isprintable()
    owner.release_store(store, run_dir)
    assert store.owner.read() is None
    assert not (run_dir / owner.OWNER_COPY_FILE_NAME).exists()


def test_a_claim_that_cannot_be_taken_back_stays_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_of_run(tmp_path, f"memory://test/{next(_number)}")
    run_dir = made(tmp_path / "run")
    owner.claim_store(store, run_dir)

    def refuse(self: object) -> None:
        raise OSError("the store does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(type(store.owner), "remove", refuse)
        owner.release_store(store, run_dir)
    # As the next start in this directory does.
    owner.claim_store(store, run_dir)
    owner.release_store(store, run_dir)
    assert store.owner is not None
    assert store.owner.read() is None


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# Directories alone


def test_a_full_disk_is_said_of_the_step_and_not_of_a_hidden_directory(tmp_path: Path) -> None:
    """At each operation of a save."""
    said: list[str] = []
    for number in range(1, 100):

        def fill(at: int, name: str, path: Path, number: int = number) -> None:
            if at == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        disk = CountingDisk(fill)
        store = LocalStore(tmp_path / str(number), disk)
        try:
            save_in(store, 7, {"a": torch.ones(4)})
        except CheckpointError as error:
            said.append(str(error))
        if disk.num_operations < number:
            break
    assert len(said) >= 8
    assert [line for line in said if ".partial" in line or "No space left" not in line] == []
    assert sum("step-7" in line for line in said) >= 5


def test_a_directory_that_cannot_be_looked_at_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    assert open_store_of_run(tmp_path, f"file://{tmp_path}/nowhere").folders() == []
    for name in ("loop", "file"):
        with pytest.raises(CheckpointError, match="checkpoints cannot be looked for"):
            open_store_of_run(tmp_path, f"file://{tmp_path}/{name}").folders()
    (tmp_path / "run" / "step-1").mkdir(parents=True)
    (tmp_path / "run" / "step-1" / MANIFEST_FILE_NAME).symlink_to(MANIFEST_FILE_NAME)
    [damaged] = open_store_of_run(tmp_path, f"file://{tmp_path}/run").folders()
    with pytest.raises(CheckpointError, match=r"step-1"):
        read_manifest(damaged)


# Object stores alone


def test_an_upload_that_was_cut_off_is_not_committed() -> None:
    """A store that says "done" with half of the bytes."""
    store = ObjectStore.open("memory://test/cut")

    def cut() -> None:
        for key, size in store._remote.list_file_sizes().items():
            if key.endswith(".safetensors"):
                store._remote.put_object(key, store._remote.read(key, 0, size // 2))

    with pytest.raises(CheckpointError, match=r"the store has \d+ bytes of it, not"):
        save_in(store, 1, tensors(), before_commit=cut)
    assert everything(store) == ""


def test_a_copy_whose_answer_is_lost_leaves_no_stray_file() -> None:
    """The store made it and did not say so: the bytes are sent again under another name."""
    store = ObjectStore.open("memory://test/lost", patience=RetryPolicy(2, 0.01))
    whole = tensors()
    for step in (1, 2):
        whole["trained"] += 1
        save_in(store, step, whole)
    copy = store._remote.fs.cp_file

    def lost(source: str, target: str) -> None:
        copy(source, target)
        raise TimeoutError("no answer")

    store._remote.fs.cp_file = lost
    try:
        whole["trained"] += 1
        save_in(store, 3, whole)
    finally:
        del store._remote.fs.cp_file
    require_whole(store.folders()[-1], whole)


def test_of_one_step_the_last_commit_counts_while_the_older_is_still_there() -> None:
    """As after a crash between the two."""
    store = ObjectStore.open("memory://test/two")
    old = save_in(store, 1, tensors(1)).folder
    files = {name: old.read(name) for name in old.file_sizes()}
    save_in(store, 1, tensors(2))
    for name, data in files.items():
        overwrite(old, name, data)
    assert steps(store) == [1]
    require_whole(store.folders()[0], tensors(2))
    store.remove_leftovers()
    assert old.name not in everything(store)
    require_whole(store.folders()[0], tensors(2))


def test_a_range_is_read_and_not_the_file() -> None:
    store = ObjectStore.open("memory://test/ranges")
    whole = {"big": torch.randn(12 << 10, 1 << 10)}  # 48 MiB: twelve chunks
    folder = save_in(store, 1, whole).folder
    asked: list[int] = []
    fetch = store._remote.fs.cat_file

    def counted(path: str, start: int, end: int) -> bytes:
        data: bytes = fetch(path, start=start, end=end)
        asked.append(len(data))
        return data

    part = torch.zeros(256, 1 << 10)
    wanted = LogicalShard(
        "big", (12 << 10, 1 << 10), "float32", (Box((5000, 0), (0, 0), (256, 1 << 10)),), part
    )
    store._remote.fs.cat_file = counted
    try:
        load_checkpoint_into_shards(folder, {"big": wanted}, group=ONE, phases=PhaseTimer())
        one_part = sum(asked[1:])  # the manifest was first
        asked.clear()
        assert find_checkpoint_problems(folder) == []
    finally:
        del store._remote.fs.cat_file
    assert torch.equal(part, whole["big"][5000:5256])
    assert one_part <= 3 * (4 << 20)
    assert len(asked) < 8  # whoever reads on gets more at once


S3_FAULTS: dict[str, dict[str, Any]] = {
    "writing": {"method": "PUT", "part": "rank-", "status": 500},
    "in the middle of a file": {"method": "PUT", "part": "partNumber=2", "status": 503},
    "the manifest": {"method": "PUT", "part": MANIFEST_FILE_NAME, "status": 500},
    "listing": {"method": "GET", "part": "list-type", "status": 500},
    "slow": {"method": "PUT", "part": "rank-", "delay_s": 0.3},
}


LONG = ("in the middle of a file", "the manifest")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in S3_FAULTS]
)
def test_what_fails_for_a_while_is_tried_again_and_said(
    name: str, server: Server, tmp_path: Path
) -> None:
    said: list[str] = []
    store = ObjectStore.open(
        f"s3://{BUCKET}/{name}", say=said.append, patience=RetryPolicy(first_wait_s=0.01)
    )
    whole = tensors() | {"large": torch.ones(5 << 20)}  # more than what is sent in one request
    server.fail(times=2, **S3_FAULTS[name])
    save_in(store, 1, whole)
    assert server.num_failed() == 2
    assert bool(said) == (name != "slow")
    assert all("is tried again" in line for line in said)
    require_whole(store.folders()[0], whole)


@pytest.mark.parametrize(
    "name",
    [
        "in the middle of a file",
        "listing",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("writing", "the manifest")),
    ],
)
def test_what_fails_for_good_is_an_error_and_leaves_the_old_checkpoint(
    name: str, server: Server
) -> None:
    said: list[str] = []
    store = ObjectStore.open(
        f"s3://{BUCKET}/for good {name}", say=said.append, patience=RetryPolicy(3, 0.01)
    )
    old, new = tensors(1), tensors(2) | {"large": torch.ones(5 << 20)}
    save_in(store, 1, old)
    server.fail(times=1000, **S3_FAULTS[name])
    with pytest.raises(CheckpointError, match="tried 3 times") as caught:
        save_in(store, 2, new)
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)
    server.fail(times=0)
    assert steps(store) == [1]
    require_whole(store.folders()[0], old)
    save_in(store, 2, new)  # which also removes what could not be removed
    assert steps(store) == [1, 2]
    require_whole(store.folders()[1], new)
    assert (
        len(
            {
                line.split("/step-2-")[1][:13]
                for line in everything(store).splitlines()
                if "/step-2-" in line
            }
        )
        == 1
    )


ASKED_FOUR_TIMES: dict[str, tuple[dict[str, Any], Callable[[ObjectStore], object]]] = {
    "put": ({"method": "PUT", "part": ".writable"}, lambda store: store.require_writable()),
    "list": ({"method": "GET", "part": "list-type"}, lambda store: store.folders()),
    "look": (
        {"method": "HEAD", "part": "step-1"},
        lambda store: store.folder("step-1").open("a.safetensors"),
    ),
    "read": (
        {"method": "GET", "part": "step-1"},
        lambda store: store.folder("step-1").read(MANIFEST_FILE_NAME),
    ),
    "upload": (
        {"method": "PUT", "part": "a.safetensors"},
        lambda store: store.begin_draft(1).write("a.safetensors", write_a_little),
    ),
}


def write_a_little(file: DiskFile) -> FileSizeAndChecksums:
    file.write(b"abc")
    return FileSizeAndChecksums(3, "0" * 16)


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("name", list(ASKED_FOUR_TIMES))
def test_every_request_is_made_four_times_and_no_library_makes_it_more(
    name: str, status: int, server: Server
) -> None:
    fault, ask = ASKED_FOUR_TIMES[name]
    store = ObjectStore.open(f"s3://{BUCKET}/four times", patience=RetryPolicy(first_wait_s=0.001))
    server.fail(times=1000, status=status, **fault)
    with pytest.raises(CheckpointError, match="tried 4 times"):
        ask(store)
    assert server.num_failed() == 4
    server.fail(times=0)


def test_a_bucket_that_is_not_there_is_said_at_once(server: Server) -> None:
    with pytest.raises(CheckpointError, match="bucket does not exist"):
        ObjectStore.open("s3://no-such-bucket/run").require_writable()


def test_a_directory_behind_a_url_that_cannot_be_written_is_said() -> None:
    with pytest.raises(CheckpointError, match="/dev/full/x: it cannot be written"):
        open_store_of_run(Path(), "file:///dev/full/x").require_writable()


def test_a_directory_behind_a_url_is_written_as_a_runs_own(tmp_path: Path) -> None:
    """Hidden, synced and renamed: its operations are those that every crash was tried at
    (test_crash_points)."""
    store = open_store_of_run(tmp_path, f"file://{tmp_path}/a folder")
    assert (type(store), store.url) == (LocalStore, f"{tmp_path}/a folder")
    saved = save_in(store, 3, tensors())
    assert saved.url == f"{tmp_path}/a folder/step-3"
    for place in (f"file://{tmp_path}/a folder/step-3", f"file://{tmp_path}/a folder"):
        assert find_checkpoint_at_or_newest(place).url == saved.url
    assert is_location_of_one_checkpoint(f"file://{tmp_path}/a folder/step-3")
    assert not is_location_of_one_checkpoint(f"file://{tmp_path}/a folder")


CHAINS = [
    "reference::file:///tmp/x.json",
    "simplecache::s3://bucket/run",
    "filecache::memory://run",
    "zip://run::s3://bucket/runs.zip",
]
NO_STORES = [
    *CHAINS,
    "reference://",
    "reference://x",
    "ssh://host/run",
    "http://host/run",
    "file://relative/run",
]


@pytest.mark.parametrize("url", [*NO_STORES, "memory://run", "s3://me:hunter2hunter2@bucket/run"])
def test_a_strangers_run_does_not_choose_what_is_opened(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job.json names the URL that a verb opens."""
    opened: list[object] = []
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda *asked, **_: opened.append(asked))
    (tmp_path / "job.json").write_text(json.dumps({"checkpoint": {"url": url}}))
    with pytest.raises(
        CheckpointError, match=r"job\.json: its checkpoint\.url cannot be used"
    ) as caught:
        open_store_of_location(tmp_path)
    assert opened == []
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", NO_STORES)
def test_what_is_no_plain_store_is_never_opened(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda *asked, **_: opened.append(asked))
    for look in (
        lambda: open_store_of_run(Path(), url),
        lambda: (
            find_checkpoint_at_or_newest(url) if "://" in url else open_store_of_run(Path(), url)
        ),
    ):
        with pytest.raises(CheckpointError, match="cannot be opened"):
            look()
    assert opened == []


def test_a_bucket_is_a_store_and_no_checkpoint() -> None:
    assert not is_location_of_one_checkpoint("memory://bucket")


@pytest.mark.parametrize("url", ["nothing://here", "s4://bucket"])
def test_what_nothing_opens_is_refused(url: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_store_of_run(Path(), url)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(EnvironmentProblem, match=r"phalanx\[gcs\]"):
        open_store_of_run(Path(), "gs://bucket/run")


def test_words_about_a_url_hold_no_password() -> None:
    store = ObjectStore.open("memory://someone:hunter2hunter2@test/run")
    save_in(store, 1, tensors())
    overwrite(store.folders()[0], MANIFEST_FILE_NAME, b"{}")
    said = f"{store.url} {store.folders()[0].url} {find_checkpoint_problems(store.folders()[0])[0]}"
    assert "hunter2" not in said
    assert json.dumps(said)
