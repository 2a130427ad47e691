"""Collectives through the memory that ranks of a host share: their results against plain sums and
copies, what a dead or deviating peer looks like, and what is left to gloo."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import resource
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import phalanx
from commands import wait_until
from models import CPU
from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.core.errors import EnvironmentProblem
from phalanx.core.process_stat import read_process_stat
from phalanx.job.schema import Job
from phalanx.mesh.mesh import open_mesh
from phalanx.mesh.shared_memory import futex, opening
from phalanx.mesh.shared_memory.board import Board
from phalanx.mesh.shared_memory.in_place import GatheredTensor
from phalanx.mesh.shared_memory.opening import current_transport, shares_memory
from phalanx.mesh.shared_memory.peers import Peer
from phalanx.observe.events import Event, Note
from phalanx.plan.layout import Layout
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not futex.is_supported(), reason="words of x86-64 Linux")

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
# Below and above what every rank reduces whole, what is cut in slices, and what is sent in chunks;
# none of them a multiple of a cache line.
SIZES = (0, 1, 7, 5_000, 70_001, 1_100_003)
LARGE_TYPES = (torch.float32, torch.bfloat16)
USUAL = BlockSizes()


def make_values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums every type holds."""
    pattern = torch.tensor([0, 3, 1, 4, 2]).roll(rank * 3).to(dtype)
    return pattern.repeat(size // 5 + 1)[:size].contiguous()


def check_reductions(rank: int, num_ranks: int) -> list[str]:
    wrong = []
    references = {
        "sum": lambda rows: rows.sum(0),
        "max": lambda rows: rows.amax(0),
        "min": lambda rows: rows.amin(0),
        "product": lambda rows: rows.prod(0),
    }
    for size, dtype, (name, reduce_rows) in itertools.product(SIZES, DTYPES, references.items()):
        if size > 70_001 and (dtype not in LARGE_TYPES or name != "sum"):
            continue
        rows = torch.stack([make_values(r, size, dtype) for r in range(num_ranks)])
        expected = reduce_rows(rows.double() if size else rows.double().sum(0, keepdim=True))
        given = make_values(rank, size, dtype)
        op = getattr(dist.ReduceOp, name.upper())
        dist.all_reduce(given, op=op)
        if not torch.equal(given.double(), expected.to(dtype).double()):
            wrong.append(f"all_reduce {name} {dtype} {size}")
        given = make_values(rank, size, dtype)
        dist.reduce(given, num_ranks - 1, op=op)
        if rank == num_ranks - 1 and not torch.equal(given.double(), expected.to(dtype).double()):
            wrong.append(f"reduce {name} {dtype} {size}")
    for size, dtype in itertools.product(SIZES, DTYPES):
        if size > 70_001 and dtype not in LARGE_TYPES:
            continue
        rows = torch.stack([make_values(r, size * num_ranks, dtype) for r in range(num_ranks)])
        expected = rows.double().sum(0)[rank * size : (rank + 1) * size].to(dtype)
        part = torch.empty(size, dtype=dtype)
        dist.reduce_scatter_tensor(part, make_values(rank, size * num_ranks, dtype))
        if not torch.equal(part, expected):
            wrong.append(f"reduce_scatter_tensor {dtype} {size}")
        inputs = list(make_values(rank, size * num_ranks, dtype).chunk(num_ranks))
        if size:
            dist.reduce_scatter(part.zero_(), inputs)
            if not torch.equal(part, expected):
                wrong.append(f"reduce_scatter {dtype} {size}")
    return wrong


def check_copies(rank: int, num_ranks: int) -> list[str]:
    wrong = []
    types = (*DTYPES, torch.bool, torch.complex64)
    for size, dtype in itertools.product(SIZES, types):
        if size > 70_001 and dtype not in LARGE_TYPES:
            continue
        rows = [make_values(r, size, dtype) for r in range(num_ranks)]
        gathered = torch.empty(size * num_ranks, dtype=dtype)
        dist.all_gather_into_tensor(gathered, rows[rank])
        listed = [torch.empty_like(row) for row in rows]
        dist.all_gather(listed, rows[rank])
        if not torch.equal(gathered, torch.cat(rows)) or not torch.equal(
            torch.cat(listed), gathered
        ):
            wrong.append(f"all_gather {dtype} {size}")
        copied = rows[rank].clone()
        dist.broadcast(copied, num_ranks - 1)
        if not torch.equal(copied, rows[-1]):
            wrong.append(f"broadcast {dtype} {size}")
        arrived = torch.empty(size * num_ranks, dtype=dtype)
        dist.all_to_all_single(arrived, torch.cat(rows))
        if not torch.equal(arrived, torch.cat([rows[rank]] * num_ranks)):
            wrong.append(f"all_to_all_single {dtype} {size}")
    # Uneven parts: rank r sends (r + target) % 3 rows to each target, of two columns.
    counts = [[(source + target) % 3 for target in range(num_ranks)] for source in range(num_ranks)]
    given = torch.full((sum(counts[rank]), 2), float(rank))
    arrives = [counts[source][rank] for source in range(num_ranks)]
    arrived = torch.empty(sum(arrives), 2)
    dist.all_to_all_single(arrived, given, arrives, counts[rank])
    expected = [source for source, count in enumerate(arrives) for _ in range(count)]
    if arrived[:, 1].tolist() != expected:
        wrong.append("all_to_all_single, uneven")
    parts = [torch.full((count,), rank) for count in counts[rank]]
    received = [torch.empty(count, dtype=torch.int64) for count in arrives]
    dist.all_to_all(received, parts)
    if torch.cat(received).tolist() != expected:
        wrong.append("all_to_all, uneven")
    return wrong


def check_messages(rank: int, num_ranks: int) -> list[str]:
    """Tags out of order, a message of any rank, more messages than a queue holds, and large ones
    both ways at once."""
    wrong = []
    after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    sends = [dist.isend(torch.full((3,), 10.0 * rank + tag), after, tag=tag) for tag in range(3)]
    for tag in (2, 0, 1):
        got = torch.empty(3)
        dist.recv(got, before, tag=tag)
        if got.tolist() != [10.0 * before + tag] * 3:
            wrong.append(f"tag {tag}")
    sends += [dist.isend(torch.tensor([number]), after) for number in range(100)]
    got_number = torch.empty(1, dtype=torch.int64)
    for number in range(100):
        dist.recv(got_number, before)
        if got_number.item() != number:
            wrong.append(f"message {number}")
    arrived_numbers = [torch.empty(1, dtype=torch.int64) for _ in range(500)]
    receives = [dist.irecv(each, before) for each in arrived_numbers]
    sends += [dist.isend(torch.tensor([number]), after) for number in range(500)]
    for receive in receives:
        receive.wait()
    if [each.item() for each in arrived_numbers] != list(range(500)):
        wrong.append("receives that were posted before their messages came")
    large = torch.full((6_000_000,), float(rank))
    arrived = torch.empty_like(large)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, large, after), dist.P2POp(dist.irecv, arrived, before)]
    )
    for work in (*sends, *works):
        work.wait()
    if not bool((arrived == before).all()):
        wrong.append("a large message")
    if rank == 0:
        sources = [dist.recv(torch.empty(2), tag=9) for _ in range(num_ranks - 1)]
        if sorted(sources) != list(range(1, num_ranks)):
            wrong.append(f"messages of any rank came from {sources}")
    else:
        dist.send(torch.ones(2), 0, tag=9)
    return wrong


