"""Runs a comparison: starts contenders as far as memory goes, gives them turns, and collects what
they took. Torch-free."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from phalanx.bench.cpu_usage import CpuUsage
from phalanx.bench.training.contenders import ALONE, Contender
from phalanx.bench.training.layouts import ComparedJob
from phalanx.bench.training.payload import Turn
from phalanx.bench.training.processes import ContenderFailedError, ContenderServer, RankGroup
from phalanx.bench.training.summary import Standing, TurnRow, summarize_contender
from phalanx.core.errors import PhalanxError
from phalanx.launch.paths import LOGS
from phalanx.run.launched import refuse_external_launcher
from phalanx.run.scratch import open_scratch_directory
from phalanx.run.stop_signals import raising_on_stop_signals

WARM_UP = Turn(1, 2, 1)
# A turn lasts about as long, so that its beginning and the noise of the machine weigh little.
SECONDS_OF_TURN = 1.5
MIN_STEPS, MAX_STEPS = 2, 50
# At the beginning of a turn caches are full of the others' weights.
NUM_WARM_STEPS = 1
# What one more contender may take is free, by this factor, before it is started.
ROOM_FACTOR = 1.5


@dataclass(frozen=True)
class TrainBenchRequest:
    """A comparison: `contenders` beside ranks that never talk, in `num_turns` turns each.

    `steps_of_turn`: steps that count in each; None: as many as last SECONDS_OF_TURN.
    """

    compared: ComparedJob
    contenders: tuple[Contender, ...]
    num_turns: int
    steps_of_turn: int | None = None


@dataclass(frozen=True)
class TrainBenchProgress:
    """`done` of `total` starts and turns are behind us; `running` says what is going on."""

    done: int
    total: int
    running: str


@dataclass(frozen=True)
class TrainBenchResult:
    """The standing of each contender, ranks that never talk first, and what the machine did."""

    standings: tuple[Standing, ...]
    rows: tuple[TurnRow, ...]
    num_sections: int
    wall_s: float
    logs: Path | None = None
    """What the ranks of contenders said, if one of them failed."""


@dataclass
class _Comparison:
    request: TrainBenchRequest
    server: ContenderServer
    logs: Path
    on_progress: Callable[[TrainBenchProgress], None]
    on_row: Callable[[TurnRow], None]
    rows: list[TurnRow] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    groups: dict[str, RankGroup] = field(default_factory=dict)
    section: int = 0
    num_steps: int = 0
    _done: int = 0

    def run(self) -> int:
        """Let all contenders have their turns; returns the number of sections."""
        waiting = list(self.request.contenders)
        try:
            self._start(ALONE)
            while waiting:
                self._start_as_many_as_fit(waiting)
                self._take_turns()
                self._close_all_but_alone()
                self.section += 1
        finally:
            for group in self.groups.values():
                group.close()
        return self.section

    def _start_as_many_as_fit(self, waiting: list[Contender]) -> None:
        """Start contenders of `waiting`, at least one, while memory for one more is free."""
        used_bytes = 0
        while waiting:
            before = psutil.virtual_memory().available
            self._start(waiting.pop(0))
            available = psutil.virtual_memory().available
            used_bytes = max(used_bytes, before - available)
            if available < ROOM_FACTOR * used_bytes:
                break

    def _start(self, contender: Contender) -> None:
        """Start the ranks of `contender` and let them warm up; a failure is noted."""
        self._report_progress(f"{contender.name}: starting")
        name = re.sub(r"[^a-z0-9]+", "-", contender.name)
        group = RankGroup(contender, self.logs / f"{self.section}-{name}")
        self.groups[contender.name] = group
        compared = self.request.compared
        try:
            job, plan = compared.plan_contender(contender)
            group.start(self.server, job, plan, compared.num_ranks)
            self._take_turn(group, 0, WARM_UP)
        except ContenderFailedError as error:
            self._drop_group(group, error)
        self._done += 1

    def _take_turns(self) -> None:
        """Give each contender its turns, in an order that rotates."""
        if not self.num_steps:
            step_s = self.rows[0].step_s
            num_timed_steps = max(MIN_STEPS, min(MAX_STEPS, math.ceil(SECONDS_OF_TURN / step_s)))
            self.num_steps = NUM_WARM_STEPS + (self.request.steps_of_turn or num_timed_steps)
        first_step = WARM_UP.first_step + WARM_UP.num_steps
        for number in range(1, self.request.num_turns + 1):
            turn = Turn(first_step, self.num_steps, NUM_WARM_STEPS)
            names = list(self.groups)
            start = number % len(names)
            for name in names[start:] + names[:start]:
                self._report_progress(f"{name}: turn {number} of {self.request.num_turns}")
                self._done += 1
                group = self.groups[name]
                try:
                    self._take_turn(group, number, turn)
                except ContenderFailedError as error:
                    self._drop_group(group, error)
            first_step += self.num_steps

    def _take_turn(self, group: RankGroup, number: int, turn: Turn) -> None:
        name = group.contender.name
        step_s = max((row.step_s for row in self.rows if row.contender == name), default=0.0)
        usage = CpuUsage()
        ranks = group.take_turn(turn, expected_s=step_s * turn.num_steps)
        own_s = usage.own_cpu_seconds() + sum(rank.cpu_s for rank in ranks)
        row = TurnRow(
            name,
            self.section,
            number,
            turn,
            tuple(ranks),
            usage.compute_share_of_others(own_s),
            round(os.getloadavg()[0], 2),
        )
        self.rows.append(row)
        self.on_row(row)

    def _drop_group(self, group: RankGroup, error: ContenderFailedError) -> None:
        name = group.contender.name
        self.failures[name] = str(error)
        group.close()
        del self.groups[name]
        if group.contender.is_alone:
            raise PhalanxError(f"ranks that never talk failed: {error}")

    def _close_all_but_alone(self) -> None:
        for name in list(self.groups):
            if name != ALONE.name:
                self.groups.pop(name).close()

    def _report_progress(self, running: str) -> None:
        contenders = 1 + len(self.request.contenders)
        # Ranks that never talk have turns in each section: how many there will be is not known.
        total = max(self._done + 1, contenders * (1 + self.request.num_turns))
        self.on_progress(TrainBenchProgress(self._done, total, running))


def bench_training(
    request: TrainBenchRequest,
    *,
    on_progress: Callable[[TrainBenchProgress], None] = lambda progress: None,
    on_row: Callable[[TurnRow], None] = lambda row: None,
) -> TrainBenchResult:
    """Let the contenders train in turn; `on_row` gets each turn as it ends.

    A contender that fails is a standing with the reason. Raises PhalanxError where none can be
    measured.
    """
    refuse_external_launcher("bench")
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(raising_on_stop_signals())
        scratch = stack.enter_context(open_scratch_directory("bench-train"))
        server = stack.enter_context(ContenderServer(scratch.directory))
        server.wait_until_ready()
        logs = scratch.directory / LOGS
        comparison = _Comparison(request, server, logs, on_progress, on_row)
        num_sections = comparison.run()
        scratch.keeps_logs = bool(comparison.failures)
    standings = summarize_standings(request, comparison.rows, comparison.failures)
    return TrainBenchResult(
        standings,
        tuple(comparison.rows),
        num_sections,
        time.monotonic() - began,
        logs if comparison.failures else None,
    )


def summarize_standings(
    request: TrainBenchRequest, rows: Sequence[TurnRow], failures: dict[str, str]
) -> tuple[Standing, ...]:
    """The standing of ranks that never talk and of each contender, in their order."""
    plan = request.compared.plan
    return tuple(
        summarize_contender(
            contender,
            rows,
            tokens_per_step=plan.global_batch_size * plan.seq_len,
            precision=plan.precision,
            why_not=failures.get(contender.name, ""),
        )
        for contender in (ALONE, *request.contenders)
    )
