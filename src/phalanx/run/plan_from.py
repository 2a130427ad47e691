"""The time and memory of a job, from a small run of it (or of a job like it): what the run
measured, scaled by how the parts of a step grow.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import LayoutError, UsageError
from phalanx.core.units import (
    describe_prediction_error,
    format_bytes,
    format_seconds,
    plural,
)
from phalanx.job.load import load_job, load_job_json
from phalanx.job.schema import Job
from phalanx.plan.calibrated.one_core import load_one_core_profile
from phalanx.plan.calibrated.step import (
    estimate_processor_seconds,
    estimate_step_from_profile,
)
from phalanx.plan.cluster import detect_cluster
from phalanx.plan.described_cluster import describe_absent_gpus
from phalanx.plan.plan import Plan
from phalanx.plan.profiles import MachineProfile, find_profile_of_cluster
from phalanx.plan.stored_plan import StoredPlanError, read_stored_plan
from phalanx.plan.timing.step_time import STEP_TERMS, StepTime
from phalanx.run.recorded_steps import RecordedSteps, read_recorded_steps

# What a step's terms are made of, as phases of a run measure it.
GROUPS: dict[str, tuple[str, ...]] = {
    "computing": ("ideal", "matmul loss", "attention", "elementwise", "launch", "offload"),
    "messages": ("tp", "cp", "ep", "bubble", "dp exposed"),
    "optimizer": ("optimizer",),
}
# Messages that take longer than this, beside computing's scale, are waited for.
MAX_MESSAGE_SHARE = 3.0
# Half of the logarithm's width of the 80 % interval: of a run like this one; for each factor of e
# that the step is longer; and for the share of a step that the run had nothing of.
BAND, BAND_PER_E, BAND_UNMEASURED = 0.08, 0.04, 0.7
# Seconds that a kernel takes whatever its size; the others of computing grow with the tokens.
FIXED_TERMS = ("launch",)
# Two explanations of a run that differ by more than this factor are worth a line.
LARGE_DISAGREEMENT = 1.25


@dataclass(frozen=True)
class PlanFromRun:
    """A plan whose time and memory are extrapolated from a run."""

    run_dir: Path
    run: RecordedSteps
    run_estimate: StepTime
    scales: dict[str, float]
    plan: Plan
    step: StepTime
    memory_bytes: int
    waiting_s: float
    """Seconds of the run's step in which ranks waited for each other rather than for messages."""
    explained_s: tuple[float, float]
    """Seconds of the step, the fewer first, if all that computing took beyond its estimate is by
    the kernel, and if all of it is by the token: one run cannot tell which."""
    is_profiled: bool
    """True where a profile of `phalanx bench` says how parts grow; else one core's figures."""

    def to_json(self) -> dict[str, Any]:
        """The body of phalanx.plan-from/1."""
        return {
            "run": str(self.run_dir),
            "measured": {
                "num_steps": self.run.num_steps,
                "step_s": self.run.step_s,
                "low_s": self.run.low_s,
                "high_s": self.run.high_s,
                "groups_s": self.run.groups_s,
                "unattributed_s": self.run.unattributed_s,
                "processor_s": self.run.processor_s,
                "memory_ratio": self.run.memory_ratio,
            },
            "scales": self.scales,
            "waiting_s": self.waiting_s,
            "explained_s": list(self.explained_s),
            "has_profile": self.is_profiled,
            "step": self.step.to_json(),
            "memory_bytes": self.memory_bytes,
            "plan": self.plan.to_json(),
        }

    def lines(self) -> list[str]:
        """Lines for people."""
        run, step, plan = self.run, self.step, self.plan
        parts = ", ".join(f"{name} {scale:.2f}" for name, scale in self.scales.items())
        tokens = plan.global_batch_size * plan.seq_len
        lines = [
            f"from    {self.run_dir}: {format_seconds(run.step_s)}/step measured"
            f" ({format_seconds(run.low_s)} to {format_seconds(run.high_s)}, of"
            f" {plural(run.num_steps, 'step')})"
        ]
        if self.is_profiled:
            error = describe_prediction_error(self.run_estimate.total_s, run.step_s)
            lines.append(f"        the profile of this machine alone says it {error}")
        lines += [
            f"scales  {parts}; {format_seconds(self.waiting_s)} of a step waiting for other ranks,"
            f" {format_seconds(run.unattributed_s)} beside these",
            f"time    {format_seconds(step.total_s)}/step ({format_seconds(step.low_s)} to"
            f" {format_seconds(step.high_s)}), {tokens / step.total_s:,.0f} tokens/s;"
            " extrapolated from this run",
            *self._describe_disagreement(),
        ]
        memory = f"memory  {format_bytes(self.memory_bytes)} per rank"
        if run.memory_ratio is None:
            return [*lines, f"{memory} predicted; the run is too small to say more"]
        return [*lines, f"{memory}: predicted, times {run.memory_ratio:.2f} as the run measured it"]

    def _describe_disagreement(self) -> list[str]:
        """A line where the run's size leaves open how the step grows; none where it does not
        matter."""
        few_s, many_s = self.explained_s
        if many_s < LARGE_DISAGREEMENT * few_s:
            return []
        return [
            "        outside of what was measured: the run cannot say which part of its computing"
            " is by the kernel",
            f"        and which by the token: {format_seconds(few_s)} if all that is beyond the"
            f" estimate is by the kernel, {format_seconds(many_s)} if by the token;",
            "        a run at a batch or a model nearer to this one says",
        ]


