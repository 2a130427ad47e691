"""Ranks that share memory, all of them in this process: their channels are driven by hand, so that a
test says who is where."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.core.process_stat import read_start_ticks
from phalanx.mesh.shared_memory.arena import OwnArena, open_arena_of_process
from phalanx.mesh.shared_memory.board import SEGMENT_TABLE_AT, reserve_directory
from phalanx.mesh.shared_memory.calls import BUILDERS, CallContext, TakenCall
from phalanx.mesh.shared_memory.channel import GroupChannel
from phalanx.mesh.shared_memory.messages import Receive, Send
from phalanx.mesh.shared_memory.operations import Collective, Operation
from phalanx.mesh.shared_memory.peers import Peer
from phalanx.mesh.shared_memory.segments import SeenSegments

ARENA_BYTES = 1 << 28


class SharedRanks:
    """`channels[r]`: that of rank r in a group of all. `pids`: of ranks that others take for another
    process than this one."""

    def __init__(self, num_ranks: int, pids: Mapping[int, int] | None = None) -> None:
        self.num_ranks, self._pids = num_ranks, pids or {}
        self.arenas = [OwnArena(ARENA_BYTES) for _ in range(num_ranks)]
        for arena in self.arenas:
            reserve_directory(arena)
        self.channels = [
            GroupChannel(
                "world",
                1,
                self.arenas[rank],
                [None if peer == rank else self._open_peer(peer) for peer in range(num_ranks)],
                has_own_core=False,
            )
            for rank in range(num_ranks)
        ]

    def _open_peer(self, rank: int) -> Peer:
        own_pid = os.getpid()
        mapped = open_arena_of_process(own_pid, self.arenas[rank].descriptor, ARENA_BYTES)
        segments = SeenSegments(own_pid, mapped, SEGMENT_TABLE_AT)
        pid = self._pids.get(rank, own_pid)
        return Peer(rank, pid, read_start_ticks(pid) or 0, mapped, segments)

    def post(self, rank: int, name: str, *args: Any) -> Operation:
        """Have `rank` call the operator `name` of c10d."""
        call = build_call(name, *args, rank=rank, num_ranks=self.num_ranks)
        assert call is not None
        operation, channel = call.operation, self.channels[rank]
        if isinstance(operation, Collective):
            channel.post(operation)
        elif isinstance(operation, Send):
            channel.post_send(operation)
        elif isinstance(operation, Receive):
            channel.post_receive(operation)
        return operation

    def advance(self, operations: Sequence[Operation], rounds: int = 200) -> bool:
        """Let all ranks do what they can; True if `operations` are done then."""
        for _ in range(rounds):
            for channel in self.channels:
                channel.advance()
            if all(operation.is_done for operation in operations):
                return True
        return False

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


def build_call(name: str, *args: Any, rank: int = 0, num_ranks: int = 2) -> TakenCall | None:
    """The call of an operator as shared memory takes it; None if it leaves it to gloo."""

    def locate(tensor: torch.Tensor) -> None:
        return None

    return BUILDERS[name](CallContext(rank, num_ranks, "sum", locate), args)
