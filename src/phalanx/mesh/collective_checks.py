"""resilience.check_collectives: ranks compare what they are about to call before it runs.

Each call has a tag (`collective_tags`). A rank leaves the digest of its tags where the others see
it, and compares it with those of ranks that have come to the same number; one that differs stops
before it takes part. So nobody computes with what does not fit, and nobody waits for others who
would not have waited. On one machine digests lie in memory (`call_boards`), over machines in the
ranks' store, where leaving and comparing are one round trip. What stopped is put into words from
the tags that all ranks of the group remember, and is the same error on every rank.

A thread beside training tells the others of this rank's calls when they ask, and looks for calls
that another rank does not come to.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.core.black_box import PostedCollective
from phalanx.core.errors import RanksDifferError
from phalanx.mesh.call_boards import (
    CallBoard,
    describe_board,
    hash_channel,
    open_described_board,
)
from phalanx.mesh.collective_tags import (
    NUM_REMEMBERED,
    Channel,
    CollectiveTag,
    build_collective_tag,
    describe_absence,
    describe_difference,
    name_ranks,
    read_tags,
)

# Below the number of tags that ranks remember: the first that differs is still known.
SAMPLING_INTERVAL = NUM_REMEMBERED // 2
_POLL_S = 0.5
# While ranks ask each other, as one that asks is about to announce an error.
_POLL_DURING_QUESTIONS_S = 0.02
_ANSWER_TIMEOUT_S = 4.0
# For training to end by itself once the error is known: its operations end when others leave.
_END_TIMEOUT_S = 3.0
_FIX = "make all ranks call the same collectives in the same order"

FindOverdue = Callable[[float], Sequence[int]]


class CollectiveChecks:
    """Compares the collectives of this rank with those of the others.

    `find_overdue` (set by the recorder) returns the records of calls that have not ended for so
    many seconds. After an error that training does not notice `report_error` is called, and the
    process ends.
    """

    def __init__(
        self,
        *,
        interval: int,
        wait_s: float,
        report_error: Callable[[BaseException], None],
        board_path: Path | None = None,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        self.num_compared = 0
        self.find_overdue: FindOverdue = lambda seconds: ()
        self._every, self._wait_s = interval, wait_s
        self._report_error, self._end_process = report_error, end_process
        self._channels: dict[str, Channel] = {}
        self._newest: tuple[Channel, CollectiveTag] | None = None
        self._call_of_record: dict[int, tuple[Channel, CollectiveTag]] = {}
        self._examined: set[int] = set()
        self._store: dist.Store | None = None
        self._rank, self._world_size, self._answered = 0, 1, 0
        self._answered_s = -math.inf
        self._is_lost = False
        self._board_path = board_path
        self._board: CallBoard | None = None
        # By rank; None for one that cannot be seen, as it is on another machine.
        self._boards: dict[int, CallBoard | None] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    # Called by the recorder, before a collective runs

    def compare(
        self,
        number: int,
        call: PostedCollective,
        group_key: str,
        label: str,
        ranks: Sequence[int],
        reduce_op: str,
        step: int,
    ) -> None:
        """Raise RanksDifferError if another rank calls something else in place of `call`, whose
        record is `number`; `ranks` are those of its group."""
        # Without a store ranks of one machine still see each other's calls in memory.
        is_blind = self._is_lost and self._board is None
        if is_blind or len(ranks) < 2 or (call.op == "recv" and call.peer < 0):
            return
        channel = self._find_channel(call, group_key, label, ranks)
        tag = build_collective_tag(call, reduce_op, step)
        channel.add(tag)
        self._newest = channel, tag
        self._remember_record(number, channel, tag)
        if tag.sequence % self._every and tag.sequence != 1:
            return
        try:
            is_same = self._compare_with_others(channel, tag)
        except (dist.DistError, RuntimeError):
            # The store is gone, and with it the rank or supervisor that held it: the collective
            # will tell.
            self._is_lost = True
            return
        self.num_compared += 1
        if not is_same:
            raise self._put_difference_into_words(channel)

    def _compare_with_others(self, channel: Channel, tag: CollectiveTag) -> bool:
        """True if no rank is seen that came to this number with other calls."""
        board = self._board
        if board is None:
            return self._compare_with_first(channel, tag)
        # Before the others are looked at: of two ranks one sees the other.
        board.write(channel.number, tag.sequence, channel.digest)
        needs_store = False
        for rank in channel.ranks:
            if rank == self._rank:
                continue
            other = self._boards.get(rank) or self._find_board(rank)
            if other is None:
                needs_store = True
            elif other.read(channel.number, tag.sequence) not in (None, channel.digest):
                return False
        # Who has no board yet has not come, and looks at the store if it is on another machine.
        return not needs_store or self._compare_with_first(channel, tag)

    def _find_board(self, rank: int) -> CallBoard | None:
        assert self._store is not None
        if rank in self._boards or not self._store.check([f"board/{rank}"]):
            return None
        description = self._store.get(f"board/{rank}").decode()
        self._boards[rank] = open_described_board(description)
        return self._boards[rank]

    def find_error(self) -> RanksDifferError | None:
        """The error that a rank has announced; None if none has."""
        store = self._store
        if store is None:
            return None
        try:
            if not store.check(["error"]):
                return None
            text = store.get("error").decode()
            store.set(f"read/{self._rank}", "1")
        except (dist.DistError, RuntimeError):
            return None
        return RanksDifferError(text, fix=_FIX)

    def _find_channel(
        self, call: PostedCollective, group_key: str, label: str, ranks: Sequence[int]
    ) -> Channel:
        self._open_store()
        key = group_key
        if call.tag >= 0:
            source, target = call.peer, self._rank
            if call.op == "send":
                source, target = target, source
            key = f"{group_key}/{source}>{target}/{call.tag}"
            label, ranks = f"messages from rank {source} to rank {target}", (source, target)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(key, label, ranks, number=hash_channel(key))
        return channel

    def _open_store(self) -> None:
        if self._store is not None:
            return
        with self._lock:
            if self._store is not None:
                return
            # A connection of its own: whoever waits for a key keeps a connection to itself.
            store = dist.distributed_c10d._get_default_store().clone()
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
            own_store = dist.PrefixStore("collective_checks", store)
            self._open_board(own_store)
            self._store = own_store

    def _open_board(self, store: dist.Store) -> None:
        description = ""
        # Without room for it ranks compare by the store.
        with contextlib.suppress(OSError):
            if self._board_path is not None:
                self._board = CallBoard.create(self._board_path)
                description = describe_board(self._board_path)
        store.set(f"board/{self._rank}", description)

    def _remember_record(self, number: int, channel: Channel, tag: CollectiveTag) -> None:
        self._call_of_record[number] = channel, tag
        self._call_of_record.pop(number - 4 * NUM_REMEMBERED, None)

    def _compare_with_first(self, channel: Channel, tag: CollectiveTag) -> bool:
        """True if the first rank that came to this number has the same tags so far, or none that
        is still known."""
        assert self._store is not None
        # Keys are used again, so that the store does not grow: the value says of which number.
        slot = f"{channel.key}/{tag.sequence % NUM_REMEMBERED}"
        own_record = f"{tag.sequence}:{channel.digest}"
        expected_record = channel.left_at.get(slot, "")
        channel.left_at[slot] = own_record
        while True:
            stored_record = self._store.compare_set(slot, expected_record, own_record).decode()
            number = int(stored_record.partition(":")[0])
            if number >= tag.sequence:
                # Greater: a root that does not wait for those that it sends to is far ahead.
                return stored_record == own_record or number > tag.sequence
            expected_record = stored_record

    # What has been found, in words

    def _put_difference_into_words(self, channel: Channel) -> RanksDifferError:
        states: dict[int, Any] = {}
        # Without a store nobody can be asked.
        with contextlib.suppress(dist.DistError, RuntimeError):
            states = self._ask_ranks(channel.ranks, is_enough=_know_call(channel))
        tags_of = {rank: read_tags(state, channel.key) for rank, state in states.items()}
        text = describe_difference(channel, tags_of)
        if not text:
            text = f"{name_ranks(channel.ranks)} differ in what they call in {channel.label}"
            tag = channel.tags[-1]
            text += f"; rank {self._rank} calls {tag.describe()}, #{tag.sequence}, at {tag.site}"
        return self._announce(text)

    def _announce(self, text: str) -> RanksDifferError:
        """Let all ranks end with `text`, unless another rank was first; returns the error."""
        assert self._store is not None
        with contextlib.suppress(dist.DistError, RuntimeError):
            text = self._store.compare_set("error", "", text).decode()
            self._wait_for_readers()
        return RanksDifferError(text, fix=_FIX)

    def _wait_for_readers(self) -> None:
        """Rank 0, which may hold the store, leaves after the others have read the error."""
        assert self._store is not None
        self._store.set(f"read/{self._rank}", "1")
        if self._rank != 0:
            return
        keys = [f"read/{rank}" for rank in range(self._world_size)]
        deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
        while not self._store.check(keys) and time.monotonic() < deadline_s:
            self._stopped.wait(0.02)

    def _ask_ranks(
        self, ranks: Sequence[int], *, is_enough: Callable[[dict[int, Any]], bool]
    ) -> dict[int, Any]:
        """Ask `ranks` for the state of their calls; None for one that does not answer in time.
        Returns sooner once `is_enough` of the states."""
        assert self._store is not None
        own_question = self._store.add("questions", 1)
        states: dict[int, Any] = dict.fromkeys(ranks)
        began_s = time.monotonic()
        while time.monotonic() < began_s + _ANSWER_TIMEOUT_S:
            # Other ranks may ask, too.
            self._answer_questions()
            for rank in ranks:
                key = f"state/{rank}"
                if self._store.check([key]):
                    state = json.loads(self._store.get(key))
                    if state["question"] >= own_question:
                        states[rank] = state
            if all(state is not None for state in states.values()) and is_enough(states):
                break
            time.sleep(0.02)
        return states

    def _answer_questions(self) -> None:
        """Tell the others of this rank's calls if one has asked since it last did."""
        assert self._store is not None
        question = self._store.add("questions", 0)
        if question == self._answered:
            return
        self._answered, self._answered_s = question, time.monotonic()
        newest: list[Any] = []
        label = ""
        if self._newest is not None:
            label, newest = self._newest[0].label, list(self._newest[1])
        channels = {key: each.to_json() for key, each in list(self._channels.items())}
        state = {"question": question, "channels": channels, "newest": newest, "label": label}
        self._store.set(f"state/{self._rank}", json.dumps(state))

    # The thread beside training

    def watch(self) -> None:
        """Answer other ranks and look for calls that one does not come to, until `stop`."""
        while not self._stopped.wait(self._choose_poll_s()):
            if self._store is None or self._is_lost:
                continue
            try:
                error = self._look_around()
            except (dist.DistError, RuntimeError):
                self._is_lost = True
                continue
            if error is not None:
                self._end_if_training_does_not(error)
                return

    def _choose_poll_s(self) -> float:
        if time.monotonic() < self._answered_s + _ANSWER_TIMEOUT_S:
            return _POLL_DURING_QUESTIONS_S
        return _POLL_S

    def _look_around(self) -> RanksDifferError | None:
        assert self._store is not None
        self._answer_questions()
        error = self.find_error()
        if error is not None:
            return error
        for number in self.find_overdue(self._wait_s):
            if number in self._call_of_record and number not in self._examined:
                self._examined.add(number)
                error = self._examine(*self._call_of_record[number])
                if error is not None:
                    return error
        return None

    def _examine(self, channel: Channel, tag: CollectiveTag) -> RanksDifferError | None:
        """The error if ranks of `channel` have not come to `tag`."""
        states = self._ask_ranks(channel.ranks, is_enough=lambda answers: True)
        absent = _find_absent(channel, tag, states)
        if not absent:
            # All are in it: it is slow.
            return None
        return self._announce(describe_absence(channel, tag, absent, self._wait_s))

    def _end_if_training_does_not(self, error: RanksDifferError) -> None:
        """Report `error` and end the process, unless training ends first: it may wait in C++ for a
        rank that will not come."""
        if self._stopped.wait(_END_TIMEOUT_S):
            return
        self._report_error(error)
        print(f"phalanx: {error}", file=sys.stderr, flush=True)
        self._end_process(int(error.exit_code))

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        """Let go of boards, when nothing is compared any more."""
        own_board, self._board = self._board, None
        for board in (own_board, *self._boards.values()):
            if board is not None:
                board.close()
        self._boards = {}
        if own_board is not None and self._board_path is not None:
            self._board_path.unlink(missing_ok=True)


