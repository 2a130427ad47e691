"""Schedules in which each rank holds two stages in a V, so that it has the first microbatches back
early.

`near` is a rank's stage on the way there, `far` the one on the way back; rank 0 holds the first and
the last stage.
"""

from __future__ import annotations

from collections import Counter, deque

from phalanx.plan.pipeline.schedule import Action, Kind, Schedule, v_placement


class _Tape:
    """A rank's actions as they are decided.

    Each stage takes its microbatches in order, so the next one is a count.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[Kind, int]] = Counter()
        self._weights_due: deque[Action] = deque()

    def do(self, kind: Kind, stage: int) -> None:
        """The next F, I or B of `stage`. The W of an I is put off until `weights`."""
        counted: Kind = (
            "F" if kind == "F" else "I"
        )  # B and I are the same count: a microbatch has one or the other
        action = Action(kind, stage, self._next[counted, stage])
        self._next[counted, stage] += 1
        self.actions.append(action)
        if kind == "I":
            self._weights_due.append(Action("W", stage, action.microbatch))

    def weights(self, stage: int | None = None) -> None:
        """The oldest W that was put off (of `stage`), if there is one."""
        due = next((action for action in self._weights_due if stage in (None, action.stage)), None)
        if due is not None:
            self._weights_due.remove(due)
            self.actions.append(due)

    def num_left(self, kind: Kind, stage: int, num_microbatches: int) -> int:
        return num_microbatches - self._next[kind, stage]

    def num_due(self, stage: int) -> int:
        return sum(action.stage == stage for action in self._weights_due)


def zb_v(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """No bubble once all ranks run, where F, I and W take equally long (arXiv 2401.10241,
    section 6)."""
    # Fewer microbatches than fill the V: plan for as many, and leave out those that do not exist.
    planned = max(num_microbatches, 2 * num_ranks - 1)
    rows = (
        tuple(
            action
            for action in _zb_v_row(rank, num_ranks, planned)
            if action.microbatch < num_microbatches
        )
        for rank in range(num_ranks)
    )
    return Schedule("zb-v", num_microbatches, v_placement(num_ranks), tuple(rows))


def _zb_v_row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    near, far, to_turn = rank, 2 * num_ranks - 1 - rank, num_ranks - rank
    tape = _Tape()

    def forward_and_back(stage: int) -> None:
        tape.do("F", stage)
        back(stage)

    def back(stage: int) -> None:
        tape.do("I", stage)
        tape.weights(stage)

    for _ in range(2 * to_turn - 1):
        tape.do("F", near)
    for _ in range(rank):
        tape.do("F", far)
        tape.do("F", near)
    for _ in range(to_turn):
        forward_and_back(far)
    while tape.num_left("F", far, num_microbatches):
        if tape.num_left("F", near, num_microbatches):
            tape.do("F", near)
        back(near)
        forward_and_back(far)
    for _ in range(rank):
        tape.do("I", near)
        tape.do("I", far)
    for _ in range(to_turn):
        tape.do("I", near)
        tape.weights(near)
    for stage in (far, near):
        for _ in range(tape.num_due(stage)):
            tape.weights(stage)
    return tape.actions


def dualpipe_v(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """A forward beside a backward of the other stage (DeepSeek-V3, arXiv 2412.19437; cut in half to
    a V).

    Where the original overlaps such a pair in time, these are two actions, forward first: the order
    of execution that torch's runtime gives them too unless it is told how to overlap.
    """
    rows = (tuple(_dualpipe_v_row(rank, num_ranks, num_microbatches)) for rank in range(num_ranks))
    return Schedule("dualpipe-v", num_microbatches, v_placement(num_ranks), tuple(rows))


def _dualpipe_v_row(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    near, far, beyond = rank, 2 * num_ranks - 1 - rank, num_ranks - 1 - rank
    tape = _Tape()
    for _ in range(2 * beyond):
        tape.do("F", near)
    for _ in range(rank + 1):
        tape.do("F", near)
        tape.do("F", far)
    for _ in range(beyond):
        tape.do("I", far)
        tape.weights()
        tape.do("F", far)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        tape.do("F", near)
        tape.do("B", far)
        tape.do("F", far)
        tape.do("B", near)
    for _ in range(beyond):
        tape.do("B", far)
        tape.do("F", far)
        tape.do("B", near)
    # Of the last backwards the second half is split: their W fill the gaps that the end of the
    # pipeline leaves.
    drained: list[int] = [far, near] * (rank + 1)
    num_whole = 2 * ((rank + 1) // 2) + (1 if rank % 2 == 0 else 0)
    for position, stage in enumerate(drained):
        tape.do("B" if position < num_whole else "I", stage)
    for _ in range(beyond):
        tape.weights()
        tape.do("I", near)
    for _ in range(rank + 1):
        tape.weights()
    return tape.actions
