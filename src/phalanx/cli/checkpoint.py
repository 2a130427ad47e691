"""Checkpoints of a run: list, verify every byte, compare, remove old ones; export and import
weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli._options import BestOption, JsonOption

EXAMPLE = "Example: phalanx checkpoint ls runs/train-20260101-120000"
EXAMPLE_OF_COMMAND = {
    "ls": "Example: phalanx checkpoint ls runs/train-20260101-120000",
    "verify": "Example: phalanx checkpoint verify runs/train-20260101-120000/checkpoints/step-400",
    "diff": "Example: phalanx checkpoint diff runs/a runs/b/checkpoints/step-400",
    "prune": (
        "Example: phalanx checkpoint prune runs/train-20260101-120000 --keep-last 3 --keep-every"
        " 1000 --dry-run"
    ),
    "export": "Example: phalanx checkpoint export runs/train-20260101-120000 --out my-model",
    "import": "Example: phalanx checkpoint import Qwen3-0.6B --out imported",
}

# As Hugging Face counts the size of a shard, not 2**30.
GB_BYTES = 10**9

CheckpointLocationArgument = Annotated[
    str, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's directory, or one checkpoint's.")
]
RunDirArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's directory.")]


def list_checkpoints_command(
    location: CheckpointLocationArgument, as_json: JsonOption = False
) -> int:
    """List the checkpoints of a run, oldest first."""
    # Here, as in all verbs, and not above: `--help` waits for no import.
    from phalanx.checkpoint.reading.listing import list_checkpoints
    from phalanx.cli._checkpoint_output import print_checkpoint_list
    from phalanx.cli._json import print_json
    from phalanx.cli._output import make_errors_printable

    with make_errors_printable(as_json):
        listing = list_checkpoints(location)
    if as_json:
        checkpoints = [entry.to_json() for entry in listing.entries]
        print_json(
            "checkpoints",
            {"run": location, "best": listing.best_step, "checkpoints": checkpoints},
            indent=1,
        )
    else:
        print_checkpoint_list(listing)
    return 0


def verify_command(
    location: CheckpointLocationArgument,
    all_of_them: Annotated[
        bool, typer.Option("--all", help="Every checkpoint of the run, not only the newest.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Read every byte and compare it with its checksum; exit code 5 if anything is wrong."""
    from phalanx.checkpoint.reading.listing import (
        find_all_checkpoints_of_run,
        find_checkpoint_or_newest_of_run,
    )
    from phalanx.checkpoint.reading.verify import verify_checkpoint_folder
    from phalanx.checkpoint.stores import is_location_of_one_checkpoint
    from phalanx.cli._checkpoint_output import print_checkpoint_verdict
    from phalanx.cli._json import print_json
    from phalanx.cli._output import make_errors_printable
    from phalanx.cli._progress import ProgressLine
    from phalanx.core.errors import ExitCode

    with make_errors_printable(as_json):
        if all_of_them and not is_location_of_one_checkpoint(location):
            folders = find_all_checkpoints_of_run(location)
        else:
            folders = [find_checkpoint_or_newest_of_run(location)]
    results = []
    for folder in folders:
        # A bar for each, which is gone before the verdict is printed.
        with ProgressLine(f"verifying {folder.name}") as line:
            results.append(verify_checkpoint_folder(folder, line.update))
        if not as_json:
            print_checkpoint_verdict(results[-1])
    if as_json:
        print_json(
            "checkpoint-verify", {"checkpoints": [result.to_json() for result in results]}, indent=1
        )
    if not all(result.is_intact for result in results):
        return ExitCode.CHECKPOINT
    return ExitCode.OK


def diff_command(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A checkpoint, or a run, of which the newest is taken."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    as_json: JsonOption = False,
) -> int:
    """Compare two checkpoints tensor by tensor, whatever layouts wrote them; exit code 11 if
    they differ."""
    from phalanx.checkpoint.reading.diff import describe_checkpoint_difference, diff_checkpoints
    from phalanx.checkpoint.reading.listing import find_checkpoint_or_newest_of_run
    from phalanx.cli._json import print_json
    from phalanx.cli._output import make_errors_printable, print_line
    from phalanx.core.errors import ExitCode

    with make_errors_printable(as_json):
        first, second = find_checkpoint_or_newest_of_run(a), find_checkpoint_or_newest_of_run(b)
        difference = diff_checkpoints(first, second)
    if as_json:
        print_json(
            "checkpoint-diff", {"a": first.url, "b": second.url, **difference.to_json()}, indent=1
        )
    else:
        for text in (
            f"first   {first.url}",
            f"second  {second.url}",
            *describe_checkpoint_difference(difference),
        ):
            print_line(text)
    if not difference.is_identical:
        return ExitCode.VERIFICATION
    return ExitCode.OK


