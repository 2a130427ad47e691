"""Causes that lie between ranks: what they send, and waiting for other stages of a pipeline."""

from __future__ import annotations

from statistics import mean

from phalanx.report.bottleneck.cause import MIN_SHARE, Cause
from phalanx.report.bottleneck.study import StepStudy
from phalanx.report.bottleneck.what_if import calculate_speedup
from phalanx.report.formats import format_percent


def find_communication(study: StepStudy) -> None:
    """The rank that waits least in collectives waits for nobody: its seconds are transfer."""
    transfer_s = 0.0
    for index in range(study.table.num_steps):
        transfer_s += min(
            rows[index].seconds.get("collective", 0.0) for rows in study.table.rows.values()
        )
    share = transfer_s / study.total_s
    if len(study.table.ranks) < 2 or share < MIN_SHARE:
        return
    axis, how = _find_busiest_axis(study)
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
            calculate_speedup(study.table, study.total_s - transfer_s),
            f"communication over {axis}" if axis else "communication",
            tuple(evidence),
            _advise_on_communication(axis),
            axis=axis,
            is_upper_bound=True,
        )
    )


def _find_busiest_axis(study: StepStudy) -> tuple[str, str]:
    """The axis over which most is sent, and how that is known; ("", "") where it is not."""
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
    share = mean(shares)
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
            1 / (1 - share),
            "waiting for other stages of the pipeline",
            tuple(evidence),
            action,
            axis="pp",
            is_upper_bound=True,
        )
    )


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
