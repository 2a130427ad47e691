"""`verify` finds bugs planted in tensor parallelism, names tensor and likely cause.

Without them all rows are equal: tests/distributed/test_verify.py and test_tensor_parallel_zoo.py.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_tensor_parallel_zoo import SHAPE, zoo_job
from test_verify import clip_by_local_norms, small_job
from torch import nn

from models import CPU
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.mesh import tensor_group
from phalanx.parallel.dropout.rng import DropoutRng
from phalanx.parallel.tensor import grad_sync as tp_sync
from phalanx.parallel.tensor import modules as tp_modules
from phalanx.parallel.tensor import sharder as tp
from phalanx.plan.rules import DimSlice, ShardingRule
from phalanx.verify import rank as verify_rank
from phalanx.verify.cases import plan_layout_cases
from phalanx.verify.payloads import VerifyCase, VerifyPayload
from phalanx.verify.row import ROWS_FILE_NAME
from phalanx.verify.verified_job import make_verified_job
from plants import some
from ranks import run_ranks

LAYOUTS = {
    "sequence": {"tp": 2, "sequence_parallel": True},
    "whole": {"tp": 2, "sequence_parallel": False},
}


def judge_tp(
    rank: int, job: Job, shape: DecoderShape | None, directory: str, plant: Callable[[], None]
) -> None:
    plant()
    judged = make_verified_job(job, 2)
    layouts = [(name, axes) for name, axes in LAYOUTS.items() if shape is None or name == "whole"]
    cases = plan_layout_cases(judged, layouts, num_ranks=2, cluster=CPU, shape=shape)
    work = [
        VerifyCase("float64", case.name, case.parallel, case.plan)
        for case in cases
        if case.plan is not None
    ]
    verify_rank.run_verify_cases(
        VerifyPayload(judged, Path(directory), None, 2, 2, "small", tuple(work))
    )


# Planted bugs


def rows_of_the_other_rank() -> None:
    """The rule of a row takes the features of the other rank than those that reach it."""

    def swapped(self: Any, rule: ShardingRule, size: int, name: str) -> Sequence[DimSlice]:
        rank = self.group.rank if rule.kind != "row" else self.group.size - 1 - self.group.rank
        return rule.list_rank_slices(size, self.group.size, rank, name=name)

    tp.ModuleSharder._find_dim_slices_of_rank = swapped  # type: ignore[assignment, method-assign]


def columns_cut_along_the_inputs() -> None:
    """What is said to be a block of rows is one of columns: the wrong dimension."""
    cut_of = tp._build_boxes_of_slices

    def turned(shape: tuple[int, ...], dim: int, spans: Sequence[DimSlice]) -> Any:
        return cut_of(shape, 1 - dim if len(shape) == 2 and shape[0] == shape[1] else dim, spans)

    tp._build_boxes_of_slices = turned


def whole_parameters_not_summed() -> None:
    """Of norms that see a part of the tokens, or of the heads, each rank keeps its own gradient."""
    init = tp_sync.PartialGradientSum.__init__

    def forgetful(self: Any, group: Any, whole: Any, cuts: Any) -> None:
        init(self, group, [], cuts)

    tp_sync.PartialGradientSum.__init__ = forgetful  # type: ignore[method-assign]


def shared_heads_not_summed() -> None:
    """Keys and values that two ranks hold: each rank keeps its own gradient."""
    init = tp_sync.PartialGradientSum.__init__

    def forgetful(self: Any, group: Any, whole: Any, cuts: Any) -> None:
        init(self, group, whole, cuts)
        self._shared = set()

    tp_sync.PartialGradientSum.__init__ = forgetful  # type: ignore[method-assign]


def head_cut_apart_from_the_embedding() -> None:
    """Of a tied weight each place gets a part of its own."""
    cut = tp.ModuleSharder._replace_by_parameter_shard

    def apart(self: Any, *args: Any) -> None:
        replaced = dict(self._replaced)
        self._replaced.clear()
        cut(self, *args)
        self._replaced.update(replaced)

    tp.ModuleSharder._replace_by_parameter_shard = apart  # type: ignore[assignment, method-assign]


def entry_without_a_sum() -> None:
    """The backward of the entry into a region keeps what this rank's features alone contribute."""
    tensor_group._CopyInputFunction.backward = staticmethod(lambda ctx, grad: (grad, None))  # type: ignore[method-assign, assignment]
    tensor_group._AllGatherTokensFunction.backward = staticmethod(  # type: ignore[method-assign, assignment]
        lambda ctx, grad: (ctx.group.select_tokens_of_rank(grad), None)
    )


