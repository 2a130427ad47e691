"""The formulas of docs/strategies.md beside what ranks really send; its tables are what the planner says today."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models import VOCAB, fill, global_batches, plan, share
from phalanx.job.shape import ModelShape
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.parallelize import parallelize
from ranks import run_ranks

DOCS = Path(__file__).parents[2] / "docs"
COSTS = runpy.run_path(str(DOCS / "strategies.py"))
SHAPE = ModelShape(4, 64, 4, 2, 16, 96, VOCAB, False)
RANKS, MICROBATCHES = 2, 3


class Moved(TorchDispatchMode):
    """Bytes that collectives make, as gloo has them: a gather is a broadcast from each rank, a scatter a reduction to
    each."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::")
            size = sum(t.nbytes for t in args[0] if isinstance(t, torch.Tensor)) if isinstance(args[0], list) else 0
            self.num_bytes[name] = self.num_bytes.get(name, 0) + size
        return function(*args, **(kwargs or {}))


def sent(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ways = {"ddp": {"dp_replicate": 2}, "tp": {"tp": 2}} | {
        f"zero{n}": {"dp_shard": 2, "zero_stage": n} for n in (2, 3)
    }
    for name, axes in ways.items():
        parts = 1 if name == "tp" else RANKS
        a_plan = plan(RANKS, MICROBATCHES, **axes)
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            module = Decoder(SHAPE)
            fill(module)
            model = parallelize(module, a_plan, mesh)
            mine = share(global_batches(1)[0], rank % parts, parts, MICROBATCHES)
            objective = causal_cross_entropy(4096)
            model.finish_step(model.forward_backward(mine, objective))
            with Moved() as moved:
                facts = model.finish_step(model.forward_backward(mine, objective))
            found[name] = (moved.num_bytes, facts.sent_bytes, facts.sent_tp_bytes, mine[0]["inputs"].numel())
    return found


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    first: dict[str, Any] = run_ranks(RANKS, sent)[0]
    return first


def test_copies_send_one_all_reduce_of_fp32_gradients(measured: dict[str, Any]) -> None:
    wanted = COSTS["data_parallel_bytes"](0, SHAPE.num_params, 0, RANKS, microbatches=MICROBATCHES)
    assert measured["ddp"][1] == wanted


@pytest.mark.parametrize("stage", [2, 3])
def test_shards_gather_for_each_microbatch_and_scatter_once(measured: dict[str, Any], stage: int) -> None:
    """Within the padding of what does not divide (a vocabulary of 37)."""
    moved, *_ = measured[f"zero{stage}"]
    root = SHAPE.num_params - SHAPE.blocks_params
    wanted = COSTS["data_parallel_bytes"](stage, SHAPE.num_params, root, RANKS, microbatches=MICROBATCHES)
    made = moved["broadcast_"] + moved["reduce_"]
    assert COSTS["all_gather"](made, RANKS) == pytest.approx(wanted, rel=0.01)


def test_tensor_parallel_ranks_send_activations_in_each_microbatch(measured: dict[str, Any]) -> None:
    """Besides: three numbers per token for the loss, the gradients of norms."""
    *_, num_bytes, tokens = measured["tp"]
    wanted = MICROBATCHES * COSTS["tensor_parallel_bytes"](SHAPE.num_layers, tokens, SHAPE.dim, 4, 2)
    assert wanted < num_bytes < 1.03 * wanted


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
