"""Causes that all ranks share: data, saves, the host, processors that are not there."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from phalanx.report.bottleneck.cause import MIN_SHARE, Cause
from phalanx.report.bottleneck.study import StepStudy, sum_compute_seconds
from phalanx.report.bottleneck.what_if import calculate_speedup
from phalanx.report.formats import format_percent

# Of a rank's own time, on a processor: below this it slept, waited, or had no turn.
_MIN_PROCESSOR_SHARE = 0.7


@dataclass(frozen=True)
class _SharedCause:
    """A cause that takes time groups out of the steps of all ranks; `evidence` has {share} and
    {num_saves}."""

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
    "training stands still for {share} of its time while {num_saves} checkpoints are saved",
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
        share=format_percent(share, 1), num_saves=study.outline.num_saves
    )
    study.causes.append(
        Cause(
            cause.kind,
            share,
            speedup,
            cause.subject,
            (evidence,),
            cause.action,
            phase=cause.groups[0],
        )
    )


def find_small_operators(study: StepStudy) -> None:
    """Forward and backward that are mostly the calling of operators, whose number larger
    microbatches, a compiler or fewer and larger layers make smaller."""
    operators = study.outline.operators
    if operators is None or not 0 < operators.operator_s < 1 or operators.num_microbatches < 1:
        return
    num_operators = operators.num_operators * operators.num_microbatches
    host_s = num_operators * operators.operator_s
    step_s = study.total_s / max(study.table.num_steps, 1)
    share = host_s / step_s
    if share < MIN_SHARE:
        return
    evidence = (
        f"a step has {num_operators:,.0f} operators ({operators.num_operators:,.0f} a microbatch),"
        f" and one costs {1e6 * operators.operator_s:.1f} us by itself, forward and backward:"
        f" {format_percent(share, 1)} of a step",
    )
    saved_share, action = share, "larger layers, a larger batch, or train.compile"
    if operators.num_microbatches > 1:
        # In one microbatch a step calls as many as one of them does now.
        saved_share = share * (1 - 1 / operators.num_microbatches)
        action = (
            f"larger microbatches: a step has {operators.num_microbatches} of them"
            " (train.micro_batch_size), as far as memory allows"
        )
    study.causes.append(
        Cause(
            "host overhead",
            min(share, 1.0),
            1 / max(1 - saved_share, 0.1),
            "calling operators on small tensors",
            evidence,
            action,
            phase="forward",
            is_upper_bound=True,
        )
    )


def find_evaluation(study: StepStudy) -> None:
    evaluation_s = study.outline.evaluation_s
    share = evaluation_s / (evaluation_s + study.total_s)
    if share >= MIN_SHARE and study.outline.num_evaluations > 1:
        study.causes.append(
            Cause(
                "evaluation",
                share,
                1 / (1 - share),
                "evaluating",
                (
                    f"{study.outline.num_evaluations} evaluations between these steps take"
                    f" {format_percent(share, 1)} of the time",
                ),
                "evaluate less often (eval.every_steps) or on fewer samples",
                phase="evaluate",
                is_upper_bound=True,
            )
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
    share = median(idle_s.values()) / study.total_s
    if share < MIN_SHARE:
        return
    study.causes.append(
        Cause(
            "no processor time",
            share,
            1 / (1 - share),
            "ranks without a processor while they compute",
            (f"ranks had a processor for {format_percent(median(shares), 1)} of their own time",),
            "look for other processes on these cores, fewer ranks or threads than cores, and"
            " code that sleeps or waits in forward or backward",
            is_upper_bound=True,
        )
    )


def find_uneven_steps(study: StepStudy) -> None:
    """Ranks take turns in being late: no one of them is the cause."""
    if any(cause.kind == "straggler" for cause in study.causes) or len(study.table.ranks) < 2:
        return
    late_s = 0.0
    for group in study.group_comparable_ranks():
        if len(group) < 2:
            return
        late_s = max(late_s, _sum_lateness(study, group))
    share = late_s / study.total_s
    if share < MIN_SHARE:
        return
    study.causes.append(
        Cause(
            "uneven steps",
            share,
            calculate_speedup(study.table, study.total_s - late_s),
            "ranks that are late in turn",
            (
                f"the latest rank of a step is {format_percent(share, 1)} of it behind the"
                " median, and it is another one each time",
            ),
            "look for other processes on these machines, and for batches of uneven length",
            is_upper_bound=True,
        )
    )


def _sum_lateness(study: StepStudy, group: tuple[int, ...]) -> float:
    late_s = 0.0
    for index in range(study.table.num_steps):
        own_seconds = [study.remaining_seconds(rank, index) for rank in group]
        late_s += max(own_seconds) - median(own_seconds)
    return late_s
