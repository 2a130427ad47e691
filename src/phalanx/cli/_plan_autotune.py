"""`phalanx plan --autotune K`: the K best layouts, run for a few steps; predicted and measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from phalanx.cli._arguments import split_job_file_and_overrides
from phalanx.cli._json import print_json
from phalanx.cli._launched import refuse_launcher
from phalanx.cli._progress import ProgressLine
from phalanx.core.units import describe_prediction_error, format_seconds, plural

if TYPE_CHECKING:
    from phalanx.run.autotune import AutotuneResult, TunedLayout


def run_and_print_autotune(count: int, arguments: Sequence[str], *, as_json: bool) -> int:
    """Run the `count` best layouts of a job and print them, fastest first. Returns the exit code:
    that of a stop, 1 if no run ended."""
    from phalanx.job.load import load_job
    from phalanx.plan.described_cluster import (
        require_cluster_is_this_machine,
        require_cluster_keys_have_effect,
    )
    from phalanx.run.autotune import autotune_job

    refuse_launcher("plan --autotune")
    job_file, overrides = split_job_file_and_overrides(arguments)
    job = load_job(job_file, overrides)
    # Else each layout would be refused in turn, as if it had failed.
    require_cluster_is_this_machine(job)
    require_cluster_keys_have_effect(job)
    began = time.monotonic()
    with ProgressLine("trying", line_s=0.0) as line:

        def show(index: int, total: int, layout: TunedLayout) -> None:
            words = f"{index + 1}/{total}  {layout.name}"
            if index:
                left_s = (time.monotonic() - began) / index * (total - index)
                words += f"  eta {format_seconds(left_s)}"
            line.update(index, total, instead=words)

        result = autotune_job(job, count, on_layout=show)
    if as_json:
        print_json("autotune", result.to_json(), indent=1)
    else:
        for text in _describe_autotune_result(result):
            print(text)
    if result.stop_code is not None:
        print("stopped; what had run is above", file=sys.stderr)
        return result.stop_code
    if result.winner is not None:
        return 0
    return 1


def _describe_autotune_result(result: AutotuneResult) -> Iterator[str]:
    yield (
        f"ran {plural(len(result.layouts), 'layout')} of {result.num_considered} that are legal"
        f" and fit; predictions {result.basis}"
    )
    for layout in result.layouts:
        keys = " ".join(_format_override(key, value) for key, value in layout.keys.items())
        predicted = "–"
        if layout.predicted_s is not None:
            predicted = format_seconds(layout.predicted_s)
        if layout.measured is None:
            yield f"  failed  {layout.name:<12} {keys}: {layout.why_not}"
            continue
        run = layout.measured
        error = ""
        if layout.predicted_s is not None:
            error = f" ({describe_prediction_error(layout.predicted_s, run.step_s)})"
        yield (
            f"  {format_seconds(run.step_s):>8}/step ({format_seconds(run.low_s)} to"
            f" {format_seconds(run.high_s)}), predicted {predicted}{error}  {layout.name}  {keys}"
        )
    if result.winner is not None:
        keys = " ".join(_format_override(key, value) for key, value in result.winner.keys.items())
        yield f"pick    {keys or 'as the job says'}   ({result.winner.name}, by measurement)"


def _format_override(key: str, value: object) -> str:
    from phalanx.run.autotune import find_section_of_key

    return f"{find_section_of_key(key)}.{key}={value}"
