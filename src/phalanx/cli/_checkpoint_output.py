"""What `phalanx checkpoint` prints for people."""

from __future__ import annotations

import time
from pathlib import Path

from phalanx.checkpoint.exchange.import_weights import WeightsImportResult
from phalanx.checkpoint.exchange.importing import MODEL_TOML_FILE_NAME
from phalanx.checkpoint.reading.listing import CheckpointListing, ListedCheckpoint
from phalanx.checkpoint.reading.verify import CheckpointVerification
from phalanx.checkpoint.writing.prune_run import PrunedCheckpoints
from phalanx.cli._output import print_line
from phalanx.core.units import format_bytes, plural
from phalanx.run.export import ExportResult

MIN_NAME_WIDTH = 14


def print_checkpoint_list(listing: CheckpointListing) -> None:
    """Print a line for each checkpoint."""
    width = max(MIN_NAME_WIDTH, *(len(entry.name) for entry in listing.entries))
    for entry in listing.entries:
        line = f"{entry.name:<{width}} {_describe_checkpoint(entry)}"
        if entry.step == listing.best_step and entry.error is None:
            line += "  best"
        print_line(line)


def _describe_checkpoint(entry: ListedCheckpoint) -> str:
    if entry.error is not None:
        return f"damaged: {entry.error}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.written_unix_s))
    layout = " ".join(f"{axis}={degree}" for axis, degree in entry.layout.items() if degree > 1)
    size = format_bytes(entry.num_bytes)
    line = f"{when}  {size:>10} in {entry.num_files} files  written by {layout or 'one rank'}"
    if entry.collectives:
        line += f" through {entry.collectives}"
    return line


def print_checkpoint_verdict(result: CheckpointVerification) -> None:
    """Print each problem on a line of its own, and the verdict."""
    for problem in result.problems:
        print_line(f"phalanx: {problem}", as_problem=True)
    if result.is_intact:
        print_line(f"whole   {result.url}: {format_bytes(result.num_bytes)}, every checksum holds")
    else:
        print_line(f"damaged {result.url}: {plural(len(result.problems), 'problem')}")


def print_prune_result(result: PrunedCheckpoints, *, dry_run: bool) -> None:
    """Print which checkpoints are gone and which are kept; of a `dry_run`, which would be."""
    for note in result.notes:
        print_line(f"note    {note}")
    remove, keep = "removed", "kept"
    if dry_run:
        remove, keep = "would remove", "would keep"
    print_line(f"{remove}  {', '.join(result.removed) or 'nothing'}")
    print_line(f"{keep}  {', '.join(result.kept)}")


def print_exported_model(result: ExportResult) -> None:
    """Print the model and the files that were written, and how transformers opens them."""
    exported = result.exported
    size = format_bytes(exported.num_bytes)
    print_line(f"from    {result.folder.url}, every byte of the weights verified")
    print_line(
        f"model   {exported.architecture}, {exported.num_tensors} tensors of {exported.dtype},"
        f" {size}"
    )
    for note in result.notes:
        print_line(f"note    {note}")
    files = ", ".join(exported.files[:6])
    if len(exported.files) > 6:
        files += " ..."
    print_line(f"wrote   {result.out}: {files}")
    print_line(f'open    transformers.{exported.auto_class}.from_pretrained("{result.out}")')


def print_imported_checkpoint(result: WeightsImportResult, *, source: str, out: str) -> None:
    """Print the checkpoint that was written, and how to train on from it."""
    print_line(
        f"from    {source}: {result.num_tensors} tensors of {result.dtype},"
        f" {format_bytes(result.num_bytes)}"
    )
    for note in result.notes:
        print_line(f"note    {note}")
    print_line(f"wrote   {result.checkpoint}")
    if result.model_toml is not None:
        print_line(
            f"train   phalanx train {Path(out) / MODEL_TOML_FILE_NAME} data.source=..."
            "   (starts from these weights)"
        )
    else:
        print_line(f"train   set model.init_from={out} beside your own model.kind")
