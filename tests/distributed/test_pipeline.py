"""Pipelines compute what one process computes: every schedule, alone and with each other axis.

Reference: bare_loop.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bare_loop import Trace, train_in_microbatches
from models import fill
from models import shape as small_shape
from phalanx.core.errors import LayoutError
from phalanx.nn.models.decoder import Decoder
from pipelines import (
    LAYERS,
    LR,
    MICRO,
    SCHEDULES,
    Case,
    in_pipelines,
    pipeline_plan,
    token_batches,
    worst,
)
from ranks import run_ranks

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def decoder(tied: bool, dtype: str) -> nn.Module:
    module = Decoder(small_shape(tied=tied, num_layers=LAYERS))
    fill(module)
    return module.to(DTYPES[dtype])


def kind(tied: bool, dtype: str) -> str:
    return f"{'tied' if tied else 'untied'} {dtype}"


def compute_references(rank: int) -> dict[str, Trace]:
    return {
        kind(tied, dtype): train_in_microbatches(
            decoder(tied, dtype), token_batches(), micro=16, lr=LR, max_norm=0.5
        )
        for tied in (True, False)
        for dtype in DTYPES
    }


@pytest.fixture(scope="module")
def references() -> dict[str, Trace]:
    """Computed in one process of its own, so that this one stays free to fork."""
    return run_ranks(1, compute_references)[0]


def case(
    name: str,
    tied: bool,
    dtype: str = "fp64",
    *,
    how: dict[str, Any] | None = None,
    **parallel: Any,
) -> Case:
    reference = kind(tied, dtype)
    return Case(
        f"{name} {reference}",
        partial(decoder, tied, dtype),
        parallel,
        how or {},
        reference=reference,
    )


def require_parity(num_ranks: int, cases: list[Case], references: dict[str, Trace]) -> None:
    found = run_ranks(num_ranks, in_pipelines, num_ranks, cases, references, deadline_s=900.0)
    off = {}
    for place, one in enumerate(cases):
        off[one.name] = worst(
            [mine[place] for mine in found],
            references[one.reference],
            TOLERANCE[one.reference[-4:]],
        )
    assert {name: errors for name, errors in off.items() if errors} == {}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_each_schedule_alone(num_ranks: int, references: dict[str, Trace]) -> None:
    tied = num_ranks == 2
    cases = [case(name, tied, pp=num_ranks, schedule=name) for name in SCHEDULES]
    cases += [case(name, not tied, pp=num_ranks, schedule=name) for name in ("1f1b", "zb-v")]
    cases += [
        case(name, tied, "fp32", pp=num_ranks, schedule=name) for name in ("gpipe", "dualpipe-v")
    ]
    require_parity(num_ranks, cases, references)


WITH_DATA_PARALLELISM = {
    "ddp": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "zero2": {"dp_shard": 2, "zero_stage": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
}


@pytest.mark.long
def test_with_data_parallelism(references: dict[str, Trace]) -> None:
    """Each kind of it with two schedules, of whole backwards and of split ones, tied and untied
    in turn."""
    cases = [
        case(f"{schedule} {name}", (place + at) % 2 == 0, pp=2, schedule=schedule, **how)
        for at, (name, how) in enumerate(WITH_DATA_PARALLELISM.items())
        for place, schedule in enumerate(("1f1b", "zb-v"))
    ]
    require_parity(4, cases, references)


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_with_data_parallelism_every_schedule(
    references: dict[str, Trace], tied: bool, dtype: str
) -> None:
    cases = [
        case(f"{schedule} {name}", tied, dtype, pp=2, schedule=schedule, **how)
        for name, how in WITH_DATA_PARALLELISM.items()
        for schedule in SCHEDULES
    ]
    require_parity(4, cases, references)


@pytest.mark.long
def test_with_tensor_parallelism(references: dict[str, Trace]) -> None:
    """With the sequence cut and without."""
    cases = [
        case(schedule, cut, pp=2, tp=2, schedule=schedule, sequence_parallel=cut)
        for schedule, cut in (("1f1b", True), ("interleaved-zero-bubble", False), ("zb-v", True))
    ]
    require_parity(4, cases, references)


@pytest.mark.long
@pytest.mark.parametrize("cut", [True, False])
def test_with_tensor_parallelism_every_schedule(references: dict[str, Trace], cut: bool) -> None:
    cases = [
        case(f"{schedule} {tied}", tied, pp=2, tp=2, schedule=schedule, sequence_parallel=cut)
        for schedule in SCHEDULES
        for tied in (True, False)
    ]
    require_parity(4, cases, references)


@pytest.mark.long
def test_all_axes_on_eight_ranks(references: dict[str, Trace]) -> None:
    cases = [case("zb-v", True, pp=2, tp=2, dp_shard=2, zero_stage=3, schedule="zb-v")]
    require_parity(8, cases, references)


@pytest.mark.long
def test_all_axes_with_every_schedule(references: dict[str, Trace]) -> None:
    cases = [
        case(f"{name} {stage}", tied, pp=2, tp=2, schedule=name, **how)
        for name in SCHEDULES
        for tied in (True, False)
        for stage, how in WITH_DATA_PARALLELISM.items()
    ]
    require_parity(8, cases, references)


# Cuts and schedules of one's own


@pytest.mark.long
@pytest.mark.parametrize("each_tied_and_not", [False, pytest.param(True, marks=pytest.mark.long)])
def test_uneven_cuts(references: dict[str, Trace], each_tied_and_not: bool) -> None:
    """A first stage of the embedding alone, a last one of the head alone; both; and a crooked
    cut."""
    cuts = {"1f1b": [(0, 1, 4, 3), (3, 4, 1, 0), (0, 5, 3, 0)], "gpipe": [(5, 1, 1, 1)]}
    cases = [
        case(f"{name} {cut}", tied, pp=4, schedule=name, stage_blocks=cut)
        for name, some in cuts.items()
        for number, cut in enumerate(some)
        for tied in ((True, False) if each_tied_and_not else (number % 2 == 0,))
    ]
    cases += [
        case(f"zb-v {tied}", tied, pp=4, schedule="zb-v", stage_blocks=(0, 1, 1, 2, 2, 1, 1, 0))
        for tied in (1, 0)
    ]
    cases.append(case("zero3", True, pp=2, dp_shard=2, zero_stage=3, stage_blocks=(0, 8)))
    cases.append(case("zero3 head", False, pp=2, dp_shard=2, zero_stage=3, stage_blocks=(8, 0)))
    cases.append(case("tp", True, pp=2, tp=2, stage_blocks=(8, 0)))
    require_parity(4, cases, references)


# Rank 0 has stages 0 and 1, rank 1 the third: no named schedule does. Whole and split backwards,
# weights late.
OWN = (
    "0F0,0F1,1F0,1F1,0F2,0F3,1F2,1F3,1B0,0I0,1I1,0B1,1B2,0B2,0W0,1I3,0I3,1W1,1W3,0W3\n"
    "2F0,2I0,2F1,2B1,2F2,2W0,2I2,2F3,2B3,2W2\n"
)
BROKEN = {
    "waits for itself": ("0B0,0F0\n1F0,1B0\n", "0B0"),
    "a backward is missing": ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n", "1B1|microbatch 1"),
    "stage on two ranks": ("0F0,0B0,1F0\n1F0,1B0\n", "stage 1"),
    "no action": ("0F0,0B0\n1F0,sleep\n", "no action"),
    "sends": ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "follow from the actions"),
    "empty": ("\n", "empty"),
    "other ranks": ("0F0,0B0\n", "is for 1 rank|for 1 ranks|no rank has|ranks"),
    "crossed": ("0F0,0F1,0B1,0B0\n1F1,1B0,1F0,1B1\n", "wait|before"),
}


def test_a_schedule_from_a_file(tmp_path: Path, references: dict[str, Trace]) -> None:
    file = tmp_path / "own.csv"
    file.write_text(OWN)
    how = {"micro": 4}
    cases = [case("own", tied, how=how, pp=2, schedule_file=str(file)) for tied in (True, False)]
    require_parity(2, cases, references)
    how = {"micro": 2}
    zero3 = case(
        "own zero3", True, how=how, pp=2, dp_shard=2, zero_stage=3, schedule_file=str(file)
    )
    require_parity(4, [zero3], references)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_schedule_is_refused_before_anything_runs(tmp_path: Path, name: str) -> None:
    file = tmp_path / "broken.csv"
    text, words = BROKEN[name]
    file.write_text(text)
    with pytest.raises(LayoutError, match=words):
        pipeline_plan(2, pp=2, micro=MICRO, schedule_file=str(file))
