"""What a comparison says of turns: medians and shares, none where losses differ; and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from phalanx.bench.training.contenders import (
    ALONE,
    LIBRARIES,
    Contender,
    list_libraries,
    list_phalanx_contenders,
)
from phalanx.bench.training.layouts import (
    make_compared_job,
    parse_layouts,
    select_contenders_with_plan,
)
from phalanx.bench.training.payload import RankTurn, Turn
from phalanx.bench.training.rows import open_rows
from phalanx.bench.training.summary import (
    TurnRow,
    collect_losses,
    compute_middle_half,
    find_loss_difference,
    summarize_contender,
)
from phalanx.core.errors import LayoutError, UsageError
from phalanx.job.load import load_job
from phalanx.job.schema import Job

DDP = Contender("torch ddp", "torch_ddp")
ZERO3 = Contender("phalanx zero3", "phalanx_layout", "zero3", "phalanx")
TINY = ("model.dim=32", "model.num_layers=1", "model.num_heads=2", "data.seq_len=16")


def make_row(
    contender: Contender,
    number: int,
    step_s: tuple[float, ...],
    losses: tuple[float, ...] = (4.0, 3.0, 2.0),
    *,
    section: int = 0,
) -> TurnRow:
    """A turn of three steps, of which the first only warms up, by a fast rank and by one that
    takes `step_s`."""
    turn = Turn(1 + 3 * number, 3, 1)
    fast = tuple(seconds / 2 for seconds in step_s)
    ranks = tuple(RankTurn(each, losses, 0.1, 0.0, 2**20) for each in (fast, step_s))
    return TurnRow(contender.name, section, number, turn, ranks, 0.0, 1.0)


def make_rows(**changes: tuple[float, ...]) -> list[TurnRow]:
    """Two turns after the warm-up: DDP takes 1.25 and 2 times as long as ranks that never talk."""
    rows = [make_row(each, 0, (9.0, 9.0, 9.0)) for each in (ALONE, DDP, ZERO3)]
    for number, factor in ((1, 1.25), (2, 2.0)):
        rows.append(make_row(ALONE, number, (5.0, 1.0, 1.0), (9.0, 9.0, 9.0)))
        rows.append(make_row(DDP, number, (50.0, factor, factor)))
        zero3 = (1.0, 4.0, 4.0)
        rows.append(make_row(ZERO3, number, zero3, changes.get("zero3", (4.0, 3.0, 2.0))))
    return rows


def test_shares_are_medians_of_turns_and_the_slowest_rank_counts() -> None:
    """Neither the warm-up turn nor the first step of a turn counts."""
    ddp = summarize_contender(DDP, make_rows(), tokens_per_step=100, precision="fp32")
    assert ddp.share == pytest.approx((1 / 1.25 + 1 / 2) / 2)
    assert (ddp.share_low, ddp.share_high) == pytest.approx((0.5, 0.8))
    assert ddp.tokens_per_s == pytest.approx(100 / ((1.25 + 2) / 2))
    assert (ddp.num_turns, ddp.difference, ddp.worst_loss_off) == (2, None, 0.0)


def test_ranks_that_never_talk_are_one_whatever_they_learn() -> None:
    """Their losses after the first step are their own copies'."""
    alone = summarize_contender(ALONE, make_rows(), tokens_per_step=100, precision="fp32")
    assert (alone.share, alone.difference) == (1.0, None)


def test_a_turn_is_held_beside_its_own_section() -> None:
    """The machine may be slower in another one."""
    rows = make_rows()
    for number in (1, 2):
        rows.append(make_row(ALONE, number, (8.0, 8.0, 8.0), section=1))
        rows.append(make_row(Contender("late", "torch_ddp"), number, (8.0, 16.0, 16.0), section=1))
    late = Contender("late", "torch_ddp")
    assert summarize_contender(late, rows, tokens_per_step=1, precision="fp32").share == 0.5


@pytest.mark.parametrize("loss", [2.01, math.nan, math.inf])
def test_no_share_of_a_contender_whose_loss_differs(loss: float) -> None:
    rows = make_rows(zero3=(4.0, 3.0, loss))
    zero3 = summarize_contender(ZERO3, rows, tokens_per_step=100, precision="fp32")
    assert (zero3.share, zero3.tokens_per_s, zero3.step_s) == (None, None, None)
    assert zero3.difference is not None
    assert (zero3.difference.step, zero3.difference.reference_loss) == (6, 2.0)
    # NaN is no JSON, and the row is written all the same.
    assert json.dumps(zero3.to_json())


def test_rounding_is_no_difference() -> None:
    reference = {1: 4.0, 2: 3.0}
    assert find_loss_difference({1: 4.0, 2: 3.0001}, reference, 1e-4) is None
    assert find_loss_difference({1: 4.0, 2: 3.001}, reference, 1e-4) is not None
    # Steps that only one of them took say nothing.
    assert find_loss_difference({7: 1.0}, reference, 1e-3) is None


