"""The answer of a search in lines of a terminal: what fits, how fast, at what cost, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.core.units import format_bytes, format_count, format_seconds, plural
from phalanx.job.schema import Job
from phalanx.job.user_dataset import is_own_dataset
from phalanx.plan.advice.terminal import format_step_interval
from phalanx.plan.advice.waterfall import list_memory_phases
from phalanx.plan.cluster import Cluster, LinkLevel, choose_headroom
from phalanx.plan.described_cluster import describe_untimed_topologies
from phalanx.plan.rules_of_thumb.memory import MAX_MEMORY_SHARE
from phalanx.plan.search.comparison import explain_why_winner
from phalanx.plan.search.overrides import format_overrides
from phalanx.plan.search.result import NearestFit, PeakMemory, RankedLayout, SearchResult

if TYPE_CHECKING:
    from phalanx.plan.search.scaling import DeviceCountResult
    from phalanx.plan.search.task import SearchTask

MAX_REASONS = 3
# Plans of memory are wrong by several percent. Beside a winner that fills more than the first of
# these, a runner-up is named that leaves the second free, for at most the third of the step.
FULL_SHARE_OF_MEMORY = 0.9
LEANER_SHARE_OF_MEMORY = 0.1
LONGER_SHARE_OF_STEP = 0.1
# Lengths of its multiples are cut into as many parts as axes of usual degrees ask for.
EVEN_LENGTH = 128
UNKNOWN_PRICE = "no price on demand is known: set cluster.instance or cluster.price_per_hour"


def format_search_result(result: SearchResult, cluster: Cluster) -> list[str]:
    """The answer first, then the winner, the runners-up and what was looked at."""
    lines = [_describe_verdict(result), *_describe_searched_job(result, cluster)]
    if result.winner is not None:
        lines += [
            f"layout  {describe_layout(result.winner, result.sample_noun)}",
            *_describe_economics(result),
            "",
            *format_ranking([result.winner, *result.runners_up]),
        ]
        leaner = describe_leaner_runner_up(result, cluster)
        if leaner:
            lines += ["", f"room    {leaner}"]
    else:
        lines += ["", *_describe_nearest_fits(result)]
    return [*lines, "", *_describe_considered_layouts(result), *result.remarks]


def _describe_verdict(result: SearchResult) -> str:
    winner = result.winner
    if winner is None:
        return f"{result.failure_kind} · {result.failure}"
    parts, unit = ["FITS"], find_counted_unit(result.sample_noun, result.sample_tokens)
    if winner.time is not None:
        time = winner.time
        parts.append(f"{format_step_interval(time.total_s, time.low_s, time.high_s)} a step")
    if winner.tokens_per_s_per_device is not None:
        parts.append(f"{winner.tokens_per_s_per_device:,.0f} {unit}/s/GPU")
    if winner.mfu is not None:
        parts.append(f"MFU {winner.mfu:.0%}")
    parts.append(f"peak {describe_peak_memory(winner.memory)}")
    goodput = result.economics.get("goodput")
    if goodput is not None:
        parts.append(f"goodput {format_goodput(goodput['value'])}")
    return " · ".join(parts)


def format_goodput(value: float, percent: str = "%") -> str:
    """'98.4%'; near 1 with another digit, and never 100: something is always lost."""
    if value < 0.9995:
        return f"{100 * value:.1f}{percent}"
    return f"{min(100 * value, 99.99):.2f}{percent}"


def describe_peak_memory(memory: PeakMemory) -> str:
    """'62.4 GiB of 70.8 GiB (rank 0 of the pipeline, in the backward)'."""
    phases = list_memory_phases(memory.categories, memory.phases)
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    where = f"in the {phase}"
    if phase == "between steps":
        where = "between steps"
    if memory.by_pipeline_rank:
        where = f"pipeline rank {memory.pipeline_rank}, {where}"
    return f"{format_bytes(memory.total_bytes)} of {format_bytes(memory.capacity_bytes)} ({where})"


def _describe_searched_job(result: SearchResult, cluster: Cluster) -> list[str]:
    noun = result.sample_noun.removesuffix("s")
    batch = plural(result.global_batch_size, noun)
    if find_counted_unit(result.sample_noun, result.sample_tokens) == "tokens":
        batch += f" x {result.sample_tokens:,} tokens"
    batch += " a step"
    if result.defaults:
        verb = "is the default" if len(result.defaults) == 1 else "are defaults"
        batch += f" ({' and '.join(result.defaults)} {verb})"
    model = f"{result.model}, {format_count(result.num_params)} parameters"
    lines = [f"model   {model}, {batch}, products in {result.precision}"]
    nodes = plural(cluster.num_nodes, "node")
    levels = ", ".join(
        _describe_link_level(level) for level in cluster.links if level.num_devices > 1
    )
    text = f"cluster {describe_devices(result.num_ranks, result.cluster)} in {nodes}"
    if levels:
        text += f" ({levels}, each way and GPU)"
    return [*lines, text]


def describe_devices(num_devices: int, name: str) -> str:
    """'64 x h100-sxm', or '64 GPUs of p5.48xlarge (h100-sxm)': of a machine by its name."""
    if name.endswith(")"):
        return f"{plural(num_devices, 'GPU')} of {name}"
    return f"{num_devices:,} x {name}"


def _describe_link_level(level: LinkLevel) -> str:
    text = f"{level.name} {level.gb_s:g} GB/s"
    if level.oversubscription > 1:
        text += f" oversubscribed {level.oversubscription:g}:1"
    return text


def describe_layout(ranked: RankedLayout, sample_noun: str = "sequences") -> str:
    """The layout of a candidate in words, with its batch and what it recomputes."""
    text = f"{ranked.family} ({ranked.layout}), {ranked.num_microbatches} x"
    text += f" {ranked.micro_batch_size} {sample_noun} a data-parallel rank"
    if ranked.schedule:
        text += f", {ranked.schedule} with {plural(ranked.stages_per_rank, 'stage')} a rank"
    if ranked.recompute != "none":
        text += f", recompute {ranked.recompute}"
    if ranked.offload != "none":
        text += f", offload {ranked.offload}"
    if ranked.memory.host_bytes:
        text += f" ({format_bytes(ranked.memory.host_bytes)} of host memory a rank)"
    return text


def _describe_economics(result: SearchResult) -> list[str]:
    cost: Mapping[str, Any] | None = result.economics.get("cost")
    if cost is None:
        return []
    amount, share = describe_counted_amount(result)
    parts = [f"{share * cost['hours_per_billion_tokens']:.3g} h"]
    prices = (("on demand", "dollars"), ("on spot machines", "spot_dollars"))
    for name, key in prices:
        dollars = cost[f"{key}_per_billion_tokens"]
        if dollars is not None:
            parts.append(f"${format_amount(share * dollars)} {name}")
    kwh = cost["kwh_per_billion_tokens"]
    if kwh is None:
        parts.append("energy unknown: set cluster.watts")
    else:
        parts.append(f"{format_amount(share * kwh)} kWh")
    lines = [f"cost    {amount}: {', '.join(parts)}"]
    steps = result.economics.get("job_steps")
    if steps is not None:
        text = f"        {plural(steps, 'step')}: {cost['job_hours']:,.3g} h"
        if cost["job_dollars"] is not None:
            text += f", ${format_amount(cost['job_dollars'])} on demand"
        lines.append(text)
    if cost["dollars_per_billion_tokens"] is None:
        lines.append(f"        {UNKNOWN_PRICE}")
    if cost.get("price_note"):
        lines.append(f"        {cost['price_note']}")
    return lines


def find_counted_unit(sample_noun: str, sample_tokens: int) -> str:
    """What speeds are of: tokens, or samples of a user's own that are one row each."""
    return "samples" if sample_noun == "samples" and sample_tokens == 1 else "tokens"


