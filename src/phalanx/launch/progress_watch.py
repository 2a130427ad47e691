"""Watches whether a run makes progress, and names the ranks that keep it from that.

Progress is that a rank wrote something into its black box: a position, or a collective; within
one step not without end. In longer work, such as a save, a sign of work is progress, too. That a
process is alive is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from phalanx.core.black_box_reader import LastPosition
from phalanx.launch.ask_stacks import ask_for_stacks
from phalanx.launch.endless_steps import EndlessStepWatch
from phalanx.launch.hang_kinds import (
    LINK_CUT,
    WAITING_ELSEWHERE,
    Culprits,
    HangEvidence,
    find_culprits,
)
from phalanx.launch.hang_limits import (
    BETWEEN_STEPS_PHASES,
    MIN_STEP_LIMIT_S,
    HangLimit,
    HangSettings,
    StepDurations,
    choose_limit,
    have_warmed_up,
)
from phalanx.launch.hang_verdict import HangVerdict, build_verdict_on_hang, build_verdict_on_step
from phalanx.launch.positions_in_attempt import PositionsInAttempt
from phalanx.launch.processor_watch import MAX_SHORT_STEP_S, ProcessorWatch
from phalanx.launch.rank_activity import QuietTime, sample_process
from phalanx.launch.stack_groups import find_odd_ranks
from phalanx.launch.stuck_links import choose_cut_off_ranks, find_stuck_links
from phalanx.launch.untold_ends import UntoldEnds
from phalanx.launch.work_signs import WorkSigns
from phalanx.observe.events import Event
from phalanx.observe.process_status import PROCESS_STATES, ProcessStatus, is_process_there
from phalanx.observe.rank_waits import RankState

POLL_INTERVAL_S = 0.5
# A supervisor that was itself kept from looking counts no more than this for the time between.
_MAX_COUNTED_INTERVAL_S = 2 * POLL_INTERVAL_S
# Between two looks at stacks while none of them tells.
_NEXT_STACKS_S = 30.0
# A run with a slow rank goes on within this time, or within so many steps.
_MAX_SILENCE_OF_SLOW_S, _NUM_SILENT_STEPS_OF_SLOW = 1.5, 2
# Of what a rank usually gets: below it, hardly anything could be told from nothing.
_MIN_USUAL_CPU_SHARE = 0.2


class ProgressWatch:
    """Looks at the ranks of one attempt after another. The durations of steps are of the whole
    run."""

    def __init__(
        self,
        run_dir: Path,
        settings: HangSettings,
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._run_dir, self._settings, self._emit = run_dir, settings, emit
        self._durations, self._endless = StepDurations(), EndlessStepWatch()
        self._pids: tuple[int, ...] = ()
        self._positions = PositionsInAttempt(run_dir)
        self._processors = ProcessorWatch((), 0.0)
        self.begin_attempt((), 0.0)

    def begin_attempt(
        self, pids: Sequence[int], now_s: float, server_pid: int = 0, attempt: int = 0
    ) -> None:
        """Begin to watch the processes `pids`, by rank, which were just started, or kept, for
        `attempt` by the process `server_pid`, their parent."""
        for event in self._processors.end():
            self._emit(event)
        self._pids = tuple(pids)
        self._positions = PositionsInAttempt(self._run_dir, self._pids, attempt)
        self._processors = ProcessorWatch(pids, now_s, self._positions.read_step)
        self._left: frozenset[int] = frozenset()
        self._quiet = {rank: QuietTime() for rank in range(len(pids))}
        self._untold_ends = UntoldEnds(server_pid)
        self._usual_cpu_share: dict[int, float] = {}
        self._work: WorkSigns | None = None
        self._progress_s = self._sampled_s = self._polled_s = now_s
        # Seconds in which nobody looked, which count for nobody: since the last progress, in all.
        self._unseen_s = self._all_unseen_s = 0.0
        self._next_stacks_s = 0.0
        self._durations.begin_attempt()
        self._endless.forget_step()

    def poll(
        self, now_s: float, finished: Collection[int] = (), left: Collection[int] = ()
    ) -> HangVerdict | None:
        """Look at the ranks if that is due; the verdict once they hang. `finished`: ranks whose
        work is done by their own word; `left`: those of them whose processes have ended."""
        self._left = frozenset(left)
        self._look_at_processors(now_s, is_done=len(finished) == len(self._pids))
        is_due = now_s >= self._polled_s + POLL_INTERVAL_S
        if not self._pids or not self._settings.is_on or not is_due:
            return None
        unseen_s = max(0.0, now_s - self._polled_s - _MAX_COUNTED_INTERVAL_S)
        self._polled_s = now_s
        self._all_unseen_s += unseen_s
        self._positions.read_all()
        if self._has_progressed(now_s):
            return self._judge_step(now_s, finished)
        limit = choose_limit(
            self._settings,
            self._positions.by_rank,
            len(self._pids),
            self._durations.compute_long_step_s(),
        )
        # Once the work of all is done, ranks sample text, and say so token by token.
        counts_work = limit.counts_work or len(finished) == len(self._pids)
        if counts_work and self._has_worked(now_s):
            return None
        self._unseen_s += unseen_s
        silent_s = now_s - self._progress_s - self._unseen_s
        # The workers of a loader are looked at when it becomes interesting.
        self._sample_ranks(with_helpers=silent_s >= limit.quiet_s / 2)
        untold_s = self._look_at_untold_ends(now_s)
        # Whatever ranks do, an end is told at once.
        is_end_untold = max(untold_s.values(), default=0.0) >= MIN_STEP_LIMIT_S
        if silent_s < limit.quiet_s and not is_end_untold:
            return None
        return self._judge(limit, silent_s, now_s, finished, untold_s)

    @property
    def positions(self) -> Mapping[int, LastPosition]:
        """What each rank of this attempt has written, at the last look."""
        return dict(self._positions.by_rank)

    def find_next_look_s(self) -> float:
        """Monotonic seconds at which the ranks should be looked at again."""
        if not self._pids or not self._settings.is_on:
            return math.inf
        return self._processors.next_look_s

    def _look_at_processors(self, now_s: float, *, is_done: bool) -> None:
        if not self._settings.is_on or now_s < self._processors.next_look_s:
            return
        goes_on = not is_done and self._positions.check_all_in_steps()
        silent_s = now_s - self._progress_s
        if goes_on and silent_s > _MAX_SILENCE_OF_SLOW_S:
            # Whoever keeps a run from all progress is judged as hung, and not as slow.
            goes_on = silent_s < _NUM_SILENT_STEPS_OF_SLOW * self._durations.compute_long_step_s()
        are_steps_short = self._durations.may_be_shorter_than(MAX_SHORT_STEP_S)
        for event in self._processors.look(now_s, goes_on=goes_on, are_steps_short=are_steps_short):
            self._emit(event)

    def _has_progressed(self, now_s: float) -> bool:
        """True if any rank wrote something since the last progress; then what was counted since
        begins anew."""
        newest_s = self._positions.newest_progress_s
        if newest_s <= self._progress_s:
            return False
        self._progress_s, self._unseen_s, self._work = newest_s, 0.0, None
        self._observe_step(now_s)
        elapsed_s, self._sampled_s = now_s - self._sampled_s, now_s
        for rank, pid in enumerate(self._pids):
            quiet, sample = self._quiet[rank], sample_process(pid)
            if sample is not None and quiet.last is not None and elapsed_s > 0:
                share = (sample.main_thread_cpu_s - quiet.last.main_thread_cpu_s) / elapsed_s
                before = self._usual_cpu_share.get(rank, share)
                share = min(1.0, max(_MIN_USUAL_CPU_SHARE, 0.8 * before + 0.2 * share))
                self._usual_cpu_share[rank] = share
            quiet.begin(sample)
        return True

    def _has_worked(self, now_s: float) -> bool:
        """True if a rank gave a sign of work since the last progress; then what was counted since
        begins anew."""
        if self._work is None:
            self._work = WorkSigns(self._pids, now_s)
        last_work_s = self._work.find_last_work_s(now_s, self._positions.by_rank)
        if last_work_s is None or last_work_s <= self._progress_s:
            return False
        self._progress_s, self._unseen_s, self._sampled_s = last_work_s, 0.0, now_s
        for rank, pid in enumerate(self._pids):
            self._quiet[rank].begin(sample_process(pid))
        return True

    def _observe_step(self, now_s: float) -> None:
        positions = self._positions.by_rank.values()
        step = max(position.step for position in positions)
        if any(position.phase in BETWEEN_STEPS_PHASES for position in positions):
            self._durations.forget_step()
        else:
            # A machine that stood still for a while makes no step a long one.
            warms_up = not have_warmed_up(positions)
            self._durations.observe(step, now_s - self._all_unseen_s, warms_up=warms_up)

    def _sample_ranks(self, *, with_helpers: bool) -> None:
        for rank, pid in enumerate(self._pids):
            sample = sample_process(pid, with_helpers=with_helpers)
            if sample is not None:
                self._quiet[rank].add(sample)

    def _look_at_untold_ends(self, now_s: float) -> dict[int, float]:
        """For each rank that has ended, how long the server could have told so and has not."""
        ended = [rank for rank, quiet in self._quiet.items() if quiet.has_ended]
        untold = [rank for rank in ended if rank not in self._left]
        return self._untold_ends.look(untold, now_s - self._all_unseen_s)

    def _judge_step(self, now_s: float, finished: Collection[int]) -> HangVerdict | None:
        """The verdict on ranks that go on and do not end their step."""
        if finished or len(self._positions.by_rank) < len(self._pids):
            return None
        endless = self._endless.look(
            self._positions.by_rank,
            now_s=now_s,
            p99_s=self._durations.compute_long_step_s(),
            long_s=max(self._settings.long_s, self._settings.hang_s or 0.0),
        )
        if endless is None:
            return None
        states = self._build_states(endless.elapsed_s)
        return build_verdict_on_step(endless, states, ask_for_stacks(self._run_dir, states))

    def _judge(
        self,
        limit: HangLimit,
        silent_s: float,
        now_s: float,
        finished: Collection[int],
        untold_s: Mapping[int, float],
    ) -> HangVerdict | None:
        states = self._build_states(silent_s)
        evidence = HangEvidence(
            states,
            self._quiet,
            self._usual_cpu_share,
            frozenset(finished),
            silent_s,
            limit,
            now_s,
            self._left,
            untold_s,
        )
        culprits = find_culprits(evidence)
        if not culprits.kind and not culprits.why.startswith("all ranks have posted"):
            return None
        if not culprits.kind and now_s < self._next_stacks_s:
            return None
        if culprits.kind in ("", WAITING_ELSEWHERE):
            cut_off = choose_cut_off_ranks(find_stuck_links(self._pids))
            if cut_off:
                culprits = Culprits(LINK_CUT, cut_off)
        self._next_stacks_s = now_s + _NEXT_STACKS_S
        detected_s = now_s - self._progress_s
        present = {rank: state for rank, state in states.items() if rank not in self._left}
        stacks = ask_for_stacks(self._run_dir, present)
        culprits = _refine_by_stacks(culprits, stacks)
        if not culprits.kind:
            return None
        return build_verdict_on_hang(culprits, evidence, stacks, detected_s)

    def _build_states(self, silent_s: float) -> dict[int, RankState]:
        states = {}
        for rank in range(len(self._pids)):
            last = self._quiet[rank].last
            if last is None:
                is_there = is_process_there(self._pids[rank])
                status = ProcessStatus("unknown" if is_there else "gone")
            else:
                # A look in which a rank that mostly runs slept, or the other way, misleads.
                state = PROCESS_STATES.get(last.letter, "sleeping")
                if state in ("running", "sleeping"):
                    state = "running" if self._quiet[rank].is_running else "sleeping"
                status = ProcessStatus(state, self._quiet[rank].process_cpu_s / silent_s)
            states[rank] = RankState(rank, self._positions.by_rank.get(rank), status)
        return states


def _refine_by_stacks(culprits: Culprits, stacks: Mapping[int, Sequence[str]]) -> Culprits:
    """The culprits, but for those whose stack is that of most ranks; where the boxes tell of no
    culprit, the ranks with another stack than most."""
    if culprits.kind not in ("", WAITING_ELSEWHERE) or len(stacks) < 3:
        return culprits
    odd = find_odd_ranks(stacks)
    if not culprits.kind:
        if odd:
            return Culprits(WAITING_ELSEWHERE, odd)
        return culprits
    remaining = tuple(rank for rank in culprits.ranks if rank in odd)
    if remaining and len(culprits.ranks) > 1:
        return Culprits(culprits.kind, remaining)
    return culprits