def check_callers(rank: int, num_ranks: int) -> list[str]:
    """Whoever calls: views, tensors with gradients, functional collectives, DDP, subgroups, many
    at once."""
    wrong = []
    strided = torch.full((40, 30), float(rank)).t()
    dist.all_reduce(strided)
    if not bool((strided == sum(range(num_ranks))).all()):
        wrong.append("a view that is not contiguous")
    parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
    with torch.no_grad():
        dist.broadcast(parameter, 1)
    if parameter._version != 0 or parameter[0].item() != 1:
        wrong.append("a parameter")
    total = functional.all_reduce(torch.ones(10), "sum", dist.group.WORLD)
    if (total + 0)[0].item() != num_ranks:
        wrong.append("a functional collective")
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 200)
    ddp = DistributedDataParallel(model)
    for _ in range(3):
        ddp(torch.full((2, 300), float(rank))).sum().backward()
    mean = 2.0 * sum(range(num_ranks)) / num_ranks
    if not torch.allclose(model.weight.grad, torch.full_like(model.weight, 3 * mean)):
        wrong.append("DDP of torch")
    pairs = [dist.new_group([first, first + 1]) for first in range(0, num_ranks - 1, 2)]
    for first, pair in zip(range(0, num_ranks - 1, 2), pairs, strict=True):
        if rank in (first, first + 1):
            number = torch.tensor([rank])
            dist.all_reduce(number, group=pair)
            if number.item() != 2 * first + 1:
                wrong.append(f"the group of {first} and {first + 1}")
    started = []
    for number in range(200):
        values = torch.full((1000,), float(number + rank))
        started.append((number, values, dist.all_reduce(values, async_op=True)))
    for number, values, work in reversed(started):
        work.wait()
        if values[-1].item() != number * num_ranks + sum(range(num_ranks)):
            wrong.append(f"reduction {number} of 200 at once")
    return wrong


