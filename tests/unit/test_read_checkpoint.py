"""docs/read_checkpoint.py, on its own: it reads what the store wrote, and refuses what is not as
it was written."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.checkpoint.stores.local import LocalStore
from phalanx.checkpoint.writing.write import RankSnapshot, write_checkpoint
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import Box, LogicalShard, get_dtype_name
from phalanx.mesh.mesh import Mesh
from phalanx.plan.layout import Layout

READER = Path(__file__).parents[2] / "docs" / "read_checkpoint.py"
WHOLE = {
    "w": torch.arange(24.0).view(6, 4),
    "half": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "optim/w/step": torch.tensor(7.0),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shards = {}
    for name, whole in WHOLE.items():
        size = tuple(whole.shape)
        cuts = [(0, size[0] // 2), (size[0] // 2, size[0])] if size else [None]
        boxes = tuple(
            Box((), (), ())
            if cut is None
            else Box(
                (cut[0], *(0,) * (len(size) - 1)),
                (cut[0], *(0,) * (len(size) - 1)),
                (cut[1] - cut[0], *size[1:]),
            )
            for cut in cuts
        )
        shards[name] = LogicalShard(name, size, get_dtype_name(whole.dtype), boxes, whole)
    mesh = Mesh(Layout(), 0, 0, torch.device("cpu"))
    return write_checkpoint(
        LocalStore(tmp_path),
        RankSnapshot(3, shards, aliases={"head": "w"}, facts={"note": "é"}),
        job_digest="d",
        group=mesh,
        phases=PhaseTimer(),
    ).folder.path


def namespace() -> dict[str, object]:
    found: dict[str, object] = {"__name__": "read_checkpoint"}
    exec(compile(READER.read_text(), str(READER), "exec"), found)
    return found


def test_it_reads_what_was_saved(checkpoint: Path) -> None:
    tensors = namespace()["read_tensors"](checkpoint)  # type: ignore[operator]
    assert set(tensors) == {*WHOLE, "head"}
    for name, whole in WHOLE.items():
        bits = whole.view(torch.uint16).numpy() if whole.dtype == torch.bfloat16 else whole.numpy()
        assert tensors[name].tolist() == bits.tolist()
    assert tensors["head"].tolist() == WHOLE["w"].tolist()


def test_it_needs_no_phalanx_and_no_torch(checkpoint: Path) -> None:
    tree = ast.walk(ast.parse(READER.read_text()))
    imported = {a.name for n in tree if isinstance(n, ast.Import) for a in n.names}
    assert imported == {"json", "sys", "numpy", "xxhash"}
    done = subprocess.run(
        [sys.executable, "-I", READER, checkpoint], capture_output=True, text=True, check=True
    )
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["half", "uint16"],
        ["head", "float32"],
        ["optim/w/step", "float32"],
        ["w", "float32"],
    ]


@pytest.mark.parametrize("damage", ["flip", "cut", "extra", "missing", "manifest", "a space in it"])
def test_it_refuses_what_is_not_as_it_was_written(checkpoint: Path, damage: str) -> None:
    file = next(checkpoint.glob("*.safetensors"))
    data = file.read_bytes()
    if damage == "flip":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "extra":
        (checkpoint / "more").write_bytes(b"")
    elif damage == "missing":
        file.unlink()
    elif damage == "a space in it":
        (checkpoint / "manifest.json").write_bytes(
            (checkpoint / "manifest.json").read_bytes() + b" "
        )
    else:
        path = checkpoint / "manifest.json"
        path.write_text(path.read_text().replace('"step": 3', '"step": 4'))
    with pytest.raises(ValueError, match=r"written|missing"):
        namespace()["read_tensors"](checkpoint)  # type: ignore[operator]
