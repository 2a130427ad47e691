"""Rows of `verify` in a narrow type look at the types of reductions: what one in bfloat16 rounds is
within their bands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_verify_low_types import rows_with
from torch.distributed.fsdp import MixedPrecisionPolicy

from phalanx.parallel.data_parallel import shard as dp_shard
from phalanx.parallel.data_parallel.ddp_buckets import WholeReduction
from phalanx.verify.reduction_types import REDUCTIONS_JUDGED

BF16 = ("bfloat16",)


def reduce_in_compute_type() -> None:
    """FSDP reduces gradients in the type of activations."""

    def build(compute_dtype: torch.dtype, *, cast_inputs: bool) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=compute_dtype, cast_forward_inputs=cast_inputs
        )

    dp_shard._build_mixed_precision_policy = build


def reduce_buckets_in_bfloat16() -> None:
    """DDP's buckets are rounded on their way."""
    post = WholeReduction._post

    def rounded(self: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        half = buffer.bfloat16()
        dist.all_reduce(half, op=dist.ReduceOp.AVG, group=self._group)
        buffer.copy_(half)
        return post(self, bucket)

    WholeReduction._post = rounded  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("plant", "layout", "words"),
    [
        (reduce_in_compute_type, "zero3", "reduce_scatter"),
        (reduce_buckets_in_bfloat16, "ddp", "all_reduce"),
    ],
)
def test_gradients_that_are_reduced_in_bfloat16_are_a_difference(
    plant: Any, layout: str, words: str
) -> None:
    rows = rows_with(plant, 2, (layout,), dtypes=BF16)
    first = rows[f"{layout} bfloat16"]["first"]
    assert first["what"] == "gradient reduction"
    assert first["ranks"] == [0, 1]
    assert first["cause"].startswith(f"{words} of 2 ranks adds gradients up in bfloat16")


@pytest.mark.parametrize(
    "more", [(), pytest.param(("tp4",), marks=pytest.mark.long)], ids=["judged", "and what is not"]
)
def test_sums_of_activations_in_bfloat16_are_none(more: tuple[str, ...]) -> None:
    """The ranks of tp add up activations in their type; a tied weight is on two stages."""
    names = ("zero3-tp2", "pp2-zero3-1f1b", *more)
    rows = rows_with(None, 4, names, {"preset": "gpt2"}, BF16)
    assert {name: row["first"] for name, row in rows.items()} == dict.fromkeys(rows)
    judged = {name for name, row in rows.items() if REDUCTIONS_JUDGED in row["judged"]}
    assert judged == {"zero3-tp2 bfloat16", "pp2-zero3-1f1b bfloat16"}