def test_a_failure_has_a_reason_and_no_numbers() -> None:
    standing = summarize_contender(
        DDP, make_rows(), tokens_per_step=1, precision="fp32", why_not="rank 1 ended early"
    )
    assert (standing.share, standing.why_not) == (None, "rank 1 ended early")


def test_losses_are_means_over_ranks() -> None:
    turn = Turn(5, 2, 1)
    ranks = tuple(RankTurn((1.0, 1.0), losses, 0, 0, 0) for losses in ((2.0, 4.0), (4.0, 8.0)))
    assert collect_losses([TurnRow("x", 0, 1, turn, ranks, 0.0, 0.0)]) == {5: 3.0, 6: 6.0}


def test_the_middle_half_of_few_turns_is_all_of_them() -> None:
    assert compute_middle_half([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert compute_middle_half([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def test_torch_is_always_there_and_what_is_missing_is_said() -> None:
    """What is installed here depends on the machine: together they are all."""
    installed, missing = list_libraries("all")
    assert {"ddp", "fsdp2"} <= {library.name for library in installed}
    assert {library.name for library in (*installed, *missing)} == set(LIBRARIES)
    assert list_libraries("none") == ([], [])


def make_job(*overrides: str) -> Job:
    return load_job(None, [*TINY, *overrides])


@pytest.mark.parametrize(
    ("overrides", "ranks", "says"),
    [
        (("optim.kind=sgd",), 2, "AdamW"),
        (("train.global_batch_size=3",), 2, "no whole share"),
        (("precision.compute=fp16",), 2, "precision.compute=fp16"),
        ((), 1, "nobody to talk to"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    overrides: tuple[str, ...], ranks: int, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        make_compared_job(make_job(*overrides), ranks)


def test_a_module_of_ones_own_is_refused() -> None:
    with pytest.raises(UsageError, match="is not compared"):
        make_compared_job(load_job(None, ["model.kind=collections:OrderedDict"]), 2)


def test_names_are_checked() -> None:
    with pytest.raises(UsageError, match="did you mean") as error:
        parse_layouts("ddp,zero33", 2)
    assert "zero3" in str(error.value)
    with pytest.raises(UsageError, match="no 'horovod'"):
        list_libraries("ddp,horovod")
    assert parse_layouts("zero3/gloo,job,ddp,ddp", 2) == ["zero3/gloo", "job", "ddp"]


def test_a_layout_that_does_not_fit_is_left_out_or_refused() -> None:
    compared = make_compared_job(make_job(), 3 - 1)
    contenders = list_phalanx_contenders(["ddp", "ep"])
    fitting, refused = select_contenders_with_plan(compared, contenders, may_leave_out=True)
    assert [contender.variant for contender in fitting] == ["ddp"]
    assert list(refused) == ["phalanx ep"]
    with pytest.raises(LayoutError):
        select_contenders_with_plan(compared, contenders, may_leave_out=False)


def test_all_layouts_train_the_same_rows_and_gloo_is_a_suffix() -> None:
    compared = make_compared_job(make_job("parallel.bucket_mb=3"), 2)
    plans = {name: compared.plan_layout(name)[1] for name in ("ddp", "zero3", "tp", "tp/gloo")}
    assert {plan.global_batch_size for plan in plans.values()} == {16}
    assert plans["tp"].layout.tp == 2
    assert plans["tp/gloo"].parallel.collectives == "gloo"
    # What else the job says of [parallel] stays.
    assert {plan.parallel.bucket_mb for plan in plans.values()} == {3}
    assert 'optim.schedule="constant"' in compared.notes


def test_what_a_comparison_leaves_out_of_a_job_does_not_refuse_it(tmp_path: Path) -> None:
    """Weights that the job starts from are said to be left out; saves are not missed by anybody."""
    auto = ("checkpoint.every=auto", "checkpoint.mtbf_hours=5")
    compared = make_compared_job(make_job(f"model.init_from={tmp_path}", *auto), 2)
    assert "model.init_from=null" in compared.notes
    assert compared.job.model.init_from is None
    assert compared.job.checkpoint.every is None


def test_rows_are_added_to_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with open_rows(path) as file:
        file.write_turn(make_row(DDP, 0, (1.0, 1.0, 1.0)))
    path.write_bytes(path.read_bytes() + b'{"torn')
    with open_rows(path) as file:
        file.write_turn(make_row(DDP, 1, (1.0, 1.0, 1.0)))
    lines = path.read_bytes().splitlines()
    assert [lines[1], json.loads(lines[2])["row"]] == [b'{"torn', "turn"]
    for content in (b"my notes\n", b"[" * 100_000, b"[1]\n", b'{"schema": "phalanx.job/1"}\n'):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="holds no rows of phalanx bench train"):
            with open_rows(path):
                pass
        assert path.read_bytes() == content
