"""Turn text, JSONL, Parquet and Arrow into checked token shards; train tokenizers; look at
datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli._options import JsonOption

EXAMPLE = "Example: phalanx data build texts/ --out tokens"
EXAMPLE_OF_COMMAND = {
    "build": (
        "Example: phalanx data build books/ web-*.jsonl.gz --tokenizer tokenizer.json --out tokens"
    ),
    "tokenizer": "Example: phalanx data tokenizer books/ --vocab-size 8192 --out tokenizer.json",
    "verify": "Example: phalanx data verify tokens",
    "stats": "Example: phalanx data stats tokens --page tokens.html",
    "ledger": "Example: phalanx data ledger runs/train-20260101-120000",
}

InputPathsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...",
        help='Files, folders or patterns of text, JSONL, Parquet and Arrow; or "stdlib".',
    ),
]
TextColumnOption = Annotated[
    str, typer.Option(metavar="NAME", help="The field of JSONL rows, or the column, with the text.")
]
DatasetDirArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="A folder that phalanx data build wrote.")
]


def build_command(
    inputs: InputPathsArgument,
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Where the dataset goes: a new or empty folder.")
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="bytes|FILE", help="A Hugging Face tokenizer.json, or a folder with one."
        ),
    ] = "bytes",
    column: TextColumnOption = "text",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Processes that build; default one per core, where that helps."
        ),
    ] = None,
    shard_mb: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="About how many MiB of input make a shard; default 4 to 64, by their size.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Write token shards that data.source = DIR trains on.

    A text file is one document, a row of the others is one. The result does not depend on the
    number of workers. A build that was stopped or killed goes on with the same command.
    """
    from phalanx.cli._data_build_output import BuildProgressDisplay, print_build_summary
    from phalanx.cli._json import print_errors_as_json, print_json
    from phalanx.cli._progress import ProgressLine
    from phalanx.core.errors import ExitCode
    from phalanx.core.units import MIB
    from phalanx.data.build import build_dataset
    from phalanx.data.build_summary import BuildSummary

    display = BuildProgressDisplay()
    try:
        with print_errors_as_json(as_json), ProgressLine("building") as line:
            dataset = build_dataset(
                inputs,
                Path(out),
                tokenizer=tokenizer,
                column=column,
                num_workers=workers,
                shard_bytes=shard_mb and shard_mb * MIB,
                progress=lambda progress: display.show_build_progress(line, progress),
                # Inputs stand on the command line: errors name no key of a job.
                named="",
            )
    except KeyboardInterrupt:
        display.print_interruption()
        return ExitCode.INTERRUPTED
    summary = BuildSummary(dataset, display.last)
    if as_json:
        print_json("data-build", summary.to_json(), indent=1)
    else:
        print_build_summary(summary, tokenizer)
    return 0


def tokenizer_command(
    inputs: InputPathsArgument,
    vocab_size: Annotated[int, typer.Option(metavar="N", help="How many tokens; 257 at least.")],
    out: Annotated[
        str, typer.Option(metavar="DIR|FILE", help="A name that ends with .json, or a folder.")
    ],
    column: TextColumnOption = "text",
    max_mb: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Learn from about N MB, spread over the inputs."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Train a byte-level BPE on your corpus and write its tokenizer.json."""
    import sys

    from phalanx.cli._data_build_output import print_trained_tokenizer, show_tokenizer_training
    from phalanx.cli._json import print_errors_as_json, print_json
    from phalanx.cli._progress import ProgressLine
    from phalanx.core.errors import ExitCode
    from phalanx.data.train_tokenizer import train_tokenizer

    try:
        with print_errors_as_json(as_json), ProgressLine("training") as line:
            trained = train_tokenizer(
                inputs,
                Path(out),
                vocab_size=vocab_size,
                column=column,
                max_text_bytes=max_mb and max_mb * 10**6,
                progress=lambda progress: show_tokenizer_training(line, progress),
            )
    except KeyboardInterrupt:
        print("stopped: no tokenizer was written", file=sys.stderr)
        return ExitCode.INTERRUPTED
    if as_json:
        print_json("data-tokenizer", {**vars(trained), "path": str(trained.path)}, indent=1)
    else:
        print_trained_tokenizer(trained, inputs, vocab_size=vocab_size)
    return 0


def verify_data_command(dataset: DatasetDirArgument, as_json: JsonOption = False) -> int:
    """Read every shard and compare it with its checksums; exit code 4 if anything is wrong."""
    import sys

    from phalanx.cli._data_stats_output import print_dataset_verdict
    from phalanx.cli._json import print_errors_as_json, print_json
    from phalanx.cli._progress import ProgressLine
    from phalanx.core.errors import DataError
    from phalanx.core.units import plural
    from phalanx.data.verification import verify_dataset_with_progress

    with print_errors_as_json(as_json), ProgressLine("verifying") as line:

        def on_problem(problem: DataError) -> None:
            if not as_json:
                print(f"phalanx: {problem}", file=sys.stderr)

        def on_progress(done: int, total: int, num_problems: int) -> None:
            line.update(done, total, suffix=plural(num_problems, "problem") if num_problems else "")

        result = verify_dataset_with_progress(
            dataset, on_problem=on_problem, on_progress=on_progress
        )
    if as_json:
        print_json("data-verify", result.to_json(), indent=1)
    else:
        print_dataset_verdict(result)
    return result.exit_code


def stats_command(
    dataset: DatasetDirArgument,
    page: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Write the pictures as a page, too.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Documents, tokens, lengths and the most frequent tokens, with a picture."""
    from phalanx.cli._data_stats_output import print_dataset_stats
    from phalanx.cli._json import print_errors_as_json, print_json
    from phalanx.cli._output_files import require_page_or_new_file
    from phalanx.cli._progress import ProgressLine
    from phalanx.data.dataset import open_dataset
    from phalanx.data.stats import compute_dataset_stats
    from phalanx.report.dataset_page import write_dataset_page

    with print_errors_as_json(as_json):
        if page is not None:
            require_page_or_new_file(Path(page))
        opened = open_dataset(Path(dataset))
        with ProgressLine("reading") as line:
            measured = compute_dataset_stats(opened, line.make_byte_counter(opened.num_token_bytes))
        if page is not None:
            write_dataset_page(Path(page), opened, measured)
    if as_json:
        print_json(
            "data-stats",
            {"directory": dataset, "digest": opened.digest, **measured.to_json()},
            indent=1,
        )
        return 0
    print_dataset_stats(measured, dataset)
    if page is not None:
        print(f"\npage    {page}")
    return 0


def ledger_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run that trained with observe.samples=true.")
    ],
    as_json: JsonOption = False,
) -> int:
    """Prove from a run's records that no sample was repeated or left out; exit code 11 if one
    was."""
    from phalanx.cli._json import print_errors_as_json, print_json
    from phalanx.core.errors import ExitCode
    from phalanx.data.ledger import check_sample_records

    with print_errors_as_json(as_json):
        report = check_sample_records(Path(run))
    if as_json:
        print_json("data-ledger", report.to_json(), indent=1)
    else:
        print("\n".join(report.lines()))
    if not report.ok:
        return ExitCode.VERIFICATION
    return ExitCode.OK


COMMANDS = {
    "build": build_command,
    "tokenizer": tokenizer_command,
    "verify": verify_data_command,
    "stats": stats_command,
    "ledger": ledger_command,
}
