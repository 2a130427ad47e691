"""Ranks that call different collectives stop before they run, with both lines; without the checks
gloo computes garbage, or hangs."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.core.black_box import BlackBox
from phalanx.core.errors import RanksDifferError
from phalanx.mesh import collective_checks
from phalanx.mesh.collective_checks import (
    SAMPLING_INTERVAL,
    checking_collectives,
    raising_error_of_checks,
)
from phalanx.mesh.collective_recorder import record_collectives
from ranks import run_ranks

# A rank that comes late on a busy machine is none that does not come.
PATIENT_WAIT_S, SHORT_WAIT_S = 60.0, 3.0
Body = Callable[[int], object]
# These compare in memory, the others by the store, as ranks of two machines do.
_ranks_with_boards: tuple[int, ...] = (0, 1, 2, 3)


def _end_as_rank_does(rank: int, folder: Path, mode: str, body: Body, wait_s: float) -> str:
    """The error that a rank reports at the end of `body`; empty where it ends well."""
    box = BlackBox(folder / f"rank-{rank}")
    board = folder / f"calls-{rank}" if rank in _ranks_with_boards else None

    def write(error: BaseException) -> None:
        (folder / f"error-{rank}").write_text(str(error))

    try:
        with (
            checking_collectives(
                mode, wait_s=wait_s, report_error=write, board_path=board
            ) as checks,
            record_collectives(box, checks),
            raising_error_of_checks(checks),
        ):
            try:
                body(rank)
            except BaseException:
                # Others that wait in C++ see the connections close.
                dist.destroy_process_group()
                raise
            dist.barrier()
    except RanksDifferError as error:
        return str(error)
    return ""


def _find_errors(
    num_ranks: int, folder: Path, body: Body, mode: str = "all", wait_s: float = PATIENT_WAIT_S
) -> list[str]:
    """The error with which each rank ends: raised in it, or reported for it."""
    pids = [_fork(rank, num_ranks, folder, body, mode, wait_s) for rank in range(num_ranks)]
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (0, RanksDifferError.exit_code)
    return [(folder / f"error-{rank}").read_text() for rank in range(num_ranks)]


def _fork(rank: int, num_ranks: int, folder: Path, body: Body, mode: str, wait_s: float) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )
        text = _end_as_rank_does(rank, folder, mode, body, wait_s)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    (folder / f"error-{rank}").write_text(text)
    os._exit(0)


def _line(word: str) -> str:
    """file:line of the only line of this file that ends in `word`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [at for at, line in enumerate(lines, 1) if line.endswith(f"# {word}")]
    return f"{__file__}:{number}"


def _swap_order(rank: int) -> torch.Tensor:
    x, y = torch.full((2,), 1.0 + rank), torch.full((2,), 100.0 * (1 + rank))
    if rank == 1:
        dist.all_reduce(y)  # swapped
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)  # in order
        dist.all_reduce(y)
    return x


def _differ_in_dtype(rank: int) -> torch.Tensor:
    x = torch.ones(4)
    if rank == 1:
        x = torch.ones(4, dtype=torch.int32)
    dist.all_reduce(x)  # dtype
    return x


def _differ_in_shape(rank: int) -> None:
    dist.all_reduce(torch.ones(4 - 2 * (rank == 1)))  # shape


def _differ_in_reduce_op(rank: int) -> torch.Tensor:
    x = torch.full((2,), 2.0 + rank)
    op = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM
    dist.all_reduce(x, op)  # reduce op
    return x


def _differ_in_functional_reduce_op(rank: int) -> None:
    ops = torch.ops._c10d_functional
    name = "max" if rank == 1 else "sum"
    ops.wait_tensor(ops.all_reduce(torch.ones(2), name, dist.group.WORLD.group_name))  # functional


def _differ_in_root(rank: int) -> None:
    dist.broadcast(torch.ones(2), int(rank == 1))  # root


def _differ_in_operation(rank: int) -> None:
    x = torch.ones(2)
    if rank == 1:
        dist.broadcast(x, 0)  # broadcast
    else:
        dist.all_reduce(x)  # all_reduce


def _call_one_more(rank: int) -> None:
    x = torch.ones(2)
    for _ in range(3):
        dist.all_reduce(x)  # every step
        if rank == 1:
            dist.all_reduce(x)  # one more


def _differ_in_a_message(rank: int) -> None:
    if rank == 0:
        dist.send(torch.ones(4), 1)  # send
    elif rank == 1:
        dist.recv(torch.ones(4, dtype=torch.float64), 0)  # recv
    dist.barrier()


