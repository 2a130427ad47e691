"""Steps that a job traces: how they are written, how many they are, and whether they come."""

from __future__ import annotations

from phalanx.core.step_ranges import (
    MAX_PROFILED_STEPS,
    MAX_TRACED_STEPS,
    count_steps,
    merge_step_ranges,
    parse_step_range,
)
from phalanx.job.checks.check import declare_check, make_finding
from phalanx.job.findings import Finding
from phalanx.job.schema import Job

_USAGE = 'write steps or ranges, both ends included: [100, "200:203"]'


@declare_check("observe.trace_steps")
def check_traced_steps(job: Job) -> list[Finding]:
    return _check_step_ranges(job, "trace_steps", MAX_TRACED_STEPS)


@declare_check("observe.profile_steps")
def check_profiled_steps(job: Job) -> list[Finding]:
    return _check_step_ranges(job, "profile_steps", MAX_PROFILED_STEPS)


@declare_check("observe.trace_steps", "train.steps")
def check_traced_steps_are_reached(job: Job) -> list[Finding]:
    return _find_steps_beyond_last(job, "trace_steps")


@declare_check("observe.profile_steps", "train.steps")
def check_profiled_steps_are_reached(job: Job) -> list[Finding]:
    return _find_steps_beyond_last(job, "profile_steps")


def _check_step_ranges(job: Job, key: str, most: int) -> list[Finding]:
    """Findings about how the steps of `key` are written, and if they are more than `most`."""
    ranges = []
    for index, text in enumerate(getattr(job.observe, key)):
        try:
            ranges.append(parse_step_range(text))
        except ValueError as error:
            return [make_finding(f"observe.{key}.{index}", str(error), _USAGE)]
    num_steps = count_steps(merge_step_ranges(ranges))
    if num_steps <= most:
        return []
    return [make_finding(f"observe.{key}", f"{num_steps:,} steps, and it takes at most {most}")]


def _find_steps_beyond_last(job: Job, key: str) -> list[Finding]:
    for index, text in enumerate(getattr(job.observe, key)):
        try:
            last = parse_step_range(text).last
        except ValueError:
            # Told by the check of how it is written.
            return []
        if last > job.train.steps:
            problem = f"observe.{key} names step {last}, and train.steps is {job.train.steps}"
            return [make_finding(f"observe.{key}.{index}", problem)]
    return []


CHECKS = (
    check_traced_steps,
    check_profiled_steps,
    check_traced_steps_are_reached,
    check_profiled_steps_are_reached,
)
