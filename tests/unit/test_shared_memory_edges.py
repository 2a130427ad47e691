"""Collectives through shared memory: what ranks in one process, driven by hand, do at the edges."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.core.cores import read_cpu_quota
from phalanx.launch.reports import is_caused_by_lost_peer
from phalanx.mesh.reduce_ops import ReduceOps
from phalanx.mesh.shared_memory import channel as channel_module
from phalanx.mesh.shared_memory import futex, opening, segments
from phalanx.mesh.shared_memory import transport as transport_module
from phalanx.mesh.shared_memory.arena import OwnArena, open_arena_of_process
from phalanx.mesh.shared_memory.board import (
    CONSUMED,
    NUM_SLOTS,
    POSTED,
    REDUCED,
    SEGMENT_TABLE_AT,
    has_left,
    reserve_directory,
    say_left,
)
from phalanx.mesh.shared_memory.file_map import FileMap
from phalanx.mesh.shared_memory.in_place import GatheredTensor, GatherInPlace
from phalanx.mesh.shared_memory.operations import Collective, CollectivesDifferError, Operation
from phalanx.mesh.shared_memory.peers import Peer
from phalanx.mesh.shared_memory.segments import OwnSegments
from phalanx.mesh.shared_memory.tensors import ArenaTensors, view_bytes
from phalanx.mesh.shared_memory.transfers import AllReduceSlices
from phalanx.mesh.shared_memory.transport import SharedMemoryTransport
from shared_ranks import ARENA_BYTES, SharedRanks, build_call

pytestmark = pytest.mark.skipif(not futex.is_supported(), reason="words of x86-64 Linux")

MakeRanks = Callable[..., SharedRanks]


@pytest.fixture
def make_ranks() -> Iterator[MakeRanks]:
    made: list[SharedRanks] = []

    def make(*args: Any) -> SharedRanks:
        made.append(SharedRanks(*args))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def run_forked(function: Callable[[], object]) -> int:
    """Call `function` in a copy of this process; its exit code, 0 if it returned."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# A process that user code forks off a rank


def test_a_forked_copy_gives_back_no_page_of_its_rank() -> None:
    arena = OwnArena(ARENA_BYTES)
    tensors = [ArenaTensors(arena).make(1 << 18, torch.float32)]
    tensors[0].fill_(3.0)
    assert run_forked(tensors.clear) == 0
    assert tensors[0].min().item() == 3.0
    # It would be the block that the rank takes next.
    assert run_forked(lambda: arena.allocate(64)) == 1
    arena.close()


def test_a_forked_copy_waits_for_no_thread_of_its_rank() -> None:
    """A thread of the rank may have the arena's lock at the fork: the copy has no such thread."""
    arena = OwnArena(ARENA_BYTES)
    block = arena.allocate(64)
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with arena._lock:
            is_held.set()
            may_end.wait()

    def free() -> None:
        signal.alarm(5)
        arena.free(block)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        assert run_forked(free) == 0
    finally:
        may_end.set()
        thread.join()
        arena.close()


