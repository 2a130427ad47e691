"""What the ranks of a pipeline send each other, and when the receiver may ask for each message.

Over gloo a receive costs nothing until its message comes. Over NCCL it is a kernel that spins until
the sender's kernel runs, and other work of the device can come to stand behind it: kernels that
share its hardware queue, and whatever waits for the device to drain (loading a kernel at its first
use, giving memory back to the driver). A receive that is asked for too early then keeps back the
very work that its message, or a message of the other side, depends on. So there are two rules:

- On every device: a message is asked for when all actions of this rank that it depends on have been
  queued.
- Where a receive can keep other work back ("in one queue"): all actions of the schedule stand in
  one order that is the same on all ranks, and a message is asked for between the own action that
  comes before its maker in that order and the one that comes after. Each rank's queue, with its
  sends and receives, is then a part of one common sequence: however much of it waits for what was
  queued before, some rank can always go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.plan.pipeline.schedule import Action, ActionKind, Schedule
from phalanx.plan.pipeline.simulate import simulate_schedule

# Messages of a rank that are asked for beyond those that the next two actions need.
NUM_RECEIVES_AHEAD = 2
_ASSUMED_SECONDS_OF_KIND: dict[ActionKind, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Any seconds above 0 give an order that no rank waits for ever in; these are near what actions
take."""
# Of actions that begin at once: the gradients that go to another rank, then forwards, then W, which
# makes nothing that another rank waits for.
_SORT_PRIORITY_OF_KIND: dict[ActionKind, int] = {"B": -1, "I": -1, "F": 0, "W": 1}


@dataclass(frozen=True, slots=True)
class P2PMessage:
    """A message to `stage` for a microbatch: its input, or with `is_gradient` the gradient of
    its output."""

    stage: int
    microbatch: int
    is_gradient: bool

    @property
    def maker(self) -> int:
        """The stage that the message comes from."""
        if self.is_gradient:
            return self.stage + 1
        return self.stage - 1


def output_of(action: Action, num_stages: int) -> P2PMessage | None:
    """The message that an action makes for another stage: F for the next one, B and I for the
    one before; None if it makes none."""
    if action.kind == "F" and action.stage + 1 < num_stages:
        return P2PMessage(action.stage + 1, action.microbatch, False)
    if action.kind in ("B", "I") and action.stage > 0:
        return P2PMessage(action.stage - 1, action.microbatch, True)
    return None


def input_of(action: Action, num_stages: int) -> P2PMessage | None:
    """The message that an action needs of another stage: F of the one before, B and I of the
    next one; None if it needs none."""
    if action.kind == "F" and action.stage > 0:
        return P2PMessage(action.stage, action.microbatch, False)
    if action.kind in ("B", "I") and action.stage + 1 < num_stages:
        return P2PMessage(action.stage, action.microbatch, True)
    return None


@dataclass(frozen=True)
class RankMessages:
    """The messages of one pass through a schedule, as one rank sees them.

    `coming`: source rank -> what it sends here, in the order in which it makes it. `asks[i]`: the
    ranks whose next message is asked for before own action i, in this order. `made_at` and
    `needed_at`: where in the row of the other rank a message to here is made, and one from here is
    needed.
    """

    coming: Mapping[int, tuple[P2PMessage, ...]]
    asks: tuple[tuple[int, ...], ...]
    made_at: Mapping[P2PMessage, int]
    needed_at: Mapping[P2PMessage, int]


def plan_rank_messages(schedule: Schedule, rank: int, *, in_one_queue: bool) -> RankMessages:
    """The messages of `rank` in a schedule that can run.

    `in_one_queue`: receives can keep other work back.
    """
    coming: dict[int, list[P2PMessage]] = {}
    made_at: dict[P2PMessage, int] = {}
    needed_at: dict[P2PMessage, int] = {}
    num_stages, owners = schedule.num_stages, schedule.rank_of_stage
    for other, row in enumerate(schedule.actions):
        if other == rank:
            continue
        for position, action in enumerate(row):
            output, needed = output_of(action, num_stages), input_of(action, num_stages)
            if output is not None and owners[output.stage] == rank:
                coming.setdefault(other, []).append(output)
                made_at[output] = position
            if needed is not None and owners[needed.maker] == rank:
                needed_at[needed] = position
    # Every rank computes it from the same schedule and costs, and so finds the same order.
    order = _simulate_action_order(schedule)
    # One order costs overlap: of the messages of 1f1b on four ranks half are asked for only where
    # they are needed (97 % of them travel beside an action on gloo), of zb-v 6 %.
    if in_one_queue:
        asks = _plan_receives_in_order(schedule, rank, order)
    else:
        asks = _plan_receives_ahead(
            schedule, rank, coming, _count_own_actions_before(schedule, rank, order)
        )
    return RankMessages(
        {source: tuple(messages) for source, messages in coming.items()}, asks, made_at, needed_at
    )


