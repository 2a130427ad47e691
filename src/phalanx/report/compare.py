"""Two runs side by side, term by term: what a change of the job, the machine or the code did."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from phalanx.core.digest import ABSENT, find_differences
from phalanx.core.printable import printable
from phalanx.core.units import format_bytes, format_count, format_seconds, plural
from phalanx.observe.time_groups import TIME_GROUPS
from phalanx.observe.units import TEXT_METRIC_UNITS
from phalanx.report import formats
from phalanx.report.facts import RunFacts

MAX_NAMED_KEYS = 12
NUM_STRETCHES = 10
# Two-sided 95 % of Student's t with NUM_STRETCHES - 1 degrees of freedom.
_T = 2.262
# Models up to so many times as costly are taken for the same.
_SAME_FLOPS_RATIO = 1.01
# Of the job's sections those that say where a run is, not what it does.
_KEYS_OF_PLACE = ("run.dir", "run.name", "checkpoint.url")


@dataclass(frozen=True)
class ComparedTerm:
    """One number of both runs, in `unit` ("s", "bytes", "" for a plain number); NaN where it was
    not measured."""

    name: str
    unit: str
    first: float
    second: float

    @property
    def ratio(self) -> float:
        """Second over first; NaN where there is none."""
        if not (math.isfinite(self.first) and math.isfinite(self.second) and self.first):
            return math.nan
        return self.second / self.first


@dataclass(frozen=True)
class RunComparison:
    """`terms` of both runs. `speedup`: the first's mean step over the second's, both as in `terms`,
    between `low` and `high` with 95 % confidence by the spread of the steps within each run (all
    NaN without steps of both). `num_steps`: how many of each these are.

    `changed_keys`: keys of the job with both values; none where not `has_both_jobs`.
    """

    terms: tuple[ComparedTerm, ...]
    speedup: float
    low: float
    high: float
    changed_keys: tuple[str, ...]
    remarks: tuple[str, ...]
    num_steps: tuple[int, int] = (0, 0)
    has_both_jobs: bool = True

    @property
    def is_clear(self) -> bool:
        """True if the interval does not hold 1: more than the spread of the steps."""
        return not self.low <= 1 <= self.high and math.isfinite(self.speedup)

    def to_json(self) -> dict[str, Any]:
        return {
            "terms": [
                {
                    "name": term.name,
                    "unit": term.unit,
                    "first": _number_or_none(term.first),
                    "second": _number_or_none(term.second),
                }
                for term in self.terms
            ],
            "speedup": _number_or_none(self.speedup),
            "speedup_low": _number_or_none(self.low),
            "speedup_high": _number_or_none(self.high),
            "is_clear": self.is_clear,
            "num_steps": list(self.num_steps),
            "has_both_jobs": self.has_both_jobs,
            "changed_keys": list(self.changed_keys),
            "remarks": list(self.remarks),
        }


def compare_runs(first: RunFacts, second: RunFacts) -> RunComparison:
    """Compare the newest steps of two runs, their memory, their loss and their jobs."""
    speedup, low, high = _compare_step_seconds(first, second)
    return RunComparison(
        tuple(_list_terms(first, second)),
        speedup,
        low,
        high,
        tuple(_list_changed_keys(first.job, second.job)),
        tuple(_list_remarks(first, second)),
        (len(_list_compared_step_seconds(first)), len(_list_compared_step_seconds(second))),
        has_both_jobs=bool(first.job and second.job),
    )


def _list_terms(first: RunFacts, second: RunFacts) -> list[ComparedTerm]:
    has_same_units = _have_same_units(first, second)
    terms = [ComparedTerm("step, mean", "s", _mean_step_seconds(first), _mean_step_seconds(second))]
    if has_same_units:
        rates = first.tokens_per_s, second.tokens_per_s
        terms.append(ComparedTerm(f"{first.units.rate_unit}, median", "", *rates))
    for group in TIME_GROUPS:
        of_first, of_second = _group_seconds(first, group), _group_seconds(second, group)
        if max(of_first, of_second, key=formats.finite_or_zero) > 0:
            terms.append(ComparedTerm(f"  {group}", "s", of_first, of_second))
    peaks = _peak_bytes(first), _peak_bytes(second)
    terms.append(ComparedTerm("peak memory of a rank", "bytes", *peaks))
    if has_same_units:
        losses = _last_loss(first), _last_loss(second)
        terms.append(ComparedTerm("last training loss", "", *losses))
    terms.append(ComparedTerm("wall time", "s", first.wall_s, second.wall_s))
    return [term for term in terms if math.isfinite(term.first) or math.isfinite(term.second)]


def _have_same_units(first: RunFacts, second: RunFacts) -> bool:
    """True if both count one kind of targets and measure their loss in one unit, as far as their
    jobs say it."""
    return first.units == second.units and bool(first.job) == bool(second.job)


def _mean_step_seconds(facts: RunFacts) -> float:
    if facts.bottleneck is None or not facts.bottleneck.mean_step_s:
        return math.nan
    return facts.bottleneck.mean_step_s


def _group_seconds(facts: RunFacts, group: str) -> float:
    """Seconds of a step in a time group, in the mean over ranks and steps."""
    if facts.bottleneck is None or not facts.bottleneck.shares:
        return math.nan
    return facts.bottleneck.shares.get(group, 0.0) * facts.bottleneck.mean_step_s


def _peak_bytes(facts: RunFacts) -> float:
    peaks = [event.measured_bytes.get("peak", 0) for event in facts.memory.values()]
    return max((float(peak) for peak in peaks if peak), default=math.nan)


def _last_loss(facts: RunFacts) -> float:
    if facts.final_loss is None:
        return math.nan
    return facts.final_loss[1]


def _compare_step_seconds(first: RunFacts, second: RunFacts) -> tuple[float, float, float]:
    """The ratio of the mean steps that the table shows, and its 95 % interval by the spread of
    these steps on the lead ranks."""
    variance = 0.0
    for facts in (first, second):
        seconds = _list_compared_step_seconds(facts)
        if len(seconds) < NUM_STRETCHES or not min(_mean_step_seconds(facts), fmean(seconds)) > 0:
            return math.nan, math.nan, math.nan
        variance += estimate_relative_variance_of_mean(seconds)
    speedup = _mean_step_seconds(first) / _mean_step_seconds(second)
    # By the logarithms of the means (the delta method).
    factor = math.exp(_T * math.sqrt(variance))
    return speedup, speedup / factor, speedup * factor


def estimate_relative_variance_of_mean(seconds: Sequence[float]) -> float:
    """The squared relative standard error of a mean of NUM_STRETCHES steps at least, by the means
    of as many stretches of them: steps that follow each other are slow together (a busy machine, a
    slow disk), and are not so many independent measurements."""
    count = len(seconds)
    borders = [stretch * count // NUM_STRETCHES for stretch in range(NUM_STRETCHES + 1)]
    means = [fmean(seconds[start:end]) for start, end in itertools.pairwise(borders)]
    return (stdev(means) / fmean(means)) ** 2 / NUM_STRETCHES


def _list_compared_step_seconds(facts: RunFacts) -> list[float]:
    """Seconds of the steps whose mean is compared, on the lead rank."""
    if facts.bottleneck is None:
        return []
    first, last = facts.bottleneck.first_step, facts.bottleneck.last_step
    return [
        seconds
        for step, seconds in zip(facts.steps.step, facts.steps.step_s, strict=True)
        if first <= step <= last and math.isfinite(seconds)
    ]


def _list_changed_keys(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The keys of two jobs that differ, with both values; none where a job is not known."""
    if not first or not second:
        return []
    lines = []
    for difference in find_differences(first, second):
        # A key that a job of another release has not, and null.
        is_set = any(value not in (None, ABSENT) for value in (difference.a, difference.b))
        if is_set and difference.key not in _KEYS_OF_PLACE:
            lines.append(_describe_changed_key(difference.key, difference.a, difference.b))
    return lines


