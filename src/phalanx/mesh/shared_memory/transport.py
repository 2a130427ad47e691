"""Takes the calls of torch's process groups whose ranks all share this host's memory.

A call that it does not take goes on to gloo, on all ranks alike: what decides is the operator, the
group, the type and the reduction, which the ranks of a call have in common.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.core.cores import count_allowed_cores, read_cpu_quota
from phalanx.core.forked_copy import ForkedCopyGuard
from phalanx.mesh.c10d_calls import Operator, pass_to_handlers
from phalanx.mesh.reduce_ops import ReduceOps
from phalanx.mesh.shared_memory.arena import OwnArena
from phalanx.mesh.shared_memory.board import SEGMENT_TABLE_AT, say_left
from phalanx.mesh.shared_memory.calls import BUILDERS, CallContext, TakenCall
from phalanx.mesh.shared_memory.channel import GroupChannel
from phalanx.mesh.shared_memory.futures import OperationFuture, PendingFutures
from phalanx.mesh.shared_memory.in_place import (
    GatheredTensor,
    GatherInPlace,
    PlacesOfAllRanks,
    ReduceRowsInPlace,
    ReduceScatterInPlace,
    read_where_they_lie,
)
from phalanx.mesh.shared_memory.messages import Receive, Send
from phalanx.mesh.shared_memory.operations import Collective, Operation
from phalanx.mesh.shared_memory.peers import Peer
from phalanx.mesh.shared_memory.segments import NoRoom, OwnSegments
from phalanx.mesh.shared_memory.tensors import ArenaTensors
from phalanx.mesh.shared_memory.transfers import Transfer
from phalanx.mesh.shared_memory.work import SharedMemoryWork

GATHER_IN_PLACE = Operator("gather_in_place", "all_gather", 0, 1)
REDUCE_SCATTER_IN_PLACE = Operator("reduce_scatter_in_place", "reduce_scatter", 0, 1)

# How long what a rank has posted may wait for the rank to come by, before a thread looks after it.
_HELP_INTERVAL_S = 0.01
# A Work must outlive its waits, which C++ may make without telling Python: torch would wait in its
# own method, for ever.
_MAX_ENDED_WORKS = 256
_MAX_OPEN_WORKS = 4096
# Those of the loop that looks, the deque, and the call that counts.
_REFERENCES_OF_KEPT_WORK = 3


@dataclass
class _KnownGroup:
    """A process group that was asked about, and its channel: None for one that gloo keeps. Here it
    ends with its last user, and with it gloo's sockets."""

    group: weakref.ref[dist.ProcessGroup]
    channel: GroupChannel | None


