"""`phalanx bench train`: runs a comparison, keeps its rows, and prints its table."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli._arguments import split_job_file_and_overrides
from phalanx.cli._json import print_errors_as_json, print_json
from phalanx.cli._launched import refuse_launcher
from phalanx.cli._progress import ProgressLine
from phalanx.core.errors import ExitCode, UsageError
from phalanx.core.units import MIB, format_count, format_seconds, plural

if TYPE_CHECKING:
    from phalanx.bench.training.contenders import Library
    from phalanx.bench.training.drive import (
        TrainBenchProgress,
        TrainBenchRequest,
        TrainBenchResult,
    )
    from phalanx.bench.training.summary import Standing

# Above it a median says more about the machine than about who trains.
BUSY_SHARE = 0.1


@dataclass(frozen=True)
class BenchTrainOptions:
    """The options of the verb, as they were given; no layouts: those that fit of the usual ones."""

    layouts: str
    libraries: str
    ranks: int | None
    turns: int
    steps: int | None
    out: Path | None


@dataclass(frozen=True)
class _Selection:
    """What is compared; `missing`: libraries that are not installed, `refused`: contender -> why
    its layout does not fit."""

    request: TrainBenchRequest
    missing: tuple[Library, ...]
    refused: dict[str, str]


def run_and_print_bench_train(
    arguments: Sequence[str], options: BenchTrainOptions, *, as_json: bool
) -> int:
    """Compare and print. Returns the exit code: 1 if a contender failed, 11 if its losses are
    others than the reference's."""
    from phalanx.bench.training.drive import bench_training
    from phalanx.bench.training.rows import open_rows
    from phalanx.run.stop_signals import StoppedBySignalError

    refuse_launcher("bench")
    with ExitStack() as stack:
        stack.enter_context(print_errors_as_json(as_json))
        selection = _select(arguments, options)
        path = options.out or Path("runs") / time.strftime("bench-train-%Y%m%d-%H%M%S.jsonl")
        file = stack.enter_context(open_rows(path))
        file.write_comparison(selection.request)
        line = stack.enter_context(ProgressLine("comparing"))
        began = time.monotonic()

        try:
            result = bench_training(
                selection.request,
                on_progress=lambda progress: _show_progress(line, progress, began),
                on_row=file.write_turn,
            )
        except (KeyboardInterrupt, StoppedBySignalError) as stop:
            line.hide()
            print(f"stopped; the turns until now are in {path}", file=sys.stderr)
            if isinstance(stop, StoppedBySignalError):
                return ExitCode.PREEMPTED
            return ExitCode.INTERRUPTED
        for standing in result.standings:
            file.write_standing(standing)
    if as_json:
        print_json("bench-train", _build_summary(selection, result, path), indent=1)
    else:
        for text in describe_comparison(selection, result):
            print(text)
        print(f"rows    {path}")
    return _choose_exit_code(result)


def _select(arguments: Sequence[str], options: BenchTrainOptions) -> _Selection:
    from phalanx.bench.training.contenders import list_libraries, list_phalanx_contenders
    from phalanx.bench.training.drive import TrainBenchRequest
    from phalanx.bench.training.layouts import (
        DEFAULT_LAYOUTS,
        make_compared_job,
        parse_layouts,
        select_contenders_with_plan,
    )
    from phalanx.job.load import load_job

    libraries, missing = list_libraries(options.libraries)
    job_file, overrides = split_job_file_and_overrides(arguments)
    compared = make_compared_job(load_job(job_file, overrides), options.ranks)
    layouts = parse_layouts(options.layouts or DEFAULT_LAYOUTS, compared.num_ranks)
    phalanx_contenders, refused = select_contenders_with_plan(
        compared, list_phalanx_contenders(layouts), may_leave_out=not options.layouts
    )
    peer_contenders = [contender for library in libraries for contender in library.contenders]
    if not peer_contenders and not phalanx_contenders:
        raise UsageError("nothing is compared", fix="give --layouts or --with names")
    request = TrainBenchRequest(
        compared, (*peer_contenders, *phalanx_contenders), options.turns, options.steps
    )
    return _Selection(request, tuple(missing), refused)