def _describe_changed_key(key: str, first: Any, second: Any) -> str:
    before, after = _show(first), _show(second)
    if before == after:
        return f"{key}: {before} in both, and different in what is too long to show"
    return f"{key}: {before} -> {after}"


def _show(value: Any) -> str:
    if value is None or value is ABSENT:
        return "not set"
    return printable(str(value), 80)


def _list_remarks(first: RunFacts, second: RunFacts) -> list[str]:
    """The differences that make two runs hard to compare."""
    remarks = []
    if first.world_size and second.world_size and first.world_size != second.world_size:
        remarks.append(f"they have {first.world_size} and {second.world_size} ranks")
    if first.device != second.device:
        remarks.append(f"they ran on {first.device or '?'} and {second.device or '?'}")
    remarks += _list_remarks_on_work(first, second)
    for name, facts in (("first", first), ("second", second)):
        if not facts.is_finished:
            remarks.append(f"the {name} has no end on record")
        if facts.num_restarts:
            remarks.append(f"the {name} was restarted {plural(facts.num_restarts, 'time')}")
        remarks += [f"of the {name}, {gap}" for gap in facts.list_gaps()]
    return remarks


def _list_remarks_on_work(first: RunFacts, second: RunFacts) -> list[str]:
    """The differences in what a step is, how many there were, and which of them are compared."""
    if _have_same_units(first, second):
        remarks = _list_remarks_on_size(first, second)
    else:
        remarks = [_describe_units(first, second)]
    if first.last_step != second.last_step:
        remarks.append(
            f"they did {first.last_step:,} and {plural(second.last_step, 'step')}: their wall times"
            " are not those of the same work"
        )
    ranges = [_name_compared_steps(facts) for facts in (first, second)]
    if all(ranges) and ranges[0] != ranges[1]:
        remarks.append(f"the mean step is that of steps {ranges[0]} and of steps {ranges[1]}")
    return remarks


