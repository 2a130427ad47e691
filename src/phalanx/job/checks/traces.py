"""Steps that a job traces: how they are written, how many they are, and whether they come."""

from __future__ import annotations

from phalanx.core.step_ranges import (
    MAX_PROFILED_STEPS,
    MAX_TRACED_STEPS,
    StepRange,
    count_steps,
    merge_step_ranges,
    parse_step_range,
)
from phalanx.job.checks.check import declare_check, make_finding
from phalanx.job.findings import Finding
from phalanx.job.schema import Job

_USAGE = 'write steps or ranges, both ends included: [100, "200:203"]'


@declare_check("observe.trace_steps", "observe.profile_steps", "train.steps")
def check_traced_steps(job: Job) -> list[Finding]:
    findings = []
    for key, most in (("trace_steps", MAX_TRACED_STEPS), ("profile_steps", MAX_PROFILED_STEPS)):
        findings += _check_steps_of_key(job, key, most)
    return findings


def _check_steps_of_key(job: Job, key: str, most: int) -> list[Finding]:
    dotted = f"observe.{key}"
    ranges: list[StepRange] = []
    for index, text in enumerate(getattr(job.observe, key)):
        try:
            steps = parse_step_range(text)
        except ValueError as error:
            return [make_finding(f"{dotted}.{index}", str(error), _USAGE)]
        if steps.last > job.train.steps:
            problem = f"step {steps.last} never comes: train.steps is {job.train.steps}"
            return [make_finding(f"{dotted}.{index}", problem)]
        ranges.append(steps)
    num_steps = count_steps(merge_step_ranges(ranges))
    if num_steps > most:
        return [make_finding(dotted, f"{num_steps} steps are more than the {most} that it takes")]
    return []


CHECKS = (check_traced_steps,)
