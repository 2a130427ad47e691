"""`find_bottleneck`: what bounds a run, from the table of its steps and its outline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.core.units import plural
from phalanx.report.bottleneck.cause import COMPUTE_SHARE, BottleneckVerdict, Cause
from phalanx.report.bottleneck.communication import find_bubble, find_communication
from phalanx.report.bottleneck.memory_bandwidth import (
    describe_roofline,
    find_long_update,
    find_traffic_between_products,
    list_missing_evidence,
)
from phalanx.report.bottleneck.shared import (
    DATA,
    HOST_OVERHEAD,
    SAVING,
    find_evaluation,
    find_missing_processor_time,
    find_shared_cause,
    find_small_operators,
)
from phalanx.report.bottleneck.step_table import MIN_ROWS, StepTable
from phalanx.report.bottleneck.straggler import find_straggler
from phalanx.report.bottleneck.study import COMPUTE_GROUPS, RunOutline, StepStudy, sum_groups
from phalanx.report.bottleneck.uneven_steps import find_uneven_steps
from phalanx.report.formats import format_percent

LOW_UTILIZATION = 0.20
"""Of the rate of large products: below it a model spends its time on something else."""


def find_bottleneck(table: StepTable, outline: RunOutline) -> BottleneckVerdict:
    """The causes that bound the steps of `table`, the largest cause first."""
    verdict = _judge_steps(table, outline)
    return replace(verdict, attempt=table.attempt, is_of_last_attempt=table.is_of_last_attempt)


def _judge_steps(table: StepTable, outline: RunOutline) -> BottleneckVerdict:
    first, last = 0, 0
    if table.steps:
        first, last = table.steps[0], table.steps[-1]
    if table.num_steps < MIN_ROWS:
        length = plural(table.num_steps, "window of steps", "windows of steps")
        if table.num_covered == table.num_steps:
            length = plural(table.num_steps, "step")
        why_not = f"{length} after the first ones; it takes {MIN_ROWS}"
        return BottleneckVerdict(
            first, last, table.num_steps, len(table.ranks), 0.0, (), {}, why_not
        )
    study = StepStudy(table, outline)
    # Those that single ranks have come first: what is left is everyone's.
    for group in study.group_comparable_ranks():
        find_straggler(study, group)
    for cause in (DATA, SAVING, HOST_OVERHEAD):
        find_shared_cause(study, cause)
    # Loaders that all wait for hide who is late: what a rank computes longer, it waits less.
    for group in study.group_comparable_ranks():
        find_straggler(study, group)
    for find in (
        find_small_operators,
        find_long_update,
        find_traffic_between_products,
        find_communication,
        find_bubble,
        find_evaluation,
        find_missing_processor_time,
        find_uneven_steps,
    ):
        find(study)
    # By share and not by gain: an upper bound may be far above what its removal gives.
    causes = sorted(study.causes, key=lambda cause: cause.share, reverse=True)
    if not causes:
        causes = _describe_compute(study)
    return BottleneckVerdict(
        first,
        last,
        table.num_steps,
        len(table.ranks),
        table.total_s / table.num_steps,
        tuple(causes),
        study.share_by_group(),
        not_judged=_list_not_judged(study, causes),
        model_flops_utilization=outline.model_flops_utilization(study.num_ranks),
        hardware_flops_utilization=outline.hardware_flops_utilization(study.num_ranks),
        is_utilization_of_data_sheet=not outline.has_measured_reference,
    )


def _describe_compute(study: StepStudy) -> list[Cause]:
    shares = study.share_by_group()
    share = sum_groups(shares, COMPUTE_GROUPS)
    if share < COMPUTE_SHARE:
        return []
    evidence = [f"forward, backward and optimizer take {format_percent(share, 1)} of a step"]
    num_ranks, utilization = study.num_ranks, 0.0
    if study.outline.model_flops_per_s(num_ranks) > 0:
        flops_per_s = study.outline.model_flops_per_s(num_ranks)
        utilization = study.outline.model_flops_utilization(num_ranks)
        text = f"{flops_per_s / 1e9:.3g} GFLOP/s of the model on each rank"
        if utilization:
            reference = f"{study.outline.reference_flops_per_s / 1e9:.3g} GFLOP/s"
            of_what = f"of the data sheet's peak ({reference})"
            if study.outline.has_measured_reference:
                of_what = f"of what large products reach here ({reference} on rank 0)"
            text += f", {format_percent(utilization, 1)} {of_what}"
        evidence.append(text)
    if roofline := describe_roofline(study):
        evidence.append(roofline)
    return [
        Cause(
            "compute",
            share,
            1.0,
            "computation",
            tuple(evidence),
            _advise_on_compute(utilization),
        )
    ]


def _advise_on_compute(utilization: float) -> str:
    if 0 < utilization < LOW_UTILIZATION:
        return (
            "most of it is not products: elementwise kernels and memory; train.compile joins them,"
            " and wider layers have more products to each"
        )
    return "a faster step needs faster kernels (train.compile, a narrower type), or more ranks"


def _list_not_judged(study: StepStudy, causes: Sequence[Cause]) -> tuple[str, ...]:
    outline, missing = study.outline, list(study.not_judged)
    if study.num_ranks > len(study.table.ranks):
        missing.append(
            f"who waits for whom: steps of {len(study.table.ranks):,} of {study.num_ranks:,} ranks"
            " are here"
        )
    if any(cause.kind == "compute" for cause in causes):
        missing += list_missing_evidence(study)
    if outline.device == "cuda" and outline.zero_stage >= 2:
        missing.append(
            "what a GPU waits for gathered weights and reduced gradients: FSDP's own streams are"
            " not timed, it is a part of forward and backward"
        )
    if outline.is_compiled and outline.degrees.get("tp", 1) > 1:
        missing.append(
            "what ranks wait for in tensor parallelism: collectives in compiled blocks are not"
            " timed, they are a part of forward and backward"
        )
    if outline.allows_unused and outline.zero_stage < 2:
        missing.append(
            "waiting for gradients in steps in which a parameter that was used before has none:"
            " DDP's last one is not known then, it is a part of backward"
        )
    if outline.num_stages > 1 and not outline.reference_flops_per_s > 0:
        missing.append("MFU: what large products reach is not measured in a pipeline on CPUs")
    if not outline.flops_per_token:
        missing.append(
            "how fast the computation could be: the model's FLOPs are not known (with frozen"
            " weights training takes fewer than three forwards)"
        )
    return tuple(missing)
