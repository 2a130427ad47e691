"""What every built-in model keeps, whichever it is: covered by being in the folder."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

from models import SEQ_LEN, VOCAB
from phalanx.core.registry import import_object_of_kind, list_modules_of_registry
from phalanx.job.model import build_model_shape
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.mesh.blocks import find_repeated_blocks
from phalanx.mesh.logical import collect_module_shards
from phalanx.mesh.mesh import Mesh
from phalanx.nn.build import MODELS_PACKAGE, build_model, build_objective
from phalanx.nn.objective import Objective
from phalanx.parallel.call.bind_batch import build_forward_arguments
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.cluster import Cluster
from phalanx.plan.layout import Layout
from phalanx.plan.planner import make_plan
from ranks import run_ranks

KINDS = list_modules_of_registry(MODELS_PACKAGE)


def job(kind: str) -> Job:
    model = {"kind": kind, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return Job.model_validate(
        {"model": model, "data": {"seq_len": SEQ_LEN}, "train": {"global_batch_size": 2}}
    )


def on_meta(kind: str) -> tuple[nn.Module, DecoderShape]:
    shape = build_model_shape(job(kind), VOCAB)
    return build_model(job(kind), shape), shape


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    _, shape = on_meta(kind)
    batch: dict[str, torch.Tensor] = import_object_of_kind(kind, MODELS_PACKAGE, "example_batch")(
        shape, 2, SEQ_LEN, seed=0
    )
    return batch


def objective(kind: str) -> Objective:
    return build_objective(job(kind))


def test_ours_are_among_them() -> None:
    assert {"decoder", "vit"} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_built_on_meta_with_the_shapes_parameters(kind: str) -> None:
    module, shape = on_meta(kind)
    assert all(p.is_meta for p in module.parameters())
    assert sum(p.numel() for p in module.parameters()) == shape.num_params


@pytest.mark.parametrize("kind", KINDS)
def test_it_shows_equal_blocks(kind: str) -> None:
    module, shape = on_meta(kind)
    blocks = find_repeated_blocks(module)
    assert len(blocks) == shape.num_layers
    assert {sum(p.numel() for p in block.parameters()) for block in blocks} == {shape.block_params}


@pytest.mark.parametrize("kind", KINDS)
def test_its_forward_takes_a_batchs_names(kind: str) -> None:
    """Its example batch reaches it whole, but for what only the objective reads.

    Of tokens, `positions` is always an input, so that sequences can be cut, and `document_ids` are
    honoured.
    """
    module, shape = on_meta(kind)
    parameters = list(inspect.signature(module.forward).parameters)
    batch = batch_of(kind)
    args, kwargs = build_forward_arguments(module, batch)
    assert len(args) + len(kwargs) == len(batch) - 1
    assert not {"labels", "targets"} & set(parameters)
    if not shape.reads_images:
        assert parameters[0] == "inputs"
        assert {"positions", "document_ids"} <= set(parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_it_fills_every_tensor_of_its_own(kind: str) -> None:
    """No parameter is left as it was allocated, and another seed gives other weights."""
    filled = []
    for seed in (0, 1):
        module, _ = on_meta(kind)
        module.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(float("nan"))
            module.initialize(collect_module_shards(module)[0], seed)  # type: ignore[operator]
        assert all(p.isfinite().all() for p in module.parameters())
        filled.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert not torch.equal(*filled)


def train(rank: int, kind: str) -> list[Any]:
    a_job = job(kind)
    a_plan = make_plan(a_job, cluster=Cluster("cpu", 1, 2**36), num_ranks=1, vocab_size=VOCAB)
    module, _ = on_meta(kind)
    model = parallelize(module, a_plan, Mesh(Layout(), 0, 0, torch.device("cpu")))
    batch = batch_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(8):
        facts = model.reduce_and_clip(model.forward_backward([batch], objective(kind)))
        losses.append(facts.loss)
        missing = [
            name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()
        ]
        model.update(optimizer)
        optimizer.zero_grad()
    return [losses, missing]


@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_near_the_uniform_guess_and_learns(kind: str) -> None:
    """First loss within 5 % of log(what it chooses from); every parameter has a gradient; a
    batch is learned."""
    losses, missing = run_ranks(1, train, kind)[0]
    _, shape = on_meta(kind)
    choices = shape.num_classes or shape.vocab_size
    assert losses[0] == pytest.approx(math.log(choices), rel=0.05)
    assert missing == []
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_knows_its_sharding_rules(kind: str) -> None:
    """Planning reads them without importing the model's file."""
    module, shape = on_meta(kind)
    assert dict(shape.shard_rules) == module.shard_rules