def find_counted_unit_of_task(task: SearchTask) -> str:
    """What speeds of a search's job are of."""
    noun = task.shape.get_sample_noun(of_own_data=is_own_dataset(task.job.data.source))
    return find_counted_unit(noun, task.shape.count_sample_tokens(task.job.data.seq_len))


def describe_counted_amount(result: SearchResult) -> tuple[str, float]:
    """What costs are said of, and its share of a billion tokens."""
    if result.sample_noun == "images":
        return "a million images", result.sample_tokens / 1e3
    if find_counted_unit(result.sample_noun, result.sample_tokens) == "samples":
        return "a million samples", 1e-3
    return "a billion tokens", 1.0


def format_amount(amount: float) -> str:
    """A cost in whole numbers; below 10 with three digits."""
    return f"{amount:,.3g}" if amount < 10 else f"{amount:,.0f}"


def format_ranking(ranked: Sequence[RankedLayout]) -> list[str]:
    """A table of layouts: the winner, then others with the term that they lose by."""
    header = ("", "family", "layout", "batch", "recompute", "step", "MFU", "peak", "why it loses")
    rows = [header]
    for number, layout in enumerate(ranked, start=1):
        step, mfu = "unknown", ""
        if layout.step_s is not None:
            step = format_seconds(layout.step_s)
        if layout.mfu is not None:
            mfu = f"{layout.mfu:.0%}"
        degrees = str(layout.layout)
        if layout.schedule:
            degrees += f", {layout.schedule}"
        rows.append(
            (
                str(number),
                layout.family,
                degrees,
                f"{layout.num_microbatches} x {layout.micro_batch_size}",
                layout.recompute,
                step,
                mfu,
                format_bytes(layout.memory.total_bytes),
                layout.why_not or explain_why_winner(layout, ranked),
            )
        )
    return _align_columns(rows)