def _find_absent(channel: Channel, tag: CollectiveTag, states: dict[int, Any]) -> dict[int, Any]:
    """The ranks that have not come to `tag` by their states, with these."""
    absent = {}
    for rank, state in states.items():
        newest = 0
        if state is not None:
            newest = state["channels"].get(channel.key, {"newest": 0})["newest"]
        if newest < tag.sequence:
            absent[rank] = state
    return absent


def _know_call(channel: Channel) -> Callable[[dict[int, Any]], bool]:
    """True of states of ranks that have all come to the newest call of `channel`."""
    number = channel.newest

    def is_enough(states: dict[int, Any]) -> bool:
        return all(number in read_tags(state, channel.key) for state in states.values())

    return is_enough


@contextlib.contextmanager
def checking_collectives(
    mode: str,
    *,
    wait_s: float,
    report_error: Callable[[BaseException], None],
    board_path: Path | None = None,
) -> Iterator[CollectiveChecks | None]:
    """Yield the checks of `resilience.check_collectives`; None for "off".

    `board_path`: a file for this rank's calls; without one ranks compare by their store.
    """
    if mode == "off":
        yield None
        return
    interval = 1
    if mode == "sampled":
        interval = SAMPLING_INTERVAL
    checks = CollectiveChecks(
        interval=interval, wait_s=wait_s, report_error=report_error, board_path=board_path
    )
    thread = threading.Thread(target=checks.watch, name="collective-checks", daemon=True)
    thread.start()
    try:
        yield checks
    finally:
        checks.stop()
        thread.join()
        checks.close()


@contextlib.contextmanager
def raising_error_of_checks(checks: CollectiveChecks | None) -> Iterator[None]:
    """Raise what a rank has found in place of an error of the body, which may be that this rank
    left."""
    try:
        yield
    except Exception as error:
        difference = None
        if checks is not None and not isinstance(error, RanksDifferError):
            difference = checks.find_error()
        if difference is None:
            raise
        raise difference from None
