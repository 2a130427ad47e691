"""What ranks leave behind names the rank that keeps the others waiting, and the collective."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.core.black_box import BlackBox, RankIdentity
from phalanx.core.black_box_reader import read_last_position
from phalanx.core.phases import PhaseTimer
from phalanx.launch.paths import black_box_path
from phalanx.launch.positions import read_rank_states
from phalanx.mesh.collective_recorder import record_collectives
from phalanx.observe.rank_waits import RankState, WaitVerdict, judge_ranks
from phalanx.observe.where_words import describe_waits
from ranks import run_ranks

NUM_RANKS = 4
DEADLINE_S = 300.0


def _kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep() -> None:
    signal.pause()


def _enter_a_barrier_instead() -> None:
    dist.barrier()


def _train_as_rank(rank: int, run_dir: Path, culprit: int, deed: Callable[[], None]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{run_dir}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    box = BlackBox(black_box_path(run_dir, rank), RankIdentity(rank, NUM_RANKS, 0, "cpu"))
    phases = PhaseTimer(box)
    with record_collectives(box):
        for step in range(1, 4):
            phases.step = step
            with phases("backward"):
                if rank == culprit and step == 3:
                    deed()
                dist.all_reduce(torch.ones(4, 2))


@contextlib.contextmanager
def _ranks(run_dir: Path, body: Callable[[int], None]) -> Iterator[None]:
    """Ranks that run `body`, and stay where it leaves them, until the end of the block."""
    pids = []
    try:
        for rank in range(NUM_RANKS):
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    body(rank)
                # An error of a peer's end must not hide where this rank was.
                while True:
                    signal.pause()
            pids.append(pid)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _wait_for_verdict(
    run_dir: Path, kind: str, num_waits: int, *words: str, culprit: int | None = None
) -> tuple[WaitVerdict, dict[int, RankState]]:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        states = read_rank_states(run_dir, sample_s=0.02)
        verdict = judge_ranks(states)
        num_absent = sum(bool(wait.absent or wait.differing) for wait in verdict.waits)
        is_there = len(states) == NUM_RANKS and verdict.kind == kind and num_absent >= num_waits
        # On a busy machine ranks wait for one on its way for a while, and it is named meanwhile.
        is_culprit = culprit is None or verdict.culprits == (culprit,)
        if is_there and is_culprit:
            sentence = describe_waits(verdict, states)[0]
            if all(each in sentence for each in words):
                return verdict, states
        assert time.monotonic() < deadline, (verdict, describe_waits(verdict, states))


@pytest.mark.parametrize(
    ("deed", "kind", "culprit", "words"),
    [
        (_kill_itself, "gone", 2, "is gone"),
        (_stop_itself, "stopped", 0, "is stopped by a signal"),
        (_sleep, "absent", 1, "waits for something else"),
        (_enter_a_barrier_instead, "differs", 3, "posted barrier #3 of world"),
    ],
)
def test_the_rank_and_the_collective_are_named(
    tmp_path: Path, deed: Callable[[], None], kind: str, culprit: int, words: str
) -> None:
    with _ranks(tmp_path, lambda rank: _train_as_rank(rank, tmp_path, culprit, deed)):
        collective = "all_reduce #3 of world (float32 [4, 2], 32 B)"
        verdict, states = _wait_for_verdict(
            tmp_path, kind, NUM_RANKS - 1, words, collective, culprit=culprit
        )
    (sentence,) = describe_waits(verdict, states)
    assert sentence.startswith(f"rank {culprit} ")
    position = states[culprit].position
    assert position is not None
    assert (position.step, position.phase) == (3, "backward")
    assert position.file == __file__[-120:]
    if kind != "differs":
        others = [rank for rank in range(NUM_RANKS) if rank != culprit]
        assert [wait.rank for wait in verdict.waits if culprit in wait.absent] == others


def _receive_from_the_next(rank: int, run_dir: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{run_dir}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    box = BlackBox(black_box_path(run_dir, rank), RankIdentity(rank, NUM_RANKS, 0, "cpu"))
    phases = PhaseTimer(box)
    phases.step = 1
    with record_collectives(box), phases("forward"):
        if rank == NUM_RANKS - 1:
            signal.pause()
        dist.recv(torch.empty(3), rank + 1)


def test_a_chain_of_receives_ends_at_the_culprit(tmp_path: Path) -> None:
    with _ranks(tmp_path, lambda rank: _receive_from_the_next(rank, tmp_path)):
        verdict, states = _wait_for_verdict(tmp_path, "absent", NUM_RANKS - 1)
    assert verdict.culprits == (NUM_RANKS - 1,)
    (sentence,) = describe_waits(verdict, states)
    assert "before recv #1 from rank 3 of world" in sentence


def _call_everything(rank: int, run_dir: Path) -> list[tuple[str, str, int]]:
    box = BlackBox(black_box_path(run_dir, rank))
    with record_collectives(box) as recorder:
        box.write(1, "forward")
        x = torch.ones(4)
        dist.all_reduce(x)
        dist.all_gather([torch.empty(4), torch.empty(4)], x)
        gathered = None
        if rank == 0:
            gathered = [torch.empty(4), torch.empty(4)]
        dist.gather(x, gathered)
        group = dist.group.WORLD.group_name
        ops = torch.ops._c10d_functional
        ops.wait_tensor(ops.all_reduce(x, "sum", group))
        ops.wait_tensor(ops.reduce_scatter_tensor(torch.ones(8), "sum", 2, group))
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        dist.barrier()
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
        module(torch.ones(2, 5)).sum().backward()
        sharded = torch.nn.Linear(6, 7)
        torch.distributed.fsdp.fully_shard(sharded)
        sharded(torch.ones(2, 6)).sum().backward()
        box.write(2, "forward")
        assert recorder.num_errors == 0
        totals = recorder.list_totals()
        assert sum(each.num_calls for each in totals) == box._newest_collective
        own_lines = [each for each in totals if each.site.file == __file__]
        # FSDP gathers further down.
        gathers = [each for each in own_lines if each.op == "all_gather"]
        gather = min(gathers, key=lambda each: each.site.line)
        assert (gather.axis, gather.ranks) == ("world", "0,1")
        assert (gather.num_calls, gather.num_bytes) == (1, 16)
        assert gather.wait_s > 0
    before = read_last_position(black_box_path(run_dir, rank))
    # Behind the block nothing is written any more.
    dist.barrier()
    assert read_last_position(black_box_path(run_dir, rank)) == before
    assert before is not None
    return [(each.op, each.state, each.num_bytes) for each in before.collectives]


def test_collectives_of_torch_ddp_and_fsdp_are_seen_and_end(tmp_path: Path) -> None:
    for rank, calls in enumerate(run_ranks(2, _call_everything, tmp_path)):
        assert {state for _, state, _ in calls} == {"finished"}
        ops = [op for op, _, _ in calls]
        own = ["all_reduce", "all_gather", "gather", "all_reduce", "reduce_scatter"]
        assert ops[:7] == [*own, "send" if rank == 0 else "recv", "barrier"]
        # DDP's reducer starts its own from C++: weights and bias in one bucket.
        assert ("all_reduce", "finished", (5 * 3 + 3) * 4) in calls
        assert ("reduce_scatter", "finished", 2 * 28 * 4) in calls, (
            "FSDP: 7 rows as 2 x 4, and bias"
        )
