"""`phalanx plan --validate FILE`: how well the planner predicts measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli._json import print_json
from phalanx.core.units import plural

if TYPE_CHECKING:
    from phalanx.plan.validation.score import ErrorStats, ScoreReport

TABLE_HEADER = (
    f"{'n':>6}{'median':>9}{'mean':>8}{'p90':>8}{'max':>8}{'bias':>8}{'inside':>8}{'const':>8}"
)


def print_validation(path: Path, anchors: int, *, as_json: bool) -> int:
    """Prints the errors of the time model on the rows of `path`.

    Raises UsageError for a file that cannot be read, or that has no row to score.
    """
    from phalanx.core.errors import UsageError
    from phalanx.plan.validation.rows import load_row_file
    from phalanx.plan.validation.score import score_rows

    rows = load_row_file(path)
    if not rows.runs:
        reasons = ", ".join(f"{count} {reason}" for reason, count in rows.unusable.items())
        raise UsageError(
            f"{path} has no row that can be predicted",
            why=reasons or "it is empty",
            fix="see docs/planner.md for the keys of a row",
        )
    report = score_rows(rows, anchors)
    if as_json:
        misspelt = dict(rows.misspelt.keys())
        body = {"file": str(path), **report.to_json(), "misspelt_keys": misspelt}
        print_json("plan-validation", body, indent=1)
        return 0
    print(format_validation_report(report))
    for (key, known), count in rows.misspelt.items():
        print(f"not read: {key!r} of {plural(count, 'row')}; did you mean {known!r}?")
    return 0


def format_validation_report(report: ScoreReport) -> str:
    """The report as lines of a terminal."""
    lines = [
        f"step time, |predicted / measured - 1| of {report.overall.n} rows"
        f" (of {report.num_rows}; {report.num_inferred} leave something open: the fastest that"
        " fits)"
    ]
    if report.anchors:
        lines.append(_describe_anchors(report))
    lines += ["", f"{TABLE_HEADER}  (const: median of one utilisation per GPU and type)"]
    lines.append(_format_error_row(report.overall, report.baseline, "all rows"))
    lines.append(f"{'':6}{report.median_of_sources:9.1%}{'':40}  median over sources")
    lines += ["", "by source"]
    for name, stats in report.sources.items():
        lines.append(_format_error_row(stats, report.baseline_sources.get(name), name))
    lines += ["", "by class"]
    for name, stats in report.classes.items():
        lines.append(_format_error_row(stats, None, name))
    lines += ["", *_format_memory_and_regret(report)]
    return "\n".join(lines)


def _describe_anchors(report: ScoreReport) -> str:
    """How many rows of each source set its scale, in words."""
    per_source = f"{report.anchors} anchor rows per source"
    total = f"{report.num_anchor_rows} in all, not scored"
    if report.num_capped_sources:
        per_source = f"up to {per_source}"
        sources = (
            "1 source has"
            if report.num_capped_sources == 1
            else (f"{report.num_capped_sources} sources have")
        )
        total += f"; {sources} fewer: half of the rows is the most"
    return f"{per_source} ({total}) set one scale within 0.6 to 1.6"


def _format_error_row(stats: ErrorStats, baseline: ErrorStats | None, name: str) -> str:
    inside, constant = "", ""
    if stats.coverage is not None:
        inside = f"{stats.coverage:.0%}"
    if baseline is not None:
        constant = f"{baseline.median:.1%}"
    return (
        f"{stats.n:6d}{stats.median:9.1%}{stats.mean:8.1%}{stats.p90:8.1%}{stats.max:8.0%}"
        f"{stats.bias:+8.1%}{inside:>8}{constant:>8}  {name}"
    )


def _format_memory_and_regret(report: ScoreReport) -> list[str]:
    lines = []
    memory, regret = report.memory, report.regret
    if memory is not None:
        lines.append(
            f"memory of {memory.n} rows (published arithmetic, not our runtime's plan): median"
            f" {memory.median:.1%}, p90 {memory.p90:.1%}, bias {memory.bias:+.1%}"
        )
    if regret.num_groups:
        lines.append(
            f"choosing by prediction in {regret.num_groups} groups of 3 layouts or more:"
            f" {regret.median:.1%} slower than the measured best in the median,"
            f" {regret.max:.1%} at most; within 2 % in {regret.share_within_2_percent:.0%}"
        )
    if regret.num_large_groups:
        lines.append(
            f"of these, {regret.num_large_groups} groups of 64 GPUs or more: within 2 % in"
            f" {regret.large_share_within_2_percent:.0%}"
        )
    for reason, count in report.unusable.items():
        lines.append(f"not used: {plural(count, 'row')}: {reason}")
    lines.append("worst rows")
    for row in report.worst:
        error = row.predicted_s / row.measured_s - 1
        lines.append(
            f"  {error:+7.0%}  {row.measured_s:9.3f} s measured  {row.row_id} {row.model},"
            f" {row.num_gpus} x {row.gpu}  ({row.source})"
        )
    return lines
