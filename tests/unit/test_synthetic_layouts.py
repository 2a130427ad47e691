"""Layouts to come, as the store will see them: a rank's part of every tensor under pp, dp, tp and
ep, made by hand.

Whatever cut wrote a checkpoint, any other reads it bit for bit. Reference: the whole tensors the
parts are cut from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import (
    Tensors,
    ThreadRank,
    bytes_needed,
    counting_reads,
    load_shards,
    run_threads,
    save_shards,
)
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.core.errors import CheckpointError
from phalanx.mesh.logical import Box, LogicalShard, get_dtype_name
from phalanx.plan.layout import Layout
from ranks import run_ranks

# A model of three blocks. Q has 4 heads, K and V have 2, each of 2 rows; 11 tokens in the
# vocabulary.
NUM_BLOCKS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DIM, VOCAB, NUM_EXPERTS = 3, 4, 2, 2, 6, 11, 4
SENTINEL = 77  # what stands in a rank's storage where no block is
ALIASES = {"head.weight": "embed.weight"}


def whole_tensors() -> Tensors:
    """The model and the state of its optimizer, never held whole by a rank."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    weights = {"embed.weight": draw(VOCAB, DIM)}
    for block in range(NUM_BLOCKS):
        weights[f"blocks.{block}.qkv"] = draw((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, DIM)
        weights[f"blocks.{block}.out"] = draw(DIM, NUM_HEADS * HEAD_DIM)
        weights[f"blocks.{block}.norm"] = draw(DIM).bfloat16()
    weights["blocks.1.stacked_experts"] = draw(NUM_EXPERTS, 3, 2)
    for expert in range(NUM_EXPERTS):
        weights[f"blocks.2.experts.{expert}"] = draw(3, 2).bfloat16()
    moments = {f"optim/{name}/exp_avg": draw(*weight.shape) for name, weight in weights.items()}
    counts = {
        f"optim/{name}/step": torch.tensor(float(number)) for number, name in enumerate(weights)
    }
    others = {"mask": draw(7) > 0, "num_seen": torch.tensor(2**40), "empty": torch.zeros(0, 4)}
    return weights | moments | counts | others


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor: blocks stacked along dimension 0 in the order given."""

    boxes: tuple[Box, ...]
    replica: int
    num_replicas: int


def part_of(name: str, shape: tuple[int, ...], layout: Layout, rank: int) -> Part | None:
    """The part of one tensor at one rank; None if the rank does not know the tensor."""
    place = layout.coordinates(rank)
    parameter = name.removeprefix("optim/").removesuffix("/step").removesuffix("/exp_avg")
    stages = _stages(parameter, layout.pp)
    if place["pp"] not in stages:
        return None
    holders = [
        (stages.index(place["pp"]), len(stages)),
        (place["dp_replicate"], layout.dp_replicate),
    ]
    holders.append((place["cp"], layout.cp))
    expert, num_expert_ranks = place["dp_shard"] % layout.ep, layout.ep
    if ".experts." in parameter:
        if int(parameter.rpartition(".")[2]) * num_expert_ranks // NUM_EXPERTS != expert:
            return None
        holders.append((place["dp_shard"] // layout.ep, layout.dp_shard // layout.ep))
    elif ".stacked_experts" in parameter and shape:
        holders.append((place["dp_shard"] // layout.ep, layout.dp_shard // layout.ep))
    elif not shape:
        holders.append((place["dp_shard"], layout.dp_shard))
    if not shape:
        return Part((Box((), (), ()),), *_combined([*holders, (place["tp"], layout.tp)]))
    blocks = [Box((0,) * len(shape), (0,) * len(shape), shape)]
    if ".stacked_experts" in parameter:
        blocks = _slice(blocks, 0, expert, num_expert_ranks)
    tensor_cut = _cut_by_tensor_parallelism(parameter, shape, place["tp"], layout.tp)
    if tensor_cut is None:
        holders.append((place["tp"], layout.tp))
    else:
        blocks = tensor_cut
    if "experts" not in parameter:
        blocks = _rows_of_a_shard(blocks, place["dp_shard"], layout.dp_shard)
    return Part(tuple(_stacked(blocks)), *_combined(holders))


def _stages(parameter: str, num_stages: int) -> list[int]:
    """The pipeline stages that hold a parameter: a block is on one, the tied embedding on the
    first and the last."""
    if parameter.startswith("blocks."):
        return [int(parameter.split(".")[1]) * num_stages // NUM_BLOCKS]
    if parameter.startswith("embed."):
        return sorted({0, num_stages - 1})
    return list(range(num_stages))


def _combined(holders: list[tuple[int, int]]) -> tuple[int, int]:
    number, count = 0, 1
    for place, degree in holders:
        number, count = number * degree + place, count * degree
    return number, count


def _cut_by_tensor_parallelism(
    parameter: str, shape: tuple[int, ...], place: int, degree: int
) -> list[Box] | None:
    """Q, K and V by heads (K and V of one head on several ranks if need be), output by columns,
    embedding by rows."""
    whole = Box((0,) * len(shape), (0,) * len(shape), shape)
    if parameter.endswith(".out"):
        return _slice([whole], 1, place, degree)
    if parameter == "embed.weight":
        return _slice([whole], 0, place, degree)
    if not parameter.endswith(".qkv"):
        return None
    q_rows, kv_rows = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    q, k, v = (
        Box((start, 0), (0, 0), (rows, shape[1]))
        for start, rows in ((0, q_rows), (q_rows, kv_rows), (q_rows + kv_rows, kv_rows))
    )
    num_kv_parts = min(degree, NUM_KV_HEADS)
    copies = degree // num_kv_parts
    kv = [
        replace(box, replica=place % copies, num_replicas=copies)
        for box in _slice([k, v], 0, place // copies, num_kv_parts)
    ]
    return _slice([q], 0, place, degree) + kv


def _slice(boxes: list[Box], dim: int, place: int, degree: int) -> list[Box]:
    """Each box's part along `dim`: as many as there are whole ones, as torch cuts."""
    found = []
    for box in boxes:
        chunk = -(-box.size[dim] // degree)
        begin, end = min(place * chunk, box.size[dim]), min((place + 1) * chunk, box.size[dim])
        found.append(_part_of_box(box, dim, begin, end))
    return [box for box in found if math.prod(box.size) or not math.prod(boxes[0].size)]


def _part_of_box(box: Box, dim: int, begin: int, end: int) -> Box:
    start, size = list(box.global_offset), list(box.size)
    start[dim], size[dim] = start[dim] + begin, end - begin
    return replace(box, global_offset=tuple(start), size=tuple(size))


def _rows_of_a_shard(boxes: list[Box], place: int, degree: int) -> list[Box]:
    """The `place`-th of `degree` shards of the local rows, across blocks: rows of the whole that
    lie apart."""
    rows = sum(box.size[0] for box in boxes)
    chunk = -(-rows // degree)
    begin, end = min(place * chunk, rows), min((place + 1) * chunk, rows)
    found, at = [], 0
    for box in boxes:
        first, last = max(begin - at, 0), min(end - at, box.size[0])
        if first < last:
            found.append(_part_of_box(box, 0, first, last))
        at += box.size[0]
    return found


def _stacked(boxes: list[Box]) -> Iterator[Box]:
    """With local places: from row 1 on, below a row that belongs to no block (padding)."""
    at = 1
    for box in boxes:
        yield replace(box, local_offset=(at, *(0,) * (len(box.size) - 1)))
        at += box.size[0]


def shard_of_part(name: str, whole: torch.Tensor, part: Part, *, fill: bool) -> LogicalShard:
    """The part in storage of its own with gaps between its elements, filled from `whole` or not."""
    if not whole.ndim:
        local = whole.clone() if fill else torch.full_like(whole, SENTINEL)
    else:
        rows = 2 + sum(box.size[0] for box in part.boxes)
        columns = part.boxes[0].size[1:] if part.boxes else whole.shape[1:]
        local = torch.full((*columns, rows, 2), SENTINEL).to(whole.dtype)[..., 0].movedim(-1, 0)
    shard = LogicalShard(
        name,
        tuple(whole.shape),
        get_dtype_name(whole.dtype),
        part.boxes,
        local,
        part.replica,
        part.num_replicas,
    )
    if fill:
        for box in part.boxes:
            inside(local, box).copy_(at(whole, box))
    return shard


def inside(local: torch.Tensor, box: Box) -> torch.Tensor:
    return local[tuple(slice(o, o + n) for o, n in zip(box.local_offset, box.size, strict=True))]


def at(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(box.global_offset, box.size, strict=True))]


Cut = Callable[[str, tuple[int, ...], Layout, int], Part | None]


def shards_of(
    wholes: Tensors, layout: Layout, rank: int, *, fill: bool, cut: Cut = part_of
) -> dict[str, LogicalShard]:
    parts = {name: cut(name, tuple(whole.shape), layout, rank) for name, whole in wholes.items()}
    return {
        name: shard_of_part(name, wholes[name], part, fill=fill)
        for name, part in parts.items()
        if part
    }


def wrong_in(shards: dict[str, LogicalShard], wholes: Tensors) -> list[str]:
    """Tensors of which a block is not what the whole has there, or whose storage changed outside
    its blocks."""
    wrong = []
    for name, shard in shards.items():
        expected = shard_of_part(
            name, wholes[name], Part(shard.boxes, shard.replica, shard.num_replicas), fill=True
        )
        if not torch.equal(shard.tensor, expected.tensor):
            wrong.append(name)
    return wrong


LAYOUTS = {
    "one rank": Layout(),
    "ddp 3": Layout(dp_replicate=3),
    "zero 4": Layout(dp_shard=4),
    "zero 7, some ranks without a row": Layout(dp_shard=7),
    "hsdp 2x3": Layout(dp_replicate=2, dp_shard=3),
    "tp 2": Layout(tp=2),
    "tp 4, each K and V head on two ranks": Layout(tp=4),
    "fsdp 2 of tp 4: strided": Layout(dp_shard=2, tp=4),
    "hsdp 2x2 of tp 2": Layout(dp_replicate=2, dp_shard=2, tp=2),
    "pp 3, embedding on two stages": Layout(pp=3),
    "pp 2 of tp 4": Layout(pp=2, tp=4),
    "cp 2 of zero 2": Layout(dp_shard=2, cp=2),
    "ep 2 of zero 4": Layout(dp_shard=4, ep=2),
    "pp 2, zero 2, ep 2, tp 2": Layout(pp=2, dp_shard=2, tp=2, ep=2),
}


def aliases_at(layout: Layout, rank: int) -> dict[str, str]:
    """Only the stage with the head knows the head's name."""
    return ALIASES if layout.coordinates(rank)["pp"] == layout.pp - 1 else {}


def save_under(layout: Layout, wholes: Tensors, run_dir: Path, cut: Cut = part_of) -> Path:
    def save(group: ThreadRank) -> Path:
        shards = shards_of(wholes, layout, group.rank, fill=True, cut=cut)
        aliases = {
            name: stored
            for name, stored in aliases_at(layout, group.rank).items()
            if stored in wholes
        }
        return save_shards(run_dir, 1, shards, group, aliases=aliases)

    return Path(run_threads(layout, save)[0])


def load_under(
    layout: Layout, wholes: Tensors, directory: Path, cut: Cut = part_of
) -> list[list[str]]:
    """What is wrong on each rank."""

    def load(group: ThreadRank) -> list[str]:
        shards = shards_of(wholes, layout, group.rank, fill=False, cut=cut)
        load_shards(directory, shards, group)
        return wrong_in(shards, wholes)

    return run_threads(layout, load)


FEW = 2  # layouts that read what one wrote, where not every pair is tried


def read_by_others(rank: int, root: Path, num_readers: int) -> dict[str, Any]:
    """By layout that wrote: what is wrong with its files, and with what `num_readers` layouts
    read."""
    wholes = whole_tensors()
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        directory = save_under(layout, wholes, root / name)
        manifest = read_manifest(directory)
        stored_bytes = sum(
            math.prod(piece.size) * wholes[tensor].element_size()
            for tensor, stored in manifest.tensors.items()
            for piece in stored.pieces
        )
        found[name] = {
            "problems": [str(problem) for problem in find_checkpoint_problems(directory)],
            "names": set(manifest.tensors),
            "aliases": manifest.aliases,
            "bytes": stored_bytes,
            "files": len(manifest.files),
            "read": {
                other: load_under(LAYOUTS[other], wholes, directory)
                for other in readers_of(name, num_readers)
            },
        }
    return found


def readers_of(name: str, num_readers: int) -> list[str]:
    """The layout itself and those after it in the list, which begins again at its end."""
    names = list(LAYOUTS)
    begin = names.index(name)
    return (names[begin:] + names[:begin])[:num_readers]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_ranks(1, read_by_others, tmp_path_factory.mktemp("synthetic"), FEW)
    return dict(found)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_what_a_layout_writes_others_read_bit_for_bit(name: str, pairs: dict[str, Any]) -> None:
    """All blocks of all ranks, and nothing between them; the padding of a storage stays what it
    was."""
    assert pairs[name]["read"] == {
        other: [[]] * LAYOUTS[other].world_size for other in readers_of(name, FEW)
    }


@pytest.mark.long
def test_every_layout_reads_what_every_other_wrote(tmp_path: Path) -> None:
    (found,) = run_ranks(1, read_by_others, tmp_path, len(LAYOUTS))
    right = {other: [[]] * layout.world_size for other, layout in LAYOUTS.items()}
    assert {name: facts["read"] for name, facts in found.items()} == dict.fromkeys(LAYOUTS, right)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_layout_writes_every_tensor_once(name: str, pairs: dict[str, Any]) -> None:
    """Also those that rank 0 does not know; bytes of replicas are not repeated; the files
    verify."""
    wholes, found = whole_tensors(), pairs[name]
    assert found["problems"] == []
    assert found["names"] == set(wholes)
    assert found["aliases"] == ALIASES
    assert found["bytes"] == sum(whole.numel() * whole.element_size() for whole in wholes.values())


def test_the_layouts_hold_what_they_are_meant_to() -> None:
    """The cases are there: several blocks in a tensor, blocks apart, names others have not,
    ranks with nothing."""
    shapes = {name: tuple(whole.shape) for name, whole in whole_tensors().items()}

    def part(layout: str, rank: int, name: str) -> Part | None:
        return part_of(name, shapes[name], LAYOUTS[layout], rank)

    qkv = part("tp 4, each K and V head on two ranks", 1, "blocks.0.qkv")
    assert [(box.global_offset[0], box.size[0]) for box in qkv.boxes] == [(2, 2), (8, 2), (12, 2)]
    assert [(box.replica, box.num_replicas) for box in qkv.boxes] == [(0, 1), (1, 2), (1, 2)]
    strided = part("hsdp 2x2 of tp 2", 1, "blocks.0.qkv")
    assert [(box.global_offset[0], box.size[0]) for box in strided.boxes] == [(4, 4)]
    strided = part("hsdp 2x2 of tp 2", 3, "blocks.0.qkv")
    assert [(box.global_offset[0], box.size[0]) for box in strided.boxes] == [(10, 2), (14, 2)]
    assert part("pp 3, embedding on two stages", 0, "blocks.1.out") is None
    assert [part("pp 3, embedding on two stages", r, "embed.weight") is None for r in range(3)] == [
        False,
        True,
        False,
    ]
    assert [part("ep 2 of zero 4", r, "blocks.2.experts.3") is None for r in range(4)] == [
        True,
        False,
        True,
        False,
    ]
    assert part("zero 7, some ranks without a row", 6, "blocks.0.norm").boxes == ()


# Cuts drawn at random


@st.composite
def assignments(draw: st.DrawFn, size: tuple[int, ...], num_ranks: int) -> list[list[Box]]:
    """By rank, the boxes it holds of a tensor cut at random; a box is held by one rank or by
    several."""
    boxes = [Box((0,) * len(size), (0,) * len(size), size)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        long = [dim for dim, length in enumerate(box.size) if length > 1]
        if not long:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(long))
        cut = draw(st.integers(1, box.size[dim] - 1))
        boxes += [_part_of_box(box, dim, 0, cut), _part_of_box(box, dim, cut, box.size[dim])]
    ranks: list[list[Box]] = [[] for _ in range(num_ranks)]
    for box in boxes:
        holders = draw(
            st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks, unique=True)
        )
        for number, holder in enumerate(holders):
            ranks[holder].append(replace(box, replica=number, num_replicas=len(holders)))
    return ranks


def side_by_side(name: str, whole: torch.Tensor, boxes: list[Box], *, fill: bool) -> LogicalShard:
    """Boxes of any sizes in one storage, each behind the other along every dimension."""
    places, at_dim = [], [1] * whole.ndim
    for box in boxes:
        places.append(replace(box, local_offset=tuple(at_dim)))
        at_dim = [o + n for o, n in zip(at_dim, box.size, strict=True)]
    local = torch.full(at_dim, SENTINEL).to(whole.dtype)
    shard = LogicalShard(
        name, tuple(whole.shape), get_dtype_name(whole.dtype), tuple(places), local
    )
    if fill:
        for box in places:
            inside(local, box).copy_(at(whole, box))
    return shard


RANDOM = {
    "cube": torch.arange(60, dtype=torch.float64).view(3, 4, 5),
    "matrix": torch.arange(77).view(7, 11).bfloat16(),
    "vector": torch.arange(9),
}


def try_random_cuts(rank: int, root: Path, num_examples: int) -> int:
    """Save at one random cut over 1 to 5 ranks, load at another; how many were tried."""
    tried = 0

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        nonlocal tried
        tried += 1
        sides = []
        for fill in (True, False):
            layout = Layout(dp_shard=data.draw(st.integers(1, 5)))
            cuts = {
                name: data.draw(assignments(tuple(t.shape), layout.world_size))
                for name, t in RANDOM.items()
            }
            held = data.draw(
                st.lists(st.booleans(), min_size=layout.world_size, max_size=layout.world_size)
            )
            sides.append(
                (
                    layout,
                    [
                        {
                            name: side_by_side(name, RANDOM[name], cut[number], fill=fill)
                            for name, cut in cuts.items()
                            if cut[number]
                            or held[number]  # a rank without a block may know the name, or not
                        }
                        for number in range(layout.world_size)
                    ],
                )
            )
        (writers, written), (readers, wanted) = sides
        directory = run_threads(
            writers, lambda group: save_shards(root, 1, written[group.rank], group)
        )[0]
        assert find_checkpoint_problems(directory) == []
        run_threads(readers, lambda group: load_shards(directory, wanted[group.rank], group))
        for shards in wanted:
            for name, shard in shards.items():
                expected = side_by_side(name, RANDOM[name], list(shard.boxes), fill=True)
                assert torch.equal(shard.tensor, expected.tensor), name

    attempt()
    return tried


@pytest.mark.parametrize("num_examples", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_any_cut_over_any_ranks_is_read_at_any_other(tmp_path: Path, num_examples: int) -> None:
    assert run_ranks(1, try_random_cuts, tmp_path, num_examples, deadline_s=600)[0] >= num_examples


# Large replicas


def write_large_replicas(rank: int, root: Path) -> dict[str, tuple[list[int], list[list[str]]]]:
    """By layout: the bytes of its files, and what one rank and the layout itself do not read
    back."""
    wholes = {"blocks.0.qkv": torch.arange(16 << 17, dtype=torch.float32).view(16, 1 << 17)}
    found = {}
    for layout in (Layout(dp_replicate=3), Layout(tp=4), Layout(dp_replicate=2, tp=4)):
        directory = save_under(layout, wholes, root / str(layout))
        sizes = [stored.num_bytes for stored in read_manifest(directory).files.values()]
        wrong = load_under(Layout(), wholes, directory) + load_under(layout, wholes, directory)
        found[str(layout)] = (sizes, [names for names in wrong if names])
    return found


def test_ranks_that_hold_a_large_block_alike_write_a_part_each(tmp_path: Path) -> None:
    """8 MiB: three ranks have all of it; four have Q of their own and K and V by twos; and both
    at once."""
    for case, (sizes, wrong) in run_ranks(1, write_large_replicas, tmp_path)[0].items():
        assert wrong == [], case
        assert sum(sizes) < (8 << 20) + 1000 * len(sizes), case
        if case != "dp_replicate=2 x tp=4":  # two rows on four ranks: one of them writes both
            assert max(sizes) < 2 * min(sizes), case


# Parts that do not make a whole


def rows(first: int, end: int, **more: Any) -> LogicalShard:
    """Rows of a matrix of 4 x 2."""
    box = Box((first, 0), (0, 0), (end - first, 2))
    return LogicalShard(
        "matrix", (4, 2), "float32", (box,), torch.full((end - first, 2), float(first)), **more
    )


TOGETHER_WRONG: dict[str, tuple[str, list[dict[str, LogicalShard]]]] = {
    "a hole": ("do not make the whole", [{"matrix": rows(0, 2)}, {"matrix": rows(3, 4)}]),
    "twice": ("do not make the whole", [{"matrix": rows(0, 4)}, {"matrix": rows(0, 4)}]),
    "twice and a hole": ("do not make the whole", [{"matrix": rows(0, 2)}, {"matrix": rows(0, 2)}]),
    "only rank 1 knows it, and not all of it": (
        "do not make the whole",
        [{}, {"matrix": rows(0, 2)}],
    ),
    "nobody writes it": ("do not make the whole", [{}, {"matrix": rows(0, 4, replica=1)}]),
    "other shapes": (
        "do not agree on shape and type",
        [{"matrix": rows(0, 4)}, {"matrix": replace(rows(0, 4), global_shape=(5, 2))}],
    ),
    "other types": (
        "do not agree on shape and type",
        [{"matrix": rows(0, 4)}, {"matrix": replace(rows(0, 4), dtype="int32")}],
    ),
    "a type that no file holds": (
        "complex128",
        [{"matrix": replace(rows(0, 4), dtype="complex128")}, {}],
    ),
}


def refusals(root: Path, sides: list[dict[str, LogicalShard]]) -> list[str]:
    def save(group: ThreadRank) -> str:
        with pytest.raises(CheckpointError) as caught:
            save_shards(root, 1, sides[group.rank], group)
        return str(caught.value)

    return run_threads(Layout(dp_shard=len(sides)), save)


@pytest.mark.parametrize("kind", list(TOGETHER_WRONG))
def test_parts_that_make_no_whole_are_refused_on_every_rank_and_nothing_is_left(
    kind: str, tmp_path: Path
) -> None:
    words, sides = TOGETHER_WRONG[kind]
    first, second = refusals(tmp_path, sides)
    assert words in first
    assert "matrix" in first
    assert first == second
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_names_that_no_rank_wants_or_that_nobody_saved_are_refused_on_every_rank(
    tmp_path: Path,
) -> None:
    """Others' names are no surplus to a rank; what nobody wants, and what is not there, is said
    on all of them."""
    other = replace(rows(0, 4), name="other")
    two = Layout(pp=2)
    saved = run_threads(
        two,
        lambda g: save_shards(tmp_path, 1, [{"matrix": rows(0, 4)}, {"other": other}][g.rank], g),
    )

    def load(wanted: list[dict[str, LogicalShard]]) -> list[str]:
        for shard in (shard for mine in wanted for shard in mine.values()):
            shard.tensor.fill_(SENTINEL)

        def refused(group: ThreadRank) -> str:
            try:
                load_shards(saved[0], wanted[group.rank], group)
            except CheckpointError as error:
                return str(error)
            return ""

        return run_threads(two, refused)

    fits = [{"matrix": rows(0, 4)}, {"other": other}]
    assert load(fits) == ["", ""]
    assert fits[0]["matrix"].tensor.tolist() == [[0.0, 0.0]] * 4
    for wanted, words in (
        ([{"matrix": rows(0, 4)}, {}], "other"),
        (
            [{"matrix": rows(0, 4)}, {"other": other, "third": replace(other, name="third")}],
            "third",
        ),
    ):
        first, second = load(wanted)
        assert words in first
        assert first == second
        assert wanted[0]["matrix"].tensor.unique().tolist() == [SENTINEL]


# What is read


LARGE = {"rows": (2048, 1024), "long_rows": (2, 3 << 20), "deep": (2, 3, 1 << 20)}
READERS: dict[str, Callable[[tuple[int, ...]], list[Box]]] = {
    "a quarter of the rows": lambda size: _slice([_all(size)], 0, 1, 4),
    "a third of the columns": lambda size: _slice([_all(size)], 1, 1, 3),
    "a fused block": lambda size: [
        box for part in _slice([_all(size)], 0, 0, 3) for box in _slice([part], 0, 1, 2)
    ],
    "two blocks apart": lambda size: [
        _part_of_box(_all(size), 0, 0, 1),
        _part_of_box(_all(size), 0, size[0] - 1, size[0]),
    ],
    "a thin slice of the last dimension": lambda size: _slice([_all(size)], len(size) - 1, 2, 64),
    "one element": lambda size: [Box((0,) * len(size), (0,) * len(size), (1,) * len(size))],
}


def _all(size: tuple[int, ...]) -> Box:
    return Box((0,) * len(size), (0,) * len(size), size)


def read_ranges(
    rank: int, root: Path
) -> dict[tuple[str, str], tuple[dict[str, int], dict[str, int], bool, int]]:
    """For each writer and reader: bytes read and bytes of the chunks needed, both by file; whether
    what was read is right; bytes of the checkpoint.
    """
    wholes = {
        name: torch.arange(math.prod(size), dtype=torch.float32).view(size)
        for name, size in LARGE.items()
    }
    found = {}
    for writer, layout in (("one rank", Layout()), ("zero 4", Layout(dp_shard=4))):
        directory = save_under(layout, wholes, root / writer)
        manifest = read_manifest(directory)
        for reader, boxes in READERS.items():
            wanted = {
                name: shard_of_part(
                    name, whole, Part(tuple(_stacked(boxes(tuple(whole.shape)))), 0, 1), fill=False
                )
                for name, whole in wholes.items()
            }
            with counting_reads() as read:
                run_threads(Layout(), partial(load_shards, directory, wanted))
            num_bytes = sum(stored.num_bytes for stored in manifest.files.values())
            found[writer, reader] = (
                read,
                bytes_needed(directory, wanted),
                wrong_in(wanted, wholes) == [],
                num_bytes,
            )
    return found


@pytest.mark.long
def test_a_rank_reads_the_chunks_that_hold_its_bytes_once_and_no_others(tmp_path: Path) -> None:
    (found,) = run_ranks(1, read_ranges, tmp_path)
    for case, (read, needed, right, _) in found.items():
        assert right, case
        assert read == needed, case
    whole = found["one rank", "one element"][3]
    assert sum(found["one rank", "one element"][1].values()) < 0.35 * whole  # the bound is one
    assert sum(found["zero 4", "a quarter of the rows"][1].values()) < 0.6 * whole
