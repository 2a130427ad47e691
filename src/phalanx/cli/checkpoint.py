"""Look at the checkpoints of a run: list them, verify every byte, compare two, remove old ones."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLE = "Example: phalanx checkpoint ls runs/train-20260101-120000"
EXAMPLES = {
    "ls": "Example: phalanx checkpoint ls runs/train-20260101-120000",
    "verify": "Example: phalanx checkpoint verify runs/train-20260101-120000/checkpoints/step-400",
    "diff": "Example: phalanx checkpoint diff runs/a runs/b/checkpoints/step-400",
    "prune": "Example: phalanx checkpoint prune runs/train-20260101-120000 --keep-last 3 --keep-every 1000 --dry-run",
}

Place = Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's directory, or one checkpoint's.")]
RunDir = Annotated[str, typer.Argument(metavar="RUN", help="A run's directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]


def ls(run: RunDir, as_json: AsJson = False) -> int:
    """List the committed checkpoints of a run, oldest first."""
    from phalanx.cli._checkpoint import ls

    return ls(run, as_json)


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
        int | None, typer.Option(min=1, metavar="N", help="Keep those whose step is a multiple of N, too.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> int:
    """Remove old checkpoints of a run that no job is using. The best one and the newest that verifies always stay."""
    from phalanx.cli._checkpoint import prune

    return prune(run, keep_last, keep_every, dry_run, as_json)


COMMANDS = {"ls": ls, "verify": verify, "diff": diff, "prune": prune}
