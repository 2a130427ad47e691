"""What `phalanx data build` and `phalanx data tokenizer` show while they work, and print when they
are done.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from phalanx.cli._progress import ProgressLine
from phalanx.core.units import format_bytes, format_count, format_seconds, plural
from phalanx.data.build import BuildProgress
from phalanx.data.build_summary import BuildSpeed, BuildSummary
from phalanx.data.train_tokenizer import TrainedTokenizer, TrainingProgress
from phalanx.report.dataset_page import describe_left_out_inputs
from phalanx.run.next_command import format_next_command

MIN_SHOWN_UNIT_BYTES = 50_000  # fewer are told one by one


class BuildProgressDisplay:
    """Shows how far a build is, and remembers it."""

    def __init__(self) -> None:
        self.last: BuildProgress | None = None

    def show_build_progress(self, line: ProgressLine, progress: BuildProgress) -> None:
        self.last = progress
        counts = progress.counts
        noun = "documents"
        if counts.num_documents == 1:
            noun = "document"
        text = (
            f"{format_count(counts.num_documents)} {noun}  {format_count(counts.num_tokens)} tokens"
        )
        line.update(
            counts.read_bytes,
            progress.total_bytes,
            kept_bytes=progress.kept_counts.read_bytes,
            suffix=text,
        )

    def print_interruption(self) -> None:
        """Print how many shards an interrupted build has done."""
        if self.last is not None:
            shards = (
                f"{self.last.num_shards_done} of {self.last.num_shards} shards are whole and kept"
            )
            print(f"stopped: {shards}; the same command goes on from there", file=sys.stderr)


def print_build_summary(summary: BuildSummary, tokenizer: str) -> None:
    """Print what the dataset holds, how fast it was built, and the command that trains on it."""
    dataset, progress = summary.dataset, summary.progress
    manifest = dataset.manifest
    tokens = (
        f"{format_count(dataset.num_tokens)} tokens of {plural(dataset.num_documents, 'document')}"
    )
    ratio = 0.0
    if dataset.source_bytes:
        ratio = dataset.num_tokens / dataset.source_bytes
    size = f"{_format_megabytes(dataset.source_bytes)} of text ({ratio:.3f} tokens per byte)"
    _print_labelled_line(
        "there" if progress is None else "built", f"{dataset.directory}: {tokens}, {size}"
    )
    shards = plural(len(dataset.shards), "shard")
    if progress is not None and progress.num_shards_kept:
        shards += f", {progress.num_shards_kept} of them there before"
    # A dtype of numpy's ends with its number of bytes: "<u2".
    kind = f"{8 * int(manifest.dtype[-1])}-bit ids of a vocabulary of {manifest.vocab_size:,}"
    _print_labelled_line(
        "shards", f"{shards}, {format_bytes(summary.num_bytes)}; {kind} ({tokenizer})"
    )
    if manifest.end_of_document is None:
        _print_labelled_line(
            "note", "the tokenizer has no token that ends a document; none was put between them"
        )
    if missing := describe_left_out_inputs(manifest):
        _print_labelled_line("note", "; ".join(missing))
    if summary.speed is not None:
        _print_labelled_line("speed", _describe_build_speed(summary.speed, dataset.tokenizer.kind))
    print(format_next_command("train", f"data.source={dataset.directory}"))


def show_tokenizer_training(line: ProgressLine, progress: TrainingProgress) -> None:
    """Show how far the training of a tokenizer is."""
    joining = ""
    if progress.is_merging:
        joining = f"text is read; joining pairs, {format_seconds(progress.elapsed_s)} so far"
    line.update(progress.read_bytes, progress.total_bytes, instead=joining)


def print_trained_tokenizer(
    trained: TrainedTokenizer, inputs: Sequence[str], *, vocab_size: int
) -> None:
    """Print the tokenizer that was trained, and the command that builds a dataset with it."""
    tokens = f"{trained.vocab_size:,} tokens"
    # A small corpus has fewer pairs to join than were asked for.
    if trained.vocab_size != vocab_size:
        tokens += f" (the corpus has no more; {vocab_size:,} were asked for)"
    size = f"{_format_megabytes(trained.text_bytes)} of text"
    _print_labelled_line(
        "trained", f"{trained.path}: {tokens} from {size} in {format_seconds(trained.elapsed_s)}"
    )
    _print_labelled_line("", f"about {trained.num_tokens_per_byte:.3f} tokens per byte of it")
    print(
        format_next_command(
            "data", "build", *inputs, "--tokenizer", str(trained.path), "--out", "DIR"
        )
    )


def _print_labelled_line(label: str, text: str) -> None:
    print(f"{label:<8}{text}")


def _describe_build_speed(speed: BuildSpeed, tokenizer_kind: str) -> str:
    workers = "1 worker"
    if speed.num_workers > 1:
        workers = f"{speed.num_workers} workers"
    work = f"{_format_megabytes(speed.text_bytes)} in {format_seconds(speed.elapsed_s)}, {workers}"
    text = f"{speed.text_bytes_per_s / 1e6:,.1f} MB/s ({work})"
    # Bytes are tokens already: their "tokenizer" takes no time that means anything.
    if tokenizer_kind != "bytes" and speed.tokenizer_bytes_per_s_per_worker:
        rate = f"{speed.tokenizer_bytes_per_s_per_worker / 1e6:,.1f} MB/s per worker"
        text += (
            f"; the tokenizer alone {rate}, {100 * speed.tokenizer_share_of_time:.0f} % of the time"
        )
    return text


def _format_megabytes(num_bytes: int) -> str:
    if num_bytes < MIN_SHOWN_UNIT_BYTES:
        return plural(num_bytes, "byte")
    return f"{num_bytes / 1e6:,.1f} MB"