def describe_leaner_runner_up(result: SearchResult, cluster: Cluster) -> str:
    """Where the winner leaves little of its memory: the fastest runner-up that needs a good deal
    less for a little more time, and the keys that choose it. Where there is none, and next to
    nothing is left, the key that plans with less; "" elsewhere."""
    winner = result.winner
    if winner is None or winner.step_s is None:
        return ""
    capacity = winner.memory.capacity_bytes
    if winner.memory.total_bytes < FULL_SHARE_OF_MEMORY * capacity:
        return ""
    for number, ranked in enumerate(result.runners_up, start=2):
        change = (ranked.step_s or math.inf) / winner.step_s - 1
        saved = winner.memory.total_bytes - ranked.memory.total_bytes
        if change <= LONGER_SHARE_OF_STEP and saved >= LEANER_SHARE_OF_MEMORY * capacity:
            keys = {key: ranked.job_keys[key] for key in ranked.job_keys if key != "parallel.ranks"}
            return (
                f"the winner fills {winner.memory.total_bytes / capacity:.0%} of what a plan may"
                f" fill; {number} ({ranked.family}) needs {format_bytes(saved)} less, for"
                f" {change:+.1%} of the step: {format_overrides(keys)}"
            )
    if winner.memory.total_bytes < MAX_MEMORY_SHARE * capacity:
        return ""
    return (
        f"the winner fills {winner.memory.total_bytes / capacity:.1%} of what a plan may fill, and"
        " no runner-up of nearly its time needs much less; to leave about 5% of it free, add"
        f" cluster.memory_gib={_shrink_memory_gib(capacity, cluster, result.num_ranks):.1f}"
    )


def _shrink_memory_gib(capacity_bytes: float, cluster: Cluster, num_ranks: int) -> float:
    """The memory of a rank with which a plan may fill 5 % less."""
    less = 0.05 * capacity_bytes / choose_headroom(cluster.device).share
    return (cluster.memory_per_rank(num_ranks) - less) / 2**30


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _describe_nearest_fits(result: SearchResult) -> list[str]:
    if not result.nearest:
        return [f"nothing that was tried along any axis fits: {_suggest_smaller_step(result)}"]
    lines = ["what would fit (each planned by itself, as for a run):"]
    lines += [f"  {line}" for line in map(describe_nearest_fit, result.nearest)]
    return lines


