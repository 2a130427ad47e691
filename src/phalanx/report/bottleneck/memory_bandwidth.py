"""Computation that waits for memory: the optimizer's update, and what a forward and backward read
and write between their products.

Both are a roofline: bytes that are moved at the least, over the seconds that were measured, beside
the rate of copies that `phalanx bench` has timed. Without that rate nothing is claimed.
"""

from __future__ import annotations

from statistics import median

from phalanx.core.units import format_bytes
from phalanx.plan.calibrated.blocks import COMPILED_TRAFFIC_SHARE
from phalanx.report.bottleneck.cause import CLEAR_SHARE, MIN_EXPLAINED_SHARE, Cause, ExpectedGain
from phalanx.report.bottleneck.communication import measure_transfer
from phalanx.report.bottleneck.study import StepStudy
from phalanx.report.formats import format_milliseconds, format_percent

MIN_RATE_SHARE = 0.80
"""Of what copies reach: from this rate on memory is what bounds an update."""
MAX_RATE_SHARE = 1.25
"""From this rate on it is a cache, and not memory."""
_BATCH_FACTORS = (2, 4)


def find_long_update(study: StepStudy) -> None:
    """An update of the weights that takes a fifth of a step: memory bounds it where it moves bytes
    at the rate of memory; else why it takes so long is not judged.

    A fifth and not a tenth: every step has an update.
    """
    share = study.typical_share(("optimizer",))
    update_s = _measure_update_s(study)
    if share < CLEAR_SHARE or not update_s > 0:
        return
    at_memory_rate, why_not = _compare_with_copies(study, update_s)
    if why_not:
        study.not_judged.append(
            f"why the update of the weights takes {format_percent(share, 1)} of a step: {why_not}"
        )
    took = f"the update takes {format_milliseconds(update_s)} of a step"
    kind, subject, evidence = "optimizer", "the optimizer's update", took
    if at_memory_rate:
        kind, subject = "memory bandwidth", "memory bandwidth in the optimizer's update"
        evidence = f"{took} and {at_memory_rate}"
    gains = list_update_gains(study)
    study.causes.append(
        Cause(
            kind,
            share,
            study.take_out_groups(("optimizer",)),
            subject,
            (evidence,),
            _advise_on_update(gains),
            phase="optimizer",
            is_upper_bound=True,
            gains=gains,
        )
    )


def _compare_with_copies(study: StepStudy, update_s: float) -> tuple[str, str]:
    """What the update moves at the rate of memory, or else why that is not said of it."""
    update, memory = study.outline.update, study.outline.memory
    if update is None:
        return (
            "",
            "an own optimizer, or one whose state lies elsewhere, moves nobody knows how much",
        )
    rate = update.moved_bytes / update_s
    if memory is None or not (roof := memory.find_rate(update.touched_bytes)) > 0:
        why = _say_why_unknown(memory is None)
        return "", (
            f"it moves at least {format_rate(rate)} on each rank; the evidence does not suffice, as"
            f" {why}"
        )
    if not MIN_RATE_SHARE <= rate / roof <= MAX_RATE_SHARE:
        return "", (
            f"it moves {format_rate(rate)} on each rank, and memory gives {format_rate(roof)}"
            f" ({memory.basis})"
        )
    return (
        f"moves at least {format_bytes(update.moved_bytes)} on each rank: {format_rate(rate)},"
        f" {format_percent(rate, roof)} of the {format_rate(roof)} that memory gives it"
        f" ({memory.basis})"
    ), ""


def find_traffic_between_products(study: StepStudy) -> None:
    """A forward and backward that products at their measured rate, and all else at memory's,
    explain, where the latter is a fifth of a step or more."""
    roofline, memory = study.outline.roofline, study.outline.memory
    if roofline is None or memory is None:
        return
    # Calls of operators are charged already; what they hide is not told from waiting for memory.
    if any(cause.kind == "host overhead" for cause in study.causes):
        return
    measured_s = study.typical_share(("forward", "backward")) * study.mean_step_s
    # The roofline may explain more than there is.
    between_s = min(roofline.between_s, measured_s)
    share = between_s / study.mean_step_s
    roof_s = roofline.products_s + roofline.between_s
    if share < CLEAR_SHARE or not (
        MIN_EXPLAINED_SHARE * measured_s <= roof_s <= MAX_RATE_SHARE * measured_s
    ):
        return
    between_steps = [between_s] * study.table.num_steps
    speedup = study.take_out(dict.fromkeys(study.table.ranks, between_steps))
    gains: tuple[ExpectedGain, ...] = ()
    action = (
        "a narrower type (precision.compute), or wider layers, which have more products to each"
    )
    if not study.outline.is_compiled:
        left_s = study.total_s - (1 - COMPILED_TRAFFIC_SHARE) * _compute_saved_s(study, speedup)
        gains = (ExpectedGain("train.compile=true", study.total_s / left_s, "at most"),)
        action = (
            f"train.compile joins it: {gains[0].speedup:.2f} x faster if half of it goes, which"
            " is an estimate"
        )
    study.causes.append(
        Cause(
            "memory bandwidth",
            share,
            speedup,
            "memory bandwidth between products",
            (
                f"at the rates that were measured products take"
                f" {format_milliseconds(roofline.products_s)} of a step and what is read and"
                f" written between them {format_milliseconds(roofline.between_s)}, which explains"
                f" {format_percent(roof_s, measured_s)} of forward and backward"
                f" ({memory.basis})",
            ),
            action,
            phase="forward",
            is_upper_bound=True,
            gains=gains,
        )
    )


