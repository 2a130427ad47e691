"""A soak from start to end: a probe of the job's steps, the undisturbed run, the disturbed one, and
the judgement."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from phalanx.core.black_box_reader import BlackBoxVersionError, read_last_position
from phalanx.core.digest import digest
from phalanx.core.errors import PhalanxError, UsageError
from phalanx.core.typed_json import to_json
from phalanx.core.units import format_seconds
from phalanx.drills.campaign import Circumstances
from phalanx.drills.command import PHALANX_COMMAND, CommandEnd, run_phalanx
from phalanx.drills.drive import opening_runs_folder, read_job_facts
from phalanx.drills.fault_code import digest_package_code, digest_recovery_code
from phalanx.drills.fits import find_reason_against_job
from phalanx.drills.job import (
    DrilledJob,
    format_inject,
    list_restart_budget_keys,
    load_drilled_job,
    measure_job,
)
from phalanx.drills.judge import Check, finite_or_none
from phalanx.drills.record import RunRecord, read_run_record
from phalanx.drills.run_trial import compare_final_checkpoints, read_last_line
from phalanx.drills.soak.kept import BegunSoak, claim_folder
from phalanx.drills.soak.measure import (
    AnsweredStrike,
    list_false_verdicts,
    measure_strikes,
    sum_charges_s,
)
from phalanx.drills.soak.mix import FaultMix, PlannedStrike, draw_strikes
from phalanx.drills.soak.totals import SoakGoodput, compute_soak_goodput, judge_totals
from phalanx.drills.trials import WARM_UP_STEPS, DrillShape, load_fault
from phalanx.launch.paths import black_box_path
from phalanx.report.reduce import collect_run_facts

PROBE_STEPS = 40
# With a fault each 30 s, and steps that wait some milliseconds for a save, one each second or less
# loses least (Young/Daly). Where no rank is left, what is done again must fit the bar of 5 s, too.
SAVE_EVERY_S = 2.0
_MIN_SAVE_STEPS = 10
# With the small job's own batch a soak of half an hour has steps by the hundred thousand.
LARGER_BATCH = "train.global_batch_size=32"
# What the bars charge is far more than what recovery usually takes: for the time that is left.
_USUAL_SHARE_OF_CHARGE = 0.25
_LIMIT_FACTOR, _LIMIT_SLACK_S = 3.0, 300.0


@dataclass(frozen=True)
class SoakRequest:
    """A soak of the job that `job_file` (None: the small one) and `overrides` say.

    `out`: where the runs stay (None: they are removed).
    """

    job_file: str | None
    overrides: tuple[str, ...]
    mix: FaultMix
    minutes: float
    fault_every_s: float = 30.0
    seed: int = 0
    out: Path | None = None
    run_limit_s: float | None = None
    command: Sequence[str] = PHALANX_COMMAND


@dataclass(frozen=True)
class SoakPlan:
    """What a soak does, as its probe and its seed want it. `keys`: what it sets in the job besides
    steps and saves."""

    job: DrilledJob
    shape: DrillShape
    step_s: float
    gap_steps: int
    strikes: tuple[PlannedStrike, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class SoakProgress:
    """`activity`: "probe", "undisturbed run", "disturbed run" or "judging". `num_done` and
    `num_steps` are steps of both runs together; `left_s` is None before the first is done."""

    activity: str
    num_done: int = 0
    num_steps: int = 0
    num_struck: int = 0
    left_s: float | None = None


@dataclass(frozen=True)
class SoakedRun:
    """One of the two runs. `goodput` and `participation` (0 to 1) as its page says them; None where
    it has no steps."""

    record: RunRecord
    end: CommandEnd
    goodput: float | None
    participation: float | None


@dataclass(frozen=True)
class SoakResult:
    """A soak that has run: its strikes in order, the bars of the run as a whole, and both runs."""

    request: SoakRequest
    plan: SoakPlan
    undisturbed: SoakedRun
    disturbed: SoakedRun
    answered: tuple[AnsweredStrike, ...]
    checks: tuple[Check, ...]
    goodput: SoakGoodput
    circumstances: Circumstances = field(repr=False)

    @property
    def is_passed(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def counts(self) -> Counter[str]:
        """Strikes by fault."""
        return Counter(each.planned.fault for each in self.answered)

    @property
    def run_dir(self) -> Path:
        return self.disturbed.record.run_dir

    def to_json(self) -> dict[str, Any]:
        """The body of phalanx.drill-soak/1."""
        request, plan = self.request, self.plan
        return {
            "passed": self.is_passed,
            "minutes": request.minutes,
            "fault_every_s": request.fault_every_s,
            "seed": request.seed,
            "circumstances": self.circumstances.to_json(),
            "num_ranks": plan.shape.num_ranks,
            "num_steps": plan.shape.num_steps,
            "save_every_steps": plan.shape.save_every_steps,
            "gap_steps": plan.gap_steps,
            "step_s": round(plan.step_s, 5),
            "keys": list(plan.keys),
            "undisturbed_wall_s": round(self.undisturbed.end.wall_s, 2),
            "disturbed_wall_s": round(self.disturbed.end.wall_s, 2),
            "participation": self.disturbed.participation,
            "goodput": {
                **self.goodput.to_json(),
                "share_of_ceiling": self.goodput.share_of_ceiling,
            },
            "checks": [check.to_json() for check in self.checks],
            "mix": dict(sorted(self.counts.items())),
            "left_out": [to_json(each) for each in request.mix.left_out],
            "strikes": [
                {
                    **each.to_json(),
                    "checks": [check.to_json() for check in each.checks],
                    "passed": each.is_passed,
                }
                for each in self.answered
            ],
            "run": str(self.run_dir) if request.out is not None else None,
        }


def run_soak(
    request: SoakRequest,
    *,
    on_progress: Callable[[SoakProgress], None] = lambda progress: None,
    on_plan: Callable[[SoakPlan], None] = lambda plan: None,
) -> SoakResult:
    """Run a soak.

    Raises UsageError where the job does not run undisturbed or the soak is too short for its steps,
    and what loading and planning raise.
    """
    # Refused, if at all, before there is a folder.
    probe_job = _load_soaked_job(request, PROBE_STEPS, None, ())
    _require_faults_fit(request)
    begun = BegunSoak(_compute_soak_key(request, probe_job))
    if request.out is not None:
        begun = claim_folder(request.out, begun.key)
    with opening_runs_folder(request.out) as folder:
        runner = _SoakRunner(request, folder, on_progress)
        step_s = begun.step_s
        if step_s is None:
            step_s = runner.probe_step_s(probe_job)
        plan = _plan_soak(request, step_s)
        # At the start: sources may change while it runs.
        circumstances = replace(
            Circumstances.now(digest(read_job_facts(plan.job.job))), code=digest_recovery_code()
        )
        on_plan(plan)
        runner.num_steps = 2 * plan.shape.num_steps
        charged_s = sum_charges_s(plan.strikes, plan.shape, plan.step_s)
        if begun.undisturbed is None:
            undisturbed = runner.run_undisturbed(plan, charged_s)
            if request.out is not None:
                BegunSoak(begun.key, step_s, undisturbed.end).write(request.out)
        else:
            undisturbed = runner.take_over_undisturbed(begun.undisturbed)
        disturbed = runner.run_disturbed(plan, undisturbed, charged_s)
        on_progress(SoakProgress("judging", runner.num_steps, runner.num_steps))
        return judge_soak(request, plan, undisturbed, disturbed, circumstances)


def judge_soak(
    request: SoakRequest,
    plan: SoakPlan,
    undisturbed: SoakedRun,
    disturbed: SoakedRun,
    circumstances: Circumstances,
) -> SoakResult:
    """Judge both runs of a soak by what they left on the disk."""
    record = disturbed.record
    step_p99_s = undisturbed.record.measure_step_quantile_s(0.99)
    answered = measure_strikes(record, plan.strikes, plan.shape, step_p99_s)
    # As both runs took them: the probe was short.
    step_s = measure_usual_step_s(undisturbed.record)
    goodput = compute_soak_goodput(
        undisturbed.goodput,
        disturbed.goodput,
        undisturbed.end.wall_s,
        sum_charges_s(plan.strikes, plan.shape, step_s),
    )
    checks = judge_totals(
        answered,
        list_false_verdicts(undisturbed.record, record, answered),
        record,
        disturbed.end,
        num_steps=plan.shape.num_steps,
        is_bit_equal=compare_final_checkpoints(undisturbed.record.run_dir, record.run_dir),
        goodput=goodput,
        participation=disturbed.participation,
        num_left=undisturbed.end.num_left + disturbed.end.num_left,
        keeps_all_checkpoints=plan.job.job.checkpoint.keep_last is None,
    )
    return SoakResult(
        request,
        plan,
        undisturbed,
        disturbed,
        tuple(answered),
        tuple(checks),
        goodput,
        circumstances,
    )


def _compute_soak_key(request: SoakRequest, job: DrilledJob) -> str:
    """The key of a soak: two of the same key have equal undisturbed runs."""
    return digest(
        [
            read_job_facts(job.job),
            list(request.mix.faults),
            [request.minutes, request.fault_every_s, request.seed],
            [digest_package_code(), importlib.metadata.version("torch"), platform.node()],
        ]
    )


def _plan_soak(request: SoakRequest, step_s: float) -> SoakPlan:
    """Steps, saves and strikes for a job whose steps take `step_s`. Raises UsageError."""
    num_steps = round(request.minutes * 60 / step_s)
    gap_steps = round(request.fault_every_s / step_s)
    min_gap_steps = request.mix.min_gap_steps
    if gap_steps < min_gap_steps:
        raise UsageError(
            f"a step takes {format_seconds(step_s)}, and between two faults there must be"
            f" {min_gap_steps} steps",
            fix=f"give --fault-every {math.ceil(min_gap_steps * step_s)} or more",
        )
    if num_steps < gap_steps:
        raise UsageError(
            "no fault strikes in so short a soak",
            fix=f"give --soak {math.ceil(request.fault_every_s / 60)} or more",
        )
    save_every = max(min(round(SAVE_EVERY_S / step_s), gap_steps // 4), _MIN_SAVE_STEPS)
    num_strikes = num_steps // gap_steps
    keys = (
        "observe.samples=true",
        *list_restart_budget_keys(num_strikes),
        *request.mix.list_overrides(),
    )
    job = _load_soaked_job(request, num_steps, save_every, keys)
    shape = measure_job(job.job)
    if shape.num_ranks < 2:
        raise UsageError("a soak needs two ranks", fix="give parallel.ranks=2")
    if 4 * shape.save_every_steps > gap_steps:
        raise UsageError(
            f"checkpoint.every_steps = {shape.save_every_steps} leaves less than four saves"
            f" between two faults, which are {gap_steps} steps apart",
            fix=f"give checkpoint.every_steps={gap_steps // 4}",
        )
    strikes = draw_strikes(request.mix.faults, shape, gap_steps=gap_steps, seed=request.seed)
    return SoakPlan(job, shape, step_s, gap_steps, tuple(strikes), keys)


def _require_faults_fit(request: SoakRequest) -> None:
    """Raises UsageError where the mix has a fault that has no right answer in this job."""
    job = _load_soaked_job(request, PROBE_STEPS, None, request.mix.list_overrides())
    shape = measure_job(job.job)
    for name in request.mix.faults:
        if why := find_reason_against_job(load_fault(name).expectation, shape):
            raise UsageError(f"{name} does not fit this job", why=why, fix="leave it out")


def _load_soaked_job(
    request: SoakRequest, num_steps: int, save_every: int | None, keys: Sequence[str]
) -> DrilledJob:
    """The job with so many steps. Raises UsageError where an override wants another number."""
    if request.job_file is None:
        keys = (LARGER_BATCH, *keys)
    job = load_drilled_job(
        request.job_file,
        request.overrides,
        num_steps=num_steps,
        save_every_steps=save_every,
        keys=keys,
    )
    if job.job.train.steps != num_steps:
        raise UsageError(
            f"a soak counts its steps itself, and train.steps = {job.job.train.steps} was given",
            fix="leave train.steps to --soak",
        )
    return job


class _SoakRunner:
    """Runs the runs of a soak below `folder`, and tells how far they are."""

    def __init__(
        self, request: SoakRequest, folder: Path, on_progress: Callable[[SoakProgress], None]
    ) -> None:
        self._request, self._folder, self._on_progress = request, folder, on_progress
        self.num_steps = 0

    def probe_step_s(self, job: DrilledJob) -> float:
        """Seconds of a usual step of the job, from the end of one to the end of the next. Raises
        UsageError where it does not run."""
        self._on_progress(SoakProgress("probe"))
        probe = self._run("probe", job, (), 3600.0, lambda run_dir: None)
        return measure_usual_step_s(probe.record)

    def take_over_undisturbed(self, end: CommandEnd) -> SoakedRun:
        """The undisturbed run that an earlier command left, which ended so."""
        run_dir = self._folder / "undisturbed" / "run"
        return SoakedRun(read_run_record(run_dir), end, *_read_shares(run_dir))

    def run_undisturbed(self, plan: SoakPlan, charged_s: float) -> SoakedRun:
        steps, tell = plan.shape.num_steps, self._on_progress
        meter = _StepMeter(plan.shape)

        def watch(run_dir: Path) -> None:
            step, step_s = meter.read(run_dir)
            left_s = None
            if step_s is not None:
                left_s = (2 * steps - step) * step_s + _USUAL_SHARE_OF_CHARGE * charged_s
            tell(SoakProgress("undisturbed run", step, self.num_steps, left_s=left_s))

        limit_s = self._find_limit_s(60 * self._request.minutes)
        return self._run("undisturbed", plan.job, (), limit_s, watch)

    def run_disturbed(self, plan: SoakPlan, undisturbed: SoakedRun, charged_s: float) -> SoakedRun:
        steps, tell = plan.shape.num_steps, self._on_progress
        meter = _StepMeter(plan.shape)
        texts = [text for strike in plan.strikes for text in strike.inject]

        def watch(run_dir: Path) -> None:
            step, step_s = meter.read(run_dir)
            left_s = None
            if step_s is not None:
                left_s = (steps - step) * step_s
            num_struck = sum(strike.place.step <= step for strike in plan.strikes)
            tell(SoakProgress("disturbed run", steps + step, self.num_steps, num_struck, left_s))

        limit_s = self._find_limit_s(undisturbed.end.wall_s + charged_s)
        return self._run(
            "disturbed", plan.job, (format_inject(texts),), limit_s, watch, may_fail=True
        )

    def _find_limit_s(self, expected_s: float) -> float:
        return self._request.run_limit_s or _LIMIT_FACTOR * expected_s + _LIMIT_SLACK_S

    def _run(
        self,
        name: str,
        job: DrilledJob,
        overrides: Sequence[str],
        limit_s: float,
        watch: Callable[[Path], None],
        *,
        may_fail: bool = False,
    ) -> SoakedRun:
        """Train the job. Raises UsageError where that fails and may not."""
        run_dir = self._folder / name / "run"
        # What this soak had begun when it was stopped.
        shutil.rmtree(run_dir.parent, ignore_errors=True)
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        log = run_dir.with_suffix(".log")
        end = run_phalanx(
            ["train", *job.arguments, *overrides, f"run.dir={run_dir}"],
            run_dir,
            log=log,
            limit_s=limit_s,
            command=self._request.command,
            on_wait=lambda: watch(run_dir),
        )
        if end.code != 0 and not may_fail:
            raise UsageError(
                f"the job does not run undisturbed: it ended with exit code {end.code}",
                why=read_last_line(log),
            )
        return SoakedRun(read_run_record(run_dir), end, *_read_shares(run_dir))


class _StepMeter:
    """Reads the step at which a run is from the black boxes of its ranks, once a second."""

    def __init__(self, shape: DrillShape) -> None:
        self._shape = shape
        self._step, self._first = 0, 0
        self._read_at_s, self._began_s = -math.inf, math.nan

    def read(self, run_dir: Path) -> tuple[int, float | None]:
        """(steps that are done, seconds of each so far); None before the first steps are done."""
        now_s = time.monotonic()
        if now_s - self._read_at_s >= 1.0:
            self._read_at_s = now_s
            steps = [self._read_step(run_dir, rank) for rank in range(self._shape.num_ranks)]
            # Ranks that start again are at step 0: the run is not.
            self._step = max(self._step, min(steps) - 1)
            if self._step > WARM_UP_STEPS and math.isnan(self._began_s):
                self._began_s, self._first = now_s, self._step
        if math.isnan(self._began_s) or self._step == self._first:
            return self._step, None
        return self._step, (now_s - self._began_s) / (self._step - self._first)

    def _read_step(self, run_dir: Path, rank: int) -> int:
        try:
            position = read_last_position(black_box_path(run_dir, rank))
        except (OSError, BlackBoxVersionError):
            return 0
        return position.step if position is not None else 0


def measure_usual_step_s(record: RunRecord) -> float:
    """Median seconds from the end of a step of rank 0 to the end of the next, without those of the
    start."""
    moments = [each.monotonic_s for each in record.finished_steps if each.rank == 0]
    return statistics.median(after - before for before, after in pairwise(moments[WARM_UP_STEPS:]))


def _read_shares(run_dir: Path) -> tuple[float | None, float | None]:
    """(goodput, participation) of a run as its page says them; None without steps."""
    try:
        facts = collect_run_facts(run_dir)
    except PhalanxError:
        return None, None
    goodput = None
    if facts.ledger.wall_s > 0:
        goodput = finite_or_none(facts.ledger.good_s / facts.ledger.wall_s)
    return goodput, finite_or_none(facts.reliability.participation)
