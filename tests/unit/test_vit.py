"""The vision transformer: what it is given, what it gives, and the counts that planning relies on.

That it computes what the published one computes is tested in test_families.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import fill
from phalanx.core.errors import LayoutError
from phalanx.job.shapes.vit import VitShape
from phalanx.nn.models.vit import VisionTransformer, example_batch
from phalanx.nn.objective import classification_cross_entropy
from phalanx.parallel.call.bind_batch import build_forward_arguments

SHAPE = VitShape(
    *(2, 32, 4, 4, 8, 64),
    activation="gelu",
    norm="layernorm",
    bias="all",
    image_size=12,
    patch_size=4,
    num_channels=2,
    num_classes=5,
)
SHAPES = {
    "class_token": SHAPE,
    "mean": replace(SHAPE, pooling="mean"),
    "modern": replace(
        SHAPE, norm="rmsnorm", activation="swiglu", bias="none", qk_norm=True, num_kv_heads=2
    ),
}


def built(shape: VitShape) -> VisionTransformer:
    module = VisionTransformer(shape)
    fill(module)
    return module


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parameters_are_those_of_the_shape(shape: VitShape) -> None:
    with torch.device("meta"):
        module = VisionTransformer(shape)
    assert sum(p.numel() for p in module.parameters()) == shape.num_params
    assert sum(p.numel() for p in module.blocks[0].parameters()) == shape.block_params


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_flops_are_those_torch_counts(shape: VitShape) -> None:
    """Against torch.utils.flop_counter of a forward: equal, for every patch attends to every
    patch."""
    module, counter = built(shape), FlopCounterMode(display=False)
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        module(example_batch(shape, 1, 0, seed=0)["images"])
    counts = {
        str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()
    }
    wanted = shape.flops_per_sample(0)
    assert counts["aten.bmm"] == wanted["attention"]
    matrices = ("aten.mm", "aten.addmm", "aten.convolution")
    assert sum(counts.get(operation, 0) for operation in matrices) == wanted["matmul"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_patch_counts(shape: VitShape) -> None:
    module, images = built(shape).double(), example_batch(shape, 1, 0, seed=0)["images"].double()
    before = module(images)
    for row in range(0, 12, 4):
        for column in range(0, 12, 4):
            changed = images.clone()
            changed[:, :, row, column] += 1.0
            assert (module(changed) - before).abs().max() > 1e-6


def test_where_a_patch_lies_matters() -> None:
    module, images = built(SHAPE).double(), example_batch(SHAPE, 1, 0, seed=0)["images"].double()
    assert (module(images) - module(images.roll(4, dims=-1))).abs().max() > 1e-6


@pytest.mark.parametrize("size", [(2, 12, 16), (2, 8, 8), (3, 12, 12)])
def test_other_images_are_refused(size: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"the model takes 2 x 12 x 12; set model\.image_size"):
        built(SHAPE)(torch.zeros(1, *size))


def test_bf16_runs_in_its_type() -> None:
    module, batch = built(SHAPE), example_batch(SHAPE, 3, 0, seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(batch["images"])
    exact = module(batch["images"])
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("key", ["labels", "targets"])
def test_classification_sums_over_labels_and_leaves_out_the_masked(key: str) -> None:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([1, -100, 4, 0])
    loss, count = classification_cross_entropy(logits, {key: labels})
    wanted = -sum(logits[i].log_softmax(0)[labels[i]] for i in (0, 2, 3))
    torch.testing.assert_close(loss, wanted)
    assert count == 3


@pytest.mark.parametrize("outputs", [torch.zeros(2, 3, 4), (torch.zeros(2, 3),)])
def test_classification_says_what_it_needs(outputs: Any) -> None:
    with pytest.raises(
        LayoutError, match=r"classification needs logits \[batch, classes\]; the model returned"
    ):
        classification_cross_entropy(outputs, {"labels": torch.zeros(2, dtype=torch.long)})


def test_a_batch_without_inputs_reaches_what_names_its_keys() -> None:
    module, batch = built(SHAPE), example_batch(SHAPE, 2, 0, seed=0)
    assert build_forward_arguments(module, batch) == ((), {"images": batch["images"]})
    with pytest.raises(
        LayoutError, match="VisionTransformer names nothing of a batch with labels, pixels"
    ):
        build_forward_arguments(module, {"pixels": batch["images"], "labels": batch["labels"]})
