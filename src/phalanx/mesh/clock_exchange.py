"""Offsets between the monotonic clocks of machines, measured over the process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from phalanx.mesh.mesh import Mesh

# The shortest of so many trips counts: the others were held up on their way.
NUM_ROUND_TRIPS = 32


class MeasuredOffset(NamedTuple):
    """`offset_ns` on this rank's clock at `at_ns` gives rank 0's, wrong by at most `error_ns`."""

    at_ns: int
    offset_ns: int
    error_ns: int


def list_clock_leaders(clocks: Sequence[str]) -> dict[str, int]:
    """The first rank that has each clock, but for the clock of rank 0."""
    leaders: dict[str, int] = {}
    for rank, clock in enumerate(clocks):
        if clock != clocks[0]:
            leaders.setdefault(clock, rank)
    return leaders


def exchange_clock_offsets(
    mesh: Mesh, clocks: Sequence[str], read_ns: Callable[[], int] = time.perf_counter_ns
) -> MeasuredOffset | None:
    """The offset of this rank's clock to that of rank 0; None where they are one clock.

    `clocks`: the name of each rank's clock. Collective, on CPU tensors: the group of `mesh` is one
    of gloo. One rank of each clock sends rank 0 a message and gets its time back. Half of the
    shortest trip is the error: the answer was written at some moment of it (Cristian, 1989).
    """
    own_offset: MeasuredOffset | None = None
    for leader in list_clock_leaders(clocks).values():
        if mesh.rank == 0:
            _answer_with_own_time(mesh, leader, read_ns)
        elif mesh.rank == leader:
            own_offset = _measure_offset_to_first_rank(mesh, read_ns)
    gathered = mesh.gather_json(own_offset)
    leader_of_own_clock = list_clock_leaders(clocks).get(clocks[mesh.rank])
    if leader_of_own_clock is None:
        return None
    return MeasuredOffset(*gathered[leader_of_own_clock])


def _answer_with_own_time(mesh: Mesh, leader: int, read_ns: Callable[[], int]) -> None:
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(NUM_ROUND_TRIPS):
        dist.recv(message, leader, group=mesh.group)
        message[0] = read_ns()
        dist.send(message, leader, group=mesh.group)


def _measure_offset_to_first_rank(mesh: Mesh, read_ns: Callable[[], int]) -> MeasuredOffset:
    message = torch.zeros(1, dtype=torch.int64)
    best: MeasuredOffset | None = None
    for _ in range(NUM_ROUND_TRIPS):
        sent_ns = read_ns()
        dist.send(message, 0, group=mesh.group)
        dist.recv(message, 0, group=mesh.group)
        received_ns = read_ns()
        middle_ns, half_trip_ns = (sent_ns + received_ns) // 2, (received_ns - sent_ns + 1) // 2
        if best is None or half_trip_ns < best.error_ns:
            best = MeasuredOffset(middle_ns, int(message.item()) - middle_ns, half_trip_ns)
    assert best is not None
    return best