def load_job_file_or_job_of_run(
    run_dir: Path, job_file: str | None, overrides: Sequence[str]
) -> Job:
    """The job in `job_file`, else that of the run; with overrides. Raises UsageError where there is
    no run, and for a job of GPUs that this machine has not, whose profile says how the run grows;
    StoredPlanError where the run has lost one of its files."""
    where = str(run_dir)
    missing = [name for name in ("job.json", "plan.json") if not (run_dir / name).is_file()]
    if len(missing) > 1:
        raise UsageError("no run is there", where=where, fix="give one that phalanx train wrote")
    if missing:
        raise StoredPlanError(f"the run has no {missing[0]}", where=where, fix="give another run")
    if job_file is not None:
        job = load_job(job_file, overrides)
    else:
        job = load_job_json(run_dir / "job.json", overrides)
    difference = describe_absent_gpus(job)
    if difference:
        raise UsageError(
            f"--from is for this machine: {difference}",
            where=where,
            fix="leave cluster.gpu, cluster.instance and cluster.file out, or --from",
        )
    return job


def extrapolate_plan_from_run(run_dir: Path, plan: Plan) -> PlanFromRun:
    """The time and memory of `plan` by what the run in `run_dir` measured.

    Raises UsageError for a run with too few steps, StoredPlanError for one whose records no run
    wrote so, LayoutError for a profile that lacks what is needed.
    """
    run_plan = _read_plan_of_run(run_dir)
    measured = read_recorded_steps(run_dir, run_plan)
    if run_plan.device != plan.device:
        raise UsageError(
            f"the run was on {run_plan.device} and the plan is for {plan.device}",
            where=str(run_dir),
            fix="give a run of the same kind of device",
        )
    cluster = detect_cluster(plan.device)
    profile = find_profile_of_cluster(cluster)
    if profile is None and plan.device != "cpu":
        raise UsageError(
            "no profile of this machine says how a step on its GPUs grows",
            fix="run phalanx bench all",
        )
    growth = profile or load_one_core_profile(cluster.num_devices)
    before, after = (
        estimate_step_from_profile(run_plan, growth),
        estimate_step_from_profile(plan, growth),
    )
    scales, waiting_s = _compute_measured_over_estimated(measured, before)
    crowding = _estimate_crowding(measured, scales, run_plan, growth)
    growths = _bound_computing_growth(scales, crowding, before, after)
    step = _scale_step_time_terms(measured, scales, waiting_s, before, after)
    explained_s = _bound_step_s(measured, step, before, after, growths)
    step = _widen_interval(step, explained_s)
    memory_bytes = round(_find_peak_bytes_of_neediest_rank(plan) * (measured.memory_ratio or 1.0))
    return PlanFromRun(
        run_dir,
        measured,
        before,
        scales,
        plan,
        step,
        memory_bytes,
        waiting_s,
        explained_s,
        profile is not None,
    )


def _find_peak_bytes_of_neediest_rank(plan: Plan) -> int:
    """Bytes of the rank that needs most."""
    return max(sum(plan.memory_of_rank(rank).values()) for rank in range(plan.world_size))


def _read_plan_of_run(run_dir: Path) -> Plan:
    """The plan that a run has on record. Raises StoredPlanError where it cannot be read, or is not
    that of the run's job."""
    path = run_dir / "plan.json"
    plan = read_stored_plan(path)
    batch = load_job_json(run_dir / "job.json").train.global_batch_size
    if plan.global_batch_size == batch:
        return plan
    raise StoredPlanError(
        f"global_batch_size is {plan.global_batch_size}, and the run's job says {batch}",
        where=str(path),
        fix="give another run",
    )


def _sum_terms_of_group(terms: Mapping[str, float], group: str) -> float:
    return sum(terms[term] for term in GROUPS[group])


def _compute_measured_over_estimated(
    measured: RecordedSteps, estimate: StepTime
) -> tuple[dict[str, float], float]:
    """Measured over estimated seconds of each group that the run had, others have none; and the
    seconds in collectives that no message takes: ranks that are slower or have no turn are waited
    for there."""
    scales, waiting_s = {}, 0.0
    for group, seconds in measured.groups_s.items():
        estimated_s = _sum_terms_of_group(estimate.terms, group)
        # Of one rank, say, the reduction that sends nothing.
        if estimated_s > 0 and seconds > 0:
            scales[group] = seconds / estimated_s
        elif group == "messages":
            waiting_s = seconds
    limit = MAX_MESSAGE_SHARE * max(1.0, scales.get("computing", 1.0))
    if scales.get("messages", 0.0) > limit:
        messages_s = _sum_terms_of_group(estimate.terms, "messages")
        waiting_s = (scales["messages"] - limit) * messages_s
        scales["messages"] = limit
    return scales, waiting_s


