"""A trace in a few lines for people: what it has, and what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.core.units import format_bytes, plural
from phalanx.observe.where_words import format_rank_list
from phalanx.report.trace.merge import TraceFacts


def list_trace_lines(
    path: Path, num_bytes: int, facts: TraceFacts, *, wants_operators: bool = False
) -> list[str]:
    """The lines under a trace that was written to `path`; `wants_operators`: they were asked
    for."""
    if facts.first_step == facts.last_step:
        steps = f"step {facts.first_step}"
    else:
        steps = f"steps {facts.first_step} to {facts.last_step}"
    counts = [plural(facts.num_spans, "span"), plural(facts.num_collectives, "collective")]
    if facts.num_operators:
        counts.append(plural(facts.num_operators, "operator"))
    if facts.num_arrows:
        counts.append(f"{plural(facts.num_arrows, 'arrow')} from a send to its receive")
    lines = [
        f"trace   {path} ({format_bytes(num_bytes)})",
        f"        {steps} of {plural(len(facts.ranks), 'rank')}: {', '.join(counts)}",
        f"clock   {_describe_clock(facts)}",
    ]
    lines += [f"lacks   {sentence}" for sentence in _list_gaps(facts)]
    if wants_operators and not facts.num_operators:
        lines.append("lacks   operators and kernels: these steps were traced without them")
    lines.append("open    https://ui.perfetto.dev, where the file stays in your browser")
    return lines


def _describe_clock(facts: TraceFacts) -> str:
    if facts.num_clocks == 1 and not facts.unaligned_ranks:
        return "all ranks have one"
    if not facts.clock_error_s > 0:
        return f"{facts.num_clocks} clocks; how far these are apart is not known"
    text = (
        f"{facts.num_clocks} clocks; times of ranks on different ones are right to"
        f" {facts.clock_error_s * 1e6:.3g} µs"
    )
    if facts.unaligned_ranks:
        text += ", where that is known"
    return text


def _list_gaps(facts: TraceFacts) -> list[str]:
    gaps = []
    for each in facts.unreadable:
        gaps.append(f"{each.file} cannot be read: {each.why}")
    if facts.missing_ranks:
        gaps.append(f"{format_rank_list(facts.missing_ranks)}: no part was left")
    if facts.unfinished_ranks:
        ranks = format_rank_list(facts.unfinished_ranks)
        gaps.append(f"{ranks}: it ends before step {facts.last_step} does")
    if facts.unaligned_ranks:
        ranks = format_rank_list(facts.unaligned_ranks)
        gaps.append(f"{ranks}: another clock, and no offset to it; its times are its own")
    if facts.num_dropped:
        gaps.append(f"{facts.num_dropped:,} rows beyond what a part may hold")
    if facts.num_unreadable_lines:
        gaps.append(f"{plural(facts.num_unreadable_lines, 'line')} that cannot be read")
    return gaps


def list_windows_in_words(windows: Sequence[tuple[int, object]]) -> str:
    """The steps that a run has traces of: "100:103, 200 (attempt 1)"."""
    words = []
    for attempt, steps in windows:
        words.append(f"{steps} (attempt {attempt})" if attempt else str(steps))
    return ", ".join(words)
