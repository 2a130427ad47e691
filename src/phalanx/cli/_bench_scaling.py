"""`phalanx bench scaling`: how a job scales over ranks of this machine, and what eats the rest."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from phalanx.cli._arguments import split_job_file_and_overrides
from phalanx.cli._json import print_errors_as_json, print_json
from phalanx.cli._launched import refuse_launcher
from phalanx.cli._progress import ProgressLine
from phalanx.core.errors import UsageError
from phalanx.core.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.run.scaling import ScalingPoint, ScalingResult

MIN_SHOWN_SHARE = 0.01


def run_and_print_scaling(
    arguments: Sequence[str],
    ranks: str,
    *,
    num_steps: int,
    repeats: int,
    is_strong: bool,
    as_json: bool,
) -> int:
    """Train a job on each number of ranks, and print efficiencies, of the runs before a stop, too.
    Returns the exit code: that of a stop, 1 if a run failed."""
    from phalanx.job.load import load_job
    from phalanx.run.scaling import ScalingRequest, measure_scaling

    refuse_launcher("bench")
    began = time.monotonic()
    with print_errors_as_json(as_json), ProgressLine("training", line_s=0.0) as line:
        job_file, overrides = split_job_file_and_overrides(arguments)
        job = load_job(job_file, overrides)
        request = ScalingRequest(job, _parse_ranks(ranks), num_steps, repeats, is_strong)

        def show(index: int, total: int, num_ranks: int) -> None:
            words = f"{index + 1}/{total}  {plural(num_ranks, 'rank')}"
            if index:
                left_s = (time.monotonic() - began) / index * (total - index)
                words += f"  eta {format_seconds(left_s)}"
            line.update(index, total, instead=words)

        result = measure_scaling(request, on_run=show)
    if result.stop_code is not None and not result.points:
        print("stopped before the first run was done", file=sys.stderr)
        return result.stop_code
    if as_json:
        print_json("scaling", result.to_json(), indent=1)
    else:
        for text in describe_scaling(result):
            print(text)
    if result.stop_code is not None:
        return result.stop_code
    return 1 if any(point.why_not for point in result.points) else 0


def _parse_ranks(text: str) -> tuple[int, ...]:
    """Numbers of ranks of "1,2,4", each once, ascending. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 64 for part in parts):
        raise UsageError(f"--ranks is numbers from 1 to 64 such as 1,2,4, not {text!r}")
    ranks = tuple(sorted({int(part) for part in parts}))
    if len(ranks) < 2:
        raise UsageError("--ranks needs two numbers of ranks to compare", fix="give 1,2 say")
    return ranks


def describe_scaling(result: ScalingResult) -> Iterator[str]:
    """A line for each number of ranks, and under it what its step takes beyond linear scaling."""
    kind = "weak scaling: each rank keeps its batch"
    if result.is_strong:
        kind = "strong scaling: the batch of a step stays"
    yield kind
    for point in result.points:
        if point.why_not:
            yield f"{plural(point.num_ranks, 'rank'):>8}  failed: {point.why_not}"
            continue
        rate = f"{point.tokens_per_s:>10,.0f} {result.units.short_rate_unit}"
        yield (
            f"{plural(point.num_ranks, 'rank'):>8}  {format_seconds(point.step_s):>8}/step"
            f"  {rate}  {point.efficiency:>6.1%} of linear"
            f"  {point.layout}, {plural(point.global_batch_size, 'sample')} a step"
        )
        if point.num_ranks > result.base_ranks:
            yield f"          {_describe_loss(point)}"
    last = result.points[-1]
    if not last.why_not and last.num_ranks > result.base_ranks:
        yield _describe_verdict(last)
    for remark in result.remarks:
        yield f"note    {remark}"


def _describe_loss(point: ScalingPoint) -> str:
    lost = sorted(point.lost.items(), key=lambda item: item[1], reverse=True)
    parts = [f"{name} {share:.1%}" for name, share in lost if share >= MIN_SHOWN_SHARE]
    if not parts:
        return "no term takes a hundredth of a step more than in linear scaling"
    return f"of a step, beyond linear: {', '.join(parts)}"


def _describe_verdict(point: ScalingPoint) -> str:
    from phalanx.run.scaling import GOOD_EFFICIENCY

    if not point.is_credible:
        return (
            f"{plural(point.num_ranks, 'rank')} reach {point.efficiency:.1%} of linear scaling,"
            " which says little of scaling: the run on the fewest ranks may have been slow for a"
            " reason of its own (on CPUs its ranks may have more threads: compare with"
            " OMP_NUM_THREADS=1)"
        )
    verdict = "at least"
    if not point.is_good:
        verdict = "below"
    return (
        f"{plural(point.num_ranks, 'rank')} reach {point.efficiency:.1%} of linear scaling:"
        f" {verdict} the {GOOD_EFFICIENCY:.0%} that guides ask for"
    )
