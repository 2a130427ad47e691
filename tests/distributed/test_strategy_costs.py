"""The formulas of docs/strategies.md beside what ranks really send; its tables are what the
planner says today."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives import CountCollectives
from models import VOCAB, fill, global_batches, plan, share
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.parallelize import parallelize
from ranks import run_ranks

DOCS = Path(__file__).parents[2] / "docs"
COSTS = runpy.run_path(str(DOCS / "strategies.py"))
SHAPE = DecoderShape(4, 64, 4, 2, 16, 96, VOCAB, False)
RANKS, MICROBATCHES = 2, 3


def sent(rank: int) -> dict[str, Any]:
    """What collectives made in a step's passes and in its update, beside what phalanx says that
    it sent."""
    found: dict[str, Any] = {}
    ways = {"ddp": {"dp_replicate": 2}, "tp": {"tp": 2}} | {
        f"zero{n}": {"dp_shard": 2, "zero_stage": n} for n in (1, 2, 3)
    }
    for name, axes in ways.items():
        parts = 1 if name == "tp" else RANKS
        a_plan = plan(RANKS, MICROBATCHES, **axes)
        with open_mesh(a_plan.layout, device="cpu", collectives="gloo") as mesh:
            module = Decoder(SHAPE)
            fill(module)
            model = parallelize(module, a_plan, mesh)
            optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
            mine = share(global_batches(1)[0], rank % parts, parts, MICROBATCHES)
            objective = causal_cross_entropy(4096)
            for _ in range(2):  # in its second backward DDP agrees on buckets
                model.reduce_and_clip(model.forward_backward(mine, objective))
                model.update(optimizer)
            with CountCollectives() as moved:
                sums = model.forward_backward(mine, objective)
            with CountCollectives() as finished:
                facts = model.reduce_and_clip(sums)
            with CountCollectives() as updated:
                model.update(optimizer)
            of_step = Counter(moved.num_bytes) + Counter(finished.num_bytes)
            found[name] = Sent(
                moved.num_bytes,
                of_step,
                updated.num_bytes,
                facts.sent_bytes,
                facts.sent_tp_bytes,
                mine[0]["inputs"].numel(),
            )
    return found


@dataclass(frozen=True)
class Sent:
    moved: dict[str, int]
    """By forward and backward, by name of the collective."""
    of_step: dict[str, int]
    updated: dict[str, int]
    told: int
    told_of_tp: int
    tokens: int


@pytest.fixture(scope="module")
def measured() -> dict[str, Sent]:
    first: dict[str, Sent] = run_ranks(RANKS, sent)[0]
    return first


def test_copies_all_reduce_fp32_gradients_once(measured: dict[str, Sent]) -> None:
    """However many microbatches."""
    found = measured["ddp"]
    assert set(found.moved) == {"allreduce_"}, "gradients, and nothing besides"
    reduced = COSTS["all_reduce"](found.moved["allreduce_"], RANKS)
    wanted = COSTS["data_parallel_bytes"](0, SHAPE.num_params, 0, RANKS, microbatches=MICROBATCHES)
    assert reduced == wanted == found.told
    assert not found.updated


def test_zero1_gathers_what_was_updated(measured: dict[str, Sent]) -> None:
    """Within the padding of what does not divide (a vocabulary of 37). Over gloo it averages
    gradients whole; elsewhere it sends half of that (tests/distributed/test_data_parallel.py)."""
    found, ddp = measured["zero1"], measured["ddp"]
    assert found.moved == ddp.moved
    assert set(found.updated) == {"broadcast_"}
    gathered = COSTS["all_gather"](found.updated["broadcast_"], RANKS)
    wanted = COSTS["data_parallel_bytes"](1, SHAPE.num_params, 0, RANKS, microbatches=MICROBATCHES)
    assert found.told / 2 + gathered == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("stage", [2, 3])
def test_shards_gather_for_each_microbatch_and_scatter_once(
    measured: dict[str, Sent], stage: int
) -> None:
    """Within the padding of what does not divide (a vocabulary of 37)."""
    moved = measured[f"zero{stage}"].moved
    root = SHAPE.num_params - SHAPE.blocks_params
    wanted = COSTS["data_parallel_bytes"](
        stage, SHAPE.num_params, root, RANKS, microbatches=MICROBATCHES
    )
    assert set(moved) == {"broadcast_", "reduce_"}
    assert COSTS["all_gather"](sum(moved.values()), RANKS) == pytest.approx(wanted, rel=0.01)
    scattered = COSTS["all_gather"](moved["reduce_"], RANKS)
    assert scattered == measured[f"zero{stage}"].told
    assert scattered == pytest.approx(COSTS["all_gather"](4 * SHAPE.num_params, RANKS), rel=0.01)


def test_tensor_parallel_ranks_send_activations_in_each_microbatch(
    measured: dict[str, Sent],
) -> None:
    """Besides: three numbers per token for the loss, the gradients of norms."""
    found = measured["tp"]
    kinds = {
        "all_reduce": "all_reduce",
        "all_gather_into_tensor_out": "all_gather",
        "reduce_scatter_tensor": "all_gather",
    }
    num_bytes = sum(COSTS[kind](found.of_step.get(name, 0), RANKS) for name, kind in kinds.items())
    wanted = MICROBATCHES * COSTS["tensor_parallel_bytes"](
        SHAPE.num_layers, found.tokens, SHAPE.dim, 4, 2
    )
    assert wanted < num_bytes < 1.03 * wanted
    assert found.told_of_tp == num_bytes


def test_the_tables_are_what_the_planner_says() -> None:
    page = (DOCS / "strategies.md").read_text(encoding="utf-8")
    assert COSTS["with_tables"](page) == page, "run make docs"
    assert set(re.findall(r"<!-- (\w+): generated", page)) == set(COSTS["TABLES"])


def test_numbers_that_the_text_repeats_are_those_of_the_tables() -> None:
    """Corrections of what is often said: they must not need correcting."""
    of = {row[0]: row for row in COSTS["zero"]()}
    assert of["8"][1:3] == ("2.909 times less", "4.267 times less"), "2.9 and 4.3"
    limits = [[float(words.split()[0]) for words in of["1,024"][1:3]]]
    assert limits[0] == pytest.approx([4, 8], rel=0.01)
    for ranks, count, of_ideal, of_step in COSTS["bubbles"]()[1:]:
        hops, m = int(ranks) - 1, int(count)
        assert (of_ideal, of_step) == (f"{hops / m:.1%}", f"{hops / (m + hops):.1%}")
        if m == 4 * hops:
            assert of_step == "20.0%"
    assert 312e12 / 2.0e12 == 156
    assert 4096 * 4096 * 2 == 32 * 2**20
    rows = {row[0]: row for row in COSTS["layouts"]()}
    times = [float(rows[f"`{name}`"][7].split()[0]) for name in ("zero_stage=3", "dp_replicate=8")]
    assert 4 < times[0] / times[1] < 5, "more than four times what DDP sends"
