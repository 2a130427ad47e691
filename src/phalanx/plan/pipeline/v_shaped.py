"""Schedules in which each rank holds two stages in a V, so that it has the first microbatches back
early.

`down_stage` is a rank's stage on the way to the turn, `up_stage` the one on the way back; rank 0
holds the first and the last stage.
"""

from __future__ import annotations

from collections import Counter, deque

from phalanx.plan.pipeline.schedule import Action, ActionKind, Schedule, place_stages_in_v


class _RankActionBuilder:
    """The actions of a rank in the order in which they are decided.

    Each stage takes its microbatches in order, so the next one is a count.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[ActionKind, int]] = Counter()
        self._weights_due: deque[Action] = deque()

    def append_action(self, kind: ActionKind, stage: int) -> None:
        """Adds the next F, I or B of `stage`. The W of an I is put off until
        `append_weight_action`."""
        # B and I are one count: a microbatch has one or the other.
        counted: ActionKind = "I"
        if kind == "F":
            counted = "F"
        action = Action(kind, stage, self._next[counted, stage])
        self._next[counted, stage] += 1
        self.actions.append(action)
        if kind == "I":
            self._weights_due.append(Action("W", stage, action.microbatch))

    def append_weight_action(self, stage: int | None = None) -> None:
        """Adds the oldest W that was put off (of `stage`), if there is one."""
        for due in self._weights_due:
            if stage in (None, due.stage):
                # Removing ends the loop: a deque may not change while it is iterated over.
                self._weights_due.remove(due)
                self.actions.append(due)
                return

    def count_remaining(self, kind: ActionKind, stage: int, num_microbatches: int) -> int:
        return num_microbatches - self._next[kind, stage]

    def count_weights_due(self, stage: int) -> int:
        return sum(action.stage == stage for action in self._weights_due)


def generate_zb_v(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """ZB-V: no bubble once all ranks run, where F, I and W take equally long (arXiv 2401.10241,
    section 6)."""
    # Fewer microbatches than fill the V: plan for as many, and leave out those that do not exist.
    planned = max(num_microbatches, 2 * num_ranks - 1)
    rows = []
    for rank in range(num_ranks):
        row = _generate_zb_v_row(rank, num_ranks, planned)
        rows.append(tuple(action for action in row if action.microbatch < num_microbatches))
    return Schedule("zb-v", num_microbatches, place_stages_in_v(num_ranks), tuple(rows))


def _generate_zb_v_row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    down_stage, up_stage, to_turn = rank, 2 * num_ranks - 1 - rank, num_ranks - rank
    tape = _RankActionBuilder()

    def forward_and_back(stage: int) -> None:
        tape.append_action("F", stage)
        back(stage)

    def back(stage: int) -> None:
        tape.append_action("I", stage)
        tape.append_weight_action(stage)

    # Warm-up: down until the first microbatch is back from the turn, then both ways alternately,
    # then up alone, where the first gradients are.
    for _ in range(2 * to_turn - 1):
        tape.append_action("F", down_stage)
    for _ in range(rank):
        tape.append_action("F", up_stage)
        tape.append_action("F", down_stage)
    for _ in range(to_turn):
        forward_and_back(up_stage)
    # Steady state: a forward and a backward of each stage.
    while tape.count_remaining("F", up_stage, num_microbatches):
        if tape.count_remaining("F", down_stage, num_microbatches):
            tape.append_action("F", down_stage)
        back(down_stage)
        forward_and_back(up_stage)
    # The end: I first, because other ranks wait for it, and W in the gaps.
    for _ in range(rank):
        tape.append_action("I", down_stage)
        tape.append_action("I", up_stage)
    for _ in range(to_turn):
        tape.append_action("I", down_stage)
        tape.append_weight_action(down_stage)
    for stage in (up_stage, down_stage):
        for _ in range(tape.count_weights_due(stage)):
            tape.append_weight_action(stage)
    return tape.actions


def generate_dualpipe_v(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 2
) -> Schedule:
    """DualPipe-V: a forward beside a backward of the other stage (DeepSeek-V3, arXiv 2412.19437;
    cut in half to a V).

    Where the original overlaps such a pair in time, these are two actions, forward first: the order
    of execution that torch's runtime gives them too unless it is told how to overlap.
    """
    rows = (
        tuple(_generate_dualpipe_v_row(rank, num_ranks, num_microbatches))
        for rank in range(num_ranks)
    )
    return Schedule("dualpipe-v", num_microbatches, place_stages_in_v(num_ranks), tuple(rows))


def _generate_dualpipe_v_row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    down_stage, up_stage, beyond = rank, 2 * num_ranks - 1 - rank, num_ranks - 1 - rank
    tape = _RankActionBuilder()
    # Warm-up, as in ZB-V.
    for _ in range(2 * beyond):
        tape.append_action("F", down_stage)
    for _ in range(rank + 1):
        tape.append_action("F", down_stage)
        tape.append_action("F", up_stage)
    for _ in range(beyond):
        tape.append_action("I", up_stage)
        tape.append_weight_action()
        tape.append_action("F", up_stage)
    # Steady state: each forward beside a backward of the other stage.
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        tape.append_action("F", down_stage)
        tape.append_action("B", up_stage)
        tape.append_action("F", up_stage)
        tape.append_action("B", down_stage)
    # No microbatch is left to go down.
    for _ in range(beyond):
        tape.append_action("B", up_stage)
        tape.append_action("F", up_stage)
        tape.append_action("B", down_stage)
    # Of the last backwards the second half is split: their W fill the gaps that the end of the
    # pipeline leaves.
    drained: list[int] = [up_stage, down_stage] * (rank + 1)
    num_whole = rank + 1
    for stage in drained[:num_whole]:
        tape.append_action("B", stage)
    for stage in drained[num_whole:]:
        tape.append_action("I", stage)
    for _ in range(beyond):
        tape.append_weight_action()
        tape.append_action("I", down_stage)
    for _ in range(rank + 1):
        tape.append_weight_action()
    return tape.actions
