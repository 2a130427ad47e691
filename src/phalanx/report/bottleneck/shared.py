"""Causes that all ranks share: data, saves, the host, processors that are not there."""

from __future__ import annotations

from statistics import median

from phalanx.report.bottleneck.cause import MIN_SHARE, Cause
from phalanx.report.bottleneck.study import StepStudy, sum_compute_seconds
from phalanx.report.bottleneck.what_if import calculate_speedup
from phalanx.report.formats import format_percent

# Of a rank's own time, on a processor: below this it slept, waited, or had no turn.
_MIN_PROCESSOR_SHARE = 0.7


def find_data(study: StepStudy) -> None:
    share = study.typical_share("data")
    speedup = study.take_out_group("data")
    if share >= MIN_SHARE:
        study.causes.append(
            Cause(
                "data",
                share,
                speedup,
                "waiting for data",
                (f"ranks wait {format_percent(share, 1)} of a step for their next batch",),
                "read ahead with more workers (data.workers), or make the source faster",
                phase="data",
            )
        )


def find_saving_time(study: StepStudy) -> None:
    share = study.typical_share("checkpoint")
    speedup = study.take_out_group("checkpoint")
    if share >= MIN_SHARE:
        study.causes.append(
            Cause(
                "checkpoint",
                share,
                speedup,
                "saving",
                (
                    f"training stands still for {format_percent(share, 1)} of its time"
                    f" while {study.outline.num_saves} checkpoints are saved",
                ),
                'save less often (checkpoint.every="auto" finds the interval), or beside'
                " training (checkpoint.asynchronous)",
                phase="checkpoint",
            )
        )


def find_host_overhead(study: StepStudy) -> None:
    share = study.typical_share("unaccounted")
    speedup = study.take_out_group("unaccounted")
    if share >= MIN_SHARE:
        study.causes.append(
            Cause(
                "host overhead",
                share,
                speedup,
                "work of the host between the phases of a step",
                (f"{format_percent(share, 1)} of a step belongs to none of its phases",),
                "look at hooks, callbacks and logging of your own that run in each step",
                phase="unaccounted",
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
        self_seconds = [study.table.rows[rank][index].self_s for rank in group]
        late_s += max(self_seconds) - median(self_seconds)
    return late_s
