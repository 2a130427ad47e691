"""`find_execution_order`: the actions of a schedule in an order in which each comes after all that
it waits for, whatever actions take; and what no order can do.

Many simulations of one schedule share it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from phalanx.plan.pipeline.schedule import Action, ActionKind, Schedule

ACTION_KINDS: tuple[ActionKind, ...] = ("F", "B", "I", "W")
NO_RESULT = -1  # in place of the number of a result
NO_LINK = -1  # in place of the number of a link


@dataclass(frozen=True)
class ActionResults:
    """The inputs and outputs of actions as numbers: a schedule has a hundred thousand of them.

    F makes the input of the next stage. B and I make the gradient that the stage before needs: the
    same one, whether its W came along or not. W makes nothing that another action waits for.
    """

    num_stages: int
    num_microbatches: int

    def __len__(self) -> int:
        return 2 * self.num_stages * self.num_microbatches

    def output_index_of(self, action: Action) -> int:
        """The number of the result that an action makes; NO_RESULT for W."""
        number = action.stage * self.num_microbatches + action.microbatch
        if action.kind == "W":
            return NO_RESULT
        if action.kind == "F":
            return number
        return number + len(self) // 2

    def input_indices_of(self, action: Action) -> tuple[int, int]:
        """The results that an action needs: of its own stage, and of a neighbouring one; NO_RESULT
        where it needs none."""
        forward = action.stage * self.num_microbatches + action.microbatch
        gradient = forward + len(self) // 2
        if action.kind == "W":
            return gradient, NO_RESULT
        received = NO_RESULT
        if action.kind == "F":
            if action.stage > 0:
                received = forward - self.num_microbatches
            return NO_RESULT, received
        if action.stage + 1 < self.num_stages:
            received = gradient + self.num_microbatches
        return forward, received

    def action_of_result(self, number: int) -> Action:
        """The action, F or I, that makes result `number`."""
        half = len(self) // 2
        kind: ActionKind = "I"
        if number < half:
            kind = "F"
        stage, microbatch = divmod(number % half, self.num_microbatches)
        return Action(kind, stage, microbatch)


@dataclass(frozen=True)
class ExecutionOrder:
    """The actions of a schedule that can run, each after those that it waits for."""

    num_ranks: int
    num_results: int
    num_links: int
    steps: tuple[tuple[int, int, int, int, int], ...]
    """Of each action: its rank; 4 x stage + the number of its kind in ACTION_KINDS; the result that
    it receives, and the one that it makes, as `ActionResults` numbers them; and the link by which
    that leaves."""
    stuck: dict[int, Action]
    """Rank -> the action that makes the result it waits for, for ever."""


def find_execution_order(schedule: Schedule) -> ExecutionOrder:
    """An order of all actions of `schedule` that can run.

    Expects that `check` found every action once, where it belongs.
    """
    results = ActionResults(schedule.num_stages, schedule.num_microbatches)
    links_of_kinds, num_links = _number_links(schedule)
    # Of each kind and stage what does not depend on the microbatch: the part, the results of
    # microbatch 0 that its action receives, needs of its own stage and makes, and the link.
    parts: dict[ActionKind, list[tuple[int, int, int, int, int]]] = {}
    for number, kind in enumerate(ACTION_KINDS):
        parts[kind] = []
        for stage in range(schedule.num_stages):
            first = Action(kind, stage, 0)
            own_input, received = results.input_indices_of(first)
            output = results.output_index_of(first)
            link = links_of_kinds[kind == "F"][stage]
            parts[kind].append((4 * stage + number, received, own_input, output, link))
    is_made = bytearray(len(results))
    waiting: dict[int, list[int]] = {}  # result -> ranks
    num_done = [0] * schedule.num_ranks
    steps: list[tuple[int, int, int, int, int]] = []
    # A rank goes on until it misses a result, and is looked at again only once that is there:
    # each action is visited a few times, and not each once per round over all ranks.
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        row = schedule.actions[rank]
        position = num_done[rank]
        while position < len(row):
            kind, stage, microbatch = row[position]
            part, received, own_input, output, link = parts[kind][stage]
            if received >= 0:
                received += microbatch
                if not is_made[received]:
                    waiting.setdefault(received, []).append(rank)
                    break
            if own_input >= 0 and not is_made[own_input + microbatch]:
                # Nobody else makes it: it comes later in this row, which never goes on.
                waiting.setdefault(own_input + microbatch, []).append(rank)
                break
            position += 1
            if output < 0:
                steps.append((rank, part, received, output, link))
                continue
            output += microbatch
            steps.append((rank, part, received, output, link))
            is_made[output] = True
            if output in waiting:
                # Popped: a rank waits for one result at a time, and is looked at once for it.
                ready += waiting.pop(output)
        num_done[rank] = position
    stuck = {}
    for number, ranks in waiting.items():
        for rank in ranks:
            stuck[rank] = results.action_of_result(number)
    return ExecutionOrder(
        schedule.num_ranks, len(results), num_links, tuple(steps), dict(sorted(stuck.items()))
    )


def _number_links(schedule: Schedule) -> tuple[tuple[list[int], list[int]], int]:
    """For each stage the number of the link by which the output of a backward leaves, and of a
    forward: one for each pair of ranks and direction, NO_LINK where it stays on its rank; and how
    many links there are."""
    numbers: dict[tuple[int, int], int] = {}
    rank_of_stage = schedule.rank_of_stage
    links: tuple[list[int], list[int]] = ([], [])
    for stage, rank in enumerate(rank_of_stage):
        for links_of_kind, neighbour in zip(links[::-1], (stage + 1, stage - 1), strict=True):
            number = NO_LINK
            if 0 <= neighbour < len(rank_of_stage) and rank_of_stage[neighbour] != rank:
                number = numbers.setdefault((rank, rank_of_stage[neighbour]), len(numbers))
            links_of_kind.append(number)
    return links, len(numbers)
