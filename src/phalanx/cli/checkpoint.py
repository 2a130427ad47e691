"""Checkpoints of a run: list, verify every byte, compare, remove old ones; export and import weights."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLE = "Example: phalanx checkpoint ls runs/train-20260101-120000"
EXAMPLES = {
    "ls": "Example: phalanx checkpoint ls runs/train-20260101-120000",
    "verify": "Example: phalanx checkpoint verify runs/train-20260101-120000/checkpoints/step-400",
    "diff": "Example: phalanx checkpoint diff runs/a runs/b/checkpoints/step-400",
    "prune": "Example: phalanx checkpoint prune runs/train-20260101-120000 --keep-last 3 --keep-every 1000 --dry-run",
    "export": "Example: phalanx checkpoint export runs/train-20260101-120000 --out my-model",
    "import": "Example: phalanx checkpoint import Qwen3-0.6B --out imported",
}

Place = Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's directory, or one checkpoint's.")]
RunDir = Annotated[str, typer.Argument(metavar="RUN", help="A run's directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]


def ls(place: Place, as_json: AsJson = False) -> int:
    """List the checkpoints of a run, oldest first."""
    from phalanx.cli._checkpoint import ls

    return ls(place, as_json)


def verify(
    place: Place,
    all_of_them: Annotated[
        bool, typer.Option("--all", help="Every checkpoint of the run, not only the newest.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Read every byte and compare it with its checksum; exit code 5 if anything is wrong."""
    from phalanx.cli._checkpoint import verify

    return verify(place, all_of_them, as_json)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, or a run, of which the newest is taken.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    as_json: AsJson = False,
) -> int:
    """Compare two checkpoints tensor by tensor, whatever layouts wrote them; exit code 11 if they differ."""
    from phalanx.cli._checkpoint import diff

    return diff(a, b, as_json)


def prune(
    run: RunDir,
    keep_last: Annotated[int, typer.Option(min=1, metavar="K", help="Keep the last K.")],
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the first of each N steps, too.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> int:
    """Remove old checkpoints of a run that no job is using. The best one and the newest that verifies always stay."""
    from phalanx.cli._checkpoint import prune

    return prune(run, keep_last, keep_every, dry_run, as_json)


def export(
    place: Place,
    out: Annotated[str, typer.Option(metavar="DIR", help="A directory that is not there yet.")],
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="hf: what transformers opens.")] = "hf",
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Round the weights to fp32, bf16 or fp16; default: as saved.")
    ] = None,
    shard_gb: Annotated[float, typer.Option(min=0.001, metavar="GB", help="At most this much in one file.")] = 5.0,
    best: Annotated[bool, typer.Option("--best", help="What eval.keep_best kept, not the newest.")] = False,
    as_json: AsJson = False,
) -> int:
    """Write the weights as transformers opens them: safetensors, config.json and the tokenizer."""
    from phalanx.cli._exchange import export

    return export(place, out, form, dtype, shard_gb, best, as_json)


def import_weights(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A Hugging Face directory, a .safetensors file, a DCP directory, a .pt."),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="A directory that is not there yet.")],
    prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Take only names that begin so, without it: model. or module.")
    ] = "",
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Unpickle SOURCE, which can run any program that is in it.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Make a checkpoint of others' weights, to start training from (model.init_from) or to load."""
    from phalanx.cli._exchange import import_weights

    return import_weights(source, out, prefix, trust_pickle, as_json)


COMMANDS = {"ls": ls, "verify": verify, "diff": diff, "prune": prune, "export": export, "import": import_weights}