def test_a_forked_copy_leaves_nothing_in_the_place_of_its_rank(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(1)
    transport = SharedMemoryTransport(ranks.arenas[0], 0, {}, [set()], ReduceOps())
    bucket = torch.ones(70_000)
    assert transport.publish(bucket)
    place = transport._segments.locate(bucket)
    assert place is not None

    def leave() -> None:
        transport.withdraw(bucket)
        transport.close()

    assert run_forked(leave) == 0
    assert not has_left(ranks.arenas[0])
    seen = ranks._open_peer(0).segments.view(place, bucket.nbytes)
    assert torch.from_numpy(seen).view(torch.float32).sum().item() == 70_000.0
    transport.withdraw(bucket)


# Calls whose tensors do not belong together: gloo refuses them in its own words


def rows_of(count: int, size: int = 2) -> list[torch.Tensor]:
    return [torch.ones(size) for _ in range(count)]


INTS = torch.zeros(4, dtype=torch.int32)
CALLS_OF_GLOO: dict[str, tuple[Any, ...]] = {
    "gathered floats, read as integers": ("_allgather_base_", INTS, torch.ones(2), None, True),
    "a gather of too few elements": ("_allgather_base_", torch.ones(3), torch.ones(2), None, True),
    "scattered floats, read as integers": (
        *("_reduce_scatter_base_", INTS, torch.ones(8), None, None, True),
    ),
    "one row for two ranks": ("allgather_", [rows_of(1)], rows_of(1), None, True),
    "three rows for two ranks": ("allgather_", [rows_of(3)], rows_of(1), None, True),
    "rows of another length": ("allgather_", [rows_of(2, 3)], rows_of(1), None, True),
    "one row to reduce for two ranks": ("reduce_scatter_", rows_of(1), [rows_of(1)], None, None),
    "three rows to reduce": ("reduce_scatter_", rows_of(1), [rows_of(3)], None, None),
    "one part for two ranks": ("alltoall_", rows_of(1), rows_of(1), None),
    "parts of two types": ("alltoall_", [INTS, INTS], rows_of(2, 4), None),
    "more than is received": ("alltoall_base_", torch.ones(4), torch.ones(8), None, [], []),
    "rows that do not divide": (
        "alltoall_base_",
        torch.ones(3, 2),
        torch.ones(2),
        None,
        [],
        [1, 1],
    ),
    "parts that leave rows out": (
        *("alltoall_base_", torch.ones(2), torch.ones(3), None, [1, 1], [1, 1]),
    ),
    "parts beyond the rows": (
        *("alltoall_base_", torch.ones(2), torch.ones(2), None, [1, 1], [1, 2]),
    ),
    "parts for three ranks": (
        *("alltoall_base_", torch.ones(2), torch.ones(2), None, [1, 1], [1, 1, 0]),
    ),
}
# Those that gloo takes, with bytes beside the tensors.
CALLS_OF_NOBODY: dict[str, tuple[Any, ...]] = {
    "elements that do not divide": (torch.ones(5), torch.ones(5), None, [], []),
    "a number": (torch.ones(()), torch.ones(()), None, [], []),
    "a part of less than nothing": (torch.ones(2), torch.ones(2), None, [1, 1], [3, -1]),
    "floats, received as integers": (INTS, torch.ones(4), None, [], []),
    "floats, received as longer ones": (
        *(torch.ones(4, dtype=torch.float64), torch.ones(4), None, [2, 2], [2, 2]),
    ),
}


@pytest.mark.parametrize("what", CALLS_OF_GLOO)
def test_tensors_that_do_not_belong_together_are_left_to_gloo(what: str) -> None:
    assert build_call(*CALLS_OF_GLOO[what]) is None


@pytest.mark.parametrize("what", CALLS_OF_NOBODY)
def test_what_gloo_would_take_and_move_wrong_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match="all_to_all of"):
        build_call("alltoall_base_", *CALLS_OF_NOBODY[what])


def test_tensors_of_other_shapes_and_as_many_elements_move(make_ranks: MakeRanks) -> None:
    """As over gloo: were the one whose rows do not divide left to gloo, ranks would wait for ever."""
    ranks = make_ranks(2)
    first, second = torch.zeros(6), torch.zeros(3, 2)
    calls = [
        ranks.post(0, "alltoall_base_", first, torch.arange(6.0), None, [], []),
        ranks.post(1, "alltoall_base_", second, torch.arange(6.0, 12).view(3, 2), None, [], []),
    ]
    assert ranks.advance(calls)
    assert first.tolist() == [0.0, 1.0, 2.0, 6.0, 7.0, 8.0]
    assert second.tolist() == [[3.0, 4.0], [5.0, 9.0], [10.0, 11.0]]


def test_a_tensor_is_not_taken_for_the_first_chunk_of_a_longer_one(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2)
    # One has two of a chunk each, the other one of two chunks.
    short, long = torch.ones(1 << 20), torch.ones(2 << 20)
    calls = [ranks.post(0, "allreduce_", [short.clone()]) for _ in range(2)]
    with pytest.raises(CollectivesDifferError) as caught:
        ranks.advance([*calls, ranks.post(1, "allreduce_", [long])])
    assert "4,194,304 bytes" in str(caught.value)
    assert "8,388,608 bytes" in str(caught.value)


# What ranks call that need nothing of each other: each is its own root, or waits for nobody.
CALLS_WITH_OTHER_ROOTS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "broadcasts": lambda rank: ("broadcast_", rows_of(1), None, rank),
    "reductions": lambda rank: ("reduce_", rows_of(1), None, None, 1 - rank),
    "both": lambda rank: (("broadcast_", "reduce_")[rank], rows_of(1), *[None] * (1 + rank), 0),
}


@pytest.mark.parametrize("name", CALLS_WITH_OTHER_ROOTS)
def test_ranks_that_name_different_roots_are_told(name: str, make_ranks: MakeRanks) -> None:
    """The later one as it calls, and the other one when it comes by again."""
    ranks, calls = make_ranks(2), CALLS_WITH_OTHER_ROOTS[name]
    ranks.post(0, *calls(0))
    with pytest.raises(CollectivesDifferError) as later:
        ranks.post(1, *calls(1))
    with pytest.raises(CollectivesDifferError) as earlier:
        ranks.post(0, "barrier", torch.ones(1))
    if name == "broadcasts":
        assert "this one broadcast of 8 bytes of float32 (sum, root 1 of the group)" in str(
            later.value
        )
        assert "rank 1 broadcast of 8 bytes of float32 (sum, root 1 of the group)" in str(
            earlier.value
        )


