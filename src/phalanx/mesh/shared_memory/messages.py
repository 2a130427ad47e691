"""Sends and receives between two ranks of a group.

A send copies its tensor into the sender's arena and is done. A receive takes the first message with
its tag, in the order of sending. A rank that waits for a tag says how many messages it has seen:
then the sender goes on, however many lie untaken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from phalanx.mesh.shared_memory.arena import ArenaBlock, Bytes, OwnArena
from phalanx.mesh.shared_memory.board import (
    NUM_MESSAGE_SLOTS,
    Board,
    Slot,
    has_reached,
    is_same_count,
)
from phalanx.mesh.shared_memory.operations import Blocker, Operation
from phalanx.mesh.shared_memory.peers import Peer


def make_nothing() -> Bytes:
    """No bytes: of a message that has been moved."""
    return np.empty(0, np.uint8)


# Of messages to one rank that it has not taken; one message may be larger.
_MAX_STAGED_BYTES = 64 << 20


@dataclass(eq=False)
class Send(Operation):
    target: int = 0
    tag: int = 0
    values: Bytes = field(default_factory=make_nothing, repr=False)


@dataclass(eq=False)
class Receive(Operation):
    """`source` is None for a message of any rank; afterwards it is the rank that has sent it."""

    source: int | None = None
    tag: int = 0
    values: Bytes = field(default_factory=make_nothing, repr=False)


@dataclass
class _Outbox:
    """Messages to one rank: how many were sent, those still to be staged and what keeps them, and
    blocks that it may still read."""

    num_sent: int = 0
    blocker: Blocker | None = None
    queued: deque[Send] = field(default_factory=deque)
    staged: deque[tuple[int, ArenaBlock]] = field(default_factory=deque)
    staged_bytes: int = 0


@dataclass
class _Inbox:
    """Messages of one rank: how many were seen, and those that nobody has taken yet, by number.
    `num_wanting`: so many had been seen when a receive last waited for another one. `num_answers`:
    how often that rank was told what was taken or wanted."""

    num_seen: int = 0
    num_wanting: int = 0
    num_answers: int = 0
    untaken: dict[int, Slot] = field(default_factory=dict)


class Messages:
    """The messages of one group on this rank.

    `find_board` returns the board of a rank, or None as long as it has none.
    """

    def __init__(
        self,
        arena: OwnArena,
        own_board: Board,
        members: Sequence[Peer | None],
        find_board: Callable[[int], tuple[Board | None, Blocker | None]],
    ) -> None:
        self._arena, self._own = arena, own_board
        self._members, self._find_board = members, find_board
        self._own_index = members.index(None)
        self._outboxes = [_Outbox() for _ in members]
        self._inboxes = [_Inbox() for _ in members]
        self._receives: deque[Receive] = deque()

    @property
    def is_idle(self) -> bool:
        """True if no message is to be sent or taken."""
        return not self._receives and not any(outbox.queued for outbox in self._outboxes)

    def post_send(self, send: Send) -> None:
        self._outboxes[send.target].queued.append(send)

    def find_blocker(self, send: Send) -> Blocker | None:
        """What keeps a message that is not staged yet, and all before it to the same rank."""
        return self._outboxes[send.target].blocker

    def post_receive(self, receive: Receive) -> None:
        self._receives.append(receive)

    def advance(self) -> None:
        """Stage and take what can be without waiting."""
        for target, outbox in enumerate(self._outboxes):
            if outbox.queued or outbox.staged:
                self._advance_outbox(target, outbox)
        if self._receives:
            self._take_messages()

    def _advance_outbox(self, target: int, outbox: _Outbox) -> None:
        board, blocker = self._find_board(target)
        num_taken = num_wanting = 0
        if board is not None:
            # Read before the others, so that what changes meanwhile is not slept through.
            blocker = self._block_on(target, board, board.answered_line(self._own_index))
            num_taken = board.read(board.taken_line(self._own_index))
            num_wanting = board.read(board.wanting_line(self._own_index))
        while outbox.staged and has_reached(num_taken, outbox.staged[0][0]):
            _, block = outbox.staged.popleft()
            outbox.staged_bytes -= block.capacity
            self._arena.free(block)
        while outbox.queued:
            send = outbox.queued[0]
            is_full = not has_reached(num_taken, outbox.num_sent + 1 - NUM_MESSAGE_SLOTS)
            too_large = outbox.staged and outbox.staged_bytes + len(send.values) > _MAX_STAGED_BYTES
            # It has seen all, which makes their slots free, and waits for what comes behind them.
            is_wanted = is_same_count(num_wanting, outbox.num_sent)
            if (is_full or too_large) and not is_wanted:
                outbox.blocker = blocker
                return
            outbox.queued.popleft()
            self._stage(outbox, send)

    def _stage(self, outbox: _Outbox, send: Send) -> None:
        outbox.num_sent += 1
        block = self._arena.allocate(len(send.values))
        np.copyto(self._arena.view_block(block), send.values)
        outbox.staged.append((outbox.num_sent, block))
        outbox.staged_bytes += block.capacity
        slot = Slot(block.offset, len(send.values), len(send.values), 0, 0, 0, send.tag)
        self._own.write_message_slot(send.target, outbox.num_sent, slot)
        self._own.write(self._own.sent_line(send.target), outbox.num_sent)
        send.values = make_nothing()
        send.end()

    def _take_messages(self) -> None:
        # What came too early for one receive may come in time for the next one of the same rank
        # and tag, which must not have it.
        waiting: set[tuple[int | None, int]] = set()
        for _ in range(len(self._receives)):
            receive = self._receives.popleft()
            if not self._try_take(receive, waiting):
                waiting.add((receive.source, receive.tag))
                self._receives.append(receive)

    def _try_take(self, receive: Receive, waiting: Set[tuple[int | None, int]]) -> bool:
        sources = [receive.source]
        if receive.source is None:
            sources = [rank for rank, peer in enumerate(self._members) if peer is not None]
        for source in sources:
            assert source is not None
            board, receive.blocker = self._find_board(source)
            if board is None:
                continue
            receive.blocker = self._block_on(source, board, board.sent_line(self._own_index))
            if waiting & {(source, receive.tag), (None, receive.tag)}:
                continue
            inbox = self._inboxes[source]
            self._look_for_new(source, board, inbox)
            for number, slot in inbox.untaken.items():
                if slot.peer == receive.tag:
                    self._take(receive, source, board, inbox, number)
                    return True
            self._ask_for_more(source, inbox)
        return False

    def _ask_for_more(self, source: int, inbox: _Inbox) -> None:
        if inbox.untaken and inbox.num_wanting != inbox.num_seen:
            inbox.num_wanting = inbox.num_seen
            self._answer(source, inbox, self._own.wanting_line(source), inbox.num_seen)

    def _answer(self, source: int, inbox: _Inbox, line: int, count: int) -> None:
        self._own.write_quietly(line, count)
        inbox.num_answers += 1
        self._own.write(self._own.answered_line(source), inbox.num_answers)

    def _look_for_new(self, source: int, board: Board, inbox: _Inbox) -> None:
        num_sent = board.read(board.sent_line(self._own_index))
        while inbox.num_seen != num_sent and has_reached(num_sent, inbox.num_seen + 1):
            inbox.num_seen += 1
            slot = board.read_message_slot(self._own_index, inbox.num_seen)
            inbox.untaken[inbox.num_seen] = slot

    def _take(
        self, receive: Receive, source: int, board: Board, inbox: _Inbox, number: int
    ) -> None:
        slot = inbox.untaken.pop(number)
        # A shorter one leaves the rest of the tensor as it is, as over gloo.
        if slot.num_bytes > len(receive.values):
            raise RuntimeError(
                f"rank {source} of the group has sent {slot.num_bytes} bytes and"
                f" {len(receive.values)} are to be received"
            )
        message = board.arena.view(slot.place, slot.num_bytes)
        np.copyto(receive.values[: slot.num_bytes], message)
        # All messages before the oldest that lies untaken.
        num_taken = min(inbox.untaken, default=inbox.num_seen + 1) - 1
        self._answer(source, inbox, self._own.taken_line(source), num_taken)
        receive.source = source
        receive.values = make_nothing()
        receive.end()

    def _block_on(self, rank: int, board: Board, line: int) -> Blocker:
        peer = self._members[rank]
        assert peer is not None
        return Blocker(peer, board.address_of(line), board.read(line))
