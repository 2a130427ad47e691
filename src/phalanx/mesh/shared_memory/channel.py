"""The operations of one process group, in the order in which its ranks post them.

Posting never waits. What an operation needs of other ranks is looked at whenever this rank posts or
waits, and now and then by a thread beside it (`backend`), so that ranks which wait for one another
in different groups all come on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.mesh.shared_memory.arena import ArenaBlock, Bytes, OwnArena
from phalanx.mesh.shared_memory.board import (
    CONSUMED,
    NUM_SLOTS,
    POSTED,
    REDUCED,
    Board,
    Slot,
    add_board,
    directory_word,
    find_board,
    has_left,
    has_reached,
)
from phalanx.mesh.shared_memory.futex import wait_for_change
from phalanx.mesh.shared_memory.messages import Messages, Receive, Send
from phalanx.mesh.shared_memory.operations import (
    Blocker,
    Collective,
    CollectivesDifferError,
    Operation,
)
from phalanx.mesh.shared_memory.peers import Peer, describe_loss, explain_unseen_memory
from phalanx.mesh.shared_memory.reduction import DTYPES, REDUCE_OPS
from phalanx.mesh.shared_memory.transfers import Transfer

# Of operands that this rank has staged and that others have not read, in one group.
_MAX_STAGED_BYTES = 32 << 20
# So long a wait sleeps before it asks whether the ranks that it waits for are alive.
_SLEEP_S = 0.05
# The same of a receive of any rank, which cannot sleep on the words of all.
_SLEEP_OF_ANY_S = 0.002
# Some 100 µs, where each rank has a core: the other one is about as far.
_NUM_SPINS = 600

_KINDS = (
    "barrier",
    "all_reduce",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
)
_KINDS_WITH_ROOT = ("broadcast", "reduce")


@dataclass
class _Pending:
    """A transfer that has been posted: its number in the group, what this rank has said of it, and
    how far it is."""

    sequence: int
    transfer: Transfer
    slot: Slot
    operation: Collective
    block: ArenaBlock | None
    has_moved: bool = False


@dataclass
class _Uncompared:
    """A transfer for which this rank need not wait, and the ranks whose call it has not seen."""

    sequence: int
    slot: Slot
    ranks: list[int]


class _MemoryOfMembers:
    """GroupMemory of this rank and those that it has mapped. Raises DistBackendError where a rank
    whose memory is to be seen has died or left."""

    def __init__(self, label: str, arena: OwnArena, members: Sequence[Peer | None]) -> None:
        self._label, self._arena, self._members = label, arena, members

    def view(self, rank: int, place: int, num_bytes: int) -> Bytes:
        peer = self._members[rank]
        if peer is None:
            return self._arena.view(place, num_bytes)
        try:
            return peer.segments.view(place, num_bytes)
        except (OSError, ValueError) as error:
            raise explain_unseen_memory(peer, f"group {self._label}", error) from error

    def forget(self, rank: int, place: int, num_bytes: int) -> None:
        peer = self._members[rank]
        # Segments beside the arena stay in the map.
        if peer is not None and place + num_bytes <= peer.arena.num_bytes:
            peer.arena.forget(place, num_bytes)


class GroupChannel:
    """The operations of one process group on this rank.

    `members`: the ranks of the group in its order, with None for this one. `label` is what people
    call the group. `memory`: what lies where its ranks say. `has_own_core`: this rank may spin, as
    there is a core for each rank of the host, of whatever group.
    """

    def __init__(
        self,
        label: str,
        key: int,
        arena: OwnArena,
        members: Sequence[Peer | None],
        *,
        has_own_core: bool,
    ) -> None:
        self.label, self._key, self._arena = label, key, arena
        self.members = tuple(members)
        self.rank = self.members.index(None)
        self.num_ranks = len(self.members)
        self.memory = _MemoryOfMembers(label, arena, self.members)
        self.lock = threading.RLock()
        self._num_spins = _NUM_SPINS if has_own_core else 0
        self._own = add_board(arena, key, self.num_ranks)
        self._boards: list[Board | None] = [None] * self.num_ranks
        self._boards[self.rank] = self._own
        self._queued: deque[tuple[Collective, Transfer]] = deque()
        self._pending: deque[_Pending] = deque()
        # At most NUM_SLOTS, oldest first: nobody posts more before all have come.
        self._uncompared: deque[_Uncompared] = deque()
        # Blocks that others may still read, with the transfer they belong to, oldest first.
        self._staged: deque[tuple[int, ArenaBlock]] = deque()
        self._staged_bytes = 0
        self._num_posted = self._num_ended = 0
        self._error: Exception | None = None
        # When this rank last asked whether others are alive, and how much had ended then.
        self._looked_s, self._num_ended_when_asked = 0.0, 0
        self._blocker: Blocker | None = None
        # (line, sequence, ranks): what the first open collective waits for.
        self._awaited: tuple[int, int, Sequence[int]] = (POSTED, 0, ())
        self._messages = Messages(arena, self._own, self.members, self._find_board)

    @property
    def is_idle(self) -> bool:
        """True if nothing that was posted is open, or will ever end."""
        if self._error is not None:
            return True
        return not self._queued and not self._pending and self._messages.is_idle

    def post(self, collective: Collective) -> None:
        """Take `collective`, after all that were taken before.

        Raises what has ended this group's operations, if something has.
        """
        with self.lock:
            self._queued.extend((collective, transfer) for transfer in collective.transfers)
            self.advance()

    def post_send(self, send: Send) -> None:
        with self.lock:
            self._messages.post_send(send)
            self.advance()

    def post_receive(self, receive: Receive) -> None:
        with self.lock:
            self._messages.post_receive(receive)
            self.advance()

    def advance(self) -> None:
        """Do what can be done without waiting.

        Raises CollectivesDifferError if another rank has posted something else.
        """
        with self.lock:
            if self._error is not None:
                raise self._error
            try:
                self._advance_collectives()
                if not self._messages.is_idle:
                    self._messages.advance()
            except Exception as error:
                self._error = error
                raise

    def _advance_collectives(self) -> None:
        if not (self._queued or self._pending or self._staged or self._uncompared):
            return
        while True:
            num_ended = self._num_ended
            self._free_consumed_blocks()
            self._post_queued()
            self._move_pending()
            if self._uncompared:
                self._compare_late_ranks()
            self._end_transfers()
            # What has ended may make room for what is queued.
            if not self._queued or self._num_ended == num_ended:
                return

    def wait(
        self, operation: Operation, timeout_s: float, advance_others: Callable[[], object]
    ) -> None:
        """Return when `operation` is done.

        Raises DistBackendError if a rank that it needs has died or left, and RuntimeError after
        `timeout_s`; after that the operation goes on, and may be waited for again.
        """
        now_s = time.monotonic()
        deadline_s, look_s = now_s + timeout_s, now_s + _SLEEP_S
        sleep_s = _SLEEP_S if self._waits_for_one(operation) else _SLEEP_OF_ANY_S
        while True:
            with self.lock:
                self.advance()
                if operation.is_done:
                    return
                blocker = self._find_blocker(operation)
            assert blocker is not None, "an open operation waits for another rank"
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise RuntimeError(
                    f"Timed out waiting {timeout_s:g} s for rank {blocker.peer.rank} in"
                    f" {operation.name} of group {self.label}"
                )
            if any(blocker.has_changed() for _ in range(self._num_spins)):
                continue
            wait_for_change(blocker.address, blocker.value, min(sleep_s, remaining_s))
            if blocker.has_changed():
                continue
            if time.monotonic() >= look_s:
                self._require_present(operation)
                look_s = time.monotonic() + _SLEEP_S
            advance_others()

    def sleep_on(self, operation: Operation, timeout_s: float) -> bool:
        """Return when `operation` may come on, at the latest after `timeout_s`; False, and at once,
        if nothing is known that it waits for."""
        with self.lock:
            blocker = None if operation.is_done else self._find_blocker(operation)
        if blocker is None:
            return False
        wait_for_change(blocker.address, blocker.value, timeout_s)
        return True

    def say(self, operation: Operation) -> str:
        """What people call an operation of this group."""
        return f"{operation.name} of group {self.label}"

    @property
    def error(self) -> Exception | None:
        """What has ended this group's operations; None while they go on."""
        return self._error

    def fail(self, error: Exception) -> None:
        """Have every later call raise `error`."""
        with self.lock:
            self._error = self._error or error

    def find_error(self, operation: Operation) -> Exception | None:
        """What has ended this group's operations: also that a rank has died or left which
        `operation` waits for, for callers that only ask whether it is done."""
        now_s = time.monotonic()
        # By operation: one that waits for a slow rank must not hide one that waits for a dead one.
        if self._error is None and now_s >= operation.asked_s + _SLEEP_S:
            operation.asked_s = now_s
            self._fail_if_lost(operation)
        return self._error

    def look_for_lost(self) -> None:
        """Find out whether ranks that the oldest collective waits for are there, unless something
        has ended since the last look: for a thread that looks now and then."""
        if self._error is not None or time.monotonic() < self._looked_s + _SLEEP_S:
            return
        self._looked_s = time.monotonic()
        with self.lock:
            oldest = None
            if self._pending:
                oldest = self._pending[0].operation
            elif self._queued:
                oldest = self._queued[0][0]
            num_ended, self._num_ended_when_asked = self._num_ended_when_asked, self._num_ended
            if oldest is None or num_ended != self._num_ended:
                return
        self._fail_if_lost(oldest)

    def _fail_if_lost(self, operation: Operation) -> None:
        # It is kept for those who wait.
        with contextlib.suppress(Exception):
            self._require_present(operation)

    def _require_present(self, operation: Operation) -> None:
        """Raise DistBackendError if a rank that `operation` still waits for has died or left."""
        with self.lock:
            lost = self._find_lost(operation)
            if lost is None:
                return
            # What it wrote before that still counts.
            self.advance()
            if operation.is_done or lost not in self._list_awaited(operation):
                return
        error = describe_loss(lost, f"{operation.name} of group {self.label}")
        self.fail(error)
        raise error

    def _find_lost(self, operation: Operation) -> Peer | None:
        """A rank that has died or left, of those that `operation` waits for. Of a message of any
        rank those that left are missed when all have."""
        awaited = self._list_awaited(operation)
        # In this order: one that leaves and ends in between has left.
        dead = [peer for peer in awaited if not peer.is_alive() and not has_left(peer.arena)]
        left = [peer for peer in awaited if has_left(peer.arena)]
        if dead:
            return dead[0]
        if left and (self._waits_for_one(operation) or len(left) == len(awaited)):
            return left[0]
        return None

    def _find_blocker(self, operation: Operation) -> Blocker | None:
        if isinstance(operation, Collective):
            return self._blocker
        if isinstance(operation, Send):
            return self._messages.find_blocker(operation)
        return operation.blocker

    def _waits_for_one(self, operation: Operation) -> bool:
        """False for a message that any of several ranks may send."""
        is_of_any = isinstance(operation, Receive) and operation.source is None
        return not is_of_any or self.num_ranks == 2

    def _list_awaited(self, operation: Operation) -> list[Peer]:
        """The ranks that `operation` waits for, in their order: all of them, for the first may be
        slow and another one dead."""
        if isinstance(operation, Collective):
            line, sequence, ranks = self._awaited
            missing = [rank for rank in ranks if not self._has_reached(line, sequence, rank)]
            peers = [self.members[rank] for rank in missing]
        elif self._waits_for_one(operation):
            blocker = self._find_blocker(operation)
            peers = [None if blocker is None else blocker.peer]
        else:
            peers = list(self.members)
        return [peer for peer in peers if peer is not None]

    def _find_board(self, rank: int) -> tuple[Board | None, Blocker | None]:
        """The board of a rank of the group; as long as it has none, what to wait for."""
        board = self._boards[rank]
        if board is not None:
            return board, None
        peer = self.members[rank]
        assert peer is not None
        # Read before looking, so that a board which comes meanwhile is not slept through.
        address, word = directory_word(peer.arena)
        board = self._boards[rank] = find_board(peer.arena, self._key, self.num_ranks)
        if board is None:
            return None, Blocker(peer, address, word)
        return board, None

    def _has_all_reached(self, line: int, sequence: int, ranks: Sequence[int]) -> bool:
        """True if `ranks` have come to `sequence`; else the first that has not is the blocker."""
        for rank in ranks:
            if rank == self.rank:
                continue
            board, blocker = self._find_board(rank)
            if board is None:
                self._blocker, self._awaited = blocker, (line, sequence, ranks)
                return False
            word = board.read(line)
            if not has_reached(word, sequence):
                peer = self.members[rank]
                assert peer is not None
                self._blocker = Blocker(peer, board.address_of(line), word)
                self._awaited = line, sequence, ranks
                return False
        return True

    def _has_reached(self, line: int, sequence: int, rank: int) -> bool:
        board, _ = self._find_board(rank)
        return board is not None and has_reached(board.read(line), sequence)

    def _is_read_by_all(self, sequence: int) -> bool:
        """True if every rank, and this one, has done its part of `sequence`."""
        return sequence <= self._num_ended and self._has_all_reached(
            CONSUMED, sequence, range(self.num_ranks)
        )

    def _free_consumed_blocks(self) -> None:
        while self._staged and self._is_read_by_all(self._staged[0][0]):
            _, block = self._staged.popleft()
            self._staged_bytes -= block.capacity
            self._arena.free(block)

    def _post_queued(self) -> None:
        while self._queued:
            operation, transfer = self._queued[0]
            num_bytes = 0
            if transfer.place is None:
                num_bytes = transfer.operand_bytes
            if self._staged and self._staged_bytes + num_bytes > _MAX_STAGED_BYTES:
                self._block_on_oldest()
                return
            sequence = self._num_posted + 1
            oldest_kept = sequence - NUM_SLOTS
            if oldest_kept > 0 and not self._is_read_by_all(oldest_kept):
                return
            self._queued.popleft()
            self._num_posted = sequence
            self._pending.append(self._stage(sequence, operation, transfer))

    def _block_on_oldest(self) -> None:
        if not self._pending:
            self._has_all_reached(CONSUMED, self._staged[0][0], range(self.num_ranks))

    def _stage(self, sequence: int, operation: Collective, transfer: Transfer) -> _Pending:
        block, place = None, transfer.place
        if place is None and transfer.operand_bytes:
            block = self._arena.allocate(transfer.operand_bytes)
            place = block.offset
            transfer.stage(self._arena.view_block(block))
            self._staged.append((sequence, block))
            self._staged_bytes += block.capacity
        slot = _describe(transfer, place or 0)
        self._own.write_slot(sequence, slot)
        self._own.write(POSTED, sequence)
        return _Pending(sequence, transfer, slot, operation, block)

    def _move_pending(self) -> None:
        for pending in self._pending:
            if pending.has_moved:
                continue
            transfer = pending.transfer
            sources = [r for r in range(self.num_ranks) if transfer.needs_operand_of(r)]
            if not self._has_all_reached(POSTED, pending.sequence, sources):
                return
            transfer.move(self._list_operands(pending, sources), self.memory)
            pending.has_moved = True
            if not sources:
                self._compare_later(pending)
            if transfer.ends_when_all_moved:
                self._own.write(REDUCED, pending.sequence)

    def _list_operands(self, pending: _Pending, sources: Sequence[int]) -> list[Bytes]:
        """What each rank has staged; of a rank that is no source: nothing."""
        operands = [self._arena.bytes[:0]] * self.num_ranks
        for rank in sources:
            board, peer = self._boards[rank], self.members[rank]
            assert board is not None
            slot = board.read_slot(pending.sequence)
            self._require_same_call(pending.slot, rank, slot)
            if peer is not None:
                try:
                    operands[rank] = peer.segments.view(slot.place, slot.num_bytes)
                except (OSError, ValueError) as error:
                    needed_by = f"{pending.operation.name} of group {self.label}"
                    raise explain_unseen_memory(peer, needed_by, error) from error
            elif pending.block is not None:
                operands[rank] = self._arena.view_block(pending.block)
        return operands

    def _require_same_call(self, own_slot: Slot, rank: int, slot: Slot) -> None:
        if slot.agreed != own_slot.agreed:
            raise CollectivesDifferError(
                f"ranks call different collectives of group {self.label}: this one"
                f" {_format_slot(own_slot)}, rank {self._name_member(rank)}"
                f" {_format_slot(slot)}"
            )

    def _compare_later(self, pending: _Pending) -> None:
        """Have the calls of other ranks compared as they come: the root's with all of them, and any
        other one's with its root's."""
        root = pending.transfer.root
        ranks = [root]
        if root == self.rank:
            ranks = [rank for rank in range(self.num_ranks) if rank != root]
        self._uncompared.append(_Uncompared(pending.sequence, pending.slot, ranks))

    def _compare_late_ranks(self) -> None:
        while self._uncompared:
            oldest = self._uncompared[0]
            oldest.ranks = [r for r in oldest.ranks if not self._try_compare(oldest, r)]
            # Who has not come to this one has come to none behind it.
            if oldest.ranks:
                return
            self._uncompared.popleft()

    def _try_compare(self, own: _Uncompared, rank: int) -> bool:
        """False as long as `rank` has not come."""
        if not self._has_reached(POSTED, own.sequence, rank):
            return False
        board = self._boards[rank]
        assert board is not None
        slot = board.read_slot(own.sequence)
        # Beyond that its slot may be one of a later operation.
        if not has_reached(board.read(POSTED), own.sequence + NUM_SLOTS - 1):
            self._require_same_call(own.slot, rank, slot)
        return True

    def _name_member(self, rank: int) -> int:
        peer = self.members[rank]
        return -1 if peer is None else peer.rank

    def _end_transfers(self) -> None:
        while self._pending and self._pending[0].has_moved:
            first = self._pending[0]
            if first.transfer.ends_when_all_moved:
                if not self._has_all_reached(REDUCED, first.sequence, range(self.num_ranks)):
                    return
                if first.block is not None:
                    first.transfer.collect(self._arena.view_block(first.block))
            self._pending.popleft()
            self._num_ended = first.sequence
            self._own.write(CONSUMED, first.sequence)
            operation = first.operation
            operation.num_done += 1
            if operation.num_done == len(operation.transfers):
                operation.end()


def _describe(transfer: Transfer, place: int) -> Slot:
    return Slot(
        place,
        transfer.operand_bytes,
        transfer.agreed_bytes,
        _KINDS.index(transfer.name),
        DTYPES.index(transfer.dtype),
        REDUCE_OPS.index(transfer.reduce_op),
        transfer.root,
    )


def _format_slot(slot: Slot) -> str:
    """A collective in words; numbers that are no index of a list come from a damaged board."""
    try:
        kind, dtype = _KINDS[slot.kind], str(DTYPES[slot.dtype]).removeprefix("torch.")
        root = f", root {slot.peer} of the group" if kind in _KINDS_WITH_ROOT else ""
        op = REDUCE_OPS[slot.reduce_op]
        return f"{kind} of {slot.agreed_bytes:,} bytes of {dtype} ({op}{root})"
    except IndexError:
        return "something that cannot be read"