def _list_remarks_on_size(first: RunFacts, second: RunFacts) -> list[str]:
    """The differences in what a step and a target cost, and in the steps of the last losses, of
    runs that count the same."""
    remarks = []
    sizes = [_count_step_items(facts) for facts in (first, second)]
    if all(map(math.isfinite, sizes)) and sizes[0] != sizes[1]:
        noun = "tokens" if first.units == TEXT_METRIC_UNITS else "samples"
        remarks.append(
            f"their steps are of {sizes[0]:,.0f} and {sizes[1]:,.0f} {noun}: compare"
            f" {first.units.rate_unit}, and not seconds of a step"
        )
    flops = [formats.number_or_nan(facts.plan.get("flops_per_token")) for facts in (first, second)]
    if all(each > 0 for each in flops) and max(flops) > _SAME_FLOPS_RATIO * min(flops):
        remarks.append(
            f"their models take {format_count(flops[0])}FLOP and {format_count(flops[1])}FLOP a"
            " token: a faster step is not the same work done faster"
        )
    losses = first.final_loss, second.final_loss
    if losses[0] is not None and losses[1] is not None and losses[0][0] != losses[1][0]:
        remarks.append(f"the last losses are those of steps {losses[0][0]:,} and {losses[1][0]:,}")
    return remarks


def _describe_units(first: RunFacts, second: RunFacts) -> str:
    """Why rates and losses of the two are not compared."""
    if not (first.job and second.job):
        return (
            "what the one without a job counts, and what its loss is, is not known: their rates and"
            " losses are not compared"
        )
    return (
        f"they count {first.units.items} and {second.units.items}, and measure their losses in"
        " other units: their rates and losses are not compared"
    )


def _count_step_items(facts: RunFacts) -> float:
    """Tokens of a step by the plan, samples of a model that is not of text; NaN where it does not
    say."""
    num_samples = formats.number_or_nan(facts.plan.get("global_batch_size"))
    if facts.units != TEXT_METRIC_UNITS:
        return num_samples
    return num_samples * formats.number_or_nan(facts.plan.get("seq_len"))


def _name_compared_steps(facts: RunFacts) -> str:
    """ "4 to 40"; empty without steps."""
    verdict = facts.bottleneck
    if verdict is None or not verdict.mean_step_s > 0:
        return ""
    return f"{verdict.first_step:,} to {verdict.last_step:,}"


def list_comparison_lines(comparison: RunComparison, names: tuple[str, str]) -> list[str]:
    """The comparison as text: the answer first, then the terms as a table, then what differs."""
    rows = [("", *names, "change")]
    for term in comparison.terms:
        rows.append(
            (
                term.name,
                _format_value(term.first, term.unit),
                _format_value(term.second, term.unit),
                _format_change(term),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [_describe_speedup(comparison), ""]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    lines.append("")
    shown = comparison.changed_keys[:MAX_NAMED_KEYS]
    lines += [f"job     {line}" for line in shown]
    if not comparison.has_both_jobs:
        lines.append("job     cannot be compared: not both can be read")
    elif not shown:
        lines.append("job     both have the same job")
    if len(comparison.changed_keys) > len(shown):
        lines.append(f"job     and {len(comparison.changed_keys) - len(shown)} more keys")
    lines += [f"note    {text}" for text in comparison.remarks]
    return lines


def _describe_speedup(comparison: RunComparison) -> str:
    if not math.isfinite(comparison.speedup):
        return "steps cannot be compared: a run has too few of them"
    if not comparison.is_clear:
        return (
            "the steps of the two cannot be told apart within their spread: those of the second are"
            f" {comparison.speedup:.2f} x as fast"
            f" ({_describe_interval(comparison, comparison.low, comparison.high)})"
        )
    if comparison.speedup > 1:
        interval = _describe_interval(comparison, comparison.low, comparison.high)
        return f"steps of the second are {comparison.speedup:.2f} x faster ({interval})"
    interval = _describe_interval(comparison, 1 / comparison.high, 1 / comparison.low)
    return f"steps of the second are {1 / comparison.speedup:.2f} x slower ({interval})"


def _describe_interval(comparison: RunComparison, low: float, high: float) -> str:
    first, second = comparison.num_steps
    return (
        f"{low:.2f} to {high:.2f} with 95 % confidence, by the spread within {first:,} and"
        f" {second:,} steps"
    )


def _format_value(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "–"
    if unit == "s":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _format_change(term: ComparedTerm) -> str:
    if not math.isfinite(term.ratio):
        return ""
    return f"{100 * (term.ratio - 1):+.1f} %"


def _number_or_none(value: float) -> float | None:
    if math.isfinite(value):
        return value
    return None