def prune_command(
    run: RunDirArgument,
    keep_last: Annotated[int, typer.Option(min=1, metavar="K", help="Keep the last K.")],
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the first of each N steps, too.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Remove old checkpoints of a run that no job is using.

    The best one and the newest that verifies always stay.
    """
    from phalanx.checkpoint.writing.prune_run import prune_run
    from phalanx.cli._checkpoint_output import print_prune_result
    from phalanx.cli._json import print_json
    from phalanx.cli._output import make_errors_printable

    with make_errors_printable(as_json):
        result = prune_run(run, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    if as_json:
        print_json("checkpoint-prune", {"run": run, "dry_run": dry_run, **asdict(result)}, indent=1)
    else:
        print_prune_result(result, dry_run=dry_run)
    return 0


def export_command(
    location: CheckpointLocationArgument,
    out: Annotated[str, typer.Option(metavar="DIR", help="A directory that is not there yet.")],
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="hf: what transformers opens.")
    ] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="Round the weights to fp32, bf16 or fp16; default: as saved."
        ),
    ] = None,
    shard_gb: Annotated[
        float, typer.Option(min=0.001, metavar="GB", help="At most this much in one file.")
    ] = 5.0,
    best: BestOption = False,
    as_json: JsonOption = False,
) -> int:
    """Write the weights as transformers opens them: safetensors, config.json and the tokenizer."""
    from phalanx.cli._checkpoint_output import print_exported_model
    from phalanx.cli._json import print_json
    from phalanx.cli._output import make_errors_printable
    from phalanx.cli._progress import ProgressLine
    from phalanx.core.errors import UsageError
    from phalanx.run.export import export_checkpoint

    with make_errors_printable(as_json):
        if form != "hf":
            raise UsageError(f"unknown format {form!r}", fix="the one there is: hf")
        with ProgressLine("exporting") as line:
            result = export_checkpoint(
                location,
                out,
                dtype=dtype,
                shard_bytes=max(1, int(shard_gb * GB_BYTES)),
                best=best,
                progress=line.update,
            )
    if as_json:
        print_json("checkpoint-export", result.to_json(), indent=1)
    else:
        print_exported_model(result)
    return 0


def import_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A Hugging Face directory, a .safetensors file, a DCP directory, a .pt.",
        ),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="A directory that is not there yet.")],
    prefix: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Take only names that begin so, without it: model. or module."
        ),
    ] = "",
    trust_pickle: Annotated[
        bool,
        typer.Option(
            "--trust-pickle", help="Unpickle SOURCE, which can run any program that is in it."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Make a checkpoint of others' weights, to start training from (model.init_from) or to load."""
    from phalanx.checkpoint.exchange.import_weights import import_weights_as_checkpoint
    from phalanx.cli._checkpoint_output import print_imported_checkpoint
    from phalanx.cli._json import print_json
    from phalanx.cli._output import make_errors_printable
    from phalanx.cli._progress import ProgressLine
    from phalanx.core.errors import UsageError

    with make_errors_printable(as_json), ProgressLine("importing") as line:
        # Here: a path has one slash where a URL has two.
        if "://" in source:
            raise UsageError(
                "only files of this machine are imported",
                where=source,
                fix="download it first, and give the directory or file",
            )
        result = import_weights_as_checkpoint(
            Path(source), Path(out), prefix=prefix, trust_pickle=trust_pickle, progress=line.update
        )
    if as_json:
        print_json(
            "checkpoint-import", {"source": source, "out": out, **result.to_json()}, indent=1
        )
    else:
        print_imported_checkpoint(result, source=source, out=out)
    return 0


COMMANDS = {
    "ls": list_checkpoints_command,
    "verify": verify_command,
    "diff": diff_command,
    "prune": prune_command,
    "export": export_command,
    "import": import_command,
}
