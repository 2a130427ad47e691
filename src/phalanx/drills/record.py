"""What the files of a run say, as a drill needs it: steps of all ranks with their moments, and what
struck."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from phalanx.core.files import open_regular_file, read_bounded_lines
from phalanx.observe.events import (
    CheckpointSaved,
    Envelope,
    RunStarted,
    SamplesRead,
    StepFinished,
)
from phalanx.observe.tail import parse_valid_event_line
from phalanx.resilience.strikes import Strike, read_strikes

_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class RunRecord:
    """The events of a run, and the strikes that are on record beside them."""

    run_dir: Path
    envelopes: tuple[Envelope, ...]
    strikes: tuple[Strike, ...]

    @cached_property
    def finished_steps(self) -> list[Envelope]:
        """`step_finished` of all ranks, oldest first."""
        steps = [each for each in self.envelopes if isinstance(each.event, StepFinished)]
        return sorted(steps, key=lambda each: each.monotonic_s)

    def cut(self, from_s: float, until_s: float) -> RunRecord:
        """What was recorded from one moment to just before another."""
        return RunRecord(
            self.run_dir,
            tuple(each for each in self.envelopes if from_s <= each.monotonic_s < until_s),
            tuple(each for each in self.strikes if from_s <= each.monotonic_s < until_s),
        )

    @property
    def last_step(self) -> int:
        """The newest step that a rank has done; 0 if none."""
        return max(map(_step, self.finished_steps), default=0)

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step, of the newest time that a step was done."""
        return {_step(each): _finished(each).loss for each in self.finished_steps}

    @property
    def restarts(self) -> tuple[int, ...]:
        """The steps that later attempts went on from."""
        return tuple(
            int(each.event.step)
            for each in self.envelopes
            if isinstance(each.event, RunStarted) and each.attempt > 0
        )

    def find_attempt(self, rank: int, at_s: float) -> int:
        """The attempt in which a rank was at a moment, by its own words before it."""
        attempts = [
            each.attempt
            for each in self.envelopes
            if each.rank == rank and each.monotonic_s <= at_s
        ]
        return max(attempts, default=0)

    def find_trained_again_s(self, strike: Strike, *, ranks_go_on: bool = False) -> float:
        """Seconds from a strike to the end of the next step that was never done before; NaN if
        there is none.

        Where no attempt followed, or `ranks_go_on` after such a fault, it is one of the attempt
        that was struck, and all ranks have to have done it.
        """
        attempt = self.find_attempt(strike.rank, strike.monotonic_s)
        is_last = all(each.attempt <= attempt for each in self.envelopes)
        if is_last or ranks_go_on:
            went_on_s = self._find_went_on_s(strike, attempt)
            if is_last or math.isfinite(went_on_s):
                return went_on_s
        before = [_step(each) for each in self.finished_steps if each.attempt <= attempt]
        last = max(before, default=0)
        for each in self.finished_steps:
            if each.attempt > attempt and _step(each) > last:
                return each.monotonic_s - strike.monotonic_s
        return math.nan

    def _find_went_on_s(self, strike: Strike, attempt: int) -> float:
        """Seconds from a strike to when each rank had done a step beyond the struck one in the
        `attempt` that was struck; NaN if one never did."""
        first_s: dict[int, float] = {}
        for each in self.finished_steps:
            is_later = each.monotonic_s >= strike.monotonic_s and _step(each) > strike.step
            if each.attempt == attempt and is_later:
                first_s.setdefault(each.rank, each.monotonic_s)
        if not first_s or first_s.keys() != {each.rank for each in self.finished_steps}:
            return math.nan
        return max(first_s.values()) - strike.monotonic_s

    def count_steps_of_open_save(
        self, strike: Strike, save_every: int, *, ranks_leave_later: bool = False
    ) -> int:
        """Steps from the newest one that was to be saved to the struck one, if its checkpoint was
        not committed yet when the fault struck; 0 if it was. `ranks_leave_later`: those count, too,
        that ranks did until they left."""
        due = strike.step // save_every * save_every
        saved = [
            each.event.step
            for each in self.envelopes
            if isinstance(each.event, CheckpointSaved) and each.monotonic_s <= strike.monotonic_s
        ]
        if max(saved, default=0) >= due:
            return 0
        last = strike.step
        if ranks_leave_later:
            attempt = self.find_attempt(strike.rank, strike.monotonic_s)
            done = [_step(each) for each in self.finished_steps if each.attempt == attempt]
            last = max((last, *done))
        return last - due

    def count_lost_steps(self) -> int:
        """Steps that were done, and done again: of the rank that did most of them."""
        times = Counter((each.rank, _step(each)) for each in self.finished_steps)
        lost = Counter(rank for (rank, _), count in times.items() for _ in range(count - 1))
        return max(lost.values(), default=0)

    def measure_step_quantile_s(self, quantile: float) -> float:
        """A quantile of the seconds of steps, without the first three; NaN without any."""
        seconds = sorted(
            _finished(each).step_s for each in self.finished_steps if _step(each) > _WARM_UP_STEPS
        )
        if not seconds:
            return math.nan
        return seconds[min(int(quantile * len(seconds)), len(seconds) - 1)]


def _finished(envelope: Envelope) -> StepFinished:
    assert isinstance(envelope.event, StepFinished)
    return envelope.event


def _step(envelope: Envelope) -> int:
    return int(_finished(envelope).step)


def read_run_record(run_dir: Path) -> RunRecord:
    """Read the events and the strikes of a run; what is torn is left out."""
    envelopes: list[Envelope] = []
    folder = run_dir / "events"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        envelopes += _read_event_file(path)
    return RunRecord(run_dir, tuple(envelopes), tuple(read_strikes(run_dir)))


def _read_event_file(path: Path) -> Sequence[Envelope]:
    with open_regular_file(path) as file:
        parsed = [parse_valid_event_line(line) for line in read_bounded_lines(file)]
    # Of samples the ledger knows more; a long run has one such event for each step of each rank.
    return [
        each
        for each in parsed
        if each is not None
        and math.isfinite(each.monotonic_s)
        and not isinstance(each.event, SamplesRead)
    ]