def check_published(rank: int, num_ranks: int) -> list[str]:
    """Reductions of tensors that lie in shared memory on all ranks, and on one alone."""
    wrong = []
    transport = current_transport()
    assert transport is not None
    for publishes in (range(num_ranks), [1]):
        storage = torch.zeros(1_200_001)
        values = storage[1:]
        if rank in publishes and not transport.publish(values):
            wrong.append("there is no room in /dev/shm")
        for number in range(3):
            values.fill_(float(rank + number))
            values[-1] = 7.0
            dist.all_reduce(values, op=dist.ReduceOp.AVG)
            mean = number + (num_ranks - 1) / 2
            ends = [values[0].item(), values[-2].item(), values[-1].item(), storage[0].item()]
            if ends != pytest.approx([mean, mean, 7.0, 0.0], rel=1e-6):
                wrong.append(f"{list(publishes)}, time {number}: {ends}")
        if rank in publishes:
            transport.withdraw(values)
    return wrong


ALL_CHECKS = (check_reductions, check_copies, check_messages, check_callers, check_published)


def check_primitives(rank: int, num_ranks: int) -> dict[str, Any]:
    with open_mesh(Layout(dp_replicate=num_ranks), device="cpu", collectives="shared"):
        assert shares_memory(dist.group.WORLD)
        found = {check.__name__: check(rank, num_ranks) for check in ALL_CHECKS}
        dist.barrier()
    assert current_transport() is None
    return found


# Of two ranks all runs of other tests are.
@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)],
)
def test_primitives_give_what_plain_sums_and_copies_give(num_ranks: int) -> None:
    for found in run_ranks(num_ranks, check_primitives, num_ranks):
        assert found == {check.__name__: [] for check in ALL_CHECKS}


def sum_noise(rank: int, num_ranks: int) -> list[tuple[bool, bytes]]:
    """Sums of random numbers: equal to those in rank order and float32, and their bytes."""
    sums = []
    with open_mesh(Layout(dp_replicate=num_ranks), device="cpu", collectives="shared"):
        for size, dtype in itertools.product((50, 90_000), (torch.float32, torch.bfloat16)):
            rows = []
            for source in range(num_ranks):
                generator = torch.Generator().manual_seed(source)
                rows.append(torch.randn(size, generator=generator).to(dtype))
            expected = rows[0].float()
            for row in rows[1:]:
                expected = expected + row.float()
            # Ranks arrive in another order each time.
            time.sleep(0.01 * ((rank * 7 + size) % num_ranks))
            total = rows[rank].clone()
            dist.all_reduce(total)
            is_equal = torch.equal(total, expected.to(dtype))
            sums.append((is_equal, total.view(torch.uint8).numpy().tobytes()))
        dist.barrier()
    return sums


def test_addends_are_in_rank_order_whoever_is_late() -> None:
    ranks = run_ranks(3, sum_noise, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    assert [is_equal for is_equal, _ in ranks[0]] == [True] * 4


def wait_in_two_groups(rank: int) -> float:
    """Each rank waits first for the group in which the other one has only posted."""
    with open_mesh(Layout(dp_replicate=2), device="cpu", collectives="shared", timeout_s=30):
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        tensors = [torch.ones(100_000) for _ in groups]
        works: list[Any] = [None, None]
        for number in (rank, 1 - rank):
            works[number] = dist.all_reduce(tensors[number], group=groups[number], async_op=True)
        for number in (rank, 1 - rank):
            works[number].wait()
        # A rank that computes, or waits elsewhere, still gives the others their due.
        if rank == 0:
            late = torch.ones(100_000)
            posted = dist.all_reduce(late, async_op=True)
            with contextlib.suppress(dist.DistStoreError):
                dist.distributed_c10d._get_default_store().wait(["done"], timedelta(seconds=20))
            posted.wait()
        else:
            late = torch.ones(100_000)
            dist.all_reduce(late)
            dist.distributed_c10d._get_default_store().set("done", "1")
        send_before_the_end_of_a_future(rank)
        dist.barrier()
        # Nothing here keeps a group, and gloo's sockets, that torch has let go of.
        destroyed = [weakref.ref(group) for group in groups]
        while groups:
            dist.destroy_process_group(groups.pop())
        gc.collect()
        assert [group() for group in destroyed] == [None, None]
        return float(late.sum() + sum(tensor.sum() for tensor in tensors))


def send_before_the_end_of_a_future(rank: int) -> None:
    """Rank 1 calls the reduction when it has what rank 0 sends after asking for its future."""
    total, message = torch.ones(10), torch.zeros(1)
    if rank == 0:
        future = dist.all_reduce(total, async_op=True).get_future()
        doubled = future.then(lambda each: each.value()[0] * 2)
        assert not future.done()
        dist.send(message, 1)
        # The first is waited for in C++, where a thread comes by.
        assert doubled.wait().sum().item() == 40.0
        assert future.wait()[0].data_ptr() == total.data_ptr()
    else:
        dist.recv(message, 0)
        dist.all_reduce(total)
    assert total.sum().item() == 20.0


def test_ranks_that_wait_elsewhere_hold_nobody_up() -> None:
    assert run_ranks(2, wait_in_two_groups) == [600_000.0] * 2


def send_more_than_is_taken(group: Any) -> None:
    for _ in range(10_000):
        dist.send(torch.ones(10), 1, group)


CALLS_OF_A_LONE_RANK: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(100_000), group=group),
    "a small all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
    "all_gather": lambda group: dist.all_gather_into_tensor(torch.ones(20), torch.ones(10), group),
    "reduce_scatter": lambda group: dist.reduce_scatter_tensor(
        torch.ones(10), torch.ones(20), group=group
    ),
    "broadcast": lambda group: dist.broadcast(torch.ones(10), 1, group),
    "all_to_all": lambda group: dist.all_to_all_single(torch.ones(10), torch.ones(10), group=group),
    "reduce": lambda group: dist.reduce(torch.ones(10), 0, group=group),
    "barrier": lambda group: dist.barrier(group),
    "recv": lambda group: dist.recv(torch.ones(10), 1, group),
    "send": send_more_than_is_taken,
}


