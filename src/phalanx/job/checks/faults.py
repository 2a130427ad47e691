"""Faults that a job injects: how they are spelled, and whether what they strike comes."""

from __future__ import annotations

from dataclasses import replace

from phalanx.core import registry
from phalanx.core.errors import format_nearest_word_hint
from phalanx.job.checks.check import declare_check
from phalanx.job.checks.names import is_user_object_name, list_kinds_of_package
from phalanx.job.checks.ranks import find_num_ranks
from phalanx.job.findings import Finding
from phalanx.job.schema import Job

FAULTS_PACKAGE = "phalanx.resilience.faults"
COMMON_FAULT_KEYS = ("rank", "step", "phase", "attempt")


@declare_check("resilience.inject")
def check_faults_are_well_formed(job: Job) -> list[Finding]:
    findings = []
    for index, text in enumerate(job.resilience.inject):
        for problem, fix in _find_spelling_problems(text):
            findings.append(Finding(("resilience", "inject", index), problem, fix))
    return findings


@declare_check(
    "resilience.inject",
    "parallel.ranks",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.pp",
    "parallel.tp",
)
def check_fault_ranks_exist(job: Job) -> list[Finding]:
    ranks = find_num_ranks(job)
    if ranks is None:
        return []
    problem, fix = (
        "{text!r} strikes rank {number}, which does not exist",
        f"ranks are 0 to {ranks - 1}",
    )
    return [
        replace(finding, fix=fix)
        for finding in _find_faults_beyond_limit(job, "rank", ranks - 1, problem)
    ]


@declare_check("resilience.inject", "train.steps")
def check_fault_steps_are_reached(job: Job) -> list[Finding]:
    steps = job.train.steps
    return _find_faults_beyond_limit(
        job, "step", steps, f"{{text!r}} strikes at step {{number}}, and train.steps is {steps}"
    )


def _find_faults_beyond_limit(job: Job, key: str, last: int, problem: str) -> list[Finding]:
    """One finding for each fault that names a `key` greater than `last`."""
    findings: list[Finding] = []
    for index, text in enumerate(job.resilience.inject):
        for name, _, value in (part.partition("=") for part in _split_fault(text)[1]):
            if name == key and _is_whole_number(value) and int(value) > last:
                findings.append(
                    Finding(
                        ("resilience", "inject", index),
                        problem.format(text=text, number=int(value)),
                    )
                )
    return findings


def _find_spelling_problems(text: str) -> list[tuple[str, str]]:
    """(problem, fix) for each thing wrong with the spelling of "fault:key=value,..."."""
    usage = 'write "fault:rank=1,step=7,phase=backward"'
    fault, parts = _split_fault(text)
    known = list_kinds_of_package(FAULTS_PACKAGE)
    wrong: list[tuple[str, str]] = []
    # "kill:" and "kill:7" are a fault of ours badly written, no module of the user's.
    if fault.partition(":")[0] in ("", *known) and fault not in known:
        wrong.append((f"{text!r} is not fault:key=value,...", usage))
    elif registry.is_foreign(fault) and not is_user_object_name(fault):
        wrong.append((f"{fault!r} is not package.module:function", usage))
    elif not registry.is_foreign(fault) and known and fault not in known:
        wrong.append(
            (
                f"unknown fault {fault!r}",
                format_nearest_word_hint(fault, known) or f"faults are {', '.join(known)}",
            )
        )
    keys: set[str] = set()
    for part in parts:
        key, _, value = part.partition("=")
        if not value:
            wrong.append((f"{part!r} in {text!r} is not key=value", usage))
        elif key in COMMON_FAULT_KEYS and key in keys:
            wrong.append((f"{key} is given twice in {text!r}", "keep one of them"))
        else:
            wrong += _find_fault_part_problems(key, value, text)
        keys.add(key)
    return wrong


def _find_fault_part_problems(key: str, value: str, text: str) -> list[tuple[str, str]]:
    if key not in COMMON_FAULT_KEYS:
        fix = (
            format_nearest_word_hint(key, COMMON_FAULT_KEYS)
            or f"keys are {', '.join(COMMON_FAULT_KEYS)}"
        )
        return [(f"unknown key {key!r} in {text!r}", fix)]
    if key == "phase":
        # Only here: most jobs plant no fault, and what keeps phases is large.
        from phalanx.core.phases import PHASES

        if value in PHASES:
            return []
        fix = format_nearest_word_hint(value, PHASES) or f"phases are {', '.join(PHASES)}"
        return [(f"unknown phase {value!r}", fix)]
    if not _is_whole_number(value):
        return [(f"{key} {value!r} in {text!r} is not a whole number of at least 0", "")]
    return []


def _split_fault(text: str) -> tuple[str, list[str]]:
    """The name of a fault and its parts: "kill:rank=1,step=7" -> ("kill", ["rank=1", "step=7"]).

    A fault of the user's own has a colon in its name.
    """
    # From the right: package.module:function has a colon before the one of the parts.
    head, _, tail = text.rpartition(":")
    if not head or "=" not in tail:
        return text, []
    return head, tail.split(",")


def _is_whole_number(text: str) -> bool:
    # isdecimal alone takes the digits of every script.
    return text.isascii() and text.isdecimal() and len(text) < 19  # what 64 bits hold


CHECKS = (
    check_faults_are_well_formed,
    check_fault_ranks_exist,
    check_fault_steps_are_reached,
)