def bias_on_every_rank() -> None:
    """The bias of a row is added before the sum over ranks."""

    def twice(part: nn.Module, name: str, group: Any, x: torch.Tensor) -> torch.Tensor:
        left: torch.Tensor = group.leave(nn.functional.linear(x, part.weight, part.bias))
        return left

    tp_modules._row_parallel_forward = twice


def replicated_parameters_summed() -> None:
    """What all ranks see alike is added up as if each had seen a part."""
    tp.ModuleSharder._has_partial_gradient = lambda self, owner, name: True  # type: ignore[method-assign]


def masks_by_rank_of_tp() -> None:
    """Ranks of tp drop for rows of their own, as if they saw other samples."""
    microbatch = DropoutRng.drawing_in_microbatch

    def by_rank(self: DropoutRng, step: int, first_row: int, num_rows: int) -> Any:
        return microbatch(self, step, first_row + dist.get_rank() * num_rows, num_rows)

    DropoutRng.drawing_in_microbatch = by_rank  # type: ignore[assignment, method-assign]


SMALL = {"num_kv_heads": 1, "qk_norm": True, "bias": "all", "tie_embeddings": True}
EXPECTED: dict[Callable[[], None], tuple[Any, tuple[str, ...], str, str, str]] = {
    # bug: (the zoo's module, or a model; layouts it is in; what differs first; a part of its name,
    # of the cause)
    rows_of_the_other_rank: (
        SMALL,
        ("sequence", "whole"),
        "loss",
        "",
        "a sharding rule cuts elsewhere",
    ),
    columns_cut_along_the_inputs: (
        SMALL,
        ("sequence", "whole"),
        "initial weight",
        "blocks.0.attention.q.weight",
        "another dimension is cut",
    ),
    whole_parameters_not_summed: (
        SMALL,
        ("sequence", "whole"),
        "gradient",
        "norm",
        "nobody added them up",
    ),
    shared_heads_not_summed: (
        SMALL,
        ("sequence", "whole"),
        "gradient",
        "blocks.1.attention.v.",
        "nobody added them up",
    ),
    head_cut_apart_from_the_embedding: (
        "gqa",
        ("whole",),
        "no tensor of the module:",
        "head.weight",
        "tied weight",
    ),
    entry_without_a_sum: (
        SMALL,
        ("sequence", "whole"),
        "gradient",
        "norm.weight",
        " sum",
    ),
    masks_by_rank_of_tp: ("dropout", ("whole",), "dropout", "layers.0.inner.drop", ""),
    bias_on_every_rank: ("attention", ("whole",), "loss", "", "a bias is added on every one"),
    replicated_parameters_summed: (
        SMALL,
        ("whole",),
        "gradient",
        "norm",
        'a rule "replicate" is missing',
    ),
    clip_by_local_norms: (
        SMALL,
        ("sequence", "whole"),
        "gradient",
        "norm.weight",
        "clipped by local norms",
    ),
}


@pytest.mark.parametrize("plant", some(EXPECTED, 3), ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found_and_named(plant: Callable[[], None]) -> None:
    model, layouts, what, name, cause = EXPECTED[plant]
    job, shape = (zoo_job(model), SHAPE) if isinstance(model, str) else (small_job(**model), None)
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(2, judge_tp, job, shape, directory, plant)
        rows = [
            json.loads(line) for line in (Path(directory) / ROWS_FILE_NAME).read_text().splitlines()
        ]
    assert [row["layout"] for row in rows] == [
        layout for layout in LAYOUTS if shape is None or layout == "whole"
    ]
    for row in rows:
        assert row["ok"] is (row["layout"] not in layouts), (row["layout"], row["first"])
        if not row["ok"]:
            first = row["first"]
            assert (first["what"], name in first["name"], cause in first["cause"]) == (
                what,
                True,
                True,
            ), first