def open_group_of_each_call() -> dict[str, Any]:
    """The world for the first, and a group of both ranks for each other one: in a group in which a
    rank was lost nothing is tried any more."""
    groups = {name: dist.new_group([0, 1]) for name in list(CALLS_OF_A_LONE_RANK)[1:]}
    return {next(iter(CALLS_OF_A_LONE_RANK)): dist.group.WORLD, **groups}


def call_alone(name: str, group: Any) -> tuple[str, float]:
    """What a call says that the other rank never makes, and after how many seconds."""
    began_s = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        CALLS_OF_A_LONE_RANK[name](group)
    took_s = time.monotonic() - began_s
    # From now on nothing waits.
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3), group=group)
    return str(caught.value), took_s


TIMEOUT_S = 60.0


def open_mesh_of_two() -> contextlib.AbstractContextManager[Any]:
    return open_mesh(
        Layout(dp_replicate=2), device="cpu", collectives="shared", timeout_s=TIMEOUT_S
    )


def call_after_the_other_left(rank: int) -> dict[str, tuple[str, float]]:
    with open_mesh_of_two():
        groups = open_group_of_each_call()
        dist.all_reduce(torch.ones(3))
        if rank == 1:
            return {}
        return {name: call_alone(name, group) for name, group in groups.items()}


def test_a_rank_that_has_left_is_named_in_one_line() -> None:
    told, _ = run_ranks(2, call_after_the_other_left)
    assert told.keys() == CALLS_OF_A_LONE_RANK.keys()
    for name, (message, took_s) in told.items():
        assert "rank 1" in message, name
        assert "has left" in message, name
        assert "\n" not in message, name
        assert took_s < TIMEOUT_S / 2, f"{name} waited for its timeout"


def ask_until_it_is_completed(work: dist.Work) -> tuple[str, float]:
    """As `call_alone`, of a call that is only asked whether it is done."""
    began_s = time.monotonic()
    while not work.is_completed() and time.monotonic() < began_s + TIMEOUT_S:
        time.sleep(0.001)
    return str(work.exception()), time.monotonic() - began_s


def list_shared_files(pid: int | str) -> set[tuple[str, str, str]]:
    """(device, inode, name) of the shared memory of phalanx that a process maps."""
    found = set()
    # A process of another user, or one that has just ended, shows nothing.
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
            _, _, _, device, inode, *name = line.split(maxsplit=5)
            if name and name[0].startswith(("/memfd:phalanx", "/dev/shm/")):
                found.add((device, inode, name[0]))
    return found


def call_after_the_other_was_killed(rank: int, result: Path) -> None:
    # Of ranks that other tests have in this process.
    inherited = list_shared_files("self")
    with open_mesh_of_two():
        of_calls = open_group_of_each_call()
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        transport, values = current_transport(), torch.ones(70_001)
        assert transport is not None
        assert transport.publish(values)
        dist.all_reduce(values)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        told = {name: call_alone(name, group) for name, group in of_calls.items()}
        asked = {
            "irecv": lambda: dist.irecv(torch.ones(1), 1, group=groups[0]),
            "async all_reduce": lambda: dist.all_reduce(
                torch.ones(1), group=groups[1], async_op=True
            ),
        }
        told |= {name: ask_until_it_is_completed(post()) for name, post in asked.items()}
        held = [sorted(list_shared_files("self") - inherited), count_used_bytes()]
        result.write_text(json.dumps([told, *held]))
        # Held, so that run_ranks reads of the killed rank alone.
        os._exit(0)


