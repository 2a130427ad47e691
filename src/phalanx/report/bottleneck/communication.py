"""Causes that lie between ranks: what they send, and waiting for other stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

from phalanx.core.phases import WORLD_AXIS
from phalanx.report.bottleneck.cause import MIN_SHARE, Cause
from phalanx.report.bottleneck.study import StepStudy
from phalanx.report.bottleneck.what_if import calculate_speedup, calculate_speedup_without
from phalanx.report.formats import format_milliseconds, format_percent


@dataclass(frozen=True)
class StepTransfer:
    """Seconds that even the rank that comes last spends in collectives, over all steps; `by_call`:
    those that are known by "axis: operation"."""

    seconds: float
    by_call: Mapping[str, float]

    @property
    def by_axis(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for name, call_s in self.by_call.items():
            axis = name.partition(": ")[0]
            seconds[axis] = seconds.get(axis, 0.0) + call_s
        return seconds


def find_communication(study: StepStudy) -> None:
    """The rank that waits least in collectives waits for nobody: its seconds are transfer."""
    transfer = measure_transfer(study)
    share = transfer.seconds / study.total_s
    if len(study.table.ranks) < 2 or share < MIN_SHARE:
        return
    axis, how = _find_slowest_axis(study, transfer)
    evidence = [
        f"even the rank that comes last spends {format_percent(share, 1)} of a step in"
        " collectives, which is transfer and no waiting"
    ]
    if how:
        evidence.append(how)
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


def _name_communication(axis: str) -> str:
    if not axis:
        return "communication"
    if axis == WORLD_AXIS:
        return "communication of all ranks"
    return f"communication over {axis}"


def measure_transfer(study: StepStudy) -> StepTransfer:
    """The transfer of all steps, in the mean as the rank that comes last has it."""
    seconds, by_call = 0.0, dict[str, float]()
    for index in range(study.table.num_steps):
        steps = [rows[index] for rows in study.table.rows.values()]
        last = min(steps, key=lambda step: step.seconds.get("collective", 0.0))
        seconds += last.seconds.get("collective", 0.0)
        for name, call_s in last.communication_s.items():
            by_call[name] = by_call.get(name, 0.0) + max(call_s, 0.0)
    return StepTransfer(seconds, by_call)


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
    measured = study.outline.pipeline
    evidence = [f"ranks wait {format_percent(share, 1)} of a step for other stages"]
    action = "more microbatches (train.micro_batch_size), or fewer stages (parallel.pp)"
    if measured is not None:
        evidence.append(f"in the last step that was looked at {measured.describe_wait()}")
        action = " ".join(measured.suggest_remedies()) or action
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
        )
    )


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
