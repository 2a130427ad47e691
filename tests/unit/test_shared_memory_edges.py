"""Collectives through shared memory: what ranks in one process, driven by hand, do at the edges."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.mesh.reduce_ops import ReduceOps
from phalanx.mesh.shared_memory import channel as channel_module
from phalanx.mesh.shared_memory import futex
from phalanx.mesh.shared_memory.arena import OwnArena
from phalanx.mesh.shared_memory.board import CONSUMED, POSTED, REDUCED, has_left, say_left
from phalanx.mesh.shared_memory.operations import CollectivesDifferError, Operation
from phalanx.mesh.shared_memory.peers import Peer
from phalanx.mesh.shared_memory.tensors import ArenaTensors
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
