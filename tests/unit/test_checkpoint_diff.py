"""`diff_checkpoints`: layouts do not matter, every difference is said, damage is not compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.checkpoint.reading.diff import describe_checkpoint_difference, diff_checkpoints
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.checkpoint.writing.write import RankSnapshot, write_checkpoint
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import Box, LogicalShard, get_dtype_name
from phalanx.mesh.mesh import Mesh
from phalanx.plan.layout import Layout

Tensors = dict[str, torch.Tensor]


def base() -> Tensors:
    dice = torch.Generator().manual_seed(3)
    return {
        "w": torch.randn(6, 4, generator=dice),
        "half": torch.randn(8, generator=dice).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.0),
    }


def save(
    run_dir: Path, tensors: Tensors, *, rows_cut_at: int = 0, step: int = 3, **facts: object
) -> Path:
    shards = {}
    for name, whole in tensors.items():
        size = tuple(whole.shape)
        rest = (0,) * (len(size) - 1)
        if size and 0 < rows_cut_at < size[0]:
            cuts = [(0, rows_cut_at), (rows_cut_at, size[0])]
            boxes = tuple(Box((b, *rest), (b, *rest), (e - b, *size[1:])) for b, e in cuts)
        else:
            boxes = (Box((0,) * len(size), (0,) * len(size), size),)
        shards[name] = LogicalShard(name, size, get_dtype_name(whole.dtype), boxes, whole)
    mesh = Mesh(Layout(), 0, 0, torch.device("cpu"))
    return write_checkpoint(
        LocalStore(run_dir / "checkpoints"), RankSnapshot(step, shards, {"head": "w"}, {"step": step, **facts}),
        job_digest="", group=mesh, phases=PhaseTimer(),
    ).folder.path  # fmt: skip


def test_the_same_state_cut_differently_is_the_same(tmp_path: Path) -> None:
    found = diff_checkpoints(
        save(tmp_path / "a", base()), save(tmp_path / "b", base(), rows_cut_at=2)
    )
    assert found.is_identical
    assert found.num_equal == 5  # with the tied one
    assert list(describe_checkpoint_difference(found)) == ["same    5 tensors are equal bit by bit"]


def test_one_bit_of_any_type_is_said_with_its_size(tmp_path: Path) -> None:
    changed = base()
    changed["w"][5, 3] += 0.5
    changed["half"][0] = 0.0
    changed["flags"][1] = True
    found = diff_checkpoints(save(tmp_path / "a", base()), save(tmp_path / "b", changed))
    by_name = {tensor.name: tensor for tensor in found.tensors}
    assert set(by_name) == {"w", "half", "flags", "head"}
    assert (by_name["w"].num_different, by_name["w"].num_elements) == (1, 24)
    assert by_name["w"].max_abs == pytest.approx(0.5, rel=1e-6)
    reference = float((changed["w"] - base()["w"]).norm() / base()["w"].norm())
    assert by_name["w"].relative == pytest.approx(reference, rel=1e-5)
    assert by_name["half"].max_abs == pytest.approx(abs(float(base()["half"][0])))
    assert by_name["flags"].max_abs == 1.0
    assert any(
        line.startswith("values  w: 1 of 24 differ, at most 0.5")
        for line in describe_checkpoint_difference(found)
    )


def test_negative_zero_is_not_zero_and_nan_is_itself(tmp_path: Path) -> None:
    a, b = base(), base()
    a["w"][0, 0], b["w"][0, 0] = 0.0, -0.0
    a["half"][:], b["half"][:] = float("nan"), float("nan")
    found = diff_checkpoints(save(tmp_path / "a", a), save(tmp_path / "b", b))
    assert [tensor.name for tensor in found.tensors] == ["w", "head"]


def test_names_shapes_types_and_facts_are_said(tmp_path: Path) -> None:
    other = base()
    del other["flags"]
    other["new"] = torch.zeros(2)
    other["w"] = other["w"].T.contiguous()
    other["scalar"] = other["scalar"].double()
    found = diff_checkpoints(
        save(tmp_path / "a", base(), seed=1, note=None),
        save(tmp_path / "b", other, step=4, seed=1, more={"x": True}),
    )
    assert {(t.name, t.what) for t in found.tensors} == {
        ("flags", "only_a"),
        ("new", "only_b"),
        ("w", "shape"),
        ("head", "shape"),
        ("scalar", "dtype"),
    }
    assert found.to_json()["facts"] == {
        "more": {"a": None, "b": {"x": True}, "only_in": "b"},
        "note": {"a": None, "b": None, "only_in": "a"},
        "step": {"a": 3, "b": 4},
    }
    assert list(describe_checkpoint_difference(found))[:3] == [
        'fact    more: absent and {"x": true}',
        "fact    note: null and absent",
        "fact    step: 3 and 4",
    ]


def test_a_damaged_one_is_not_compared(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a", base()), save(tmp_path / "b", base())
    file = next(b.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="not those that were written"):
        diff_checkpoints(a, b)
