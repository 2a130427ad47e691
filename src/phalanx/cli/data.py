"""Turn text, JSONL, Parquet and Arrow into checked token shards; train tokenizers; look at datasets."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLE = "Example: phalanx data build texts/ --out tokens"
EXAMPLES = {
    "build": "Example: phalanx data build books/ web-*.jsonl.gz --tokenizer tokenizer.json --out tokens",
    "tokenizer": "Example: phalanx data tokenizer books/ --vocab-size 8192 --out tokenizer.json",
    "verify": "Example: phalanx data verify tokens",
    "stats": "Example: phalanx data stats tokens --page tokens.html",
    "ledger": "Example: phalanx data ledger runs/train-20260101-120000",
}

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...", help='Files, folders or patterns of text, JSONL, Parquet and Arrow; or "stdlib".'
    ),
]
Column = Annotated[str, typer.Option(metavar="NAME", help="The field of JSONL rows, or the column, with the text.")]
DatasetDir = Annotated[str, typer.Argument(metavar="DIR", help="A folder that phalanx data build wrote.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]


def build(
    inputs: Inputs,
    out: Annotated[str, typer.Option(metavar="DIR", help="Where the dataset goes: a new or empty folder.")],
    tokenizer: Annotated[
        str, typer.Option(metavar="bytes|FILE", help="A Hugging Face tokenizer.json, or a folder with one.")
    ] = "bytes",
    column: Column = "text",
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Processes that build; default one per core, where that helps."),
    ] = None,
    shard_mb: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="About how many MiB of input make a shard; default 4 to 64, by their size."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write token shards that data.source = DIR trains on.

    A text file is one document, a row of the others is one. The result does not depend on the number of workers. A
    build that was stopped or killed goes on with the same command.
    """
    from phalanx.cli._data_build import build
    from phalanx.cli._json import printing_json

    with printing_json(as_json):
        return build(inputs, out, tokenizer, column, workers, shard_mb, as_json)


def tokenizer(
    inputs: Inputs,
    vocab_size: Annotated[int, typer.Option(metavar="N", help="How many tokens; 257 at least.")],
    out: Annotated[str, typer.Option(metavar="DIR|FILE", help="A name that ends with .json, or a folder.")],
    column: Column = "text",
    max_mb: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Learn from about N MB, spread over the inputs.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Train a byte-level BPE on your corpus and write its tokenizer.json."""
    from phalanx.cli._data_build import train
    from phalanx.cli._json import printing_json

    with printing_json(as_json):
        return train(inputs, out, vocab_size, column, max_mb, as_json)


def verify(dataset: DatasetDir, as_json: AsJson = False) -> int:
    """Read every shard and compare it with its checksums; exit code 4 if anything is wrong."""
    from phalanx.cli._data_look import verify
    from phalanx.cli._json import printing_json

    with printing_json(as_json):
        return verify(dataset, as_json)


def stats(
    dataset: DatasetDir,
    page: Annotated[str | None, typer.Option(metavar="FILE.html", help="Write the pictures as a page, too.")] = None,
    as_json: AsJson = False,
) -> int:
    """Documents, tokens, lengths and the most frequent tokens, with a picture."""
    from phalanx.cli._data_look import stats
    from phalanx.cli._json import printing_json

    with printing_json(as_json):
        return stats(dataset, page, as_json)


def ledger(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run that trained with observe.samples=true.")],
    as_json: AsJson = False,
) -> int:
    """Prove from a run's records that no sample was repeated or left out; exit code 11 if one was."""
    from phalanx.cli._data_look import ledger
    from phalanx.cli._json import printing_json

    with printing_json(as_json):
        return ledger(run, as_json)


COMMANDS = {"build": build, "tokenizer": tokenizer, "verify": verify, "stats": stats, "ledger": ledger}
