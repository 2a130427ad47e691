"""Finds a step that does not end although its ranks go on writing phases and collectives: by their
number, beside that of the steps before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.core.black_box_reader import LastPosition
from phalanx.launch.hang_limits import BETWEEN_STEPS_PHASES, PATIENT_LIMIT_S, is_compiling

# A starved rank takes longer for a step, and does not write more in it.
_TIMES_MOST_WRITES = 4
_MIN_WRITES = 64
_NUM_SLOW_STEPS = 20
# Fewer steps do not tell how much a step writes.
_MIN_STEPS = 3
# Of a run that has not ended as many steps: in one microbatch.
_MIN_WRITES_UNKNOWN = 1000


@dataclass(frozen=True)
class EndlessStep:
    """Ranks that have been in `step` for `elapsed_s` and go on. `num_writes`: phases and
    collectives of the first of them since then; `most_writes`: of a step so far, 0 where that is
    not known."""

    ranks: tuple[int, ...]
    step: int
    elapsed_s: float
    limit_s: float
    num_writes: int
    most_writes: int


class EndlessStepWatch:
    """Looks at the positions of the ranks of one attempt after another. What a step writes is
    learned from the whole run."""

    def __init__(self) -> None:
        self._most_writes, self._num_steps = 0.0, 0
        self.forget_step()

    def forget_step(self) -> None:
        """What is seen next begins a step: an attempt begins, or something lies between steps."""
        self._place: tuple[int, int] | None = None
        self._place_s = self._step_s = 0.0
        self._step_writes: dict[int, int] = {}
        self._place_writes: dict[int, int] = {}

    def look(
        self, positions: Mapping[int, LastPosition], *, now_s: float, p99_s: float, long_s: float
    ) -> EndlessStep | None:
        """The step that does not end, or None. Steps take `p99_s`; longer work may take `long_s`
        without a sign."""
        phases = {position.phase for position in positions.values()}
        if not phases.isdisjoint(BETWEEN_STEPS_PHASES) or any(
            map(is_compiling, positions.values())
        ):
            self.forget_step()
            return None
        writes = {rank: _count_writes(position) for rank, position in positions.items()}
        place = max((position.step, position.microbatch) for position in positions.values())
        if (
            self._place is None
            or place[0] != self._place[0]
            or writes.keys() != (self._step_writes.keys())
        ):
            self._begin_step(place, writes, now_s)
            return None
        if place != self._place:
            self._place, self._place_s, self._place_writes = place, now_s, writes
        if self._num_steps >= _MIN_STEPS:
            limit_s = max(long_s, _NUM_SLOW_STEPS * p99_s)
            since, begun_s = self._step_writes, self._step_s
            least = _TIMES_MOST_WRITES * max(self._most_writes, _MIN_WRITES)
        else:
            limit_s, least = max(PATIENT_LIMIT_S, long_s), _MIN_WRITES_UNKNOWN
            since, begun_s = self._place_writes, self._place_s
        new = {rank: writes[rank] - since.get(rank, 0) for rank in writes}
        ranks = tuple(sorted(rank for rank, number in new.items() if number >= least))
        if len(ranks) == len(writes):
            # Common work of another kind, say an evaluation in a hook of the user's.
            limit_s = max(PATIENT_LIMIT_S, limit_s)
        if not ranks or now_s - begun_s < limit_s:
            return None
        return EndlessStep(
            ranks, place[0], now_s - begun_s, limit_s, new[ranks[0]], round(self._most_writes)
        )

    def _begin_step(self, place: tuple[int, int], writes: dict[int, int], now_s: float) -> None:
        if self._place is not None and writes.keys() == self._step_writes.keys():
            num_steps = place[0] - self._place[0]
            if num_steps > 0:
                of_rank = (writes[rank] - begun for rank, begun in self._step_writes.items())
                self._most_writes = max(self._most_writes, max(of_rank) / num_steps)
                self._num_steps += num_steps
        self._place, self._place_s, self._step_s = place, now_s, now_s
        self._step_writes = self._place_writes = writes


def _count_writes(position: LastPosition) -> int:
    newest = max((each.number for each in position.collectives), default=0)
    return position.num_writes + newest
