"""When a rank of a pipeline asks for its messages: never before its own actions that they depend
on, and on devices where a receive keeps other work back, so that no set of ranks can wait for each
other."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from phalanx.plan.pipeline.check import find_schedule_problems
from phalanx.plan.pipeline.generate import SCHEDULE_NAMES, can_run_microbatches, generate_schedule
from phalanx.plan.pipeline.messages import (
    P2PMessage,
    RankMessages,
    input_of,
    output_of,
    plan_rank_messages,
)
from phalanx.plan.pipeline.schedule import Action, Schedule

Node = tuple[int, int]  # rank, place


def own_schedule(seed: int) -> Schedule:
    """A schedule as a user could write it: stages anywhere, actions in any order that can run."""
    draw = random.Random(seed)
    num_ranks, num_microbatches = draw.randint(2, 5), draw.randint(1, 6)
    owners = list(range(num_ranks)) + [draw.randrange(num_ranks) for _ in range(draw.randint(0, 5))]
    draw.shuffle(owners)
    splits = [draw.random() < 0.5 for _ in owners]
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    done: set[Action] = set()
    left = {Action("F", s, m) for s in range(len(owners)) for m in range(num_microbatches)}
    left |= {
        Action(kind, s, m)  # type: ignore[arg-type]
        for s, split in enumerate(splits)
        for kind in ("IW" if split else "B")
        for m in range(num_microbatches)
    }
    while left:
        ready = sorted((a for a in left if is_ready(a, done, splits)), key=str)
        action = draw.choice(ready)
        rows[owners[action.stage]].append(action)
        done.add(action)
        left.remove(action)
    return Schedule(f"own {seed}", num_microbatches, tuple(owners), tuple(map(tuple, rows)))


def is_ready(action: Action, done: set[Action], splits: list[bool]) -> bool:
    kind, s, m = action.kind, action.stage, action.microbatch
    if kind == "F":
        return s == 0 or Action("F", s - 1, m) in done
    if kind == "W":
        return Action("I", s, m) in done
    later = s + 1 == len(splits) or Action("I" if splits[s + 1] else "B", s + 1, m) in done
    return Action("F", s, m) in done and later


def forwards(num_ranks: int, turns: int, num_microbatches: int) -> Schedule:
    """What evaluation does."""
    owners = tuple(range(num_ranks)) * turns
    rows = [
        tuple(
            Action("F", s, m)
            for s, o in enumerate(owners)
            if o == r
            for m in range(num_microbatches)
        )
        for r in range(num_ranks)
    ]
    return Schedule("forward", num_microbatches, owners, tuple(rows))


def schedules() -> Iterator[Schedule]:
    for name in SCHEDULE_NAMES:
        for num_ranks in (2, 3, 4, 8):
            for count in (1, 2, 3, 4, 8, 16):
                if can_run_microbatches(name, num_ranks, count):
                    yield generate_schedule(name, num_ranks, count)
    yield generate_schedule("interleaved", 4, 8, 3)
    yield generate_schedule("interleaved-zero-bubble", 4, 8, 1)
    yield from (forwards(p, turns, p) for p in (2, 4) for turns in (1, 2, 3))
    yield from map(own_schedule, range(60))


ALL = list(schedules())


def ask_places(messages: RankMessages) -> dict[P2PMessage, int]:
    """How many own actions are queued when each message is asked for; those of a source in the
    order of its row."""
    places, numbers = {}, dict.fromkeys(messages.coming, 0)
    for place, sources in enumerate(messages.asks):
        for source in sources:
            places[messages.coming[source][numbers[source]]] = place
            numbers[source] += 1
    return places


def makers_of(schedule: Schedule) -> dict[P2PMessage, Node]:
    return {
        made: (rank, place)
        for rank, row in enumerate(schedule.actions)
        for place, action in enumerate(row)
        if (made := output_of(action, schedule.num_stages)) is not None
    }


def add_ancestors(
    found: set[Node], schedule: Schedule, makers: dict[P2PMessage, Node], node: Node
) -> None:
    """Add to `found` what an action depends on, itself included: what came before on its rank, and
    what made what they need.

    Of what is there already, all ancestors are.
    """
    todo = [node]
    while todo:
        rank, place = todo.pop()
        if (rank, place) in found:
            continue
        found.add((rank, place))
        if place:
            todo.append((rank, place - 1))
        needed = input_of(schedule.actions[rank][place], schedule.num_stages)
        if needed is not None:
            todo.append(makers[needed])


@pytest.mark.parametrize("in_one_queue", [False, True])
def test_no_receive_is_asked_for_before_an_own_action_that_it_depends_on(
    in_one_queue: bool,
) -> None:
    for schedule in ALL:
        name, makers = (
            f"{schedule.name} p={schedule.num_ranks} m={schedule.num_microbatches}",
            makers_of(schedule),
        )
        for rank, row in enumerate(schedule.actions):
            messages = plan_rank_messages(schedule, rank, in_one_queue=in_one_queue)
            asked = ask_places(messages)
            num_needed = 0
            for place, action in enumerate(row):
                needed = input_of(action, schedule.num_stages)
                if needed is None or schedule.rank_of_stage[needed.maker] == rank:
                    continue
                num_needed += 1
                assert asked[needed] <= place, (
                    f"{name}, rank {rank}: {action} begins before its message is asked for"
                )
            assert len(asked) == num_needed
            for source, parcels in messages.coming.items():
                assert sorted(parcels, key=lambda parcel: messages.made_at[parcel]) == list(parcels)
                reached: set[Node] = set()
                for parcel in parcels:
                    add_ancestors(reached, schedule, makers, (source, messages.made_at[parcel]))
                    own = max((place for other, place in reached if other == rank), default=-1)
                    assert own < asked[parcel], (
                        f"{name}, rank {rank}: {parcel} is asked for too early"
                    )


def queues(schedule: Schedule, *, in_one_queue: bool) -> list[list[tuple[str, int]]]:
    """What stands in the queue of each rank: receive from, compute, send to."""
    found = []
    for rank, row in enumerate(schedule.actions):
        queue: list[tuple[str, int]] = []
        asks = plan_rank_messages(schedule, rank, in_one_queue=in_one_queue).asks
        for sources, action in zip(asks, row, strict=True):
            queue += [("receive", source) for source in sources]
            queue.append(("compute", rank))
            made = output_of(action, schedule.num_stages)
            if made is not None and schedule.rank_of_stage[made.stage] != rank:
                queue.append(("send", schedule.rank_of_stage[made.stage]))
        found.append(queue)
    return found


def can_end(work: list[list[tuple[str, int]]], *, sends_wait: bool) -> bool:
    """Whether all queues empty where each is done strictly in order, and a receive waits for its
    message.

    `sends_wait`: also a send, for its receiver, as for a message that no buffer takes.
    """
    at, posted = [0] * len(work), {}
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(work):
            while at[rank] < len(queue):
                what, other = queue[at[rank]]
                if what == "receive":
                    if not posted.get((other, rank)):
                        break
                    posted[other, rank] -= 1
                elif what == "send":
                    ready = at[other] < len(work[other]) and work[other][at[other]] == (
                        "receive",
                        rank,
                    )
                    if sends_wait and not ready:
                        break
                    posted[rank, other] = posted.get((rank, other), 0) + 1
                at[rank], moved = at[rank] + 1, True
    return all(place == len(queue) for place, queue in zip(at, work, strict=True))


@pytest.mark.parametrize("sends_wait", [False, True])
def test_ranks_whose_receives_block_all_later_work_never_wait_for_each_other(
    sends_wait: bool,
) -> None:
    stuck = [
        f"{schedule.name} p={schedule.num_ranks} m={schedule.num_microbatches}"
        for schedule in ALL
        if not can_end(queues(schedule, in_one_queue=True), sends_wait=sends_wait)
    ]
    assert stuck == []


def test_that_own_actions_come_first_is_not_enough_where_receives_block() -> None:
    """Two ranks each ask for what the other one makes next: this is why there is a rule for one
    queue."""
    assert not can_end(
        queues(generate_schedule("1f1b", 4, 8), in_one_queue=False), sends_wait=False
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize("in_one_queue", [False, True])
def test_most_messages_travel_beside_an_action(name: str, in_one_queue: bool) -> None:
    """Asked for before an action that is not the one that needs them, so that they can arrive
    while it computes."""
    schedule = generate_schedule(name, 4, 16)
    ahead = total = 0
    for rank, row in enumerate(schedule.actions):
        asked = ask_places(plan_rank_messages(schedule, rank, in_one_queue=in_one_queue))
        for place, action in enumerate(row):
            needed = input_of(action, schedule.num_stages)
            if needed in asked:
                total += 1
                ahead += asked[needed] < place
    assert ahead >= total / 3, f"{ahead} of {total}"


def test_own_schedules_here_can_run() -> None:
    assert [find_schedule_problems(own_schedule(seed)) for seed in range(60)] == [()] * 60
