"""Models of every style under every layout of two ranks: the parity of test_parity, which takes
one decoder further."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_parity import follow, full, over_all_ranks, sgd
from torch import nn

from bare_loop import Tensors, Trace, train_in_one_process
from models import BATCH, LAYOUTS, SEQ_LEN, fill, global_batches, plan, shape
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.vit import VitShape
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.models.vit import VisionTransformer
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.parallelize import parallelize
from ranks import run_ranks

STEPS = 2
SHAPES: dict[str, DecoderShape | VitShape] = {
    "gpt2": replace(
        shape(num_kv_heads=4),
        activation="gelu_tanh",
        norm="layernorm",
        bias="all",
        positions="learned",
        max_positions=SEQ_LEN,
    ),
    "gemma3 with untied head": replace(
        shape(num_layers=3, tied=False),
        activation="geglu_tanh",
        norm_plus_one=True,
        post_norms=True,
        qk_norm=True,
        scale_embeddings=True,
        sliding_window=3,
        global_every=2,
        bias="qkv",
    ),
    "vit": VitShape(
        *(2, 32, 4, 4, 8, 40),
        activation="gelu",
        norm="layernorm",
        bias="all",
        image_size=8,
        patch_size=4,
        num_channels=2,
        num_classes=5,
    ),
}


def build(name: str) -> nn.Module:
    shape = SHAPES[name]
    return VisionTransformer(shape) if isinstance(shape, VitShape) else Decoder(shape)


def filled(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    module = build(name)
    fill(module)
    return module.to(dtype)


def batches(name: str, dtype: torch.dtype = torch.float64) -> list[Tensors]:
    """Packed documents; or images, some of them without a label."""
    if not SHAPES[name].reads_images:
        return global_batches(STEPS, documents=True)
    generator, found = torch.Generator().manual_seed(5), []
    for _ in range(STEPS):
        labels = torch.randint(5, (BATCH,), generator=generator)
        labels[3:6] = -100
        found.append(
            {
                "inputs": torch.randn(BATCH, 2, 8, 8, generator=generator).to(dtype),
                "targets": labels,
            }
        )
    return found


def compute_references(rank: int) -> dict[str, Trace]:
    return {name: train_in_one_process(filled(name), batches(name), sgd, 0.5) for name in SHAPES}


CASES = list(itertools.product(LAYOUTS[2], SHAPES, ("none", "full")))
# Each layout with each model, and both with each way to recompute.
HALF = CASES[::4] + CASES[3::4]


def compare(
    rank: int, references: dict[str, Trace], cases: list[tuple[str, str, str]]
) -> dict[Any, Any]:
    errors = {}
    for layout, degrees in LAYOUTS[2].items():
        with open_mesh(plan(2, **degrees).layout, device="cpu") as mesh:
            for name, recompute in [each[1:] for each in cases if each[0] == layout]:
                model = parallelize(filled(name), plan(2, 3, recompute=recompute, **degrees), mesh)
                optimizer = sgd(model)  # not of the module: zero1 updates rows of it
                errors[layout, name, recompute] = follow(
                    model, batches(name), optimizer, 0.5, references[name], "weight"
                )
    return errors


@pytest.mark.parametrize(
    "cases", [HALF, pytest.param(CASES, marks=pytest.mark.long)], ids=["half", "all"]
)
def test_every_layout_equals_one_process(cases: list[tuple[str, str, str]]) -> None:
    """Loss, gradient norm, gradients and weights, with and without recompute, against the bare
    loop in fp64."""
    found = run_ranks(2, compare, run_ranks(1, compute_references)[0], cases)
    for case in found[0]:
        errors = over_all_ranks([mine[case] for mine in found])
        assert {what: size for what, size in errors.items() if not size <= 1e-10} == {}, case


def start_and_round(rank: int, num_ranks: int) -> dict[str, Any]:
    """Initial weights from meta, and the loss of a step in bf16."""
    found: dict[str, Any] = {}
    for layout, degrees in LAYOUTS[num_ranks].items():
        a_plan = plan(num_ranks, precision="bf16", **degrees)
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            for name in SHAPES:
                with torch.device("meta"):
                    module = build(name)
                model = parallelize(module, a_plan, mesh, seed=7)
                found[f"{name} {layout} weights"] = {
                    key: full(p) for key, p in model.named_parameters()
                }
                model = parallelize(filled(name, torch.float32), a_plan, mesh)
                rows = slice(rank * BATCH // num_ranks, (rank + 1) * BATCH // num_ranks)
                mine = {
                    key: tensor[rows] for key, tensor in batches(name, torch.float32)[0].items()
                }
                sums = model.forward_backward([mine], causal_cross_entropy(5))
                found[f"{name} {layout} loss"] = model.reduce_and_clip(sums).loss
    return found


def test_initial_weights_do_not_depend_on_the_layout_and_bf16_runs() -> None:
    """Bit for bit those of one rank; a loss in bf16 is near the one in fp64 and is not it."""
    exact = run_ranks(1, compute_references)[0]
    alone = run_ranks(1, start_and_round, 1)[0]
    for found in run_ranks(2, start_and_round, 2):
        for name in SHAPES:
            reference = alone[f"{name} one weights"]
            for layout in LAYOUTS[2]:
                weights = found[f"{name} {layout} weights"]
                assert set(weights) == set(reference)
                assert [
                    key for key in reference if not torch.equal(weights[key], reference[key])
                ] == []
                loss = found[f"{name} {layout} loss"]
                assert loss == pytest.approx(exact[name].losses[0], rel=2e-2)
                assert loss != pytest.approx(exact[name].losses[0], rel=1e-7)