def _show_progress(line: ProgressLine, progress: TrainBenchProgress, began: float) -> None:
    words = progress.running
    if progress.done:
        left_s = (time.monotonic() - began) / progress.done * (progress.total - progress.done)
        words += f"  eta {format_seconds(left_s)}"
    line.update(progress.done, progress.total, instead=words)


def _build_summary(selection: _Selection, result: TrainBenchResult, path: Path) -> dict[str, Any]:
    """The body of phalanx.bench-train/1."""
    from phalanx.bench.training.rows import describe_setting

    return {
        "path": str(path),
        "wall_s": result.wall_s,
        **describe_setting(selection.request.compared),
        "num_turns": selection.request.num_turns,
        "num_sections": result.num_sections,
        "load": _compute_load(result),
        "others_share": _compute_others_share(result),
        "not_installed": [library.name for library in selection.missing],
        "refused": selection.refused,
        "standings": [standing.to_json() for standing in result.standings],
    }


def describe_comparison(selection: _Selection, result: TrainBenchResult) -> Iterator[str]:
    """The setting, a line for each contender, and what was left out and why."""
    from phalanx.bench.training.rows import describe_setting

    facts = describe_setting(selection.request.compared)
    yield (
        f"model   {format_count(facts['num_params'])} parameters, {facts['precision']},"
        f" {facts['global_batch_size']} x {facts['seq_len']} tokens a step,"
        f" {plural(facts['num_ranks'], 'rank')}"
    )
    yield (
        f"machine {facts['cpu']}, {plural(facts['cores'], 'core')}, torch {facts['torch']};"
        f" load {_compute_load(result):.1f}, other programs"
        f" {_compute_others_share(result):.0%} of the cores"
    )
    if facts["changed"]:
        yield f"changed {', '.join(facts['changed'])}"
    yield ""
    yield f"{'':<20} {'tokens/s':>10}  {'of never talk':>13}  {'middle half':>14}  {'peak':>9}"
    for standing in result.standings:
        yield _describe_standing(standing)
    yield ""
    for name, why in selection.refused.items():
        yield f"left out {name}: {why}"
    for library in selection.missing:
        yield f"left out {library.name}: not installed (pip install {library.distribution})"
    if _compute_others_share(result) > BUSY_SHARE:
        yield "note    other programs were busy meanwhile: run it again on a quiet machine"
    if result.logs is not None:
        yield f"logs    {result.logs}"
    if result.num_sections > 1:
        yield (
            f"note    memory had no room for all at once: they took turns in"
            f" {result.num_sections} sections, each with ranks that never talk"
        )


def _describe_standing(standing: Standing) -> str:
    name = standing.contender.name
    if standing.why_not:
        return f"{name:<20} failed: {standing.why_not}"
    if standing.difference is not None:
        off = standing.difference
        return (
            f"{name:<20} no share: its loss in step {off.step} is {off.loss:.6g}, and that of the"
            f" reference {off.reference_loss:.6g} ({off.relative:.2%} off)"
        )
    assert standing.tokens_per_s is not None
    assert standing.share is not None
    spread = f"{standing.share_low:.3f} to {standing.share_high:.3f}"
    peak = ""
    if standing.peak_bytes is not None:
        peak = f"{standing.peak_bytes / MIB:,.0f} MiB"
    return (
        f"{name:<20} {standing.tokens_per_s:>10,.0f}  {standing.share:>13.3f}  {spread:>14}"
        f"  {peak:>9}"
    )


def _compute_load(result: TrainBenchResult) -> float:
    return statistics.median(row.load for row in result.rows)


def _compute_others_share(result: TrainBenchResult) -> float:
    return statistics.median(row.others_share for row in result.rows)


def _choose_exit_code(result: TrainBenchResult) -> int:
    if any(standing.why_not for standing in result.standings):
        return ExitCode.INTERNAL
    if any(standing.difference is not None for standing in result.standings):
        return ExitCode.VERIFICATION
    return ExitCode.OK
