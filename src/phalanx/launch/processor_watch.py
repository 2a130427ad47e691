"""Says which rank is slow because it may not run: it is stopped and continued by turns, or gets
less of a processor than the others.

The kernel knows it while it happens, whatever the phase in which it strikes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from phalanx.core.process_stat import read_run_and_delay_s, read_state_letter
from phalanx.launch.rank_activity import STOPPED_LETTERS
from phalanx.observe.events import Event, RankSlow, RankSlowEnded

# No part of a tenth of a second: of what goes on in step with that, always one half would be seen.
LOOK_INTERVAL_S = 0.07
# A rank that is stopped by turns is to be told within 20 steps. Where these take no longer than the
# second, looks are so close that of stops of 23 ms in each tenth of a second one in two is seen.
CLOSER_LOOK_INTERVAL_S, MAX_SHORT_STEP_S = 0.029, 0.05
# Once a rank was seen stopped: the next stop may be as short, and steps are.
_CLOSE_LOOK_INTERVAL_S, _CLOSE_LOOKS_S = 0.015, 0.5
# So long a stop belongs to the one before it, and so long without one a rank is not stopped by
# turns any more.
_STOPS_WINDOW_S = 3.0
# Stops with a run between them: a person may stop a process once.
_MIN_STOPS = 2
_SHARE_WINDOW_S = 1.0
# Windows in a row that must agree, at the beginning and at the end.
_MIN_WINDOWS = 3
# A rank that wants a processor for less of the time is not kept from its work by the lack of one.
_MIN_WANTED_SHARE = 0.3
_MAX_SHARE, _SLOW_FACTOR, _RECOVERED_FACTOR = 0.75, 1.3, 1.15
# Where the others get less than this, the machine is short of processors, and no rank to blame.
_MIN_PEERS_SHARE = 0.5

STOPPED_BY_TURNS = "it is stopped and continued by turns"
STARVED = "it gets less of a processor than the others (other processes, or a quota)"


@dataclass
class _RankLooks:
    """The looks at one rank. `stops`: for each look at which it was stopped, the time, the
    processor seconds it had got by then and the seconds since the look before; `run_s`, `delay_s`
    at the beginning of the window; `share` (0 to 1) of the time it wanted to run in the last one;
    `factors` of the last windows."""

    stops: deque[tuple[float, float, float]] = field(default_factory=deque)
    run_s: float = 0.0
    delay_s: float = 0.0
    share: float = 1.0
    is_wanting: bool = False
    factors: deque[float] = field(default_factory=lambda: deque(maxlen=_MIN_WINDOWS))
    slow_since: dict[str, int] = field(default_factory=dict)

    def count_stops(self) -> int:
        """Stops with a run between them."""
        run_times = [run_s for _, run_s, _ in self.stops]
        return len(set(run_times))

    def measure_stopped_share(self) -> float:
        """The part of the time from the first of the stops to the last for which it was stopped."""
        seconds = self.stops[-1][0] - self.stops[0][0]
        # Of the first it is not known since when.
        stopped_s = sum(since_look_s for _, _, since_look_s in tuple(self.stops)[1:])
        return min(0.99, stopped_s / seconds)


class ProcessorWatch:
    """Looks at the processes `pids`, by rank, several times a second.

    `read_step` returns the step that a rank is in now.
    """

    def __init__(
        self, pids: Sequence[int], now_s: float, read_step: Callable[[int], int] = lambda rank: 0
    ) -> None:
        self._pids, self._read_step = tuple(pids), read_step
        self._looks = [_RankLooks() for _ in pids]
        self.next_look_s = self._window_began_s = self._looked_s = now_s
        self._close_until_s = now_s
        self._begin_windows(now_s)

    def look(self, now_s: float, *, goes_on: bool, are_steps_short: bool = False) -> list[Event]:
        """The events that follow, if a look is due. `goes_on`: all ranks are in steps, and make
        progress. `are_steps_short`: a step may take less than `MAX_SHORT_STEP_S`."""
        if now_s < self.next_look_s:
            return []
        since_look_s, self._looked_s = now_s - self._looked_s, now_s
        if not goes_on:
            self.next_look_s = now_s + LOOK_INTERVAL_S
            # A start is different on each rank, and in a hang the one that computes is not slow.
            self._begin_windows(now_s)
            for looks in self._looks:
                looks.factors.clear()
            return []
        events: list[Event] = []
        for rank, pid in enumerate(self._pids):
            looks = self._looks[rank]
            if read_state_letter(pid) in STOPPED_LETTERS:
                if not looks.stops:
                    self._close_until_s = now_s + _CLOSE_LOOKS_S
                looks.stops.append((now_s, read_run_and_delay_s(pid)[0], since_look_s))
            while looks.stops and now_s - looks.stops[0][0] > _STOPS_WINDOW_S:
                looks.stops.popleft()
            events += self._judge_stops(rank)
        interval_s = CLOSER_LOOK_INTERVAL_S if are_steps_short else LOOK_INTERVAL_S
        is_close = now_s < self._close_until_s
        self.next_look_s = now_s + (_CLOSE_LOOK_INTERVAL_S if is_close else interval_s)
        if now_s - self._window_began_s >= _SHARE_WINDOW_S:
            events += self._judge_shares(now_s - self._window_began_s)
            self._window_began_s = now_s
        return events

    def end(self) -> list[Event]:
        """The ends of what is slow when the attempt is over."""
        events: list[Event] = []
        for rank, looks in enumerate(self._looks):
            for why in tuple(looks.slow_since):
                events.append(replace(self._end_slowness(rank, why), with_attempt=True))
        return events

    def _judge_stops(self, rank: int) -> list[Event]:
        looks = self._looks[rank]
        is_slow = STOPPED_BY_TURNS in looks.slow_since
        if not is_slow and looks.count_stops() >= _MIN_STOPS:
            self._close_until_s = looks.stops[-1][0]
            factor = 1.0 / (1.0 - looks.measure_stopped_share())
            return [self._begin(rank, STOPPED_BY_TURNS, factor)]
        if is_slow and not looks.stops:
            return [self._end_slowness(rank, STOPPED_BY_TURNS)]
        return []

    def _judge_shares(self, window_s: float) -> list[Event]:
        for rank in range(len(self._pids)):
            self._close_window(rank, window_s)
        events: list[Event] = []
        for rank, looks in enumerate(self._looks):
            peer_shares = [each.share for each in self._looks if each is not looks]
            if not peer_shares:
                continue
            factor, peers_share = 1.0, median(peer_shares)
            is_known = STARVED in looks.slow_since
            if looks.is_wanting and (is_known or peers_share >= _MIN_PEERS_SHARE):
                factor = peers_share / looks.share
            looks.factors.append(factor)
            if not is_known and self._is_starved(looks):
                events.append(self._begin(rank, STARVED, factor))
            elif is_known and max(looks.factors) < _RECOVERED_FACTOR:
                events.append(self._end_slowness(rank, STARVED))
        return events

    def _is_starved(self, looks: _RankLooks) -> bool:
        has_windows = len(looks.factors) == _MIN_WINDOWS
        return has_windows and min(looks.factors) >= _SLOW_FACTOR and looks.share <= _MAX_SHARE

    def _begin_windows(self, now_s: float) -> None:
        self._window_began_s = now_s
        for rank in range(len(self._pids)):
            self._begin_window(rank)

    def _begin_window(self, rank: int) -> None:
        looks = self._looks[rank]
        looks.run_s, looks.delay_s = read_run_and_delay_s(self._pids[rank])

    def _close_window(self, rank: int, window_s: float) -> None:
        looks = self._looks[rank]
        before_run_s, before_delay_s = looks.run_s, looks.delay_s
        self._begin_window(rank)
        run_s, delay_s = looks.run_s - before_run_s, looks.delay_s - before_delay_s
        wanted_s = run_s + delay_s
        looks.share = 1.0 if wanted_s <= 0 else max(run_s / wanted_s, 0.001)
        looks.is_wanting = wanted_s >= _MIN_WANTED_SHARE * window_s

    def _begin(self, rank: int, why: str, factor: float) -> Event:
        step = self._read_step(rank)
        self._looks[rank].slow_since[why] = step
        peer_shares = [looks.share for looks in self._looks if looks is not self._looks[rank]]
        return RankSlow(
            slow_rank=rank,
            step=step,
            first_step=step,
            factor=factor,
            excess_s=0.0,
            phase="",
            waited_s=0.0,
            cpu_share=self._looks[rank].share,
            peers_cpu_share=median(peer_shares) if peer_shares else 0.0,
            why=why,
        )

    def _end_slowness(self, rank: int, why: str) -> RankSlowEnded:
        first_step = self._looks[rank].slow_since.pop(why)
        step = max(self._read_step(rank), first_step)
        return RankSlowEnded(rank, step, first_step, 0.0, why)