def list_update_gains(study: StepStudy) -> tuple[ExpectedGain, ...]:
    """Settings that make less of the update, and how many times more tokens a second they give by
    the same steps again.

    The update, and what is sent over dp, do not grow with the batch, the rest of a step does at
    most.
    """
    total_s, gains = study.total_s, list[ExpectedGain]()
    update_s = _measure_update_s(study) * study.table.num_steps
    fixed_s = min(update_s + measure_transfer(study).by_axis.get("dp", 0.0), total_s)
    batch = study.outline.global_batch_size
    for factor in _BATCH_FACTORS:
        if batch > 0:
            grown_s = factor * (total_s - fixed_s) + fixed_s
            gains.append(
                ExpectedGain(
                    f"train.global_batch_size={factor * batch}",
                    factor * total_s / grown_s,
                    "at least",
                )
            )
    ranks = 1
    for axis in ("dp_replicate", "dp_shard"):
        ranks *= max(study.outline.degrees.get(axis, 1), 1)
    if study.outline.zero_stage < 1 and ranks > 1:
        left_s = total_s - update_s * (1 - 1 / ranks)
        # Weights are gathered after it, which nobody has measured here.
        gains.append(ExpectedGain("parallel.zero_stage=1", total_s / left_s, "at most"))
    return tuple(gains)


def _advise_on_update(gains: tuple[ExpectedGain, ...]) -> str:
    """What to do about an update that takes long, in words."""
    advice = "more tokens to each update, or ranks that share it"
    if not gains:
        return f"{advice} (train.global_batch_size, parallel.zero_stage)"
    texts = [f"{gain.setting} {gain.limit} {gain.speedup:.2f} x" for gain in gains]
    return f"{advice}; tokens a second, if microbatches grow with the batch: {', '.join(texts)}"


def list_missing_evidence(study: StepStudy) -> list[str]:
    """What the events of a run that computes most of the time do not tell about memory."""
    outline = study.outline
    if outline.memory is None:
        return [
            "memory bandwidth: the evidence does not suffice, as"
            f" {_say_why_unknown(is_unmeasured=True)}"
        ]
    if outline.roofline is None:
        return [
            "memory bandwidth in forward and backward: the evidence does not suffice, as the"
            " model's work or the rate of its products is not known, or its activations may lie in"
            " caches"
        ]
    return []


def describe_roofline(study: StepStudy) -> str:
    """What products and memory explain of a step at the rates that were measured; empty where they
    are not known."""
    roofline = study.outline.roofline
    if roofline is None:
        return ""
    compute_s = study.typical_share(("forward", "backward")) * study.mean_step_s
    rest_s = max(compute_s - roofline.products_s - roofline.between_s, 0.0)
    shares = [
        format_percent(seconds, study.mean_step_s)
        for seconds in (roofline.products_s, roofline.between_s, rest_s)
    ]
    return (
        f"at the rates that were measured products take at least {shares[0]} of a step, and what is"
        f" read and written between them {shares[1]}; {shares[2]} is neither: calls of operators,"
        " and kernels below both rates"
    )


def format_rate(bytes_per_s: float) -> str:
    """ "9.7 GB/s", of 1e9 bytes."""
    return f"{bytes_per_s / 1e9:,.3g} GB/s"


def _say_why_unknown(is_unmeasured: bool) -> str:
    if is_unmeasured:
        return (
            "what memory gives these ranks was not measured (phalanx bench gemm does, for ranks"
            " that have a core each)"
        )
    return "it is smaller than the copies that were measured, and may lie in a cache"


def _measure_update_s(study: StepStudy) -> float:
    """Seconds of the update of one step, in the median over ranks."""
    seconds = []
    for rows in study.table.rows.values():
        seconds.append(sum(row.seconds.get("optimizer", 0.0) for row in rows) / len(rows))
    return median(seconds)


def _compute_saved_s(study: StepStudy, speedup: float) -> float:
    return study.total_s * (1 - 1 / speedup)
