"""`verify` finds bugs planted in context parallelism and names the likely cause; without them
its layouts are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_verify import Plant, Rows, rows_of

from phalanx.job.schema import Job
from phalanx.parallel.context import attention as cp_attention
from phalanx.parallel.context import block_attention as cp_products
from phalanx.parallel.context import transform as cp
from phalanx.verify.cases import list_all_layouts
from phalanx.verify.contexts import list_context_parallel_layouts
from phalanx.verify.verified_job import shrink_job
from plants import some

SMALL = {"num_kv_heads": 2, "sliding_window": 5}


def rows_with(
    plant: Plant | None, num_ranks: int, only: tuple[str, ...], *dtypes: str, num_blocks: int = 2
) -> Rows:
    """Documents, a sliding window, grouped heads, uneven and masked targets."""
    body = {"model": SMALL, "data": {"seq_len": 16, "document_masks": True}}
    job = shrink_job(Job.model_validate(body), num_blocks=num_blocks)[0]
    return rows_of(job, plant, num_ranks, dtypes or ("float64",), only=only)


CP2 = tuple(name for name, _ in list_context_parallel_layouts(2))
PIPELINES = ("pp2-cp2-1f1b", "pp2-cp2-interleaved-zero-bubble", "pp2-cp2-zb-v", "pp2-cp2-full-1f1b")
CP4 = tuple(
    name
    for name, _ in list_context_parallel_layouts(4)
    if not name.endswith(("-selective", "-sqrt"))
)


@pytest.mark.parametrize(
    ("num_ranks", "names", "dtypes"),
    [
        pytest.param(2, CP2, ("float64",), marks=pytest.mark.long),
        pytest.param(2, CP2, ("float32",), marks=pytest.mark.long),
        pytest.param(4, CP4, ("float64", "float32"), marks=pytest.mark.long),
        (4, ("zero3-cp2-all-gather", "tp2-cp2-ulysses"), ("float64",)),
    ],
    ids=["two ranks", "two ranks, float32", "four ranks, all", "four ranks"],
)
def test_layouts_equal_the_reference(
    num_ranks: int, names: tuple[str, ...], dtypes: tuple[str, ...]
) -> None:
    rows = rows_with(None, num_ranks, names, *dtypes)
    known = dict(list_all_layouts(num_ranks))
    # Ulysses divides heads: two of keys, of which tensor parallelism leaves one.
    refused = {n for n in names if "ulysses" in n and known[n].get("tp", 1) * known[n]["cp"] > 2}
    assert set(rows) == {
        f"{name} {dtype}" for name in names if name not in refused for dtype in dtypes
    }
    assert {name: row["first"] for name, row in rows.items() if not row["ok"]} == {}
    assert all(row["errors"]["gradient"] > 0 for row in rows.values()), "something was compared"


@pytest.mark.long
def test_in_stages_of_a_pipeline() -> None:
    rows = rows_with(None, 4, PIPELINES, num_blocks=3)
    assert {name: row["first"] for name, row in rows.items()} == {
        f"{name} float64": None for name in PIPELINES
    }


# Planted bugs


def document_mask_dropped() -> None:
    """Tokens see all before them, whatever their document."""
    call = cp.ContextParallelMaskBuilder.__call__

    def forgetful(self: Any, num_tokens: int, window: int, document_ids: Any, *others: Any) -> Any:
        return call(self, num_tokens, window, None, *others)

    cp.ContextParallelMaskBuilder.__call__ = forgetful  # type: ignore[assignment, method-assign]


def window_dropped() -> None:
    """Tokens see more of their document than the window."""
    call = cp.ContextParallelMaskBuilder.__call__

    def wide(self: Any, num_tokens: int, window: int, *others: Any) -> Any:
        return call(self, num_tokens, 0, *others)

    cp.ContextParallelMaskBuilder.__call__ = wide  # type: ignore[assignment, method-assign]


def positions_restart_per_rank() -> None:
    """The tokens of each rank count from 0."""
    cut = cp.ContextParallelBatchSplitter.keep_own_tokens_of_batch

    def restarting(self: Any, batch: Any) -> Any:
        found = cut(self, batch)
        length = found["inputs"].shape[1]
        return found | {"positions": torch.arange(length).expand_as(found["inputs"])}

    cp.ContextParallelBatchSplitter.keep_own_tokens_of_batch = restarting  # type: ignore[method-assign]


def merge_without_rescale() -> None:
    """What blocks make is added up as it is."""

    def add(self: Any, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.out[:, :, rows] += out
        self.lse[:, :, rows] = torch.logaddexp(self.lse[:, :, rows], lse)

    cp_products.OnlineSoftmaxOutput.merge_block = add  # type: ignore[method-assign]


def gradients_of_keys_stay_away() -> None:
    """What other ranks' queries owe to a block of keys is not sent home."""

    def alone(self: Any, kv: torch.Tensor, of_block: Callable[..., torch.Tensor]) -> torch.Tensor:
        own, *_ = [of_block(owner, block) for owner, block in self.iterate_key_value_blocks(kv)]
        return own

    cp_attention._RingExchange.compute_own_key_value_gradients = alone  # type: ignore[method-assign]


def one_rank_of_cp_counts() -> None:
    """Loss and targets are those of the first rank's tokens."""
    from phalanx.mesh.mesh import Mesh

    Mesh.is_tp_leader = property(  # type: ignore[assignment, method-assign]
        lambda self: self.coordinates["cp"] == self.coordinates["tp"] == 0
    )


EXPECTED: dict[Callable[[], None], tuple[str, str, str]] = {
    # bug: (what differs first, a part of its name, of the cause)
    document_mask_dropped: ("loss", "", "the mask of documents is dropped"),
    window_dropped: ("loss", "", "the window is dropped"),
    positions_restart_per_rank: ("loss", "", "positions begin again on each rank"),
    merge_without_rescale: ("loss", "", "blocks of keys are merged without their weights"),
    gradients_of_keys_stay_away: ("gradient", "", "does not come back"),
    one_rank_of_cp_counts: ("number of targets", "", "other shares of the batch"),
}


@pytest.mark.parametrize("plant", some(EXPECTED, 3), ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found_and_named(plant: Callable[[], None]) -> None:
    what, name, cause = EXPECTED[plant]
    (row,) = rows_with(plant, 2, ("cp2",)).values()
    first = row["first"]
    assert first is not None
    assert (first["what"], name in first["name"], cause in first["cause"]) == (what, True, True), (
        first
    )
    if what == "loss":
        # What comes before attention in a forward (embeddings, norms) is right.
        assert (
            "the first output that differs is that of blocks.0.attention, on rank"
            in (first["origin"])
        )
