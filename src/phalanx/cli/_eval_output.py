"""What `phalanx eval` prints for people."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.cli._output import print_line
from phalanx.cli._progress import ProgressLine
from phalanx.core.units import format_seconds
from phalanx.run.trained.evaluate import (
    EvaluationData,
    EvaluationProgress,
    EvaluationResult,
    EvaluationTask,
)
from phalanx.run.trained.model import describe_ranks_of_model


def print_evaluation_task(task: EvaluationTask) -> None:
    """Print what is evaluated, on which ranks and data, and what warns of its tokens."""
    print_line(f"eval    {task.model.name}, on {describe_ranks_of_model(task.model, task.plan)}")
    print_line(f"data    {_describe_evaluated_data(task.data)}")
    for reason in task.data.remarks.reasons:
        print_line(f"why     {reason}")
    for warning in task.data.remarks.warnings:
        print_line(f"warning {warning.text}")


def show_evaluation_progress(line: ProgressLine, progress: EvaluationProgress | None) -> None:
    """Show how far ranks are; None before they have counted a batch."""
    if progress is None:
        line.update(0, 1, instead="starting")
        return
    text = f"{progress.num_done:,}/{progress.num_batches:,} batches of a rank"
    line.update(progress.num_done, progress.num_batches, instead=text)


def print_evaluation_result(result: EvaluationResult) -> None:
    """Print the loss of all data and of each source, the metrics, and the loss that the run
    recorded.
    """
    loss = f"{result.loss:.4f} {result.units.loss}".rstrip()
    if result.perplexity is not None:
        loss += f", perplexity {result.perplexity:.4g}"
    print_line(
        f"loss    {loss}   ({result.num_targets:,} {result.units.items},"
        f" {format_seconds(result.evaluated_s)})"
    )
    if len(result.loss_by_source) > 1:
        _print_named_values(result.loss_by_source.items())
    _print_named_values(result.metrics.items())
    if result.recorded_loss is not None:
        difference = "the same"
        if result.recorded_loss != result.loss:
            difference = f"{result.loss - result.recorded_loss:+.1e} from it here"
        print_line(
            f"        the run recorded {result.recorded_loss:.4f} at step {result.task.model.step}:"
            f" {difference}"
        )


def _print_named_values(values: Iterable[tuple[str, float]]) -> None:
    for name, value in values:
        print_line(f"        {name}  {value:.4f}")


def _describe_evaluated_data(data: EvaluationData) -> str:
    corpus = data.corpus
    if corpus.user is not None:
        count = f"{corpus.source}: {corpus.user.num_held_out:,} samples held out"
    else:
        count = f"{corpus.source}: {corpus.splits[data.split].num_tokens:,} tokens"
        if data.split == "held_out":
            count += " held out"
    if data.max_tokens is not None:
        return f"{count}, at most {data.max_tokens:,} of them"
    if data.split == "held_out":
        return count
    return f"{count}, all of it"