@pytest.mark.parametrize("name", ["broadcast_", "reduce_"])
@pytest.mark.parametrize("other", [0, 1, 2])
def test_any_of_three_ranks_may_be_the_one_that_names_another_root(
    name: str, other: int, make_ranks: MakeRanks
) -> None:
    """Also where no rank has come as another one calls: all look when they come by again."""
    ranks = make_ranks(3)
    for rank, channel in enumerate(ranks.channels):
        root = 2 if rank == other == 0 else int(rank == other)
        args = (None, root) if name == "broadcast_" else (None, None, root)
        call = build_call(name, rows_of(1), *args, rank=rank, num_ranks=3)
        assert call is not None
        assert isinstance(call.operation, Collective)
        channel._queued.extend((call.operation, each) for each in call.operation.transfers)
        channel._post_queued()
    with pytest.raises(CollectivesDifferError):
        ranks.advance([], rounds=1)


def test_a_root_takes_no_later_call_for_the_one_that_it_has_not_seen(make_ranks: MakeRanks) -> None:
    """The other rank has gone on meanwhile, and used the place of the first one anew."""
    ranks = make_ranks(2)
    values = torch.ones(1)
    ranks.post(0, "broadcast_", [values], None, 0)
    got = torch.zeros(1)
    ranks.post(1, "broadcast_", [got], None, 0)
    later = [ranks.post(1, "broadcast_", rows_of(1), None, 1) for _ in range(NUM_SLOTS)]
    assert later[-1].is_done
    assert got.item() == 1.0
    answers = [ranks.post(0, "broadcast_", rows_of(1), None, 1) for _ in range(NUM_SLOTS)]
    assert ranks.advance(answers)
    assert not ranks.channels[0]._uncompared


def test_parts_without_rows_move(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2)
    nothing, arrived = torch.zeros(0, 3), torch.zeros(2, 3)
    calls = [
        ranks.post(0, "alltoall_base_", nothing, torch.ones(2, 3), None, [0, 0], [0, 2]),
        ranks.post(1, "alltoall_base_", arrived, nothing.clone(), None, [2, 0], [0, 0]),
    ]
    assert ranks.advance(calls)
    assert arrived.sum().item() == 6.0


# Messages


@pytest.mark.parametrize(("num_messages", "size"), [(100, 1), (20, 1 << 20)])
def test_a_tag_is_received_whatever_lies_untaken_before_it(
    num_messages: int, size: int, make_ranks: MakeRanks
) -> None:
    """More messages than a queue has slots, and more bytes than a rank stages of small ones."""
    ranks = make_ranks(2)
    if size > 1:
        # 20 messages of 4 MiB are more than is staged.
        assert num_messages * size * 4 > 64 << 20
    values = [torch.full((size,), float(number)) for number in range(num_messages)]
    sends = [ranks.post(0, "send", [value], None, 1, 5) for value in values]
    last = ranks.post(0, "send", [torch.tensor([99.0])], None, 1, 6)
    assert not ranks.advance([last], rounds=5), "a rank that waits for nothing has its bound"
    got = torch.zeros(1)
    assert ranks.advance([ranks.post(1, "recv_", [got], None, 0, 6), last])
    assert got.item() == 99.0
    for number in range(num_messages):
        message = torch.zeros(size)
        assert ranks.advance([ranks.post(1, "recv_", [message], None, 0, 5)])
        assert message[-1].item() == number
    assert ranks.advance(sends)


def test_a_sender_sleeps_on_what_it_is_asked_for(make_ranks: MakeRanks) -> None:
    """Its queue is full; that another message is wanted comes as soon as that one was taken."""
    ranks = make_ranks(2)
    full = [ranks.post(0, "send", rows_of(1), None, 1, 5) for _ in range(40)][-1]
    wanted = ranks.channels[0]._find_blocker(full)
    assert wanted is not None
    assert not wanted.has_changed()
    ranks.post(1, "recv_", rows_of(1), None, 0, 6)
    assert wanted.has_changed()
    ranks.channels[0].advance()
    taken = ranks.channels[0]._find_blocker(ranks.post(0, "send", rows_of(1), None, 1, 5))
    assert taken is not None
    ranks.post(1, "recv_", rows_of(1), None, 0, 5)
    assert taken.has_changed()