def _suggest_smaller_step(result: SearchResult) -> str:
    """What is left where no axis helps: something smaller, or a length that ranks can share."""
    text = "a shorter sequence, a smaller model or larger devices"
    length = result.seq_len
    cut = EVEN_LENGTH * (length // EVEN_LENGTH)
    if result.sample_noun == "images" or length % EVEN_LENGTH == 0 or cut < EVEN_LENGTH**2:
        return text
    parts = math.gcd(length, EVEN_LENGTH)
    reason = f"data.seq_len {length:,} divides into {parts} equal parts"
    if parts == 1:
        reason = f"data.seq_len {length:,} divides into no equal parts"
    return f"{text}; {reason}, so that cp and tp cannot share it as they could --seq-len {cut}"


def describe_nearest_fit(fit: NearestFit) -> str:
    """One change with which the job fits, and its price."""
    notes = [f"{format_bytes(fit.ranked.memory.total_bytes)} per rank"]
    if fit.change and fit.words:
        notes.insert(0, fit.words)
    text = f"{fit.axis}: {fit.change or fit.words} ({', '.join(notes)}"
    if fit.ranked.step_s is not None:
        text += f", {format_seconds(fit.ranked.step_s)} a step"
    if fit.slowdown is not None and fit.slowdown > 1.005:
        text += f", {fit.slowdown:.2f} x the device time of the cheapest"
    if fit.host_bytes_per_node:
        text += f", and {format_bytes(fit.host_bytes_per_node)} of a node's host memory"
    return f"{text})"


def _describe_considered_layouts(result: SearchResult) -> list[str]:
    text = (
        f"looked  at {result.num_considered:,} layouts:"
        f" {f'{result.num_fitting:,} fit' if result.num_fitting else 'none fits'} by formulas in"
        " bulk (each with the least recomputation that it needs); those named here were planned by"
        " themselves, as for a run"
    )
    lines = [text]
    reasons = sorted(result.refused.items(), key=lambda item: -item[1])
    for reason, count in reasons[:MAX_REASONS]:
        lines.append(f"        {count} more refused then: {reason}")
    return lines


def format_scaling_table(
    counts: Sequence[DeviceCountResult], job: Job, cluster: Cluster, *, unit: str
) -> list[str]:
    """A table of `job` on more and more devices of `cluster`; below it what hours and costs are of,
    and why a number has no layout. `unit`: what speeds are of (`find_counted_unit`)."""
    header = ("GPUs", "layout", "step", f"{unit}/s", "MFU", "efficiency", "hours", "cost")
    rows: list[Sequence[str]] = [header]
    for count in counts:
        winner = count.winner
        if winner is None:
            rows.append((f"{count.num_devices:,}", "none", "", "", "", "", "", ""))
            continue
        layout = f"{winner.family} ({winner.layout})"
        if winner.step_s is None:
            rows.append((f"{count.num_devices:,}", layout, "unknown", "", "", "", "", ""))
            continue
        cost = "unknown"
        if count.job_dollars is not None:
            cost = f"${count.job_dollars:,.0f}"
        rows.append(
            (
                f"{count.num_devices:,}",
                layout,
                format_seconds(winner.step_s),
                f"{count.tokens_per_s:,.0f}",
                "" if winner.mfu is None else f"{winner.mfu:.0%}",
                f"{count.efficiency:.0%}",
                f"{count.job_hours:,.3g}",
                cost,
            )
        )
    return [*_align_columns(rows), *_list_scaling_notes(counts, job, cluster, unit)]


def _list_scaling_notes(
    counts: Sequence[DeviceCountResult], job: Job, cluster: Cluster, unit: str
) -> list[str]:
    """The lines below a table of devices."""
    notes = []
    for count in counts:
        if count.why:
            fix = f"; {count.fix}" if count.fix else ""
            notes.append(f"{plural(count.num_devices, 'GPU')}: {count.why}{fix}")
    if all(count.winner is None for count in counts):
        return notes
    if any(count.winner is not None and count.winner.step_s is None for count in counts):
        notes.append("unknown: why no time is predicted is said of one number of GPUs (--gpus N)")
    steps = f"{job.train.steps:,} steps"
    if "steps" not in job.train.model_fields_set:
        steps += ", the default of train.steps"
    notes.append(f"products in {job.precision.compute}")
    notes.append(f"hours and cost: of {steps}")
    if cluster.price_per_hour is None:
        notes.append(f"cost: {UNKNOWN_PRICE}")
    elif cluster.price_note:
        notes.append(f"cost: {cluster.price_note}")
    if cluster.network_note:
        notes.append(f"network: {cluster.network_note}")
    untimed = describe_untimed_topologies(cluster)
    if untimed:
        notes.append(f"network: {untimed}")
    notes.append(f"efficiency: {unit}/s of a GPU beside those of the smallest number that fits")
    return notes