def _simulate_action_order(schedule: Schedule) -> list[tuple[int, int]]:
    """(rank, place) of all actions, as they begin on paper."""
    spans = simulate_schedule(schedule, [_ASSUMED_SECONDS_OF_KIND] * schedule.num_stages).spans_s
    keys = []
    for rank, (row, times) in enumerate(zip(schedule.actions, spans, strict=True)):
        for position, (action, (start, _)) in enumerate(zip(row, times, strict=True)):
            # What begins at once is independent; of that, what goes on to another rank first: each
            # message is then asked for beside the action that it is made in.
            turn = _SORT_PRIORITY_OF_KIND[action.kind]
            # What has further to go comes first: a forward of an early stage, a gradient of a late.
            stage = action.stage
            if action.kind != "F":
                stage = -stage
            keys.append((start, turn, stage, rank, position))
    return [(rank, position) for *_, rank, position in sorted(keys)]


def _plan_receives_in_order(
    schedule: Schedule, rank: int, order: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    """The messages to ask for before each own action: each between the own actions that its
    maker stands between."""
    asks: list[list[int]] = [[] for _ in schedule.actions[rank]]
    num_queued = 0
    for other, position in order:
        if other == rank:
            num_queued += 1
            continue
        output = output_of(schedule.actions[other][position], schedule.num_stages)
        if output is not None and schedule.rank_of_stage[output.stage] == rank:
            # There is such an action: the one that needs the message comes later in this row.
            asks[num_queued].append(other)
    return tuple(map(tuple, asks))


def _count_own_actions_before(
    schedule: Schedule, rank: int, order: Sequence[tuple[int, int]]
) -> dict[P2PMessage, int]:
    """The number of own actions that have to be queued before each message of another rank can
    be made."""
    makers: dict[P2PMessage, int] = {}
    before = [0] * schedule.num_ranks  # of the last action of each rank so far
    for other, position in order:
        action = schedule.actions[other][position]
        needed = input_of(action, schedule.num_stages)
        if other == rank:
            before[other] = position + 1
        elif needed is not None:
            # What a message depends on, all that its receiver makes afterwards depends on, too.
            before[other] = max(before[other], makers[needed])
        output = output_of(action, schedule.num_stages)
        if output is not None:
            makers[output] = before[other]
    return makers


def _plan_receives_ahead(
    schedule: Schedule,
    rank: int,
    coming: Mapping[int, Sequence[P2PMessage]],
    own_before: Mapping[P2PMessage, int],
) -> tuple[tuple[int, ...], ...]:
    """The messages to ask for before each own action: those that the next two actions need, and
    NUM_RECEIVES_AHEAD more of the same rank, as soon as they depend on nothing to come."""
    places: dict[P2PMessage | None, tuple[int, int]] = {}  # source, number from that source
    for source, messages in coming.items():
        for at, message in enumerate(messages):
            places[message] = source, at
    num_asked, row, asks = dict.fromkeys(coming, 0), schedule.actions[rank], []
    for position in range(len(row)):
        now: list[int] = []
        # Of two actions: the message for the second travels while this rank computes the first.
        for action in row[position : position + 2]:
            needed = input_of(action, schedule.num_stages)
            if needed not in places:
                continue
            source, at = places[needed]
            for message in coming[source][num_asked[source] : at + 1 + NUM_RECEIVES_AHEAD]:
                # Messages of one source are asked for in its order, so the rest waits as well.
                if own_before[message] > position:
                    break
                num_asked[source] += 1
                now.append(source)
        asks.append(tuple(now))
    return tuple(asks)
