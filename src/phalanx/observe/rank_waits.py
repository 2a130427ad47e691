"""Finds which ranks wait for which, and why: from their black boxes and the states of their
processes.

A rank waits in a collective that it has posted and that has not ended, for the ranks of its group
that have not posted as many. Whoever is waited for and waits for no other rank is the culprit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from phalanx.core.black_box_reader import BoxGroup, LastPosition, RecordedCollective
from phalanx.observe.process_status import ProcessStatus

# In every step ranks wait for each other: a shorter wait of ranks that run means nothing.
MIN_WAIT_S = 1.0
# Phases that stand for waiting when they name what they wait for.
_WAITING_PHASES = ("collective", "pipeline")
# More than any job has: a damaged text must not ask for memory without end.
_MAX_RANKS = 1 << 20
# Every rank gives a tensor of one shape and type; of others each rank may give its own.
_EQUAL_ON_ALL_RANKS = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class RankState:
    """The facts that are known of a rank from outside: its black box, if it has one, and its
    process."""

    rank: int
    position: LastPosition | None
    process: ProcessStatus = field(default_factory=lambda: ProcessStatus("unknown"))


@dataclass(frozen=True)
class RankWait:
    """A rank that has posted `collective`, which has not ended.

    `absent`: ranks of its group that have not posted it. `differing`: ranks that posted another
    operation, type or shape under its number.
    """

    rank: int
    collective: RecordedCollective
    group: BoxGroup | None
    absent: tuple[int, ...]
    differing: tuple[int, ...]

    @property
    def began_s(self) -> float:
        """Monotonic seconds of the rank's machine since when it waits, as far as is known."""
        return self.collective.wait_began_s or self.collective.posted_s


@dataclass(frozen=True)
class WaitVerdict:
    """The ranks that keep the others waiting.

    `kind`: "stopped", "gone" (a process is halted, and is `culprits`), "absent" (`culprits` did not
    come), "differs" (`culprits` came with another operation or shape), "circle" (`culprits` wait
    for each other), "inside" (all have posted what they wait in), "none" (no rank waits).
    """

    kind: str
    culprits: tuple[int, ...]
    waits: tuple[RankWait, ...]


def judge_ranks(states: Mapping[int, RankState], now_s: float | None = None) -> WaitVerdict:
    """The verdict on ranks whose states were read at about the same moment.

    With `now_s`, monotonic seconds of the ranks' machine, only waits of at least MIN_WAIT_S count.
    """
    waits = find_waits(states)
    if now_s is not None:
        waits = tuple(wait for wait in waits if now_s - wait.began_s >= MIN_WAIT_S)
    halted = _find_halted(states)
    if halted:
        return WaitVerdict(_name_halt(states, halted), halted, waits)
    differing = _order(rank for wait in waits for rank in wait.differing)
    if differing:
        return WaitVerdict("differs", _choose_minority(waits, differing), waits)
    if not waits:
        return WaitVerdict("none", (), ())
    return _follow_waits(waits)


def find_waits(states: Mapping[int, RankState]) -> tuple[RankWait, ...]:
    """The rank's wait of each rank that waits, in rank order."""
    members = _find_members(states)
    waits = []
    for rank, state in sorted(states.items()):
        collective = _find_waited_for(state)
        if collective is None or state.position is None:
            continue
        group = find_group(state.position, collective)
        differing: tuple[int, ...] = ()
        if collective.is_p2p:
            absent = _find_absent_peer(states, rank, collective, group)
        else:
            absent, differing = _compare_with_members(states, rank, collective, group, members)
        waits.append(RankWait(rank, collective, group, absent, differing))
    return tuple(waits)


def find_group(position: LastPosition, collective: RecordedCollective) -> BoxGroup | None:
    if 0 <= collective.group < len(position.groups):
        return position.groups[collective.group]
    return None


def parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks as `core.black_box.format_ranks` writes them; none where the text is damaged."""
    ranges, _, stride_text = text.partition(":")
    ranks: list[int] = []
    try:
        stride = int(stride_text or 1)
        for part in filter(None, ranges.split(",")):
            first_text, _, last_text = part.partition("-")
            first, last = int(first_text), int(last_text or first_text)
            if stride < 1 or last - first >= _MAX_RANKS - len(ranks):
                return ()
            ranks += range(first, last + 1, stride)
    except ValueError:
        return ()
    return tuple(ranks)


def _find_waited_for(state: RankState) -> RecordedCollective | None:
    """The collective that a rank waits in, as far as its box says."""
    position = state.position
    if position is None:
        return None
    calls = [each for each in position.collectives if each.is_foreground]
    # Of calls on a device no end is ever written: nearly all that are "queued" are done.
    unended = [each for each in calls if not each.has_ended and each.state != "queued"]
    for each in unended:
        if each.state == "waiting":
            return each
    is_in_waiting_phase = position.phase in _WAITING_PHASES and bool(position.collective)
    if is_in_waiting_phase and calls and calls[-1].state == "queued":
        return calls[-1]
    if not unended:
        return None
    if is_in_waiting_phase:
        return unended[0]
    newest = unended[-1]
    # Nothing was written since: the rank waits in it, or computes behind it.
    is_last_sign = newest.posted_s >= position.monotonic_s and newest is position.collectives[-1]
    if newest.state == "failed" or (is_last_sign and state.process.state != "running"):
        return newest
    return None


def _find_members(states: Mapping[int, RankState]) -> dict[str, dict[int, BoxGroup | None]]:
    """The ranks of each group by its key, with what each of them has posted in it."""
    members: dict[str, dict[int, BoxGroup | None]] = {}
    for rank, state in states.items():
        if state.position is None:
            continue
        for group in state.position.groups:
            of_group = members.setdefault(group.key, {})
            for other in parse_ranks(group.ranks):
                of_group.setdefault(other, None)
            of_group[rank] = group
    return members


def _compare_with_members(
    states: Mapping[int, RankState],
    rank: int,
    collective: RecordedCollective,
    group: BoxGroup | None,
    members: Mapping[str, Mapping[int, BoxGroup | None]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that have not posted `collective`, and those that posted something else."""
    if group is None:
        return (), ()
    absent, differing = [], []
    for other, of_other in members[group.key].items():
        if other == rank:
            continue
        if of_other is None or of_other.num_posted < collective.sequence:
            absent.append(other)
        elif _differs(collective, _find_record(states[other].position, group, collective)):
            differing.append(other)
    return _order(absent), _order(differing)


def _find_record(
    position: LastPosition | None, group: BoxGroup, collective: RecordedCollective
) -> RecordedCollective | None:
    """The call that another rank posted in the group under the number of `collective`."""
    if position is None:
        return None
    for each in position.collectives:
        of_each = find_group(position, each)
        is_same_group = of_each is not None and of_each.key == group.key
        if is_same_group and not each.is_p2p and each.sequence == collective.sequence:
            return each
    return None


def _differs(one: RecordedCollective, other: RecordedCollective | None) -> bool:
    if other is None:
        # Longer ago than the box remembers.
        return False
    if one.op != other.op or one.dtype != other.dtype or one.peer != other.peer:
        return True
    return one.op in _EQUAL_ON_ALL_RANKS and (one.shape, one.num_bytes) != (
        other.shape,
        other.num_bytes,
    )


def _find_absent_peer(
    states: Mapping[int, RankState],
    rank: int,
    call: RecordedCollective,
    group: BoxGroup | None,
) -> tuple[int, ...]:
    """The other rank of a send or receive, if its box does not say that it has come."""
    if group is None or call.peer < 0:
        # A receive of any rank waits for none.
        return ()
    peer = states.get(call.peer)
    if peer is None or peer.position is None:
        return (call.peer,)
    matching_op = "send" if call.op == "recv" else "recv"
    for each in peer.position.collectives:
        of_each = find_group(peer.position, each)
        if of_each is None or of_each.key != group.key or each.op != matching_op:
            continue
        if each.peer in (rank, -1) and each.tag == call.tag and each.sequence >= call.sequence:
            return ()
    return (call.peer,)


def _find_halted(states: Mapping[int, RankState]) -> tuple[int, ...]:
    """Ranks whose process is stopped or gone, while not all are: a run that has ended waits for
    nobody, unless all that is left are its boxes."""
    halted = [rank for rank, state in states.items() if state.process.is_halted]
    if len(halted) < len(states):
        return _order(halted)
    return ()


def _name_halt(states: Mapping[int, RankState], halted: tuple[int, ...]) -> str:
    if any(states[rank].process.state == "gone" for rank in halted):
        return "gone"
    return "stopped"


def _choose_minority(waits: tuple[RankWait, ...], differing: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that most others differ from; all of them where it is one against one."""
    num_against = dict.fromkeys(differing, 0)
    for wait in waits:
        for rank in wait.differing:
            num_against[rank] += 1
    most = max(num_against.values())
    return _order(rank for rank, count in num_against.items() if count == most)


def _follow_waits(waits: tuple[RankWait, ...]) -> WaitVerdict:
    waited_for = _order(rank for wait in waits for rank in wait.absent)
    if not waited_for:
        return WaitVerdict("inside", (), waits)
    waiting = {wait.rank for wait in waits if wait.absent}
    culprits = _order(rank for rank in waited_for if rank not in waiting)
    if culprits:
        return WaitVerdict("absent", culprits, waits)
    return WaitVerdict("circle", waited_for, waits)


def _order(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks)))