def count_used_bytes() -> int:
    """Bytes that /dev/shm has no more."""
    shared = os.statvfs("/dev/shm")
    return (shared.f_blocks - shared.f_bfree) * shared.f_frsize


def kill_one_of_two(rank: int, result: Path) -> tuple[str, int]:
    """Why /dev/shm is not this process's own, and the bytes that are used there at the end."""
    problem = mount_shared_memory("64m")
    with pytest.raises(AssertionError, match="ended without a result"):
        run_ranks(2, call_after_the_other_was_killed, result, patience_s=60.0)
    return problem, count_used_bytes()


def test_a_rank_that_was_killed_is_named_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    ((problem, used_bytes),) = run_ranks(1, kill_one_of_two, tmp_path / "said")
    told, held, held_bytes = json.loads((tmp_path / "said").read_text())
    assert len(told) == len(CALLS_OF_A_LONE_RANK) + 2
    for name, (message, _) in told.items():
        assert "rank 1 (process " in message, name
        assert "has died" in message, name
    took_s = [seconds for _, seconds in told.values()]
    # It is promised within 0.1 s, which test_shared_memory_edges.py has for each call: here other
    # tests take the processors meanwhile.
    assert min(took_s) <= 0.3
    assert max(took_s) < 5.0
    # Two arenas, and what was published by both.
    names = [name for _, _, name in held]
    assert [sum(name.startswith(kind) for name in names) for kind in ("/memfd", "/dev")] == [2, 2]
    maps = [list_shared_files(pid) for pid in os.listdir("/proc") if pid.isdecimal()]
    assert not set().union(*maps) & {tuple(each) for each in held}
    if problem:
        # Files of other tests that run beside these have a name for a moment.
        left = set(os.listdir("/dev/shm")) - before
        wait_until(lambda: left.isdisjoint(os.listdir("/dev/shm")))
    else:
        assert (held_bytes > 0, used_bytes) == (True, 0)


def mount_shared_memory(size: str) -> str:
    """Give this process a /dev/shm of `size` that no other one sees; why that is impossible, else
    empty."""
    new_mount_namespace = 0x20000
    if ctypes.CDLL(None, use_errno=True).unshare(new_mount_namespace):
        return os.strerror(ctypes.get_errno())
    for arguments in (
        ("--make-rprivate", "/"),
        ("-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"),
    ):
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip()
    return ""


def reduce_without_room(rank: int) -> str | tuple[bool, bool]:
    """Whether a tensor found room in a full /dev/shm, and whether its sum over two ranks is right."""
    if problem := mount_shared_memory("64k"):
        return problem
    with open_mesh(Layout(dp_replicate=2), device="cpu", collectives="shared"):
        transport = current_transport()
        assert transport is not None
        values = torch.full((1_200_001,), 1.0 + rank)
        has_room = transport.publish(values)
        dist.all_reduce(values)
        dist.barrier()
        return has_room, bool((values == 3.0).all())


def test_where_dev_shm_is_full_tensors_are_copied_and_sums_stay_right() -> None:
    found = run_ranks(2, reduce_without_room)
    if isinstance(found[0], str):
        pytest.skip(f"a /dev/shm of its own takes root: {found[0]}")
    assert found == [(False, True)] * 2


class _NotesBus(phalanx.Bus):
    def __init__(self, rank: int) -> None:
        super().__init__(rank=rank)
        self.notes: list[Note] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event)


class _Rows:
    def step_microbatches(self, step: int) -> list[dict[str, torch.Tensor]]:
        return [{"inputs": torch.ones(1, 200)}]


def train_without_room(rank: int) -> str | list[dict[str, Any]]:
    """The warnings of two steps of DDP whose buckets find no room in /dev/shm."""
    if problem := mount_shared_memory("64k"):
        return problem
    job = Job.model_validate(
        {
            "data": {"seq_len": 1},
            "train": {"global_batch_size": 2, "steps": 2},
            "parallel": {"ranks": 2, "dp_replicate": 2, "collectives": "shared"},
        }
    )
    plan, bus = phalanx.make_plan(job, cluster=CPU, num_ranks=2), _NotesBus(rank)
    with (
        use_block_sizes(replace(USUAL, shared_bucket_bytes=1)),
        open_mesh(plan.layout, device="cpu", collectives="shared") as mesh,
    ):
        model = phalanx.parallelize(torch.nn.Linear(200, 200), plan, mesh)
        state = phalanx.TrainState(model, phalanx.build_optimizer(model, job.optim), seed=7)
        data = phalanx.TrainingData(
            _Rows(), lambda outputs, batch: (outputs.square().sum(), torch.tensor(len(outputs)))
        )
        phalanx.Trainer(job, plan, state, bus, data).run(time.monotonic())
        return [note.facts for note in bus.notes if note.code == "warning"]


