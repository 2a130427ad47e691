"""What every built-in model keeps, whichever it is: covered by being in the folder."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from models import SEQ_LEN, VOCAB
from phalanx.core.registry import names
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape, shape_of
from phalanx.mesh.blocks import find_blocks
from phalanx.mesh.logical import module_shards
from phalanx.mesh.mesh import Mesh
from phalanx.nn.build import MODELS, build_model
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.cluster import Cluster
from phalanx.plan.layout import Layout
from phalanx.plan.planner import make_plan
from ranks import run_ranks

KINDS = names(MODELS)


def job(kind: str) -> Job:
    model = {"kind": kind, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return Job.model_validate({"model": model, "data": {"seq_len": SEQ_LEN}, "train": {"global_batch_size": 2}})


def on_meta(kind: str) -> tuple[nn.Module, ModelShape]:
    shape = shape_of(job(kind), VOCAB)
    return build_model(job(kind), shape), shape


def test_the_decoder_is_among_them() -> None:
    assert "decoder" in KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_built_on_meta_with_the_shapes_parameters(kind: str) -> None:
    module, shape = on_meta(kind)
    assert all(p.is_meta for p in module.parameters())
    assert sum(p.numel() for p in module.parameters()) == shape.num_params


@pytest.mark.parametrize("kind", KINDS)
def test_it_shows_equal_blocks(kind: str) -> None:
    module, shape = on_meta(kind)
    blocks = find_blocks(module)
    assert len(blocks) == shape.num_layers
    assert {sum(p.numel() for p in block.parameters()) for block in blocks} == {shape.block_params}


@pytest.mark.parametrize("kind", KINDS)
def test_its_forward_takes_a_batchs_names(kind: str) -> None:
    """`inputs` first; `positions` always an input, so that sequences can be cut; `document_ids` honoured."""
    parameters = list(inspect.signature(on_meta(kind)[0].forward).parameters)
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
            module.initialize(module_shards(module, replica=0, num_replicas=1)[0], seed)  # type: ignore[operator]
        assert all(p.isfinite().all() for p in module.parameters())
        filled.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert not torch.equal(*filled)


def train(rank: int, kind: str) -> list[Any]:
    a_job = job(kind)
    a_plan = make_plan(a_job, cluster=Cluster("cpu", 1, 2**36), num_ranks=1, vocab_size=VOCAB)
    module, _ = on_meta(kind)
    model = parallelize(module, a_plan, Mesh(Layout(), 0, 0, torch.device("cpu")))
    tokens = torch.randint(VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    batch = {"inputs": tokens, "targets": tokens.roll(3, 1), "positions": torch.arange(SEQ_LEN).expand(2, -1)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(8):
        facts = model.finish_step(model.forward_backward([batch], causal_cross_entropy(16)))
        losses.append(facts.loss)
        missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        optimizer.step()
        optimizer.zero_grad()
    return [losses, missing]


@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_near_the_uniform_guess_and_learns(kind: str) -> None:
    """First loss within 5 % of log(vocabulary); every parameter has a gradient; a batch is learned."""
    losses, missing = run_ranks(1, train, kind)[0]
    assert losses[0] == pytest.approx(torch.tensor(float(VOCAB)).log().item(), rel=0.05)
    assert missing == []
    assert losses[-1] < 0.8 * losses[0]