def _estimate_crowding(
    measured: RecordedSteps, scales: Mapping[str, float], plan: Plan, profile: MachineProfile
) -> float:
    """The factor, at least 1, by which computing took longer because other programs had the cores:
    all of it alike. It is what computing took beyond its estimate, beside what its processor
    seconds are beyond theirs; 1 where these are not known, and on GPUs."""
    if measured.processor_s is None or plan.device != "cpu":
        return 1.0
    try:
        estimate_s = estimate_processor_seconds(plan, profile)
    except LayoutError:
        return 1.0  # the profile has no processor seconds
    wrong = measured.processor_s / estimate_s
    return max(1.0, scales.get("computing", 1.0) / max(1.0, wrong))


def _bound_computing_growth(
    scales: Mapping[str, float], crowding: float, before: StepTime, after: StepTime
) -> tuple[float, float]:
    """Seconds of computing, the fewer first, if all that the run took beyond its estimate, but for
    crowding, is by the kernel, and if all of it is by the token."""
    fixed, growing = (
        tuple(_sum_computing_terms(time, is_fixed=is_fixed) for time in (before, after))
        for is_fixed in (True, False)
    )
    measured_s = scales.get("computing", 1.0) * (fixed[0] + growing[0]) / crowding
    bounds = []
    for unchanged, changed in ((growing, fixed), (fixed, growing)):
        # A run that is faster than the estimate of one part alone has nothing of the other.
        kept_s = min(unchanged[0], measured_s)
        seconds = (measured_s - kept_s) * _divide_or_one(changed[1], changed[0])
        seconds += kept_s * _divide_or_one(unchanged[1], unchanged[0])
        bounds.append(crowding * seconds)
    return min(bounds), max(bounds)


def _divide_or_one(after_s: float, before_s: float) -> float:
    if before_s <= 0:
        return 1.0
    return after_s / before_s


def _sum_computing_terms(time: StepTime, *, is_fixed: bool) -> float:
    return sum(
        time.terms[term] for term in GROUPS["computing"] if (term in FIXED_TERMS) == is_fixed
    )


def _bound_step_s(
    measured: RecordedSteps,
    step: StepTime,
    before: StepTime,
    after: StepTime,
    growths: tuple[float, float],
) -> tuple[float, float]:
    """Seconds of the step, the fewer first, with the fewest and with the most of computing, beside
    which what no group has stays as it is, or grows as computing does."""
    computing_s = _sum_terms_of_group(step.terms, "computing") - measured.unattributed_s
    rest_s = step.total_s - computing_s
    times = _sum_terms_of_group(after.terms, "computing") / _sum_terms_of_group(
        before.terms, "computing"
    )
    more_s = (times - 1.0) * measured.unattributed_s
    return rest_s + growths[0] + min(0.0, more_s), rest_s + growths[1] + max(0.0, more_s)


def _widen_interval(step: StepTime, explained_s: tuple[float, float]) -> StepTime:
    """`step` with an interval that holds both explanations of the run, each with the spread that
    the step had."""
    low = step.low_s * min(1.0, explained_s[0] / step.total_s)
    high = step.high_s * max(1.0, explained_s[1] / step.total_s)
    return StepTime(step.terms, low, high)


def _scale_step_time_terms(
    measured: RecordedSteps,
    scales: Mapping[str, float],
    waiting_s: float,
    before: StepTime,
    after: StepTime,
) -> StepTime:
    """The terms of `after`, each scaled as its group was measured; one that the run had nothing of
    as computing was, with a wider interval. Waiting for other ranks grows as computing does."""
    fallback = scales.get("computing", 1.0)
    terms, unmeasured_s = {}, 0.0
    for group, names in GROUPS.items():
        for name in names:
            terms[name] = after.terms[name] * scales.get(group, fallback)
            if group not in scales:
                unmeasured_s += terms[name]
    terms["jitter"] = after.terms["jitter"]
    computing = [_sum_terms_of_group(time.terms, "computing") for time in (before, after)]
    terms["jitter"] += waiting_s * computing[1] / computing[0]
    terms["launch"] += measured.unattributed_s
    total_s = sum(terms.values())
    spread = 0.5 * math.log(measured.high_s / measured.low_s)
    growth = BAND_PER_E * abs(math.log(after.total_s / before.total_s))
    missing = BAND_UNMEASURED * unmeasured_s / total_s
    band = math.hypot(BAND, spread, growth, missing)
    in_order = {term: terms[term] for term in STEP_TERMS}
    return StepTime(in_order, total_s / math.exp(band), total_s * math.exp(band))