def test_a_full_dev_shm_is_said_once_in_an_attempt() -> None:
    warned, of_rank_1 = run_ranks(2, train_without_room)
    if isinstance(warned, str):
        pytest.skip(f"a /dev/shm of its own takes root: {warned}")
    assert of_rank_1 == []
    (warning,) = warned
    assert warning["warning"] == "shared_memory_full"
    # Weights of both ranks.
    assert warning["needed_bytes"] >= 2 * 4 * 200 * 200
    assert warning["free_bytes"] <= 65_536
    assert "/dev/shm has" in warning["text"]


def wait_briefly(rank: int) -> list[float]:
    with open_mesh(Layout(dp_replicate=2), device="cpu", collectives="shared", timeout_s=60):
        store = dist.distributed_c10d._get_default_store()
        values = torch.full((50_000,), 1.0 + rank)
        if rank == 0:
            work = dist.all_reduce(values, async_op=True)
            for _ in range(3):
                with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.02 s for rank 1"):
                    work.wait(timedelta(seconds=0.02))
            store.set("waited", "1")
            work.wait()
        else:
            if (pid := os.fork()) == 0:
                # As user code that forks, and whose child goes on with the step.
                dist.all_reduce(values)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
            store.wait(["waited"])
            dist.all_reduce(values)
        dist.barrier()
        return [values.min().item(), values.max().item()]


def test_a_wait_that_times_out_leaves_the_operation_and_the_group_usable() -> None:
    """And so does a process forked off a rank, which takes no part in its place."""
    assert run_ranks(2, wait_briefly) == [[3.0, 3.0]] * 2


def wait_without_descriptors(rank: int) -> list[float]:
    with open_mesh(Layout(dp_replicate=2), device="cpu", collectives="shared", timeout_s=60):
        store = dist.distributed_c10d._get_default_store()
        values = torch.full((5,), 1.0 + rank)
        if rank == 0:
            work = dist.all_reduce(values, async_op=True)
            with letting_no_file_be_opened(), pytest.raises(RuntimeError, match="Timed out"):
                work.wait(timedelta(seconds=0.5))
            store.set("waited", "1")
            work.wait()
        else:
            store.wait(["waited"])
            dist.all_reduce(values)
        dist.barrier()
        return values.tolist()


@contextlib.contextmanager
def letting_no_file_be_opened() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_that_may_open_no_file_waits_for_living_ranks_all_the_same() -> None:
    assert run_ranks(2, wait_without_descriptors) == [[3.0] * 5] * 2


def test_a_process_that_is_gone_is_known_without_opening_a_file() -> None:
    child = subprocess.Popen(["sleep", "100"])
    stat = read_process_stat(child.pid)
    assert stat is not None
    peer = Peer(1, child.pid, stat.start_ticks, arena=None, segments=None)  # type: ignore[arg-type]
    with letting_no_file_be_opened():
        assert peer.is_alive()
        child.kill()
        child.wait()
        assert not peer.is_alive()
    assert not peer.is_alive()


def reduce_through_memory_then_gloo(rank: int) -> list[float]:
    values = torch.full((5,), 1.0 + rank)
    for choice in ("shared", "gloo"):
        with open_mesh(Layout(dp_replicate=2), device="cpu", collectives=choice, timeout_s=60):
            dist.all_reduce(values)
            dist.barrier()
    return values.tolist()


def test_a_process_that_shared_memory_goes_on_through_gloo() -> None:
    assert run_ranks(2, reduce_through_memory_then_gloo) == [[6.0] * 5] * 2


def call_something_else(rank: int) -> str:
    with open_mesh(Layout(dp_replicate=2), device="cpu", collectives="shared", timeout_s=60):
        calls = [
            lambda: dist.all_reduce(torch.ones(6)),
            lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(2)),
        ]
        with pytest.raises(RuntimeError) as caught:
            calls[rank]()
        return str(caught.value)


def test_ranks_that_call_different_collectives_are_told() -> None:
    texts = run_ranks(2, call_something_else)
    assert any("all_reduce of 24 bytes of float32 (sum)" in text for text in texts)
    assert any("all_gather of 8 bytes" in text for text in texts)


