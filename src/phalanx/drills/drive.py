"""A drill from start to end: the undisturbed run, and one run for each trial."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.core.digest import digest
from phalanx.drills.campaign import (
    Circumstances,
    TrialRow,
    append_row,
    build_row,
    build_skipped_row,
    read_campaign,
    require_campaign_can_grow,
    select_newest_rows,
)
from phalanx.drills.command import PHALANX_COMMAND
from phalanx.drills.fault_code import digest_fault_code
from phalanx.drills.fits import find_reason_against_job
from phalanx.drills.job import DrilledJob, measure_job
from phalanx.drills.run_trial import FinishedTrial, TrialRunner, UndisturbedRun
from phalanx.drills.shared_run import (
    group_trials,
    list_keys_of_shared_run,
    run_shared_trials,
)
from phalanx.drills.trials import Trial, draw_trials, load_fault
from phalanx.job.schema import Job
from phalanx.resilience.expectation import NO_VERDICT
from phalanx.run.scratch import open_scratch_directory


@dataclass(frozen=True)
class DrillRequest:
    """The faults to drill, each in `repeats` trials of a seed.

    `campaign`: the file that keeps trials, and has those of earlier calls; with `redoes_changed`
    those of other code than today's run again. `out`: where the runs stay (None: they are
    removed). `share`: so many trials may have one run, where their faults fit beside each other.
    """

    job: DrilledJob
    faults: tuple[str, ...]
    seed: int = 0
    repeats: int = 1
    campaign: Path | None = None
    out: Path | None = None
    run_limit_s: float | None = None
    command: Sequence[str] = PHALANX_COMMAND
    redoes_changed: bool = False
    share: int = 1


@dataclass(frozen=True)
class DrillProgress:
    """`running` is what runs now ("undisturbed", or the faults). `left_s`: seconds until the end as
    far as the runs so far tell; None before the first."""

    num_done: int
    num_runs: int
    running: str
    left_s: float | None


@dataclass
class DrillResult:
    """The rows of all trials that were asked for, those of earlier calls included. `finished`:
    those of this call."""

    rows: list[TrialRow]
    finished: list[FinishedTrial] = field(default_factory=list)

    @property
    def is_passed(self) -> bool:
        """True if every trial that ran met all its bars, and one did."""
        ran = [row for row in self.rows if not row.skipped]
        return bool(ran) and all(row.is_passed for row in ran)

    @property
    def confusion(self) -> Counter[tuple[str, str]]:
        """Trials by (class that is right, class that was said)."""
        return count_classes(self.rows)

    def to_json(self) -> dict[str, Any]:
        """The body of phalanx.drill/1."""
        matrix: dict[str, dict[str, int]] = {}
        for (right, verdict), count in sorted(self.confusion.items()):
            matrix.setdefault(right, {})[verdict] = count
        return {
            "passed": self.is_passed,
            "num_trials": len(self.rows),
            "num_passed": sum(row.is_passed for row in self.rows),
            "num_skipped": sum(bool(row.skipped) for row in self.rows),
            "confusion": matrix,
            "trials": [
                {
                    **row.to_json(),
                    "checks": [check.to_json() for check in row.checks],
                    "passed": None if row.skipped else row.is_passed,
                }
                for row in self.rows
            ],
        }


def count_classes(rows: Sequence[TrialRow]) -> Counter[tuple[str, str]]:
    """Trials by (class that is right, class that was said)."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if row.measured is not None and row.bars is not None:
            verdict = row.measured.verdict if row.measured.has_struck else NO_VERDICT
            counts[row.bars.verdict, verdict] += 1
    return counts


def run_drill(
    request: DrillRequest,
    *,
    on_progress: Callable[[DrillProgress], None] = lambda progress: None,
    on_row: Callable[[TrialRow], None] = lambda row: None,
) -> DrillResult:
    """Run the trials that are not in the campaign yet.

    Raises UsageError where the job does not run undisturbed or the campaign cannot be written, and
    what loading and planning raise.
    """
    shape = measure_job(request.job.job)
    trials = draw_trials(request.faults, shape, seed=request.seed, repeats=request.repeats)
    circumstances = Circumstances.now(digest(read_job_facts(request.job.job)))
    result = DrillResult(_select_rows_of_trials(request, trials, circumstances))
    waiting = _list_trials_to_run(trials, result.rows)
    if waiting and request.campaign is not None:
        require_campaign_can_grow(request.campaign)
    for trial in list(waiting):
        fault = load_fault(trial.fault)
        why_not = fault.why_not or find_reason_against_job(fault.expectation, shape)
        if why_not:
            waiting.remove(trial)
            row = build_skipped_row(trial, why_not, _add_code(circumstances, trial))
            result.rows.append(row)
            on_row(row)
    if not waiting:
        return result
    with opening_runs_folder(request.out) as folder:
        runner = TrialRunner(request.job, shape, folder, request.command, request.run_limit_s)

        def keep(finished: FinishedTrial, sharing: int) -> None:
            trial = finished.trial
            row = build_row(finished, _add_code(circumstances, trial), sharing=sharing)
            if request.campaign is not None:
                append_row(request.campaign, row)
            result.rows.append(row)
            result.finished.append(finished)
            on_row(row)

        _run_trials(runner, group_trials(waiting, request.share), keep, on_progress)
    return result


