"""A verdict as sentences: one that says what bounds the run, then its evidence and what to do."""

from __future__ import annotations

from phalanx.core.units import format_seconds, plural
from phalanx.report.bottleneck.cause import CLEAR_SHARE, BottleneckVerdict, Cause
from phalanx.report.bottleneck.step_table import name_attempt_of_steps
from phalanx.report.formats import format_percent


def describe_bottleneck(verdict: BottleneckVerdict) -> str:
    """The sentence that says what bounds the steps, how much of them, and the gain."""
    main = verdict.main
    if verdict.why_not:
        return f"the evidence does not suffice: {verdict.why_not}"
    if main is None:
        return (
            "nothing stands out: no cause takes a tenth of a step, and computation less than four"
            " fifths"
        )
    if main.kind == "compute":
        return f"computation, {format_percent(main.share, 1)} of a step: nothing else takes a tenth"
    sentence = (
        f"{main.subject}, {describe_share(main)}"
        f"{'' if main.share >= CLEAR_SHARE else ' (a small part)'}: without it"
        f" {'training' if main.lies_between_steps else 'steps'} would be {describe_gain(main)}"
    )
    further_causes = [
        f"{cause.subject} ({_describe_further_share(cause)}, {describe_gain(cause)})"
        for cause in verdict.causes[1:]
    ]
    if further_causes:
        sentence += f"; then {', '.join(further_causes)}"
    return sentence


def describe_share(cause: Cause) -> str:
    """ "49.8 % of a step"; of what lies between steps, of both together."""
    share = format_percent(cause.share, 1)
    if cause.lies_between_steps:
        return f"{share} of the time of steps and of what lies between them"
    return f"{share} of a step"


def _describe_further_share(cause: Cause) -> str:
    if cause.lies_between_steps:
        return describe_share(cause)
    return format_percent(cause.share, 1)


def describe_gain(cause: Cause) -> str:
    """ "1.31 x faster", or "at most 1.31 x faster"."""
    limit = "at most " if cause.is_upper_bound else ""
    return f"{limit}{cause.speedup:.2f} x faster"


def list_verdict_lines(verdict: BottleneckVerdict) -> list[str]:
    """The sentence, the evidence of the main cause, what to do, and what was not judged."""
    lines = [describe_bottleneck(verdict)]
    if verdict.main is not None:
        lines += verdict.main.evidence
        lines.append(f"next: {verdict.main.action}")
    if verdict.mean_step_s > 0:
        lines.append(f"looked at: {describe_basis(verdict)}")
    if utilization := describe_utilization(verdict):
        lines.append(utilization)
    lines += [f"not judged: {text}" for text in verdict.not_judged]
    return lines


def describe_utilization(verdict: BottleneckVerdict) -> str:
    """ "MFU 31 %, HFU 41 % (with what is recomputed), of what large products reach on rank 0", or
    of the data sheet's peak; empty where it is not known."""
    if not verdict.model_flops_utilization > 0:
        return ""
    text = f"MFU {format_percent(verdict.model_flops_utilization, 1)}"
    if verdict.hardware_flops_utilization > verdict.model_flops_utilization:
        hardware = format_percent(verdict.hardware_flops_utilization, 1)
        text += f", HFU {hardware} (with what is recomputed),"
    if verdict.is_utilization_of_data_sheet:
        return f"{text} of the data sheet's peak"
    return f"{text} of what large products reach on rank 0"


def describe_basis(verdict: BottleneckVerdict) -> str:
    """ "steps 4 to 60 of 2 ranks, 92 ms each in the mean"; without the mean where no step was
    looked at."""
    ranks = plural(verdict.num_ranks, "rank")
    text = f"steps {verdict.first_step:,} to {verdict.last_step:,} of {ranks}"
    if not verdict.is_of_last_attempt:
        text += f" in {name_attempt_of_steps(verdict.attempt, is_last=False)}"
    if not verdict.mean_step_s > 0:
        return text
    return f"{text}, {format_seconds(verdict.mean_step_s)} each in the mean"
