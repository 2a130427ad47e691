"""Causes that all ranks share: data, saves, the host, processors that are not there."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from phalanx.core.units import plural
from phalanx.report.bottleneck.cause import MIN_SHARE, Cause
from phalanx.report.bottleneck.few_steps import describe_few_steps
from phalanx.report.bottleneck.study import StepStudy, sum_compute_seconds
from phalanx.report.bottleneck.what_if import (
    calculate_speedup_without,
    select_phase_seconds,
)
from phalanx.report.formats import format_percent

# Of a rank's own time, on a processor: below this it slept, waited, or had no turn.
_MIN_PROCESSOR_SHARE = 0.7
MAX_OPERATOR_S = 200e-6


@dataclass(frozen=True)
class _SharedCause:
    """A cause that takes time groups out of the steps of all ranks; `evidence` has {share} and
    {saves}."""

    kind: str
    groups: tuple[str, ...]
    subject: str
    evidence: str
    action: str


DATA = _SharedCause(
    "data",
    ("data",),
    "waiting for data",
    "ranks wait {share} of a step for their next batch",
    "read ahead with more workers (data.workers), or make the source faster",
)
SAVING = _SharedCause(
    "checkpoint",
    ("checkpoint",),
    "saving",
    "training stands still for {share} of its time in the phases of saves ({saves} on record)",
    'save less often (checkpoint.every="auto" finds the interval), or beside training'
    " (checkpoint.asynchronous)",
)
HOST_OVERHEAD = _SharedCause(
    "host overhead",
    ("unaccounted", "other"),
    "work of the host around the forwards and backwards of a step",
    "{share} of a step belongs to no forward, backward, collective, optimizer or save",
    "look at hooks, callbacks and logging of your own that run in each step; steps of a few"
    " milliseconds need more tokens (train.global_batch_size)",
)


def find_shared_cause(study: StepStudy, cause: _SharedCause) -> None:
    """Charge the seconds of the cause's time groups to it, if they are a tenth of a step."""
    share = study.typical_share(cause.groups)
    speedup = study.take_out_groups(cause.groups)
    if share < MIN_SHARE:
        return
    evidence = cause.evidence.format(
        share=format_percent(share, 1), saves=plural(study.outline.num_saves, "save")
    )
    by_rank = [select_phase_seconds(rows, cause.groups) for rows in study.table.rows.values()]
    seconds = [median(of_ranks) for of_ranks in zip(*by_rank, strict=True)]
    study.causes.append(
        Cause(
            cause.kind,
            share,
            speedup,
            cause.subject,
            (evidence, *describe_few_steps(study.table, seconds)),
            cause.action,
            phase=cause.groups[0],
        )
    )


def find_small_operators(study: StepStudy) -> None:
    """Forward and backward that are mostly the calling of operators, whose number larger
    microbatches, a compiler or fewer and larger layers make smaller."""
    operators = study.outline.operators
    if operators is None or operators.num_microbatches < 1:
        return
    # No call takes longer: where one seems to, rank 0 had no processor when it was measured.
    if not 0 < operators.operator_s < MAX_OPERATOR_S:
        return
    num_operators = float(operators.num_operators) * float(operators.num_microbatches)
    # No more than what forward and backward take: it is a part of them.
    lead_rows = study.table.rows[min(study.table.ranks)]
    forward_backward_s = sum(
        row.seconds.get("forward", 0.0) + row.seconds.get("backward", 0.0) for row in lead_rows
    ) / len(lead_rows)
    host_s = min(num_operators * operators.operator_s, forward_backward_s)
    share = host_s / study.mean_step_s
    if not MIN_SHARE <= share <= 1:
        return
    # Around an operator stands more than its call (modules, hooks, contexts): at most all that the
    # model's products do not need.
    products_s = study.outline.model_flops_utilization(study.num_ranks) * study.mean_step_s
    saved_s, action = host_s, "larger layers, a larger batch, or train.compile"
    if products_s > 0:
        saved_s = max(host_s, forward_backward_s - products_s)
    if operators.num_microbatches > 1:
        # In one microbatch a step has as many as one of them has now.
        saved_s *= 1 - 1 / operators.num_microbatches
        action = (
            f"larger microbatches: a step has {operators.num_microbatches:,.0f} of them"
            " (train.micro_batch_size), as far as memory allows"
        )
    saved_steps = [saved_s] * study.table.num_steps
    study.causes.append(
        Cause(
            "host overhead",
            share,
            study.take_out(dict.fromkeys(study.table.ranks, saved_steps)),
            "calling operators on small tensors",
            (
                f"a step has {num_operators:,.0f} operators ({operators.num_operators:,.0f} a"
                f" microbatch), and one costs {1e6 * operators.operator_s:.1f} us by itself,"
                f" forward and backward: {format_percent(share, 1)} of a step",
            ),
            action,
            phase="forward",
            is_upper_bound=True,
        )
    )


def find_evaluation(study: StepStudy) -> None:
    evaluation_s = study.outline.evaluation_s / max(study.table.num_covered, 1)
    share = evaluation_s / (evaluation_s + study.mean_step_s)
    if share >= MIN_SHARE and study.outline.num_evaluations > 1:
        study.causes.append(
            Cause(
                "evaluation",
                share,
                calculate_speedup_without(share),
                "evaluating",
                (
                    f"{study.outline.num_evaluations} evaluations between these steps take"
                    f" {format_percent(share, 1)} of the time",
                ),
                "evaluate less often (eval.every_steps) or on fewer samples (eval.tokens)",
                phase="evaluate",
                is_upper_bound=True,
            )
        )


def _note_other_waiting_for_processors(study: StepStudy) -> None:
    """What is no computing waits for processors as well, and nobody counts it there."""
    shares = [
        sum(row.cpu_s for row in rows) / max(sum_compute_seconds(rows), 1e-9)
        for rows in study.table.rows.values()
    ]
    if study.causes and max(shares) < _MIN_PROCESSOR_SHARE:
        study.not_judged.append(
            "how much of the other causes is waiting for a processor: ranks had one for at most"
            f" {format_percent(max(shares), 1)} of the time in which they computed, and for how"
            " much of the rest nobody counted"
        )


def find_missing_processor_time(study: StepStudy) -> None:
    """All ranks sleep or have no turn while they should compute."""
    shares = [study.processor_share(rank) for rank in study.table.ranks]
    if study.outline.device != "cpu" or not all(
        0 < share < _MIN_PROCESSOR_SHARE for share in shares
    ):
        return
    idle_s = {}
    for rank, rows in study.table.rows.items():
        computed_s = sum_compute_seconds(rows)
        cpu_s = sum(row.cpu_s for row in rows)
        idle_s[rank] = max(computed_s - cpu_s, 0.0)
    _note_other_waiting_for_processors(study)
    share = median(idle_s.values()) / study.total_s
    if share < MIN_SHARE:
        return
    study.causes.append(
        Cause(
            "no processor time",
            share,
            calculate_speedup_without(share),
            "ranks without a processor while they compute",
            (f"ranks had a processor for {format_percent(median(shares), 1)} of their own time",),
            "look for other processes on these cores, fewer ranks or threads than cores, and"
            " code that sleeps or waits in forward or backward",
            is_upper_bound=True,
        )
    )
