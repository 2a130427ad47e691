"""Checkpoints do not know layouts: saved under one, restored under any.

Reference: the saved tensors.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from models import (
    EXPERTS,
    SAVED,
    SAVED_EXPERTS,
    expert_pairs,
    fill,
    global_batches,
    plan,
    saved_pairs,
    shape,
    share,
)
from phalanx.checkpoint.chunks import FileSizeAndChecksums
from phalanx.checkpoint.folder import LocalCheckpointFolder
from phalanx.checkpoint.manifest import (
    MANIFEST_FILE_NAME,
    compute_manifest_checksum,
    encode_canonical_manifest,
    list_checkpoint_paths_of_run,
    read_manifest,
)
from phalanx.checkpoint.reading.full_tensors import FullTensorReader
from phalanx.checkpoint.reading.load import load_checkpoint_into_shards
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.checkpoint.writing.write import RankSnapshot, write_checkpoint
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import PhaseTimer
from phalanx.job.schema import Optim
from phalanx.mesh.logical import Box, LogicalShard, get_dtype_name, make_logical_shard
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.layout import Layout
from phalanx.train.state import TrainState
from ranks import run_ranks

OBJECTIVE = causal_cross_entropy(64)
Tensors = dict[str, torch.Tensor]


def store(run_dir: Path) -> LocalStore:
    return LocalStore(run_dir / "checkpoints")


def saved_path(
    run_dir: Path,
    step: int,
    shards: dict[str, LogicalShard],
    *,
    aliases: dict[str, str],
    facts: dict[str, Any],
    **how: Any,
) -> Path:
    """Where the shards were saved."""
    snapshot = RankSnapshot(step, shards, aliases, facts)
    folder = write_checkpoint(store(run_dir), snapshot, **how).folder
    assert isinstance(folder, LocalCheckpointFolder)
    return folder.path


def new_state(mesh: Mesh, layout: dict[str, Any], *, seed: int = 0) -> TrainState:
    with torch.device("meta"):
        module = Decoder(shape())
    model = parallelize(module, plan(mesh.world_size, **layout), mesh, seed=seed)
    return TrainState(model, build_optimizer(model, Optim(lr=1e-2)), seed)


def take_step(state: TrainState, batch: Tensors) -> float:
    mesh = state.model.mesh
    num_microbatches = state.model.plan.num_microbatches if mesh.layout.pp > 1 else 1
    mine = share(batch, mesh.data_parallel_rank, mesh.layout.data_parallel_size, num_microbatches)
    facts = state.model.reduce_and_clip(state.model.forward_backward(mine, OBJECTIVE), max_norm=1.0)
    state.model.update(state.optimizer)
    state.optimizer.zero_grad()
    state.step += 1
    return facts.loss


def whole_tensors(state: TrainState) -> Tensors:
    """Weights, both moments and update counts, gathered by torch and named here: what a restore
    is compared with."""
    shards, mesh = state.model.shards(), state.model.mesh

    def full(name: str, tensor: torch.Tensor) -> torch.Tensor:
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        shape = shards[name].global_shape
        return (
            whole if tuple(whole.shape) in (shape, ()) else put_together(mesh, name, whole, shape)
        )

    found: Tensors = {}
    whole = dict(state.model.module.named_parameters())
    for name, parameter in state.model.named_parameters():
        found[f"{name} weight"] = full(name, whole[name])
        for slot, value in state.optimizer.state[parameter].items():
            found[f"{name} {slot}"] = full(name, value)
    return of_all_stages(mesh, found)


def of_all_stages(mesh: Mesh, mine: Tensors) -> Tensors:
    """What the stages of a pipeline have, together; what several have (the tied embedding) is
    equal to the bit."""
    if mesh.layout.pp == 1:
        return mine
    every: list[Any] = [None] * mesh.layout.pp
    torch.distributed.all_gather_object(every, mine, group=mesh.submesh("pp").get_group())
    found: Tensors = {}
    for key, tensor in ((key, tensor) for stage in every for key, tensor in stage.items()):
        assert torch.equal(found.setdefault(key, tensor), tensor), key
    return found


KV_HEADS = 2  # of models.shape
NUM_SAVED_STEPS = 1  # enough for moments and counts


def put_together(mesh: Mesh, name: str, mine: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """What tensor parallelism has cut, by the rules as they are written in the docs: columns,
    rows, heads."""
    group = mesh.submesh("tp").get_group()
    every: list[Any] = [None] * mesh.layout.tp
    torch.distributed.all_gather_object(every, mine, group=group)
    dim = next(d for d, (a, b) in enumerate(zip(mine.shape, shape, strict=True)) if a != b)
    is_key_value = name.split(".")[-2] in ("k", "v")
    if is_key_value and mesh.layout.tp > KV_HEADS:  # neighbours hold the same head
        every = every[:: mesh.layout.tp // KV_HEADS]
    return torch.cat(every, dim=dim)


def each_layout(num_ranks: int, names: set[str]) -> Iterator[tuple[str, dict[str, Any], Mesh]]:
    for name, layout in SAVED[num_ranks].items():
        if f"{name}-{num_ranks}" in names:
            with open_mesh(plan(num_ranks, **layout).layout, device="cpu") as mesh:
                yield f"{name}-{num_ranks}", layout, mesh


def save_each(
    rank: int, num_ranks: int, root: Path, names: set[str]
) -> dict[str, tuple[Tensors, int]]:
    found = {}
    for name, layout, mesh in each_layout(num_ranks, names):
        state = new_state(mesh, layout)
        for batch in global_batches(NUM_SAVED_STEPS):
            take_step(state, batch)
        num_bytes = state.save(store(root / name), job_digest="0", phases=PhaseTimer()).num_bytes
        found[name] = (whole_tensors(state), num_bytes)
    return found


def load_each(
    rank: int, num_ranks: int, root: Path, saved: dict[str, Tensors], pairs: set[tuple[str, str]]
) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    batch = global_batches(NUM_SAVED_STEPS + 1)[-1]
    for name, layout, mesh in each_layout(num_ranks, {target for _, target in pairs}):
        before = whole_tensors(new_state(mesh, layout))
        for source, reference in saved.items():
            if (source, name) not in pairs:
                continue
            assert all(not torch.equal(before[key], reference[key]) for key in reference)
            state = new_state(mesh, layout)
            state.restore(list_checkpoint_paths_of_run(root / source)[-1], phases=PhaseTimer())
            restored = whole_tensors(state)
            assert set(restored) == set(reference)
            wrong = [key for key in reference if not torch.equal(restored[key], reference[key])]
            found[source, name] = (wrong, state.step, take_step(state, batch))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[Tensors, int]]]:
    root = tmp_path_factory.mktemp("layouts")
    names = {source for source, _ in saved_pairs(quick=True)}
    found: dict[str, tuple[Tensors, int]] = {}
    for num_ranks in (1, 2, 4):
        found |= run_ranks(num_ranks, save_each, num_ranks, root, names)[0]
    return root, found


@pytest.fixture(scope="module")
def saved_under_all(saved: Any) -> tuple[Path, dict[str, tuple[Tensors, int]]]:
    root, quick = saved
    names = {source for source, _ in saved_pairs(quick=False)} - quick.keys()
    found = dict(quick)
    for num_ranks in (2, 4, 8):
        found |= run_ranks(num_ranks, save_each, num_ranks, root, names)[0]
    return root, found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_restored_under_another_layout(num_ranks: int, saved: Any) -> None:
    """Every bit of weights, moments and counts; and the next step's loss is the same in all of
    them."""
    restore_under(num_ranks, *saved, saved_pairs(quick=True))


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", list(SAVED))
def test_restored_under_every_layout(num_ranks: int, saved_under_all: Any) -> None:
    restore_under(num_ranks, *saved_under_all, saved_pairs(quick=False))


def restore_under(
    num_ranks: int, root: Path, found: dict[str, tuple[Tensors, int]], pairs: list[tuple[str, str]]
) -> None:
    tensors = {name: values for name, (values, _) in found.items()}
    outcomes = run_ranks(
        num_ranks, load_each, num_ranks, root, tensors, set(pairs), deadline_s=1800.0
    )
    assert set(outcomes[0]) == {pair for pair in pairs if pair[1].endswith(f"-{num_ranks}")}
    for outcome in outcomes:
        for case, (wrong, step, loss) in outcome.items():
            assert wrong == [], case
            assert step == NUM_SAVED_STEPS
            assert loss == pytest.approx(outcomes[0]["one-1", case[1]][2], rel=1e-4), case


def test_replicated_tensors_are_written_once(saved: Any) -> None:
    """Bytes on disk are those of one copy of the state plus headers, whatever the layout; no
    rank writes it all."""
    root, found = saved
    state_bytes = sum(t.numel() * t.element_size() for t in found["one-1"][0].values())
    for name, (_, num_bytes) in found.items():
        assert state_bytes <= num_bytes <= state_bytes + 20_000 * int(name[-1]), name
        files = [file.stat().st_size for file in (root / name).rglob("*.safetensors")]
        assert sum(files) == num_bytes
        assert len(files) == int(name[-1])
        assert max(files) < 0.75 * num_bytes or len(files) == 1, name


# Experts


def new_experts(mesh: Mesh, layout: dict[str, Any], *, scale: float = 1.0) -> TrainState:
    module = Decoder(replace(shape(), **EXPERTS))
    fill(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    model = parallelize(module.double(), plan(mesh.world_size, experts=EXPERTS, **layout), mesh)
    return TrainState(model, build_optimizer(model, Optim(lr=1e-2)), seed=0)


def put_together_by_blocks(state: TrainState) -> Tensors:
    """Every tensor of the state from the blocks that ranks hold, which must agree where several
    hold the same."""
    mine = [
        (
            name,
            shard.global_shape,
            box.global_offset,
            view(shard.tensor, box.local_offset, box.size).detach().clone(),
        )
        for name, shard in state.shards().items()
        for box in shard.boxes
    ]
    every: list[Any] = [mine] * state.model.mesh.world_size
    if state.model.mesh.world_size > 1:
        torch.distributed.all_gather_object(every, mine)
    found: Tensors = {}
    held: Tensors = {}
    for name, size, offset, block in (entry for rank in every for entry in rank):
        whole = found.setdefault(name, torch.zeros(size, dtype=block.dtype))
        seen = held.setdefault(name, torch.zeros(size, dtype=torch.bool))
        here, known = (view(tensor, offset, tuple(block.shape)) for tensor in (whole, seen))
        assert torch.equal(here[known], block[known]), name
        here.copy_(block)
        known.fill_(True)
    assert all(seen.all() for seen in held.values())
    return found


def each_with_experts(num_ranks: int) -> Iterator[tuple[str, dict[str, Any], Mesh]]:
    for name, layout in SAVED_EXPERTS[num_ranks].items():
        with open_mesh(plan(num_ranks, experts=EXPERTS, **layout).layout, device="cpu") as mesh:
            yield f"{name}-{num_ranks}", layout, mesh


def save_experts(rank: int, num_ranks: int, root: Path) -> dict[str, Tensors]:
    found = {}
    for name, layout, mesh in each_with_experts(num_ranks):
        state = new_experts(mesh, layout)
        for batch in global_batches(2):
            take_step(state, batch)
        state.save(store(root / name), job_digest="0", phases=PhaseTimer())
        found[name] = put_together_by_blocks(state)
    return found


def load_experts(
    rank: int, num_ranks: int, root: Path, saved: dict[str, Tensors], pairs: set[tuple[str, str]]
) -> dict[tuple[str, str], tuple[list[str], float]]:
    found = {}
    for name, layout, mesh in each_with_experts(num_ranks):
        for source, reference in saved.items():
            if (source, name) not in pairs:
                continue
            state = new_experts(mesh, layout, scale=0.5)
            before = put_together_by_blocks(state)
            assert not any(torch.equal(before[key], reference[key]) for key in before)
            state.restore(list_checkpoint_paths_of_run(root / source)[-1], phases=PhaseTimer())
            restored = put_together_by_blocks(state)
            assert set(restored) == set(reference)
            wrong = [key for key in reference if not torch.equal(restored[key], reference[key])]
            found[source, name] = (wrong, take_step(state, global_batches(3)[2]))
    return found


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.long)])
def test_experts_restored_under_another_layout(tmp_path: Path, quick: bool) -> None:
    """Every bit of the whole stacks, their moments and counts; and the next loss is that of one
    process."""
    pairs = set(expert_pairs(quick=quick))
    sizes = [num_ranks for num_ranks in SAVED_EXPERTS if num_ranks <= 2 or not quick]
    saved: dict[str, Tensors] = {}
    for num_ranks in sizes:
        saved |= run_ranks(num_ranks, save_experts, num_ranks, tmp_path)[0]
    assert any(".experts." in name and name.startswith("optim/") for name in saved["one-1"])
    found: dict[tuple[str, str], tuple[list[str], float]] = {}
    for num_ranks in sizes:
        for outcome in run_ranks(
            num_ranks, load_experts, num_ranks, tmp_path, saved, pairs, deadline_s=600.0
        ):
            assert [case for case, (wrong, _) in outcome.items() if wrong] == []
            found |= outcome
    assert set(found) == pairs
    for case, (_, loss) in found.items():
        assert loss == pytest.approx(found["one-1", "one-1"][1], rel=1e-10), case


# The store alone: hand-made logical shards


ONE = Mesh(Layout(), 0, 0, torch.device("cpu"))


def origin(size: tuple[int, ...]) -> tuple[int, ...]:
    return (0,) * len(size)


@st.composite
def partitions(draw: st.DrawFn, size: tuple[int, ...]) -> list[Box]:
    """`size` cut at random into boxes, by halving boxes along random dimensions."""
    boxes = [(origin(size), size)]
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(boxes) - 1))
        offset, extent = boxes[at]
        long = [d for d, n in enumerate(extent) if n > 1]
        if not long:
            continue
        dim = draw(st.sampled_from(long))
        left = draw(st.integers(1, extent[dim] - 1))
        first = tuple(left if d == dim else n for d, n in enumerate(extent))
        rest = tuple(n - left if d == dim else n for d, n in enumerate(extent))
        moved = tuple(o + left if d == dim else o for d, o in enumerate(offset))
        boxes[at : at + 1] = [(offset, first), (moved, rest)]
    return [Box(offset, offset, extent) for offset, extent in boxes]


def in_strips(boxes: list[Box], size: tuple[int, ...]) -> list[Box]:
    """The boxes with local places of their own, stacked along dimension 0: a rank with several
    pieces."""
    if not size:
        return boxes
    found, at = [], 0
    for box in boxes:
        found.append(Box(box.global_offset, (at, *origin(size)[1:]), box.size))
        at += box.size[0]
    return found


def shard(
    name: str, whole: torch.Tensor, boxes: list[Box], *, strips: bool, fill: bool
) -> LogicalShard:
    """A LogicalShard of `whole` held as `boxes`: in a strided local tensor, or in stacked
    strips."""
    size = tuple(whole.shape)
    if strips and size:
        boxes = in_strips(boxes, size)
        local = torch.zeros((sum(box.size[0] for box in boxes), *size[1:]), dtype=whole.dtype)
    else:
        local = torch.zeros((*size, 2), dtype=whole.dtype)[..., 0]
    if fill:
        for box in boxes:
            view(local, box.local_offset, box.size).copy_(view(whole, box.global_offset, box.size))
    return LogicalShard(name, size, get_dtype_name(whole.dtype), tuple(boxes), local)


def view(tensor: torch.Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]


WHOLE = {
    "matrix": torch.randn(7, 5, generator=torch.Generator().manual_seed(1)),
    "cube": torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(2)).double(),
    "half": torch.randn(6, 3, generator=torch.Generator().manual_seed(3)).bfloat16(),
    "vector": torch.arange(9),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
}


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_partition_is_restored_under_any_other(tmp_path: Path, data: st.DataObject) -> None:
    """Bit for bit, for any boxes on either side, strided or stacked; scalars, bf16, integers,
    empty tensors."""

    def shards(fill: bool) -> dict[str, LogicalShard]:
        return {
            name: shard(
                name,
                whole,
                data.draw(partitions(tuple(whole.shape))),
                strips=data.draw(st.booleans()),
                fill=fill,
            )
            for name, whole in WHOLE.items()
        }

    written, wanted = shards(True), shards(False)
    path = saved_path(
        tmp_path, 1, written, aliases={}, facts={}, job_digest="", group=ONE, phases=PhaseTimer()
    )
    load_checkpoint_into_shards(path, wanted, group=ONE, phases=PhaseTimer())
    for name, found in wanted.items():
        for box in found.boxes:
            assert torch.equal(
                view(found.tensor, box.local_offset, box.size),
                view(WHOLE[name], box.global_offset, box.size),
            )


def test_facts_and_aliases_come_back_and_a_step_can_be_saved_again(tmp_path: Path) -> None:
    shards = {"w": shard("w", torch.ones(3), [Box((0,), (0,), (3,))], strips=False, fill=True)}
    for value in (1.0, 2.0):
        shards["w"].tensor.fill_(value)
        path = saved_path(
            tmp_path,
            5,
            shards,
            aliases={"a": "w"},
            facts={"n": value},
            job_digest="d",
            group=ONE,
            phases=PhaseTimer(),
        )
        (path.with_name(f".{path.name}.replaced") / "left").mkdir(
            parents=True
        )  # as a crash may leave it
    shards["w"].tensor.zero_()
    manifest = load_checkpoint_into_shards(path, shards, group=ONE, phases=PhaseTimer())
    assert shards["w"].tensor.tolist() == [2.0] * 3
    assert (manifest.facts, manifest.aliases, manifest.step, manifest.job_digest) == (
        {"n": 2.0},
        {"a": "w"},
        5,
        "d",
    )
    assert list_checkpoint_paths_of_run(tmp_path) == [path]


def test_blocks_that_do_not_make_the_whole_are_not_written(tmp_path: Path) -> None:
    part = shard("w", torch.ones(4), [Box((0,), (0,), (3,))], strips=False, fill=True)
    with pytest.raises(CheckpointError, match="w do not make the whole"):
        saved_path(
            tmp_path,
            1,
            {"w": part},
            aliases={},
            facts={},
            job_digest="",
            group=ONE,
            phases=PhaseTimer(),
        )
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_piece_that_is_there_twice_does_not_stand_for_one_that_is_not(tmp_path: Path) -> None:
    """As many elements as there should be, in a manifest that was signed again."""
    whole = torch.arange(32.0).view(8, 4)
    boxes = [Box((row, 0), (row, 0), (4, 4)) for row in (0, 4)]
    written = {"big": shard("big", whole, boxes, strips=False, fill=True)}
    path = saved_path(
        tmp_path, 1, written, aliases={}, facts={}, job_digest="", group=ONE, phases=PhaseTimer()
    )
    edit(path, lambda body: pieces(body)[1].update(offset=[0, 0]))
    wanted = {"big": shard("big", whole, [Box((0, 0), (0, 0), (8, 4))], strips=False, fill=False)}
    with pytest.raises(CheckpointError, match="big is not whole"):
        load_checkpoint_into_shards(path, wanted, group=ONE, phases=PhaseTimer())
    assert not wanted["big"].tensor.any()
    with (
        FullTensorReader(path, read_manifest(path)) as tensors,
        pytest.raises(CheckpointError, match="big is not whole"),
    ):
        tensors.load("big")


# Damage


FILE = "rank-0001.safetensors"


class Canary:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        found = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([found ^ 16]))


def edit(directory: Path, change: Callable[[dict[str, Any]], Any], *, sign: bool = True) -> None:
    """Change the manifest; with `sign`, as someone would who also knows how to write its
    checksum."""
    path = directory / MANIFEST_FILE_NAME
    body = json.loads(path.read_text())
    change(body)
    if sign:
        body["xxh3"] = compute_manifest_checksum(body)
    path.write_bytes(encode_canonical_manifest(body))


def pieces(body: dict[str, Any], name: str = "big") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = body["tensors"][name]["pieces"]
    return found


def swap_pieces(body: dict[str, Any]) -> None:
    first, second = pieces(body)
    first["offset"], second["offset"] = second["offset"], first["offset"]


def swap_files(directory: Path) -> None:
    (directory / FILE).rename(directory / "third")
    (directory / "rank-0000.safetensors").rename(directory / FILE)
    (directory / "third").rename(directory / "rank-0000.safetensors")


def point_outside(body: dict[str, Any]) -> None:
    body["files"]["../outside.safetensors"] = body["files"].pop(FILE)
    for tensor in body["tensors"].values():
        for piece in tensor["pieces"]:
            piece["file"] = piece["file"].replace(FILE, "../outside.safetensors")


def plant_pickle(name: str, directory: Path) -> None:
    """Under the name of a file, in its place if there is one: with its checksum in the manifest,
    so that it is read."""
    path = directory / name
    is_listed = path.exists() and name != MANIFEST_FILE_NAME
    path.write_bytes(pickle.dumps(Canary(directory.parent / "executed")))
    if is_listed:
        stored = asdict(FileSizeAndChecksums.compute_from_file(path))
        edit(directory, lambda body: body["files"].update({name: stored}))


FOREIGN = (
    ".metadata",
    "__0_0.distcp",
    "pytorch_model.bin",
    "model.safetensors",
    "optimizer.pt",
    "data.pkl",
    "config.json",
)
PICKLES = {
    FILE: "longer than the file",
    "rank-0000.safetensors": "longer than the file",
    MANIFEST_FILE_NAME: "cannot be read",
    **{name: f"{name} is in it" for name in FOREIGN},
}
DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "flipped bit in a tensor": ("not those that were written", lambda d: flip(d / FILE, -3)),
    "flipped bit in a header": ("not those that were written", lambda d: flip(d / FILE, 20)),
    "truncated file": (
        "bytes, not the",
        lambda d: (d / FILE).write_bytes((d / FILE).read_bytes()[:-1]),
    ),
    "missing file": ("is missing", lambda d: (d / FILE).unlink()),
    "swapped files": ("written", swap_files),
    "missing manifest": ("manifest.json is missing", lambda d: (d / MANIFEST_FILE_NAME).unlink()),
    "truncated manifest": (
        "cannot be read",
        lambda d: (d / MANIFEST_FILE_NAME).write_bytes((d / MANIFEST_FILE_NAME).read_bytes()[:200]),
    ),
    "manifest is a list": ("format", lambda d: (d / MANIFEST_FILE_NAME).write_text("[]")),
    "edited fact": ("checksum", lambda d: edit(d, lambda b: b["facts"].update(step=8), sign=False)),
    "pieces swapped": ("checksum", lambda d: edit(d, swap_pieces, sign=False)),
    "missing tensor": ("(1 missing)", lambda d: edit(d, lambda b: b["tensors"].pop("small"))),
    "unknown tensor": (
        "1 not in this model",
        lambda d: edit(d, lambda b: b["tensors"].update(x=b["tensors"]["small"])),
    ),
    "wrong shape": (
        "float32 [8, 4]  float32 [8, 5]",
        lambda d: edit(d, lambda b: b["tensors"]["big"].update(shape=[8, 5])),
    ),
    "wrong dtype": (
        "float64",
        lambda d: edit(d, lambda b: b["tensors"]["big"].update(dtype="float64")),
    ),
    "path traversal": ("bad file name", lambda d: edit(d, point_outside)),
    "piece outside": (
        "outside its shape",
        lambda d: edit(d, lambda b: pieces(b)[1].update(offset=[5, 0])),
    ),
    "piece of the wrong size": (
        "not float32",
        lambda d: edit(d, lambda b: pieces(b)[0].update(size=[5, 4])),
    ),
    "piece missing": ("not whole", lambda d: edit(d, lambda b: pieces(b).pop())),
    "piece of other dimensions": (
        "damaged",
        lambda d: edit(d, lambda b: pieces(b)[0].update(offset=[0], size=[4])),
    ),
    "other type in the file": (
        "I64",
        lambda d: edit(d, lambda b: pieces(b)[1].update(key="count#0")),
    ),
    "unknown key": ("loading", lambda d: edit(d, lambda b: pieces(b)[0].update(key="big#9"))),
    "other format": ("format 3 is not 2", lambda d: edit(d, lambda b: b.update(format=3))),
    "other chunks": ("damaged", lambda d: edit(d, lambda b: b.update(chunk_bytes=1 << 20))),
    "file nobody wrote": ("stray is in it", lambda d: (d / "stray").write_bytes(b"x")),
    **{f"pickle {name}": (said, partial(plant_pickle, name)) for name, said in PICKLES.items()},
}


def halves(rank: int, fill: float | None) -> dict[str, LogicalShard]:
    """Each of two ranks holds half of `big`; `small` and `count` are on both."""
    big, small, count = torch.full((4, 4), -1.0), torch.full((3,), -1.0), torch.full((4, 4), -1)
    if fill is not None:
        big, small, count = (
            t.copy_(torch.arange(t.numel()).view_as(t) + fill + 100 * rank)
            for t in (big, small, count)
        )
        small, count = small - 100 * rank, count - 100 * rank
    shards = {
        "big": LogicalShard("big", (8, 4), "float32", (Box((4 * rank, 0), (0, 0), (4, 4)),), big)
    }
    for name, tensor in (("small", small), ("count", count)):
        size = tuple(tensor.shape)
        box = Box(origin(size), origin(size), size)
        shards[name] = LogicalShard(
            name, size, get_dtype_name(tensor.dtype), (box,), tensor, rank, 2
        )
    return shards


def save_halves(run_dir: Path, step: int, rank: int, mesh: Mesh, fill: float = 0.0) -> Path:
    shards = halves(rank, fill)
    return saved_path(
        run_dir,
        step,
        shards,
        aliases={},
        facts={"step": step},
        job_digest="",
        group=mesh,
        phases=PhaseTimer(),
    )


def load_damaged(rank: int, root: Path) -> dict[str, tuple[str, bool]]:
    found: dict[str, tuple[str, bool]] = {}
    with open_mesh(Layout(dp_shard=2), device="cpu") as mesh:
        good = save_halves(root, 1, rank, mesh)
        shards = halves(rank, None)
        load_checkpoint_into_shards(good, shards, group=mesh, phases=PhaseTimer())
        found["good"] = (
            "",
            all(torch.equal(shards[n].tensor, s.tensor) for n, s in halves(rank, 0.0).items()),
        )
        for name, (_, damage) in DAMAGE.items():
            bad = root / name.replace(" ", "-")
            if rank == 0:
                shutil.copytree(good, bad)
                shutil.copy(good / FILE, root / "outside.safetensors")
                damage(bad)
            mesh.barrier()
            shards = halves(rank, None)
            message = ""
            try:
                load_checkpoint_into_shards(bad, shards, group=mesh, phases=PhaseTimer())
            except CheckpointError as error:
                message = str(error)
            found[name] = (message, all(bool((s.tensor == -1).all()) for s in shards.values()))
            found[f"{name} executed"] = ("", (root / "executed").exists())
    return found


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, bool]]]:
    return run_ranks(2, load_damaged, tmp_path_factory.mktemp("damage"))


def test_an_undamaged_checkpoint_of_the_same_kind_loads(damaged: Any) -> None:
    assert [found["good"] for found in damaged] == [("", True)] * 2


@pytest.mark.parametrize("kind", list(DAMAGE))
def test_damage_is_found_on_all_ranks_before_any_tensor_changes(kind: str, damaged: Any) -> None:
    messages = [found[kind][0] for found in damaged]
    assert DAMAGE[kind][0] in messages[0]
    assert messages[0] == messages[1]
    assert [found[kind][1] for found in damaged] == [True, True]


@pytest.mark.parametrize("name", list(PICKLES))
def test_a_pickle_in_a_whole_checkpoint_is_not_executed(
    name: str, damaged: Any, tmp_path: Path
) -> None:
    """One at a time, under each name that this loader or another might look at."""
    assert [found[f"pickle {name} executed"][1] for found in damaged] == [False, False]
    pickle.loads(pickle.dumps(Canary(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()  # the canary does sing


def flip_and_load(rank: int, root: Path) -> list[str]:
    """What is wrong with how a load tells of 100 flipped bits, in a file of three chunks."""
    sizes = {"lookup.weight": (768, 1024), "blocks.0.weight": (1536, 1024), "norm.weight": (256,)}
    whole = {name: torch.randn(size) for name, size in sizes.items()}
    with open_mesh(Layout(), device="cpu") as mesh:

        def shards(tensors: Tensors) -> dict[str, LogicalShard]:
            return {
                name: make_logical_shard(name, tensor, replica=0, num_replicas=1)
                for name, tensor in tensors.items()
            }

        how: dict[str, Any] = {
            "aliases": {},
            "facts": {},
            "job_digest": "",
            "group": mesh,
            "phases": PhaseTimer(),
        }
        path = saved_path(root, 1, shards(whole), **how) / "rank-0000.safetensors"
        size, wrong, dice = path.stat().st_size, [], random.Random(3)
        begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        stored = json.loads(path.read_bytes()[8:begin])
        targets = {name: torch.full(extent, -1.0) for name, extent in sizes.items()}
        for number in range(100):
            at = dice.randrange(size) if number % 5 else dice.randrange(size - 1024, size)
            flip(path, at)
            try:
                load_checkpoint_into_shards(
                    path.parent, shards(targets), group=mesh, phases=PhaseTimer()
                )
                wrong.append(f"byte {at} was not missed")
            except CheckpointError as error:
                (struck,) = [
                    key.rpartition("#")[0]
                    for key, entry in stored.items()
                    if entry["data_offsets"][0] <= at - begin < entry["data_offsets"][1]
                ] or ["the file's header"]
                said = (
                    str(error)
                    .partition("those that were written: ")[2]
                    .partition(" (xxh3")[0]
                    .split(", ")
                )
                if path.name not in str(error) or struck not in said:
                    wrong.append(f"byte {at} of {struck}: {error}")
            flip(path, at)
            if any(bool((target != -1.0).any()) for target in targets.values()):
                wrong.append(f"byte {at} reached the weights")
        load_checkpoint_into_shards(path.parent, shards(targets), group=mesh, phases=PhaseTimer())
        return wrong + [name for name in sizes if not torch.equal(targets[name], whole[name])]


def test_a_load_names_file_and_tensor_of_a_flipped_bit_and_takes_nothing(tmp_path: Path) -> None:
    assert run_ranks(1, flip_and_load, tmp_path) == [[]]


def fail_on_one_rank(rank: int, root: Path) -> list[Any]:
    with open_mesh(Layout(dp_shard=2), device="cpu") as mesh:
        good = save_halves(root, 1, rank, mesh)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        message = ""
        for step in (1, 2):  # over the old one, and beside it
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            try:
                save_halves(root, step, rank, mesh, fill=7.0)
            except CheckpointError as error:
                message = str(error)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        mesh.barrier()
        shards = halves(rank, None)
        load_checkpoint_into_shards(good, shards, group=mesh, phases=PhaseTimer())
        kept = all(
            torch.equal(shards[name].tensor, s.tensor) for name, s in halves(rank, 0.0).items()
        )
        return [message, kept, sorted(path.name for path in (root / "checkpoints").iterdir())]


def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_the_old_checkpoint(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, fail_on_one_rank, tmp_path)
    assert first == second
    assert "rank 1" in first[0]
    assert "writing" in first[0]
    assert first[1:] == [True, ["step-1"]]


def restore_other_seed(rank: int, root: Path) -> tuple[str, bool]:
    state = new_state(ONE, {}, seed=1)
    state.save(store(root), job_digest="", phases=PhaseTimer())
    other = new_state(ONE, {}, seed=2)
    before = whole_tensors(other)
    message = ""
    try:
        other.restore(list_checkpoint_paths_of_run(root)[-1], phases=PhaseTimer())
    except CheckpointError as error:
        message = str(error)
    after = whole_tensors(other)
    return message, all(torch.equal(before[key], after[key]) for key in before)


def test_a_checkpoint_of_another_seed_is_refused_with_the_state_untouched(tmp_path: Path) -> None:
    message, untouched = run_ranks(1, restore_other_seed, tmp_path)[0]
    assert "run.seed 1, not 2" in message
    assert untouched


def test_an_unfinished_checkpoint_is_not_listed_and_one_without_a_manifest_is(
    tmp_path: Path,
) -> None:
    part = {"w": shard("w", torch.ones(3), [Box((0,), (0,), (3,))], strips=False, fill=True)}
    path = saved_path(
        tmp_path, 3, part, aliases={}, facts={}, job_digest="", group=ONE, phases=PhaseTimer()
    )
    for name in (".step-4.partial", "step-x", ".step-6.replaced"):
        (path.parent / name).mkdir()
        shutil.copy(path / MANIFEST_FILE_NAME, path.parent / name)
    assert list_checkpoint_paths_of_run(tmp_path) == [path]
    assert read_manifest(path).step == 3
    (path.parent / "step-7").write_text("no directory")
    (path.parent / "step-5").mkdir()
    (path.parent / "step-6").symlink_to("nowhere")
    # Whatever is called so is a checkpoint, whole or damaged: a resume would refuse it.
    assert [found.name for found in list_checkpoint_paths_of_run(tmp_path)] == [
        "step-3",
        "step-5",
        "step-6",
        "step-7",
    ]
