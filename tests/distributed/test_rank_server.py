"""The server of ranks and a rank that waits: what an earlier attempt is told concerns them no more."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.core.typed_json import JsonObject
from phalanx.launch.end_record import EndWriter, WaitingForAttempt, open_end_pipe
from phalanx.launch.messages import (
    SERVER_TO_SUPERVISOR_CODEC,
    SUPERVISOR_TO_SERVER_CODEC,
    KillRanks,
    KillStore,
    RankExited,
    RanksForked,
    RankWaits,
    SendSignalToRanks,
    ServerOrder,
    ServerReport,
    StartRanks,
    StoreExited,
    WriteStacksToLogs,
)
from phalanx.launch.next_attempt import NextAttempt, open_order_pipe
from phalanx.launch.rank import RankTask, run_forked_rank
from phalanx.launch.rank_env import RankEnv
from phalanx.launch.rank_link import RankLink
from phalanx.launch.server import RankServer
from phalanx.launch.wire import MessageChannel

ENTRY = "test_rank_server:wait_for_attempts"
EARLIER, NOW, NEXT = 6, 7, 8
HELD_STEP = 41


def wait_for_attempts(payload: JsonObject, link: RankLink) -> int:
    """What the rank does: it waits for the next attempt, and then for a signal."""
    link.wait_for_next_attempt(HELD_STEP)
    signal.pause()
    return 0


def exit_with_code_of_next_attempt(payload: JsonObject, link: RankLink) -> int:
    """The rank ends at once, with the code of the attempt that it goes on in."""
    following = link.wait_for_next_attempt(HELD_STEP)
    assert following is not None
    code = following["code"]
    assert isinstance(code, int)
    # Not by the exit handlers of the process of the tests.
    os._exit(code)


class Server:
    """A server in a process of its own, and the supervisor's end of its link."""

    def __init__(self, run_dir: Path) -> None:
        ours, its = socket.socketpair()
        life_read, self._life = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            ours.close()
            os.close(self._life)
            link = MessageChannel(its, SERVER_TO_SUPERVISOR_CODEC, SUPERVISOR_TO_SERVER_CODEC)
            os._exit(
                RankServer(link, life_read, run_dir, frozenset()).execute_orders_until_closed()
            )
        its.close()
        os.close(life_read)
        self._link = MessageChannel(ours, SUPERVISOR_TO_SERVER_CODEC, SERVER_TO_SUPERVISOR_CODEC)
        self._received: list[ServerReport] = []

    def send(self, *orders: ServerOrder) -> None:
        for order in orders:
            self._link.send(order)

    def wait_for(self, kind: type[ServerReport]) -> ServerReport:
        """The next report of a class; no other ones but the store's come before it."""
        while True:
            while self._received:
                report = self._received.pop(0)
                if isinstance(report, kind):
                    return report
                assert isinstance(report, StoreExited), report
            assert not self._link.closed
            # Several may come at once: what follows the wanted one is for the next call.
            self._received += self._link.receive()

    def close(self) -> None:
        # The ranks die with the pipe, and the server with its link.
        os.close(self._life)
        self._link.close()
        os.waitpid(self.pid, 0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "logs").mkdir()
    server = Server(tmp_path)
    yield server
    server.close()


def test_orders_of_an_earlier_attempt_are_ignored(server: Server) -> None:
    server.send(StartRanks(NOW, 1, ENTRY, {}, "training"))
    forked = server.wait_for(RanksForked)
    assert server.wait_for(RankWaits) == RankWaits(NOW, 0, HELD_STEP)
    server.send(
        StartRanks(EARLIER, 1, ENTRY, {}, "training"),
        KillRanks(EARLIER),
        KillRanks(EARLIER, (0,)),
        SendSignalToRanks(EARLIER, signal.SIGKILL),
        WriteStacksToLogs(EARLIER, (0,)),
        KillStore(EARLIER),
        StartRanks(NEXT, 1, ENTRY, {}, "training", kept=(0,), kept_from=(0,)),
        # Of the attempt that is over by now.
        KillRanks(NOW),
        SendSignalToRanks(NEXT, signal.SIGTERM),
    )
    kept = server.wait_for(RanksForked)
    assert isinstance(forked, RanksForked)
    assert isinstance(kept, RanksForked)
    assert (kept.attempt, kept.pids) == (NEXT, forked.pids)
    # Each attempt has a store of its own.
    assert kept.store_pid not in (0, forked.store_pid)
    exited = server.wait_for(RankExited)
    assert isinstance(exited, RankExited)
    told = exited.attempt, exited.signal, exited.by_us
    assert told == (NEXT, signal.SIGTERM, False)


def test_a_rank_that_waits_ignores_an_attempt_before_its_own(tmp_path: Path) -> None:
    reader, fd = open_end_pipe()
    sender, orders = open_order_pipe()
    for attempt in (EARLIER, NOW, NEXT):
        sender.send(NextAttempt(attempt, 1, {"code": attempt}, 0, 1))
    pid = os.fork()
    if pid == 0:
        ranks = RankEnv(0, 1, local_rank=0, local_world_size=1, attempt=NOW)
        entry = "test_rank_server:exit_with_code_of_next_attempt"
        task = RankTask(entry, {}, tmp_path, ranks, master_port=1)
        os._exit(run_forked_rank(task, EndWriter(fd), orders))
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == NEXT
    assert reader.read_complete_record() is None
    assert reader.take_waiting() == WaitingForAttempt(NOW, HELD_STEP)
    sender.close()
    orders.close()
