"""Connections between ranks through which nothing comes any more: TCP repeats what it sends, and
nobody says that it arrived."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

# Repeated so often in a row the same bytes have not arrived for 1.4 s or more.
MIN_REPEATS = 3
_ESTABLISHED = "01"
# The column of the table with the number of repeats, by the timer that runs: for what is on its
# way, and for what could not be sent at all.
_COLUMN_OF_TIMER = {"01": (6, 16), "04": (8, 10)}
_TABLES = ("tcp", "tcp6")
# (address and port here, address and port there), as the kernel writes them.
_Connection = tuple[str, str]


def find_stuck_links(pids: Sequence[int]) -> frozenset[tuple[int, int]]:
    """Pairs of ranks, by their processes `pids`, between which a connection is stuck."""
    connections = {rank: dict(_list_connections(pid)) for rank, pid in enumerate(pids)}
    return frozenset(
        (first, second)
        for first, second in combinations(range(len(pids)), 2)
        if _is_link_stuck(connections[first], connections[second])
    )


def choose_cut_off_ranks(links: frozenset[tuple[int, int]]) -> tuple[int, ...]:
    """The ranks with most stuck links: one that is cut off has one to each other rank. Both ends
    where a single link is stuck."""
    num_links = Counter(rank for link in links for rank in link)
    most = max(num_links.values(), default=0)
    return tuple(sorted(rank for rank, number in num_links.items() if number == most))


def _is_link_stuck(first: Mapping[_Connection, bool], second: Mapping[_Connection, bool]) -> bool:
    for (local, remote), is_stuck in first.items():
        other_end = (remote, local)
        if other_end in second and (is_stuck or second[other_end]):
            return True
    return False


def _list_connections(pid: int) -> Iterator[tuple[_Connection, bool]]:
    """The connections of a process, and whether what it sends there is repeated in vain."""
    inodes = set(_list_socket_inodes(pid))
    for table in _TABLES:
        for line in _read_text(Path(f"/proc/{pid}/net/{table}")).splitlines()[1:]:
            fields = line.split()
            local, remote, state, timer = fields[1], fields[2], fields[3], fields[5]
            if state == _ESTABLISHED and fields[9] in inodes:
                column, base = _COLUMN_OF_TIMER.get(timer.partition(":")[0], (None, 10))
                num_repeats = 0 if column is None else int(fields[column], base)
                # A peer that is alive answers, also one that does not read: it begins at 0 again.
                yield (local, remote), num_repeats >= MIN_REPEATS


def _list_socket_inodes(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