def test_a_receive_of_any_rank_looks_often(
    make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can sleep on the word of one, and the message may be another one's."""
    ranks = make_ranks(3)
    sleeps_s: list[float] = []

    def sleep(address: int, expected: int, timeout_s: float) -> None:
        sleeps_s.append(timeout_s)
        ranks.post(1, "send", [torch.ones(1)], None, 0, 0)

    monkeypatch.setattr(channel_module, "wait_for_change", sleep)
    got = torch.zeros(1)
    receive = ranks.post(0, "recv_any_source_", [got], None, 0)
    ranks.channels[0].wait(receive, 30.0, lambda: None)
    assert got.item() == 1.0
    assert max(sleeps_s) < 0.01


def test_a_message_may_be_shorter_than_its_tensor_as_over_gloo(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2)
    whole, columns = torch.full((4,), 7.0), torch.full((2, 2), 7.0)
    for into, expected in ((whole, [1.0, 1.0, 7.0, 7.0]), (columns.T, [[1.0, 1.0], [7.0, 7.0]])):
        ranks.post(0, "send", rows_of(1), None, 1, 0)
        assert ranks.advance([ranks.post(1, "recv_", [into], None, 0, 0)])
        assert into.tolist() == expected
    ranks.post(0, "send", rows_of(1, 3), None, 1, 0)
    with pytest.raises(RuntimeError, match=r"rank 0 .* has sent 12 bytes and 8 are to be received"):
        ranks.post(1, "recv_", rows_of(1), None, 0, 0)


# Counters


def start_counters_at(ranks: SharedRanks, count: int) -> None:
    for channel in ranks.channels:
        board, messages = channel._own, channel._messages
        channel._num_posted = channel._num_ended = count
        for line in (POSTED, REDUCED, CONSUMED):
            board.write(line, count)
        for peer in range(ranks.num_ranks):
            messages._outboxes[peer].num_sent = messages._inboxes[peer].num_seen = count
            board.write(board.sent_line(peer), count)
            board.write(board.taken_line(peer), count)


@pytest.mark.parametrize("beginning", [2**31 - 70, 2**32 - 70])
def test_counters_begin_anew_after_their_last_number(beginning: int, make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2)
    start_counters_at(ranks, beginning)
    for number in range(140):
        size = 9_000 if number % 7 == 0 else 9
        values = [torch.full((size,), float(rank + number)) for rank in range(2)]
        operations = [ranks.post(rank, "allreduce_", [values[rank]]) for rank in range(2)]
        # Every other message waits behind one of another tag.
        tags = [number % 3, 7]
        got = [torch.zeros(1), torch.zeros(1)]
        for tag in tags:
            sent = torch.tensor([float(number + tag)])
            operations.append(ranks.post(0, "send", [sent], None, 1, tag))
        for tag, into in zip(reversed(tags), got, strict=True):
            operations.append(ranks.post(1, "recv_", [into], None, 0, tag))
        assert ranks.advance(operations), f"operation {number} does not end"
        assert values[0][-1].item() == values[1][-1].item() == 2 * number + 1
        assert [each.item() for each in got] == [number + tag for tag in reversed(tags)]
    assert not ranks.channels[0]._staged


# Ranks that are gone


def find_ended_process() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def wait_for(ranks: SharedRanks, operation: Operation, timeout_s: float = 20.0) -> None:
    ranks.channels[0].wait(operation, timeout_s, lambda: None)


# What rank 0 calls, and rank 1.
CALLS_OF_TWO: dict[str, tuple[Callable[[], tuple[Any, ...]], Callable[[], tuple[Any, ...]]]] = {
    "all_reduce": (lambda: ("allreduce_", rows_of(1)),) * 2,
    "all_reduce by slices": (lambda: ("allreduce_", rows_of(1, 9_000)),) * 2,
    "reduce": (lambda: ("reduce_", rows_of(1), None, None, 0),) * 2,
    "broadcast": (lambda: ("broadcast_", rows_of(1), None, 1),) * 2,
    "all_gather": (lambda: ("allgather_", [rows_of(2)], rows_of(1), None, True),) * 2,
    "reduce_scatter": (lambda: ("reduce_scatter_", rows_of(1), [rows_of(2)], None, None),) * 2,
    "all_to_all": (lambda: ("alltoall_", rows_of(2), rows_of(2), None),) * 2,
    "barrier": (lambda: ("barrier", torch.ones(1)),) * 2,
    "recv": (
        lambda: ("recv_", rows_of(1), None, 1, 0),
        lambda: ("send", rows_of(1), None, 0, 0),
    ),
}


@pytest.mark.parametrize("name", CALLS_OF_TWO)
def test_a_rank_that_dies_in_a_call_is_named(name: str, make_ranks: MakeRanks) -> None:
    """Before it comes, and after it has come: what it has written then still counts, unless it had
    a part of the work to do."""
    own_call, peer_call = CALLS_OF_TWO[name]
    pid = find_ended_process()
    ranks = make_ranks(2, {1: pid})
    with pytest.raises(dist.DistBackendError, match=rf"rank 1 \(process {pid}\) has died, and"):
        wait_for(ranks, ranks.post(0, *own_call()))
    ranks = make_ranks(2, {1: pid})
    ranks.post(1, *peer_call())
    operation = ranks.post(0, *own_call())
    if name == "all_reduce by slices":
        with pytest.raises(dist.DistBackendError, match=r"rank 1 .* has died, and all_reduce"):
            wait_for(ranks, operation)
    else:
        wait_for(ranks, operation)


def start_process_without_end() -> int:
    pid = os.fork()
    if pid == 0:
        try:
            while True:
                signal.pause()
        finally:
            os._exit(2)
    return pid


def measure_loss_s(ranks: SharedRanks, operation: Operation, pid: int) -> float:
    """Seconds from the death of rank 1, which is killed while rank 0 waits, to its error."""
    killed_s = math.nan

    def kill() -> None:
        nonlocal killed_s
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    killer = threading.Timer(0.05, kill)
    killer.start()
    try:
        with pytest.raises(dist.DistBackendError, match=rf"rank 1 \(process {pid}\) has died, and"):
            wait_for(ranks, operation)
        return time.monotonic() - killed_s
    finally:
        killer.join()
        os.waitpid(pid, 0)


@pytest.mark.parametrize("name", [*CALLS_OF_TWO, "send"])
def test_a_rank_that_is_killed_in_a_call_is_named_at_once(name: str, make_ranks: MakeRanks) -> None:
    """By the system's word and clock: of several tries one finds a processor at once, and has three
    times what is promised."""
    took_s = [math.inf]
    while min(took_s) > 0.3 and len(took_s) < 6:
        pid = start_process_without_end()
        ranks = make_ranks(2, {1: pid})
        if name == "send":
            # More than the queue takes.
            calls = [("send", rows_of(1), None, 1, 0)] * 40
        else:
            calls = [CALLS_OF_TWO[name][0]()]
        operations = [ranks.post(0, *call) for call in calls]
        took_s.append(measure_loss_s(ranks, operations[-1], pid))
    assert min(took_s) <= 0.3, took_s


def test_a_rank_that_dies_with_its_queue_full_is_named(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2, {1: find_ended_process()})
    sends = [ranks.post(0, "send", rows_of(1), None, 1, 0) for _ in range(40)]
    with pytest.raises(dist.DistBackendError, match=r"rank 1 .* has died, and send"):
        wait_for(ranks, sends[-1])


def test_a_dead_rank_is_named_while_another_one_is_slow(make_ranks: MakeRanks) -> None:
    """Rank 1 is alive and does not come."""
    ranks = make_ranks(3, {2: find_ended_process()})
    reduction = ranks.post(0, "allreduce_", [torch.ones(9)])
    with pytest.raises(dist.DistBackendError, match=r"rank 2 .* has died, and all_reduce"):
        wait_for(ranks, reduction)


def test_a_receive_of_any_rank_names_a_dead_one_and_outlives_one_that_left(
    make_ranks: MakeRanks,
) -> None:
    ranks = make_ranks(3)
    receive = ranks.post(0, "recv_any_source_", [torch.zeros(1)], None, 0)
    say_left(ranks.arenas[2])
    with pytest.raises(RuntimeError, match="Timed out"):
        wait_for(ranks, receive, timeout_s=0.12)
    say_left(ranks.arenas[1])
    with pytest.raises(dist.DistBackendError, match=r"rank 1 .* has left, and recv"):
        wait_for(ranks, receive)
    ranks = make_ranks(3, {1: find_ended_process()})
    receive = ranks.post(0, "recv_any_source_", [torch.zeros(1)], None, 0)
    with pytest.raises(dist.DistBackendError, match=r"rank 1 .* has died, and recv"):
        wait_for(ranks, receive)


def test_a_rank_that_leaves_and_ends_while_one_looks_has_left(
    make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receive of any rank goes on: rank 2 lives."""
    ranks = make_ranks(3)
    receive = ranks.post(0, "recv_any_source_", [torch.zeros(1)], None, 0)

    def leave_and_end(peer: Peer) -> bool:
        if peer.rank == 1:
            say_left(ranks.arenas[1])
        return peer.rank == 2

    monkeypatch.setattr(Peer, "is_alive", leave_and_end)
    with pytest.raises(RuntimeError, match="Timed out"):
        wait_for(ranks, receive, timeout_s=0.12)


WAITS_OF_RANK_0: dict[str, Callable[[], tuple[Any, ...]]] = {
    "all_reduce": lambda: ("allreduce_", rows_of(1)),
    "recv": lambda: ("recv_", rows_of(1), None, 1, 0),
    "recv of any rank": lambda: ("recv_any_source_", rows_of(1), None, 0),
}


@pytest.mark.parametrize("name", WAITS_OF_RANK_0)
@pytest.mark.parametrize("died_s", [0.0, 0.001, 0.049, 0.051, 0.4])
def test_a_rank_that_dies_at_any_moment_is_named_within_100_ms(
    name: str, died_s: float, make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that runs while the rank sleeps: nothing else takes long on an idle machine."""
    now_s = 0.0

    def sleep(address: int, expected: int, timeout_s: float) -> None:
        nonlocal now_s
        now_s += timeout_s

    monkeypatch.setattr(channel_module, "wait_for_change", sleep)
    monkeypatch.setattr(channel_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(Peer, "is_alive", lambda peer: peer.rank != 1 or now_s < died_s)
    ranks = make_ranks(3)
    operation = ranks.post(0, *WAITS_OF_RANK_0[name]())
    with pytest.raises(dist.DistBackendError, match=r"rank 1 .* has died"):
        wait_for(ranks, operation, timeout_s=60.0)
    assert now_s - died_s <= 0.1


@pytest.mark.parametrize("name", WAITS_OF_RANK_0)
def test_a_dead_rank_is_named_to_who_asks_whether_it_is_done(
    name: str, make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make_ranks(2, {1: find_ended_process()})
    operation, channel = ranks.post(0, *WAITS_OF_RANK_0[name]()), ranks.channels[0]
    with monkeypatch.context() as patched:
        patched.setattr(Peer, "is_alive", lambda peer: True)
        assert channel.find_error(operation) is None
    asked_s = operation.asked_s
    # It does not ask the system each time.
    assert channel.find_error(operation) is None or time.monotonic() - asked_s >= 0.05
    operation.asked_s = 0.0
    # Looks of the thread beside take nobody's turn to ask.
    channel.look_for_lost()
    error = channel.find_error(operation)
    assert isinstance(error, dist.DistBackendError)
    assert "has died" in str(error)


def test_the_thread_beside_finds_a_dead_rank_where_nobody_waits(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2, {1: find_ended_process()})
    channel = ranks.channels[0]
    channel.look_for_lost()
    assert channel.error is None
    ranks.post(0, "allreduce_", rows_of(1))
    channel._looked_s = 0.0
    channel.look_for_lost()
    assert isinstance(channel.error, dist.DistBackendError)
    # What moves on is not looked into.
    ranks = make_ranks(2, {1: find_ended_process()})
    operations = [ranks.post(rank, "allreduce_", rows_of(1)) for rank in range(2)]
    assert ranks.advance(operations)
    ranks.post(0, "allreduce_", rows_of(1))
    ranks.channels[0].look_for_lost()
    assert ranks.channels[0].error is None


# Tensors that lie in files of their own


def post_of_own_file(
    ranks: SharedRanks, rank: int, values: torch.Tensor, kind: str
) -> tuple[Operation, OwnSegments]:
    """Have `rank` reduce or gather `values` where they lie, in a file that others must open."""
    own = OwnSegments(ranks.arenas[rank], SEGMENT_TABLE_AT, 2)
    assert own.publish(values)
    if kind == "all_reduce":
        place = own.locate(values)
        transfer: Any = AllReduceSlices(
            view_bytes(values), values.dtype, "sum", rank, ranks.num_ranks, place
        )
    else:
        rows = list(torch.zeros(2, values.numel()))
        transfer = GatherInPlace([GatheredTensor(values, rows, [0, 0])], rank, own.locate)
    operation = Collective(kind, transfers=[transfer])
    ranks.channels[rank].post(operation)
    return operation, own


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_a_rank_that_dies_before_others_have_opened_its_tensors_is_named(
    kind: str, make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are closed some time before the system says that it has ended."""
    pid = find_ended_process()
    ranks = make_ranks(2, {1: pid})
    post_of_own_file(ranks, 1, torch.ones(9_000), kind)
    peer = ranks.channels[0].members[1]
    assert peer is not None
    peer.segments._pid = pid
    answers = iter([True, True])
    monkeypatch.setattr(Peer, "is_alive", lambda peer: next(answers, False))
    with pytest.raises(dist.DistBackendError, match=rf"rank 1 \(process {pid}\) has died") as lost:
        post_of_own_file(ranks, 0, torch.ones(9_000), kind)
    assert is_caused_by_lost_peer(lost.value)
    assert ranks.channels[0].error is lost.value


def test_tensors_that_a_rank_has_withdrawn_as_it_left_are_its_loss(make_ranks: MakeRanks) -> None:
    ranks, values = make_ranks(2), torch.ones(9_000)
    _, own = post_of_own_file(ranks, 1, values, "all_reduce")
    own.withdraw(values)
    say_left(ranks.arenas[1])
    with pytest.raises(dist.DistBackendError, match=r"rank 1 .* has left, and all_reduce"):
        post_of_own_file(ranks, 0, values.clone(), "all_reduce")


def test_a_rank_that_may_open_no_more_files_says_so_itself(
    make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    ranks = make_ranks(2)
    post_of_own_file(ranks, 1, torch.ones(9_000), "all_reduce")
    monkeypatch.setattr(segments, "open_arena_of_process", refuse)
    with pytest.raises(RuntimeError, match=r"rank 1 .* cannot be mapped: .*Too many open") as own:
        post_of_own_file(ranks, 0, torch.ones(9_000), "all_reduce")
    assert not is_caused_by_lost_peer(own.value)


def test_numbers_of_withdrawn_tensors_are_used_again(
    make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the tensor of before mapped does not read it in place of the new one."""
    monkeypatch.setattr(segments, "_MAX_SEGMENTS", 3)
    ranks = make_ranks(1)
    own, seen = OwnSegments(ranks.arenas[0], SEGMENT_TABLE_AT, 1), ranks._open_peer(0).segments

    def read(place: int) -> float:
        return float(torch.from_numpy(seen.view(place, 8)).view(torch.float64).item())

    kept, places = torch.full((1,), -1.0, dtype=torch.float64), set()
    assert own.publish(kept)
    for number in range(10):
        values = torch.full((1,), float(number), dtype=torch.float64)
        assert own.publish(values)
        place = own.locate(values)
        assert place is not None
        assert read(place) == number
        places.add(place)
        own.withdraw(values)
    assert len(places) == 10
    assert len(seen._mapped) == 1
    place = own.locate(kept)
    assert place is not None
    assert read(place) == -1.0
    # The places of what is gone name nothing.
    with pytest.raises(OSError, match="not in use"):
        read(min(places))
    assert seen.no_room is None


def test_a_rank_without_lines_for_tensors_says_so_to_all(
    make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_MAX_SEGMENTS", 3)
    monkeypatch.setattr(segments, "_MAX_USES_OF_LINE", 2)
    ranks = make_ranks(2)
    peer = ranks._open_peer(1)
    transport = SharedMemoryTransport(ranks.arenas[0], 0, {1: peer}, [], ReduceOps())
    own = OwnSegments(ranks.arenas[1], SEGMENT_TABLE_AT, 2)
    for _ in range(4):
        values = torch.ones(100)
        assert own.publish(values)
        own.withdraw(values)
    assert transport.no_room is None
    assert not own.publish(torch.ones(100))
    no_room = transport.no_room
    assert no_room is not None
    assert no_room == own.no_room
    assert no_room.needed_bytes == 800
    assert "no more can be listed" in no_room.why


def count_uses(inode: int) -> tuple[int, int]:
    """How many descriptors this process has of a file, and how many maps."""
    descriptors = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors.append(os.stat(f"/proc/self/fd/{each}").st_ino)
    maps = [int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines()]
    return descriptors.count(inode), maps.count(inode)


def test_a_tensor_of_another_rank_takes_no_descriptor_and_goes_with_its_last_view() -> None:
    """Else eight ranks of 120 buckets had all the files that a process may usually open."""
    arena = OwnArena(ARENA_BYTES)
    inode = os.fstat(arena.descriptor).st_ino
    assert count_uses(inode) == (1, 1)
    mapped = open_arena_of_process(os.getpid(), arena.descriptor, ARENA_BYTES)
    assert count_uses(inode) == (1, 2)
    arena.bytes[100] = 5
    values = torch.from_numpy(mapped.view(100, 4))
    del mapped
    assert values.tolist() == [5, 0, 0, 0]
    del values
    assert count_uses(inode) == (1, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        FileMap(-1, 4096)
    arena.close()


# Two sandboxes on a host, or on two, whose processes have the same numbers


def test_a_host_without_a_name_is_no_other_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "read_boot_id", lambda: "")
    assert opening._name_host() != opening._name_host()


def test_an_arena_is_not_taken_for_that_of_a_rank_elsewhere() -> None:
    """There the process and its descriptor have the numbers of this one's."""
    arenas = [OwnArena(ARENA_BYTES) for _ in range(2)]
    for arena in arenas:
        reserve_directory(arena)
    facts = [opening._describe_process(arena, "") for arena in arenas]
    peers, _ = opening._open_arenas_of_peers(arenas[0], 0, facts)
    assert list(peers) == [1]
    facts[1]["descriptor"] = facts[0]["descriptor"]
    peers, problem = opening._open_arenas_of_peers(arenas[0], 0, facts)
    assert not peers
    assert "rank 1 is not the process" in problem
    for arena in arenas:
        arena.close()


# Futures


class _Group:
    """Of which there are weak references, as of torch's."""


@contextlib.contextmanager
def opening_future(ranks: SharedRanks, timeout_s: float = 20.0) -> Iterator[Any]:
    """The future of an all-reduce of rank 0, which rank 1 has not called yet."""
    options = SimpleNamespace(_timeout=timedelta(seconds=timeout_s))
    group: Any = _Group()
    group._get_backend = lambda device: SimpleNamespace(options=options)
    transport = SharedMemoryTransport(ranks.arenas[0], 0, {}, [set()], ReduceOps())
    channel = transport._channels[1] = ranks.channels[0]
    operation = ranks.post(0, "allreduce_", [torch.ones(1)])
    work = transport._make_work(operation, "result", channel, group)
    yield work.get_future()
    transport._helper.stop()


def test_a_future_is_set_when_all_have_come(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2)
    with opening_future(ranks) as future:
        behind = future.then(lambda each: each.value() + "!")
        time.sleep(0.05)
        assert not future.done()
        ranks.post(1, "allreduce_", [torch.ones(1)])
        # In C++, which calls nothing of Python.
        assert behind.wait() == "result!"
        assert future.wait() == "result"
    with opening_future(ranks) as future:
        ranks.post(1, "allreduce_", [torch.ones(1)])
        assert future.wait() == "result"


def test_a_future_that_will_never_be_set_raises(make_ranks: MakeRanks) -> None:
    with opening_future(make_ranks(2), timeout_s=0.05) as future:
        behind = future.then(lambda each: each.value())
        with pytest.raises(RuntimeError, match=r"Timed out .*all_reduce of group world"):
            behind.wait()
    with (
        opening_future(make_ranks(2), timeout_s=0.05) as future,
        pytest.raises(RuntimeError, match=r"Timed out .*all_reduce of group world"),
    ):
        future.wait()
    pid = find_ended_process()
    with opening_future(make_ranks(2, {1: pid})) as future:
        behind = future.then(lambda each: each.value())
        with pytest.raises(RuntimeError, match=rf"rank 1 \(process {pid}\) has died"):
            behind.wait()
        with pytest.raises(dist.DistBackendError, match=rf"rank 1 \(process {pid}\) has died"):
            future.wait()


# Cores


def test_ranks_spin_where_all_of_the_host_have_cores(
    make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight ranks on two cores none spins, in however small a group; nor beyond a quota."""

    def has_own_core(num_ranks: int, cores: int, quota: float) -> bool:
        monkeypatch.setattr(transport_module, "count_allowed_cores", lambda: cores)
        monkeypatch.setattr(transport_module, "read_cpu_quota", lambda: quota)
        peers = dict.fromkeys(range(1, num_ranks), peer)
        return SharedMemoryTransport(arena, 0, peers, [], ReduceOps())._has_own_core

    ranks = make_ranks(2)
    arena, peer = ranks.arenas[0], ranks._open_peer(1)
    assert has_own_core(2, 2, math.inf)
    assert not has_own_core(8, 2, math.inf)
    assert not has_own_core(2, 2, 1.0)


def test_the_quota_of_processors_is_the_least_of_all_cgroups_around(tmp_path: Path) -> None:
    def read(own: str, files: dict[str, str]) -> float:
        (tmp_path / "cgroup").write_text(own)
        mount = tmp_path / "fs"
        shutil.rmtree(mount, ignore_errors=True)
        for name, text in files.items():
            (mount / name).parent.mkdir(parents=True, exist_ok=True)
            (mount / name).write_text(text)
        return read_cpu_quota(tmp_path / "cgroup", mount)

    assert read("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}) == math.inf
    assert read("0::/a/b\n", {"a/b/cpu.max": "max 9\n", "a/cpu.max": "150000 100000\n"}) == 1.5
    # The topmost of a container, which it calls by its name outside.
    first = {
        "cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    assert read("5:memory:/\n3:cpu,cpuacct:/docker/1\n", first) == 2.0
    unlimited = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert read("3:cpu,cpuacct:/\n", unlimited) == math.inf
    assert read("", {}) == math.inf


# Threads


def test_two_threads_do_not_sort_works_at_once(make_ranks: MakeRanks) -> None:
    """The asynchronous checkpointer's posts beside training: a Work must not be lost."""
    ranks = make_ranks(2)
    transport = SharedMemoryTransport(ranks.arenas[0], 0, {}, [set()], ReduceOps())
    is_sorting, other_is_kept = threading.Event(), threading.Event()
    came_between: list[bool] = []

    class SlowWork:
        @property
        def was_waited_for(self) -> bool:
            is_sorting.set()
            came_between.append(other_is_kept.wait(0.1))
            return False

    def keep_another() -> None:
        is_sorting.wait()
        transport._keep(SlowWork())  # type: ignore[arg-type]
        other_is_kept.set()

    transport._keep(SlowWork())  # type: ignore[arg-type]
    thread = threading.Thread(target=keep_another)
    thread.start()
    transport._keep(SlowWork())  # type: ignore[arg-type]
    thread.join()
    assert not any(came_between)
    assert len(transport._open_works) == 3