def post_a_damaged_slot(rank: int) -> str:
    """The other rank says that its operand lies far outside of its memory."""
    with open_mesh(Layout(dp_replicate=2), device="cpu", collectives="shared", timeout_s=60):
        dist.barrier()
        if rank == 1:
            board = Board.write_slot
            Board.write_slot = lambda self, sequence, slot: board(
                self, sequence, slot._replace(place=2**43)
            )
        with contextlib.suppress(RuntimeError):
            try:
                dist.all_reduce(torch.ones(100_000))
            except ValueError as error:
                return str(error)
        return ""


def test_lengths_from_another_process_are_not_trusted() -> None:
    assert "are outside of a shared arena" in "".join(run_ranks(2, post_a_damaged_slot))


def open_where_ranks_differ(rank: int, what: str, choice: str) -> list[Any]:
    """Rank 2 is on another host, or may not map memory."""
    if rank == 2 and what == "another host":
        opening._name_host = lambda: "another host"
    if rank == 2 and what == "no memory":
        opening.ARENA_BYTES = 1 << 60
    try:
        with open_mesh(Layout(dp_replicate=3), device="cpu", collectives=choice):  # type: ignore[arg-type]
            pair = dist.new_group([0, 1])
            numbers = torch.full((70_000,), float(rank))
            dist.all_reduce(numbers)
            shares = [shares_memory(dist.group.WORLD)]
            if rank < 2:
                dist.all_reduce(numbers, group=pair)
                shares.append(shares_memory(pair))
            return [numbers[-1].item(), *shares]
    except EnvironmentProblem as problem:
        return [str(problem)]


@pytest.mark.parametrize("what", ["another host", "no memory"])
def test_a_group_with_a_rank_elsewhere_goes_through_gloo(what: str) -> None:
    found = run_ranks(3, open_where_ranks_differ, what, "auto")
    assert found == [[6.0, False, True], [6.0, False, True], [3.0, False]]
    assert run_ranks(3, open_where_ranks_differ, what, "gloo") == [
        [6.0, False, False],
        [6.0, False, False],
        [3.0, False],
    ]
    for (message,) in run_ranks(3, open_where_ranks_differ, what, "shared"):
        assert "not all ranks share memory" in message
        assert "parallel.collectives" in message


# In place


def make_shown(transport: Any, values: torch.Tensor, *, in_arena: bool) -> torch.Tensor:
    """`values` where other ranks see them, or not."""
    if not in_arena:
        return values.clone()
    shown = transport.make_tensor(values.numel(), values.dtype)
    return shown.view(values.shape).copy_(values)


