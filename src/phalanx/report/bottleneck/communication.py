"""Causes that lie between ranks: what they send, and waiting for other stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from phalanx.core.phases import WORLD_AXIS
from phalanx.report.bottleneck.cause import MIN_SHARE, Cause, ExpectedGain
from phalanx.report.bottleneck.few_steps import describe_few_steps
from phalanx.report.bottleneck.step_table import RankStep
from phalanx.report.bottleneck.study import StepStudy
from phalanx.report.bottleneck.what_if import calculate_speedup, calculate_speedup_without
from phalanx.report.bubble import MeasuredPipeline
from phalanx.report.formats import format_milliseconds, format_percent

_KNOWN_SHARE = 0.95


@dataclass(frozen=True)
class StepTransfer:
    """Seconds that collectives take even of the rank that comes last, by step; `by_call`: over all
    steps, those that are known by "axis: operation". `waited_by_step`: what each rank spends there
    beyond it, as one rank is late before one operation and another before the next."""

    by_step: Sequence[float]
    waited_by_step: Sequence[float]
    by_call: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.by_step)

    @property
    def waited_s(self) -> float:
        return sum(self.waited_by_step)

    @property
    def by_axis(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for name, call_s in self.by_call.items():
            axis = name.partition(": ")[0]
            seconds[axis] = seconds.get(axis, 0.0) + call_s
        return seconds


def find_communication(study: StepStudy) -> None:
    """The rank that waits least in a collective waits for nobody: its seconds are transfer."""
    if len(study.table.ranks) < 2:
        return
    transfer = measure_transfer(study)
    _charge_transfer(study, transfer)
    _charge_waiting_in_turn(study, transfer)


def _charge_transfer(study: StepStudy, transfer: StepTransfer) -> None:
    share = transfer.seconds / study.total_s
    if share < MIN_SHARE:
        return
    axis, how = _find_slowest_axis(study, transfer)
    evidence = [
        f"even the rank that comes last spends {format_percent(share, 1)} of a step in"
        " collectives: transfer, and what cannot be told from it, waiting in turn before several"
        " calls of one operation"
    ]
    if how:
        evidence.append(how)
    evidence += describe_few_steps(study.table, transfer.by_step)
    study.causes.append(
        Cause(
            "communication",
            share,
            calculate_speedup(study.table, study.total_s - transfer.seconds),
            _name_communication(axis),
            tuple(evidence),
            _advise_on_communication(axis),
            axis=axis,
            is_upper_bound=True,
        )
    )


def _charge_waiting_in_turn(study: StepStudy, transfer: StepTransfer) -> None:
    """Ranks that have as much of their own each, but in other parts of a step."""
    share = transfer.waited_s / study.total_s
    if share < MIN_SHARE:
        return
    study.causes.append(
        Cause(
            "uneven steps",
            share,
            calculate_speedup(study.table, study.total_s - transfer.waited_s),
            "ranks that wait for each other in turn within a step",
            (
                f"each rank waits {format_percent(share, 1)} of a step in collectives, beyond what"
                " these take: one rank is late before one of them, another before the next",
                *describe_few_steps(study.table, transfer.waited_by_step),
            ),
            "compare the phases of ranks: the page of the run has them side by side, a trace"
            " (phalanx trace RUN) each collective",
            is_upper_bound=True,
        )
    )


def _name_communication(axis: str) -> str:
    if not axis:
        return "communication"
    if axis == WORLD_AXIS:
        return "communication of all ranks"
    return f"communication over {axis}"


def measure_transfer(study: StepStudy) -> StepTransfer:
    """The transfer of all steps: of each operation as the rank that comes last has it, which may be
    another one in each of them; of a run that did not record them, of all together."""
    by_step, waited_by_step, by_call = list[float](), list[float](), dict[str, float]()
    for index in range(study.table.num_steps):
        steps = [rows[index] for rows in study.table.rows.values()]
        least_s = min(step.seconds.get("collective", 0.0) for step in steps)
        transfer_s, of_step = least_s, _find_least_by_call(steps)
        if all(_knows_calls(step) for step in steps):
            transfer_s = min(least_s, sum(of_step.values()))
        by_step.append(transfer_s)
        waited_by_step.append(least_s - transfer_s)
        for name, call_s in of_step.items():
            by_call[name] = by_call.get(name, 0.0) + call_s
    return StepTransfer(by_step, waited_by_step, by_call)


def _knows_calls(step: RankStep) -> bool:
    """True where the seconds in collectives are nearly all known by operation."""
    known_s = sum(step.communication_s.values())
    return known_s > _KNOWN_SHARE * step.seconds.get("collective", 0.0)


def _find_least_by_call(steps: Sequence[RankStep]) -> dict[str, float]:
    """By "axis: operation" the seconds of the rank that has fewest, of those that have it."""
    least: dict[str, float] = {}
    for step in steps:
        for name, call_s in step.communication_s.items():
            least[name] = min(least.get(name, math.inf), max(call_s, 0.0))
    return least


def _find_slowest_axis(study: StepStudy, transfer: StepTransfer) -> tuple[str, str]:
    """The axis of most of the transfer, and how that is known; ("", "") where it is not."""
    by_axis = transfer.by_axis
    if not by_axis:
        return _find_busiest_axis(study)
    calls = sorted(transfer.by_call.items(), key=lambda item: item[1], reverse=True)
    largest = [
        f"{name} {format_milliseconds(call_s / study.table.num_steps)}"
        for name, call_s in calls[:3]
    ]
    return max(by_axis, key=by_axis.__getitem__), f"of a step: {', '.join(largest)}"


def _find_busiest_axis(study: StepStudy) -> tuple[str, str]:
    """The axis over which most is sent, of a run that did not record seconds by axis, and how that
    is known."""
    wide = [axis for axis, degree in (study.outline.degrees or {}).items() if degree > 1]
    names = sorted({"dp" if axis.startswith("dp") else axis for axis in wide})
    if len(names) == 1:
        return names[0], ""
    sent = {axis: size for axis, size in (study.outline.sent_bytes or {}).items() if size > 0}
    if not sent or study.outline.zero_stage >= 1:
        return "", ""
    axis = max(sent, key=sent.__getitem__)
    share = format_percent(sent[axis], sum(sent.values()))
    return (
        axis,
        f"{share} of the bytes that are counted go over {axis}; seconds by axis are not",
    )


def find_bubble(study: StepStudy) -> None:
    if study.outline.num_stages < 2:
        return
    shares = []
    for rows in study.table.rows.values():
        waited_s = sum(row.seconds.get("pipeline", 0.0) for row in rows)
        shares.append(waited_s / study.total_s)
    share = mean(shares) - _share_waited_for_stragglers(study)
    if share < MIN_SHARE:
        return
    measured, gains = study.outline.pipeline, tuple[ExpectedGain, ...]()
    evidence = [f"ranks wait {format_percent(share, 1)} of a step for other stages"]
    action = "more microbatches (train.micro_batch_size), or fewer stages (parallel.pp)"
    if measured is not None:
        evidence.append(f"in the last step that was looked at {measured.describe_wait()}")
        action = " ".join(measured.suggest_remedies()) or action
        gains = _list_microbatch_gains(study, measured, share)
        if gains:
            action += f" {gains[0].setting}: at most {gains[0].speedup:.2f} x the tokens a second."
    study.causes.append(
        Cause(
            "bubble",
            share,
            calculate_speedup_without(share),
            "waiting for other stages of the pipeline",
            tuple(evidence),
            action,
            axis="pp",
            is_upper_bound=True,
            gains=gains,
        )
    )


def _list_microbatch_gains(
    study: StepStudy, measured: MeasuredPipeline, share: float
) -> tuple[ExpectedGain, ...]:
    """The number of microbatches that the remedy names, and how many times more tokens a second it
    gives if a microbatch costs no more for each token: the steps again, with less waiting."""
    more = measured.more_microbatches
    if more is None or measured.is_worth_recutting or not measured.has_long_bubble:
        return ()
    setting = more.setting
    if not setting:
        batch = more.factor * study.outline.global_batch_size
        if batch < 1 or batch != int(batch):
            return ()
        setting = f"train.global_batch_size={int(batch)}"
    remaining_share = 1 - share * (1 - measured.shrink_wait(more))
    return (ExpectedGain(setting, 1 / remaining_share, "at most"),)


def _share_waited_for_stragglers(study: StepStudy) -> float:
    """The share of a step that the other ranks, in the mean over all, wait for late ones."""
    num_ranks, share = len(study.table.ranks), 0.0
    for cause in study.causes:
        if cause.kind == "straggler":
            share += (1 - 1 / cause.speedup) * (num_ranks - 1) / num_ranks
    return share


def _advise_on_communication(axis: str) -> str:
    if axis == "dp":
        return (
            "send less or less often: more tokens a step (train.global_batch_size with"
            " microbatches), parallel.compress, or a faster link"
        )
    if axis == "tp":
        return "a smaller parallel.tp, or parallel.tp_chunks to compute beside it"
    if axis == "ep":
        return "a smaller parallel.ep, or ranks of one node in it"
    if axis == "cp":
        return "a smaller parallel.cp, or longer sequences for it"
    return "more tokens a step, or a layout that sends less (phalanx plan JOB)"