def _differ_in_ddp(rank: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    if rank == 1:
        dist.all_reduce(torch.ones(3))  # before the buckets
    model(torch.ones(2, 3)).sum().backward()  # the buckets


_CASES: list[tuple[Body, str, str]] = [
    (_swap_order, "swapped", "in order"),
    (_differ_in_dtype, "dtype", "dtype"),
    (_differ_in_shape, "shape", "shape"),
    (_differ_in_reduce_op, "reduce op", "reduce op"),
    (_differ_in_functional_reduce_op, "functional", "functional"),
    (_differ_in_root, "root", "root"),
    (_differ_in_operation, "broadcast", "all_reduce"),
    (_call_one_more, "one more", "every step"),
    (_differ_in_a_message, "recv", "send"),
    (_differ_in_ddp, "before the buckets", "the buckets"),
]
_BY_STORE = (_swap_order, _differ_in_shape, _differ_in_a_message)
_WITH_THREE_RANKS = (_swap_order, _differ_in_a_message, _differ_in_ddp)


@pytest.fixture(autouse=True)
def _impatient_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, which are forks, that ask each other more often."""
    monkeypatch.setattr(collective_checks, "_POLL_S", 0.05)
    monkeypatch.setattr(collective_checks, "_END_TIMEOUT_S", 0.5)


_BOARDS = {"boards": (0, 1, 2, 3), "store": (), "both": (0, 2)}


def _use_boards(monkeypatch: pytest.MonkeyPatch, boards: str) -> None:
    monkeypatch.setattr(sys.modules[__name__], "_ranks_with_boards", _BOARDS[boards])


@pytest.mark.parametrize(
    ("body", "odd", "usual", "boards"),
    [
        (*case, boards)
        for boards in _BOARDS
        for case in _CASES
        if boards == "boards" or case[0] in _BY_STORE
    ],
)
def test_ranks_that_differ_stop_with_both_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: Body,
    odd: str,
    usual: str,
    boards: str,
) -> None:
    _use_boards(monkeypatch, boards)
    num_ranks = 2 + (body in _WITH_THREE_RANKS)
    errors = _find_errors(num_ranks, tmp_path, body)
    assert len(set(errors)) == 1, errors
    assert errors[0].startswith("the ranks differ in #")
    others = "rank 0 calls"
    if num_ranks == 3 and body is not _differ_in_a_message:
        others = "ranks 0 and 2 call"
    if odd != "recv":
        assert errors[0].index("rank 1 calls") < errors[0].index(others)
    assert _line(odd) in errors[0]
    assert _line(usual) in errors[0]


def test_without_checks_gloo_computes_garbage(tmp_path: Path) -> None:
    """The reason for the checks: if a backend finds this by itself one day, they may go."""
    sums = run_ranks(2, _return_list, _swap_order)
    assert sums[0] != [3.0, 3.0]
    maximum_or_sum = run_ranks(2, _return_list, _differ_in_reduce_op)
    # Asked for the maximum of 2 and 3, and given their sum.
    assert maximum_or_sum[1] == [5.0, 5.0]
    integers = run_ranks(2, _return_list, _differ_in_dtype)
    assert integers[1] != [2, 2, 2, 2]


def _return_list(rank: int, body: Callable[[int], torch.Tensor]) -> list[float]:
    return body(rank).tolist()


def _call_what_may_differ(rank: int) -> None:
    x = torch.ones(2)
    if rank == 0:
        dist.broadcast(x, 0)
        dist.gather(x, [torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(2)])
    else:
        dist.broadcast(x, 0)
        dist.gather(x)
    # Sends before receives, and what each sends to each is not equally much.
    sent = dist.isend(torch.ones(1), (rank + 1) % 4)
    dist.recv(torch.ones(1), (rank - 1) % 4)
    sent.wait()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(torch.ones(1 + rank // 2), group=pairs[rank // 2])
    # All to all: rank r gives r + 1 rows to each, and so no two ranks give equally many.
    rows = [other + 1 for other in range(4)]
    dist.all_to_all_single(torch.ones(sum(rows)), torch.ones(4 * (rank + 1)), rows, [rank + 1] * 4)
    for _ in range(2 * SAMPLING_INTERVAL + 5):
        dist.all_reduce(x)
    beside = dist.new_group()
    thread = threading.Thread(target=_reduce_often, args=(beside,))
    thread.start()
    _reduce_often(dist.group.WORLD)
    thread.join()


def _reduce_often(group: dist.ProcessGroup | None) -> None:
    for _ in range(20):
        dist.all_reduce(torch.ones(3), group=group)


@pytest.mark.parametrize(
    ("mode", "boards"),
    [
        *(("all", boards) for boards in _BOARDS),
        # A sample of the same calls.
        *(
            pytest.param("sampled", boards, marks=[pytest.mark.long] * (boards != "both"))
            for boards in _BOARDS
        ),
    ],
)
def test_what_may_differ_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, boards: str
) -> None:
    _use_boards(monkeypatch, boards)
    assert _find_errors(4, tmp_path, _call_what_may_differ, mode) == [""] * 4


def _swap_late(rank: int) -> None:
    x, y = torch.ones(2), torch.ones(2)
    for step in range(2 * SAMPLING_INTERVAL):
        if rank == 1 and step == 5:
            dist.all_reduce(y)  # late
        else:
            dist.all_reduce(x)  # usual


def test_samples_find_what_lies_before_them(tmp_path: Path) -> None:
    errors = _find_errors(2, tmp_path, _swap_late, "sampled")
    assert errors[0] == errors[1]
    assert errors[0].startswith("the ranks differ in #6 of world")
    assert _line("late") in errors[0]
    assert _line("usual") in errors[0]


def _skip_one(rank: int) -> None:
    dist.all_reduce(torch.ones(2))  # by all
    if rank == 1:
        threading.Event().wait()
    dist.all_reduce(torch.ones(2))  # by others


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    texts = set(_find_errors(3, tmp_path, _skip_one, wait_s=SHORT_WAIT_S))
    assert len(texts) == 1, texts
    text = texts.pop()
    assert text.startswith("rank 1 has not come to all_reduce sum of float32 [2], #2 of world")
    assert f"ranks 0 and 2 have waited {SHORT_WAIT_S:g} s" in text
    assert (
        f"rank 1 last called all_reduce sum of float32 [2], #1 of world, at {_line('by all')}"
        in text
    )
    assert _line("by others") in text