def check_in_place(rank: int, num_ranks: int, max_mapped_bytes: int) -> list[str]:
    wrong = []
    with (
        use_block_sizes(BlockSizes(shared_mapped_bytes=max_mapped_bytes)),
        open_mesh(Layout(dp_replicate=num_ranks), device="cpu", collectives="shared"),
    ):
        transport, group = current_transport(), dist.group.WORLD
        assert transport is not None
        assert group is not None
        # Rank 0 shows what it cannot show in place; others do.
        for in_arena, size in itertools.product((True, rank > 0, False), (1, 1000, 300_001)):
            shard = make_shown(transport, make_values(rank, size, torch.float32), in_arena=in_arena)
            flat = torch.zeros(num_ranks * size)
            columns = torch.zeros(size, num_ranks, dtype=torch.bfloat16)
            gathered = [
                GatheredTensor(shard, list(flat.view(num_ranks, -1)), [0] * num_ranks),
                # Of another type, and not in one piece.
                GatheredTensor(shard, list(columns.unbind(1)), [0] * num_ranks),
            ]
            transport.gather_in_place(group, gathered).wait()
            for other in range(num_ranks):
                expected = make_values(other, size, torch.float32)
                if not torch.equal(flat.view(num_ranks, -1)[other], expected):
                    wrong.append(f"gather {in_arena} {size} of {other}")
                if not torch.equal(columns[:, other].float(), expected):
                    wrong.append(f"gather to bf16 {in_arena} {size} of {other}")
            # Each has all, and has changed a part: the last one's is shorter, or empty.
            whole = make_shown(transport, torch.zeros(size), in_arena=in_arena)
            chunk = -(-size // num_ranks)
            starts = [min(other * chunk, size) for other in range(num_ranks)]
            rows = [whole[start : start + chunk] for start in starts]
            rows[rank].fill_(rank + 1.0)
            transport.gather_in_place(group, [GatheredTensor(whole, rows, starts)]).wait()
            if not torch.equal(whole, torch.arange(size).div(chunk, rounding_mode="floor") + 1.0):
                wrong.append(f"gather of rows {in_arena} {size}")
            for dtype, op in itertools.product(LARGE_TYPES, ("sum", "avg")):
                rows_of_all = [make_values(r, size * num_ranks, dtype) for r in range(num_ranks)]
                message = make_shown(transport, rows_of_all[rank], in_arena=in_arena)
                result = torch.empty(size, dtype=dtype)
                transport.reduce_scatter_in_place(
                    group, result, message.view(num_ranks, -1), op
                ).wait()
                total = torch.stack(rows_of_all).double().sum(0)[rank * size : (rank + 1) * size]
                if op == "avg":
                    total /= num_ranks
                if not torch.allclose(result.double(), total, rtol=2**-7):
                    wrong.append(f"reduce_scatter {op} {dtype} {in_arena} {size}")
                # Of two parts each rank has its rows; what lies between and behind is nobody's.
                own = make_shown(transport, rows_of_all[rank], in_arena=in_arena)
                rows = [
                    part[rank * chunk : (rank + 1) * chunk] for part in (own[:size], own[size:-1])
                ]
                transport.reduce_rows_in_place(group, own, rows, op).wait()
                scale = num_ranks if op == "avg" else 1
                wanted = rows_of_all[rank].clone()
                mean = (torch.stack(rows_of_all).double().sum(0) / scale).to(dtype)
                for start, stop in ((0, size), (size, wanted.numel() - 1)):
                    where = slice(start + rank * chunk, min(start + (rank + 1) * chunk, stop))
                    wanted[where] = mean[where]
                if not torch.allclose(own, wanted, rtol=2**-7):
                    wrong.append(f"reduce_rows {op} {dtype} {in_arena} {size}")
    return wrong


@pytest.mark.parametrize(
    ("num_ranks", "max_mapped_bytes"), [(2, USUAL.shared_mapped_bytes), (2, 50_000), (3, 9_002)]
)
def test_tensors_are_gathered_and_reduced_where_they_lie(
    num_ranks: int, max_mapped_bytes: int
) -> None:
    """Also where rows are longer than what is mapped at once, and are copied by pieces."""
    assert run_ranks(num_ranks, check_in_place, num_ranks, max_mapped_bytes) == [[]] * num_ranks


def change_after_the_gather(rank: int) -> float:
    """What a rank that is late reads of one that goes on at once and changes what it showed."""
    with open_mesh(Layout(dp_replicate=2), device="cpu", collectives="shared") as mesh:
        transport, group = current_transport(), dist.group.WORLD
        assert transport is not None
        assert group is not None
        shown = transport.make_tensor(1 << 20, torch.float32).fill_(rank + 1.0)
        whole = torch.zeros(2, 1 << 20)
        most = 0.0
        for _ in range(20):
            transport.gather_in_place(group, [GatheredTensor(shown, list(whole), [0, 0])]).wait()
            shown.fill_(100.0)
            most = max(most, float(whole.max()))
            mesh.barrier()
            shown.fill_(rank + 1.0)
        return most


def test_a_rank_goes_on_when_all_have_read_what_it_showed() -> None:
    assert run_ranks(2, change_after_the_gather) == [2.0, 2.0]


def read_of_a_rank_that_does_not_come(rank: int, in_arena: bool) -> list[float]:
    """What rank 0 gathers while rank 1 waits for it elsewhere; ranks show their tensors where others
    see them, rank 1 only if `in_arena`."""
    with open_mesh(Layout(dp_replicate=2), device="cpu", collectives="shared") as mesh:
        transport, group = current_transport(), dist.group.WORLD
        assert transport is not None
        assert group is not None
        shown = [
            make_shown(
                transport, torch.full((size,), rank + 1.0 + size), in_arena=in_arena or not rank
            )
            for size in (3, 70_000)
        ]
        places = transport.find_places_of_all_ranks(group, shown)
        if not places.are_seen([0, 1]):
            return []
        whole = torch.zeros(2, 70_000)
        if rank == 0:
            gathered = [GatheredTensor(shown[1], list(whole), [0, 0])]
            transport.gather_without_waiting(group, gathered, places, [1]).wait()
        mesh.barrier()
        return whole[:, -1].tolist()


@pytest.mark.parametrize("in_arena", [True, False])
def test_tensors_that_nobody_changes_are_read_without_waiting(in_arena: bool) -> None:
    """Where one rank's lie elsewhere, both ranks know."""
    found = run_ranks(2, read_of_a_rank_that_does_not_come, in_arena)
    assert found == ([[70_001.0, 70_002.0], [0.0, 0.0]] if in_arena else [[], []])
