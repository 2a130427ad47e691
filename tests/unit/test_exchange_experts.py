"""Experts between a tensor of each and a stack of all: any cut of ours goes out, what does not
add up stays out."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_exchange_cli import phalanx, refused, write_safetensors

from checkpoints import run_threads, save_shards
from phalanx.checkpoint.exchange.checkpoint_reader import CheckpointReader
from phalanx.checkpoint.exchange.hf_export import export_hugging_face_directory
from phalanx.checkpoint.exchange.settings import build_hugging_face_config
from phalanx.checkpoint.exchange.tensor_readers import open_safetensors_reader
from phalanx.checkpoint.manifest import read_manifest
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.mesh.logical import Box, LogicalShard
from phalanx.plan.layout import Layout

E, F, D = 4, 6, 8
MIXTRAL = DecoderShape(
    *(2, D, 2, 1, 4, F, 11, True),
    norm_eps=1e-5,
    num_experts=E,
    experts_per_token=2,
    expert_ffn_dim=F,
)
DOTS = replace(
    MIXTRAL,
    num_shared_experts=2,
    num_dense_layers=1,
    qk_norm=True,
    ffn_dim=10,
    router_scores="sigmoid",
    balance_bias=0.01,
    balance_loss=0.1,
)
LAYER = "model.layers.0"
ALONE = f"{LAYER}.block_sparse_moe.experts"


def ours(shape: DecoderShape) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(size).astype(np.float32)
        for name, size in shape.list_stored_tensors().items()
    }


def theirs(weights: dict[str, np.ndarray], *, stacked: bool = False) -> dict[str, np.ndarray]:
    """A Mixtral's experts and routers as transformers has them in files, written out by hand."""
    found = {}
    for layer in range(2):
        block, moe = f"model.layers.{layer}", f"blocks.{layer}.moe"
        gate, up, down = (
            weights[f"{moe}.experts.{part}.weight"] for part in ("gate", "up", "down")
        )
        if stacked:
            found[f"{block}.mlp.gate.weight"] = weights[f"{moe}.router.weight"]
            found[f"{block}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            found[f"{block}.mlp.experts.down_proj"] = down
            continue
        found[f"{block}.block_sparse_moe.gate.weight"] = weights[f"{moe}.router.weight"]
        for number in range(E):
            for key, part in (("w1", gate), ("w3", up), ("w2", down)):
                found[f"{block}.block_sparse_moe.experts.{number}.{key}.weight"] = part[number]
    return found


def directory(place: Path, *, stacked: bool = False) -> Path:
    """Of transformers: what `export` writes of the dense part, experts by hand."""
    shard = {name: whole_shard(name, value) for name, value in ours(MIXTRAL).items()}
    run_threads(Layout(), lambda group: save_shards(place / "run", 1, shard, group))
    with CheckpointReader(place / "run" / "checkpoints" / "step-1") as reader:
        export_hugging_face_directory(reader, MIXTRAL, place / "dense", shard_bytes=10**9)
    dense = open_safetensors_reader(place / "dense")
    tensors = {
        name: dense.load(name).view(np.float32)
        for name in dense.tensors
        if ".block_sparse_moe." not in name
    }
    folder = place / "mixtral"
    folder.mkdir()
    write_safetensors(
        folder / "model.safetensors", tensors | theirs(ours(MIXTRAL), stacked=stacked)
    )
    (folder / "config.json").write_text(json.dumps(build_hugging_face_config(MIXTRAL)))
    return folder


def whole_shard(name: str, value: np.ndarray) -> LogicalShard:
    zeros = (0,) * value.ndim
    return LogicalShard(
        name, value.shape, "float32", (Box(zeros, zeros, value.shape),), torch.from_numpy(value)
    )


def cut_shard(name: str, value: np.ndarray, rank: int) -> LogicalShard:
    """Of 8 ranks: experts cut in two over ep and in two over tp, and what is left in two over FSDP;
    all else in eight, as far as it goes."""
    places: list[slice] = [slice(None)] * value.ndim
    if ".moe.experts." in name:
        ep, tp, fsdp = rank // 4, rank // 2 % 2, rank % 2
        along = 2 if ".down." in name else 1
        width = value.shape[along] // 2
        places[along] = slice(tp * width, (tp + 1) * width)
        places[0] = slice(2 * ep + fsdp, 2 * ep + fsdp + 1)
    else:
        rows = -(-value.shape[0] // 8)
        places[0] = slice(min(rank * rows, value.shape[0]), min((rank + 1) * rows, value.shape[0]))
    local = torch.from_numpy(value[tuple(places)].copy())
    offset = tuple(place.start or 0 for place in places)
    boxes = (Box(offset, (0,) * value.ndim, tuple(local.shape)),) if local.numel() else ()
    return LogicalShard(name, value.shape, "float32", boxes, local)


@pytest.mark.parametrize("shape", [MIXTRAL, DOTS], ids=["mixtral", "dots1"])
def test_whatever_cuts_the_experts_they_go_out_one_by_one(
    shape: DecoderShape, tmp_path: Path
) -> None:
    """The same weights in one piece are the reference, and a Mixtral's names by hand."""
    weights = ours(shape)

    def save(group: Any) -> Path:
        shards = {name: cut_shard(name, value, group.rank) for name, value in weights.items()}
        return save_shards(tmp_path / "cut", 1, shards, group)

    cut = run_threads(Layout(dp_shard=8), save)[0]
    assert len(read_manifest(cut).tensors["blocks.1.moe.experts.up.weight"].pieces) == 8
    whole = {name: whole_shard(name, value) for name, value in weights.items()}
    one = run_threads(Layout(), lambda group: save_shards(tmp_path / "one", 1, whole, group))[0]
    found = {}
    for place in (cut, one):
        with CheckpointReader(place) as reader:
            export_hugging_face_directory(
                reader, shape, tmp_path / f"of-{place.parents[1].name}", shard_bytes=10**9
            )
            for name, value in weights.items():
                if value.ndim == 3:
                    assert np.array_equal(reader.load_element(name, 2).view(np.float32), value[2])
        exported = open_safetensors_reader(tmp_path / f"of-{place.parents[1].name}")
        found[place] = {name: exported.load(name).view(np.float32) for name in exported.tensors}
    assert found[cut].keys() == found[one].keys()
    assert all(np.array_equal(found[cut][name], found[one][name]) for name in found[one])
    if shape is MIXTRAL:
        assert all(
            np.array_equal(found[cut][name], value) for name, value in theirs(weights).items()
        )
    else:
        bias = found[cut]["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert np.array_equal(bias, weights["blocks.1.moe.router.bias"])
        assert "model.layers.0.mlp.gate.weight" not in found[cut]  # a dense block


@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
def test_what_comes_in_is_a_stack_in_parts(
    stacked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = directory(tmp_path, stacked=stacked), tmp_path / "imported"
    code, said, err = phalanx(capsys, "import", folder, "--out", out, "--json")
    assert code == 0, err
    assert json.loads(said)["num_tensors"] == len(MIXTRAL.list_stored_tensors())
    assert phalanx(capsys, "verify", out)[0] == 0
    stored = read_manifest(out / "checkpoints" / "step-0").tensors["blocks.1.moe.experts.up.weight"]
    assert (stored.shape, [piece.offset for piece in stored.pieces]) == (
        (E, F, D),
        [(e, 0, 0) for e in range(E)],
    )
    with CheckpointReader(out / "checkpoints" / "step-0") as reader:
        assert all(
            np.array_equal(reader.load(name).view(np.float32), value)
            for name, value in ours(MIXTRAL).items()
        )


def edit(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        reader = open_safetensors_reader(folder)
        tensors = {name: np.array(reader.load(name)).view(np.float32) for name in reader.tensors}
        change(tensors)
        write_safetensors(folder / "model.safetensors", tensors)

    return apply


def configure(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


GATE_UP = f"{LAYER}.mlp.experts.gate_up_proj"
UP = "blocks.0.moe.experts.up.weight"
WRONG: dict[str, tuple[bool, str, Callable[[Path], None]]] = {
    "more experts than config.json says": (False, f"{UP}[3]", configure(num_local_experts=3)),
    "fewer": (False, f"{UP}[4]", configure(num_local_experts=5)),
    "more in a stack": (True, f"{UP}[3]", configure(num_local_experts=3)),
    "fewer in a stack": (True, f"{UP}[4]", configure(num_local_experts=5)),
    "one that is missing": (False, f"{UP}[2]", edit(lambda t: t.pop(f"{ALONE}.2.w3.weight"))),
    "one with a number of its own": (
        False,
        f"{UP}[03]",
        edit(lambda t: t.update({f"{ALONE}.03.w3.weight": t.pop(f"{ALONE}.3.w3.weight")})),
    ),
    "one of another width": (
        False,
        f"{UP}[1]",
        edit(lambda t: t.update({f"{ALONE}.1.w3.weight": np.ones((5, D), np.float32)})),
    ),
    "a stack of another width": (
        True,
        f"{UP}[1]",
        edit(lambda t: t.update({GATE_UP: t[GATE_UP][:, 1:].copy()})),
    ),
    "a stack of one matrix": (
        True,
        GATE_UP,
        edit(lambda t: t.update({GATE_UP: t[GATE_UP][0].copy()})),
    ),
    "an empty stack": (
        True,
        GATE_UP,
        edit(lambda t: t.update({GATE_UP: np.ones((10**9, 0, D), np.float32)})),
    ),
    "a bias": (
        False,
        f"{ALONE}.0.w1.bias",
        edit(lambda t: t.update({f"{ALONE}.0.w1.bias": np.ones(F, np.float32)})),
    ),
    "experts twice": (
        False,
        "are the same tensor of the model",
        edit(
            lambda t: t.update({f"{LAYER}.mlp.experts.down_proj": np.ones((E, D, F), np.float32)})
        ),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_experts_that_do_not_add_up_are_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stacked, words, damage = WRONG[case]
    folder = directory(tmp_path, stacked=stacked)
    damage(folder)
    assert words in refused(capsys, "import", folder, "--out", tmp_path / "imported", code=5)
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
def test_no_stack_is_ever_in_memory(
    stacked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """50 MB in three stacks of 16 experts of 1 MB each: neither way holds more than a few
    experts, and a chunk."""
    experts, wide = 16, 1024
    big = replace(
        MIXTRAL,
        num_layers=1,
        dim=256,
        head_dim=128,
        ffn_dim=wide,
        num_experts=experts,
        expert_ffn_dim=wide,
    )
    folder, imported = tmp_path / "mixtral", tmp_path / "imported"
    folder.mkdir()
    weights = {
        name: np.ones(size, np.float32)
        for name, size in big.list_stored_tensors().items()
        if ".moe." not in name
    }
    names = {
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
    }
    names |= {"attention.o": "self_attn.o_proj", "attention_norm": "input_layernorm"}
    names |= {"ffn_norm": "post_attention_layernorm"}
    tensors = {
        f"model.layers.0.{new}.weight": weights[f"blocks.0.{old}.weight"]
        for old, new in names.items()
    }
    tensors |= {
        "model.embed_tokens.weight": weights["embed.weight"],
        "model.norm.weight": weights["norm.weight"],
    }
    tensors[f"{LAYER}.mlp.gate.weight"] = np.ones((experts, 256), np.float32)
    if stacked:
        tensors[GATE_UP] = np.ones((experts, 2 * wide, 256), np.float32)
        tensors[f"{LAYER}.mlp.experts.down_proj"] = np.ones((experts, 256, wide), np.float32)
    else:
        sizes = {"w1": (wide, 256), "w3": (wide, 256), "w2": (256, wide)}
        tensors |= {
            f"{ALONE}.{e}.{k}.weight": np.ones(s, np.float32)
            for e in range(experts)
            for k, s in sizes.items()
        }
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(build_hugging_face_config(big)))
    del tensors
    for arguments in (
        ("import", folder, "--out", imported),
        ("export", imported, "--out", tmp_path / "x"),
    ):
        tracemalloc.start()
        assert phalanx(capsys, *arguments)[0] == 0
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 12e6  # a stack is 16.8 MB, and the fused one 33.6