def _run_trials(
    runner: TrialRunner,
    groups: Sequence[tuple[Trial, ...]],
    keep: Callable[[FinishedTrial, int], None],
    on_progress: Callable[[DrillProgress], None],
) -> None:
    """Run each group of trials in one run, beside an undisturbed one of as many steps."""
    undisturbed: dict[int, UndisturbedRun] = {}
    pending = deque(groups)
    clock = _RunClock(_count_runs_to_come(pending, undisturbed), on_progress)
    while pending:
        group = pending.popleft()
        sharing = len(group)
        if sharing not in undisturbed:
            clock.begin("undisturbed")
            if sharing == 1:
                undisturbed[sharing] = runner.run_undisturbed()
            else:
                undisturbed[sharing] = runner.run_undisturbed(
                    f"undisturbed-{sharing}", list_keys_of_shared_run(runner.shape, sharing)
                )
        clock.begin(" ".join(trial.fault for trial in group))
        if sharing == 1:
            keep(runner.run_trial(group[0], undisturbed[1]), 1)
            continue
        finished = run_shared_trials(runner, group, undisturbed[sharing])
        for each in finished:
            keep(each, sharing)
        done = {each.trial.key for each in finished}
        alone = [(trial,) for trial in group if trial.key not in done]
        # They did not come to strike.
        pending.extend(alone)
        clock.num_runs = clock.num_begun + _count_runs_to_come(pending, undisturbed)


def _count_runs_to_come(
    pending: Collection[tuple[Trial, ...]], undisturbed: Collection[int]
) -> int:
    """One for each group, and an undisturbed one for each size of group that has none yet."""
    return len(pending) + len({len(group) for group in pending} - set(undisturbed))


def read_job_facts(job: Job) -> Any:
    """What a job says, but for the place of its run."""
    body = job.to_json()
    # Where a run lies does not change what it does.
    body.pop("run", None)
    return body


def _add_code(circumstances: Circumstances, trial: Trial) -> Circumstances:
    return replace(circumstances, code=digest_fault_code(trial.fault))


def _select_rows_of_trials(
    request: DrillRequest, trials: Sequence[Trial], circumstances: Circumstances
) -> list[TrialRow]:
    """The rows that the campaign has of `trials`, the newest of each, of the same job; without
    those that are to be done again."""
    if request.campaign is None:
        return []
    keys = {trial.key for trial in trials}
    rows = [
        row
        for row in select_newest_rows(read_campaign(request.campaign))
        if row.key in keys and row.circumstances.job == circumstances.job
    ]
    if request.redoes_changed:
        rows = [row for row in rows if row.circumstances.code == digest_fault_code(row.fault)]
    return rows


def _list_trials_to_run(trials: Sequence[Trial], rows: Sequence[TrialRow]) -> list[Trial]:
    done = {row.key for row in rows}
    return [trial for trial in trials if trial.key not in done]


@contextlib.contextmanager
def opening_runs_folder(out: Path | None) -> Iterator[Path]:
    """The folder for the runs of a drill: below `out`, or one that is removed after the body."""
    if out is not None:
        folder = out / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with open_scratch_directory("drill") as scratch:
        yield scratch.directory


@dataclass
class _RunClock:
    """Tells how far a drill is: the runs to come take as long as those so far in the mean."""

    num_runs: int
    tell: Callable[[DrillProgress], None]
    num_begun: int = 0
    began_s: float = field(default_factory=time.monotonic)

    def begin(self, activity: str) -> None:
        left_s = None
        if self.num_begun:
            each_s = (time.monotonic() - self.began_s) / self.num_begun
            left_s = each_s * (self.num_runs - self.num_begun)
        self.tell(DrillProgress(self.num_begun, self.num_runs, activity, left_s))
        self.num_begun += 1
