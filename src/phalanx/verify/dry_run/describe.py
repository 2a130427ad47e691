"""A dry run in words: the lines that a terminal shows. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.core.units import format_bytes, format_seconds, plural
from phalanx.verify.dry_run.report import CollectiveRow, DryRunReport, RankKindReport

MOST_ROWS = 8


def describe_dry_run(report: DryRunReport) -> list[str]:
    """The lines of a report: of each kind its peak and what it sends, then what was not judged."""
    lines = [
        f"dry run {report.layout} on {plural(report.world_size, 'rank')} of {report.device}: the"
        " program itself, with fake tensors; nothing is computed or sent"
    ]
    for kind in report.kinds:
        lines += _describe_rank_kind(kind)
    lines += [f"note    {note}" for note in list_dry_run_assumptions(report)]
    return lines


def _describe_rank_kind(kind: RankKindReport) -> Iterator[str]:
    source = f"ran {format_seconds(kind.wall_s)}"
    if kind.is_cached:
        source = "from the cache (--no-cache runs it again)"
    stages = ""
    if kind.stages:
        numbers = ", ".join(map(str, kind.stages))
        stages = f" with stage{'s' if len(kind.stages) > 1 else ''} {numbers}"
    yield f"kind    {kind.name} (rank {kind.rank}){stages}: {source}"
    yield f"memory  {format_bytes(kind.peak_bytes)} of tensors at most, in {kind.peak_when}"
    parts = [
        f"{category} {format_bytes(num_bytes)}"
        for category, num_bytes in kind.peak_by_category.items()
        if num_bytes
    ]
    yield f"        {', '.join(parts)}"
    yield (
        f"plan    {format_bytes(kind.planned_total_bytes)} of tensors,"
        f" {100 * kind.plan_error:+.1f} % of that"
    )
    sent = [
        f"{axis} {format_bytes(num_bytes)}"
        for axis, num_bytes in sorted(kind.sent_bytes_by_axis().items(), key=lambda item: -item[1])
    ]
    if sent:
        yield f"sends   {', '.join(sent)} per step"
    rows = _merge_rows_across_phases(kind.collectives)
    for row in rows[:MOST_ROWS]:
        yield f"        {describe_collective_row(row)}"
    num_more = len(rows) - MOST_ROWS
    if num_more > 0:
        yield f"        and {plural(num_more, 'smaller row')} (--json has all)"


def _merge_rows_across_phases(rows: Sequence[CollectiveRow]) -> list[CollectiveRow]:
    """Rows that differ in their phase alone, as one."""
    joined: dict[CollectiveRow, int] = {}
    for row in rows:
        key = replace(row, phase="", count=0)
        joined[key] = joined.get(key, 0) + row.count
    return [replace(row, count=count) for row, count in joined.items()]


def describe_collective_row(row: CollectiveRow) -> str:
    """One collective: how often, what, how large, between whom, what for, and who asks."""
    purpose = f"{row.purpose}, " if row.purpose else ""
    return (
        f"{row.count:,} x {row.kind} of {format_bytes(row.num_bytes)} over {row.axis}"
        f" ({plural(row.group_size, 'rank')}): {purpose}{row.caller}"
    )


def list_dry_run_assumptions(report: DryRunReport) -> list[str]:
    """Sentences about the assumptions of a dry run, and about what it does not measure."""
    notes = [
        "memory is that of tensors: what an allocator keeps besides, libraries and the runtime are"
        " the plan's to count"
    ]
    if any(kind.num_traced < kind.num_microbatches for kind in report.kinds):
        notes.append(
            "further microbatches are counted as the second: it left as many tensors of each size"
            " as it found"
        )
    if report.has_experts:
        notes.append("experts get equally many rows (balanced routing)")
    if report.device != "cpu":
        notes.append(
            "collectives are those of a GPU; kernels are those of a CPU in the same types, as torch"
            " here may have none for GPUs"
        )
    return notes