class SharedMemoryTransport:
    """The shared memory of this rank and of the ranks that it can reach, while they are open.

    `peers`: by rank of the world, those whose memory this one sees. `reach[r]`: those whose memory
    rank r sees, which all ranks know.
    """

    def __init__(
        self,
        arena: OwnArena,
        rank: int,
        peers: Mapping[int, Peer],
        reach: Sequence[Set[int]],
        reduce_ops: ReduceOps,
    ) -> None:
        self._arena, self._rank, self._peers, self._reduce_ops = arena, rank, peers, reduce_ops
        self._reach, self._is_closed, self._is_paused = reach, False, False
        self._reads_in_place = True
        # A garbage collection while it is held may post something.
        self._lock = threading.RLock()
        self._groups: dict[str, _KnownGroup] = {}
        self._channels: dict[int, GroupChannel] = {}
        self._open_works: deque[SharedMemoryWork] = deque()
        self._ended_works: deque[SharedMemoryWork] = deque(maxlen=_MAX_ENDED_WORKS)
        # All ranks of the host compute at once, however few a group has.
        self._has_own_core = len(peers) + 1 <= min(count_allowed_cores(), read_cpu_quota())
        self._segments = OwnSegments(arena, SEGMENT_TABLE_AT, len(peers) + 1)
        self._tensors = ArenaTensors(arena)
        self._futures = PendingFutures()
        self._helper = _Helper(self._look_after, self._futures.sleep)
        self._guard = ForkedCopyGuard(rank)

    @property
    def staged_bytes(self) -> int:
        """Bytes of this rank's memory that were in use at once for operands of others' to read."""
        return self._arena.reserved_bytes

    def handle(self, operator: Operator, args: Sequence[Any], proceed: Callable[[], Any]) -> Any:
        """Take the call if all its ranks share memory, else `proceed`."""
        build = BUILDERS.get(operator.name)
        if build is None:
            return proceed()
        if self._is_closed or self._is_paused:
            return proceed()
        group = dist.ProcessGroup.unbox(args[operator.group_at])
        channel = self._find_channel(group)
        if channel is None:
            return proceed()
        with _without_modes():
            context = CallContext(
                channel.rank, channel.num_ranks, self._reduce_ops.current, self._locate
            )
            call = build(context, args)
            if call is None:
                return proceed()
            work = self._post(call, channel, group)
            if not _is_async(args):
                # Its caller waits and is gone; the tensors would stay until the next call.
                work.forget_result()
        return call.make_result(work.boxed())

    def close(self) -> None:
        """Leave: ranks that wait for this one are told. Once is enough; a process forked off the
        rank, which leaves nothing, tells nobody."""
        if self._is_closed or self._guard.is_copy:
            return
        self._is_closed = True
        self._helper.stop()
        say_left(self._arena)
        self._arena.close()
        for channel in self._channels.values():
            channel.fail(RuntimeError("the shared memory of this rank is closed"))
        self._futures.settle()
        self._channels.clear()
        self._groups.clear()
        self._open_works.clear()
        self._ended_works.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave all calls to gloo while the body runs, on all ranks."""
        self._is_paused, before = True, self._is_paused
        try:
            yield
        finally:
            self._is_paused = before

    @contextlib.contextmanager
    def sending_messages(self) -> Iterator[None]:
        """Send what could be read in place while the body runs, on all ranks, as GPUs do."""
        self._reads_in_place, before = False, self._reads_in_place
        try:
            yield
        finally:
            self._reads_in_place = before

    @property
    def is_paused(self) -> bool:
        """True while all calls are left to gloo."""
        return self._is_paused

    def reads_in_place(self, group: dist.ProcessGroup) -> bool:
        """True if ranks of `group` read each other's tensors where they lie."""
        return self.shows_tensors and self.shares_memory(group)

    @property
    def shows_tensors(self) -> bool:
        """True if some group reads tensors in place."""
        return self._reads_in_place and not self._is_paused

    def shares_memory(self, group: dist.ProcessGroup) -> bool:
        """True if collectives of `group` go through shared memory."""
        if self._is_closed or self._is_paused:
            return False
        return self._find_channel(group) is not None

    @property
    def no_room(self) -> NoRoom | None:
        """The first time that a tensor of this rank, or of one whose memory it sees, found no room
        where others see it."""
        found = [self._segments.no_room, *(peer.segments.no_room for peer in self._peers.values())]
        return next(filter(None, found), None)

    def publish(self, tensor: torch.Tensor) -> bool:
        """Have `tensor` and its views lie where other ranks reduce them in place; False where
        there is no room, and they are copied."""
        return self._segments.publish(tensor)

    def make_tensor(
        self, num_elements: int, dtype: torch.dtype, *, is_reused: bool = False
    ) -> torch.Tensor | None:
        """A flat tensor where other ranks read it in place, whose numbers are anything; None if
        the arena is full. Its memory goes back to the system with it, or stays for the next of its
        size where it `is_reused`."""
        try:
            return self._tensors.make(num_elements, dtype, is_reused=is_reused)
        except MemoryError:
            return None

    def gather_in_place(
        self, group: dist.ProcessGroup, gathered: Sequence[GatheredTensor]
    ) -> SharedMemoryWork:
        """Gather parts of tensors that all ranks of `group` have; on each of them as many, of the
        same sizes. Until it has ended nobody may change what it shows. `group` must share memory.
        """
        return self._post_in_place(
            GATHER_IN_PLACE,
            group,
            [each.source for each in gathered],
            lambda rank: GatherInPlace(gathered, rank, self._locate),
        )

    def find_places_of_all_ranks(
        self, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]
    ) -> PlacesOfAllRanks:
        """Where each rank of `group` has its part of `tensors`, of which all have as many; returns
        when all have asked. `group` must share memory."""
        own_places = [[self._locate_or_elsewhere(tensor), tensor.nbytes] for tensor in tensors]
        own_table = torch.tensor(own_places, dtype=torch.int64, device="cpu")
        table = own_table.new_empty(group.size(), *own_table.shape)
        dist.all_gather_into_tensor(table, own_table, group=group)
        return PlacesOfAllRanks(table.tolist())

    def gather_without_waiting(
        self,
        group: dist.ProcessGroup,
        gathered: Sequence[GatheredTensor],
        places: PlacesOfAllRanks,
        indices: Sequence[int],
    ) -> SharedMemoryWork:
        """Gather tensors that no rank of `group` changes now: it has ended when it returns.
        `indices` are those of `gathered` among the tensors whose `places` these are; all of them
        must be seen. Raises what has ended the group's operations, if something has."""
        channel = self._find_channel(group)
        assert channel is not None, "asked for a group whose ranks share memory"
        if channel.error is not None:
            raise channel.error

        def read(operation: Collective) -> None:
            read_where_they_lie(gathered, places, indices, channel.rank, channel.memory)
            operation.end()

        sources = [each.source for each in gathered]
        return self._pass_to_handlers(GATHER_IN_PLACE, group, sources, channel, read)

    def reduce_scatter_in_place(
        self, group: dist.ProcessGroup, result: torch.Tensor, rows: torch.Tensor, reduce_op: str
    ) -> SharedMemoryWork:
        """Reduce this rank's row of `rows` [ranks of `group`, ...] over them into `result`; both
        are contiguous. Until it has ended nobody may change its rows. `group` must share memory.
        """
        return self._post_in_place(
            REDUCE_SCATTER_IN_PLACE,
            group,
            [rows],
            lambda rank: ReduceScatterInPlace(result, rows, reduce_op, rank, self._locate),
        )

    def reduce_rows_in_place(
        self,
        group: dist.ProcessGroup,
        whole: torch.Tensor,
        rows: Sequence[torch.Tensor],
        reduce_op: str,
    ) -> SharedMemoryWork:
        """Reduce `rows`, contiguous views of `whole` that no other rank of `group` has among its
        own, over the ranks, in place; the rest of `whole` stays as it is. Until it has ended nobody
        may change `whole`. `group` must share memory."""
        return self._post_in_place(
            REDUCE_SCATTER_IN_PLACE,
            group,
            [whole],
            lambda rank: ReduceRowsInPlace(whole, rows, reduce_op, rank, self._locate),
        )

    def _post_in_place(
        self,
        operator: Operator,
        group: dist.ProcessGroup,
        shown: Sequence[torch.Tensor],
        build: Callable[[int], Transfer],
    ) -> SharedMemoryWork:
        channel = self._find_channel(group)
        assert channel is not None, "asked for a group whose ranks share memory"

        def post(operation: Collective) -> None:
            operation.transfers = [build(channel.rank)]
            channel.post(operation)

        return self._pass_to_handlers(operator, group, shown, channel, post)

    def _pass_to_handlers(
        self,
        operator: Operator,
        group: dist.ProcessGroup,
        shown: Sequence[torch.Tensor],
        channel: GroupChannel,
        post: Callable[[Collective], None],
    ) -> SharedMemoryWork:
        """Have `post` begin an operation that whoever watches the calls of c10d sees like one of
        those."""
        works: list[SharedMemoryWork] = []

        def call() -> Any:
            with _without_modes():
                operation = Collective(operator.words)
                post(operation)
                works.append(self._make_work(operation, None, channel, group))
            return works[0].boxed()

        pass_to_handlers(operator, (shown, group.boxed()), call)
        return works[0]

    def _locate_or_elsewhere(self, tensor: torch.Tensor) -> int:
        place = self._locate(tensor)
        return PlacesOfAllRanks.ELSEWHERE if place is None else place

    def _locate(self, tensor: torch.Tensor) -> int | None:
        """The place of a tensor that other ranks see; None of others."""
        place = self._tensors.locate(tensor)
        if place is None:
            place = self._segments.locate(tensor)
        return place

    def withdraw(self, tensor: torch.Tensor) -> None:
        """`tensor` is not used in collectives any more."""
        # A process forked off the rank frees its copies; the rank still uses its own.
        if not self._guard.is_copy:
            self._segments.withdraw(tensor)

    def try_advance(self) -> bool:
        """Do what can be done in every group; return True if something is still open.

        Errors are kept for those who wait there.
        """
        self._end_if_copy()
        with _without_modes():
            for channel in list(self._channels.values()):
                if not channel.is_idle:
                    with contextlib.suppress(Exception):
                        channel.advance()
        return not all(channel.is_idle for channel in list(self._channels.values()))

    def _look_after(self) -> bool:
        """As `try_advance`, for a thread: futures are set, and a lost rank is found, where nobody
        waits."""
        has_open = self.try_advance()
        for channel in list(self._channels.values()):
            channel.look_for_lost()
        return self._futures.settle() or has_open

    def _post(
        self, call: TakenCall, channel: GroupChannel, group: dist.ProcessGroup
    ) -> SharedMemoryWork:
        operation = call.operation
        if isinstance(operation, Collective):
            channel.post(operation)
        elif isinstance(operation, Send):
            channel.post_send(operation)
        elif isinstance(operation, Receive):
            channel.post_receive(operation)
        return self._make_work(operation, call.value, channel, group)

    def _make_work(
        self, operation: Operation, result: Any, channel: GroupChannel, group: dist.ProcessGroup
    ) -> SharedMemoryWork:
        """The handle of an operation that has been posted."""

        # Works outlive their waits, and must not keep gloo's sockets that long.
        known_group = weakref.ref(group)

        def wait_for_end(timeout_s: float | None) -> None:
            self._end_if_copy()
            if timeout_s is None:
                timeout_s = _read_timeout_s(known_group())
            with _without_modes():
                channel.wait(operation, timeout_s, self.try_advance)

        def find_error() -> Exception | None:
            with _without_modes():
                return channel.find_error(operation)

        def keep_future(future: OperationFuture) -> None:
            self._futures.add(future, channel, _read_timeout_s(known_group()))
            self._helper.look_after()

        work = SharedMemoryWork(
            operation, self.try_advance, wait_for_end, find_error, keep_future, result
        )
        self._keep(work)
        if not operation.is_done:
            self._helper.look_after()
        return work

    def _keep(self, work: SharedMemoryWork) -> None:
        """Keep `work` beyond its waits; of those that ended, only their tensors are let go."""
        with self._lock:
            still_open: deque[SharedMemoryWork] = deque(maxlen=_MAX_OPEN_WORKS)
            while self._open_works:
                each = self._open_works.popleft()
                if not each.was_waited_for:
                    still_open.append(each)
                    continue
                if sys.getrefcount(each) <= _REFERENCES_OF_KEPT_WORK:
                    each.forget_result()
                self._ended_works.append(each)
            still_open.append(work)
            # What a finalizer of those tensors has posted meanwhile comes behind.
            still_open.extend(self._open_works)
            self._open_works = still_open

    def _find_channel(self, group: dist.ProcessGroup) -> GroupChannel | None:
        self._end_if_copy()
        name = group.group_name
        known = self._groups.get(name)
        if known is None or known.group() is not group:
            # The checkpointer's thread has groups of its own.
            with self._lock:
                channel = self._open_channel(group, name)
                known = self._groups[name] = _KnownGroup(weakref.ref(group), channel)
        return known.channel

    def _end_if_copy(self) -> None:
        if self._guard.is_copy:
            self._guard.end_copy()

    def _open_channel(self, group: dist.ProcessGroup, name: str) -> GroupChannel | None:
        try:
            ranks = dist.get_process_group_ranks(group)
            backend = group._get_backend(torch.device("cpu")).name()
        except (RuntimeError, ValueError, KeyError):
            # Not one that torch.distributed has opened.
            return None
        if backend != "gloo" or len(ranks) < 2 or not self._see_each_other(ranks):
            return None
        digest = hashlib.blake2b(f"{name} {ranks}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        channel = self._channels.get(key)
        if channel is None:
            label = group.group_desc
            if label == "default_pg":
                label = "world"
            members = [self._peers.get(rank) for rank in ranks]
            channel = self._channels[key] = GroupChannel(
                label, key, self._arena, members, has_own_core=self._has_own_core
            )
        return channel

    def _see_each_other(self, ranks: Sequence[int]) -> bool:
        return all(self._reach[rank] >= set(ranks) - {rank} for rank in ranks)


class _Helper:
    """A thread that looks after what is open while this rank computes, or waits elsewhere.

    `look` returns True while something is open. `sleep` waits for at most some seconds for what is
    waited for in C++, and returns False at once if nothing is.
    """

    def __init__(self, look: Callable[[], bool], sleep: Callable[[float], bool]) -> None:
        self._look, self._sleep = look, sleep
        self._has_open = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()

    def look_after(self) -> None:
        """Something that was posted is open."""
        if self._thread is None:
            self._start_once()
        self._has_open.set()

    def _start_once(self) -> None:
        # The thread of saves posts beside that of training.
        with self._start_lock:
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name="phalanx-shared-memory", daemon=True
                )
                thread.start()
                self._thread = thread

    def stop(self) -> None:
        self._stopped.set()
        self._has_open.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._has_open.wait()
            self._has_open.clear()
            if not self._sleep(_HELP_INTERVAL_S) and self._stopped.wait(_HELP_INTERVAL_S):
                return
            if self._look():
                self._has_open.set()


def _is_async(args: Sequence[Any]) -> bool:
    """What a call of an operator says of itself: the flag and a timeout come last, and are left out
    where they have their defaults."""
    return next((each for each in args[-2:] if isinstance(each, bool)), True)


def _without_modes() -> AbstractContextManager[Any]:
    """What is moved is no operation of the model: modes that count or record those must not see
    it."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return _disable_current_modes()
    return contextlib.nullcontext()


def _read_timeout_s(group: dist.ProcessGroup | None) -> float:
    """The timeout of a group; torch's usual one of a group that is gone."""
    timeout = dist.constants.default_pg_timeout
    if group is not None:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    return float(timeout.total_seconds())
