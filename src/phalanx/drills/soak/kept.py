"""What a soak keeps below `--out`, so that the same command, when it was stopped, goes on: with the
undisturbed run, where that has ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import UsageError
from phalanx.core.files import read_json, write_json_atomically
from phalanx.core.typed_json import JsonRecord, TypedJsonError
from phalanx.drills.command import CommandEnd

BEGUN_FILE_NAME = "soak-begun.json"
SOAK_RESULT_FILE_NAME = "soak.json"
SCHEMA = "phalanx.drill-soak-begun/1"


@dataclass(frozen=True)
class BegunSoak(JsonRecord):
    """`key`: what the soak is of, and the code. `step_s`: seconds of a step, as the probe found
    them, and `undisturbed`: how that run ended; None before it has."""

    key: str
    step_s: float | None = None
    undisturbed: CommandEnd | None = None

    def write(self, out: Path) -> None:
        """Keep it in `out`, below which the runs lie."""
        write_json_atomically(out / BEGUN_FILE_NAME, {"schema": SCHEMA, **self.to_json()})


def claim_folder(out: Path, key: str) -> BegunSoak:
    """The soak of `key` that was begun in `out`, or one that begins there now.

    Raises UsageError where `out` has what is not of this soak, or its result: no run is removed for
    another one.
    """
    path = out / BEGUN_FILE_NAME
    if not path.exists():
        if (out / "runs").exists() and any((out / "runs").iterdir()):
            raise UsageError(f"{out / 'runs'} has runs already", fix="give another --out")
        out.mkdir(parents=True, exist_ok=True)
        begun = BegunSoak(key)
        begun.write(out)
        return begun
    try:
        document = read_json(path)
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            raise TypedJsonError(f"it is not {SCHEMA}")
        begun = BegunSoak.from_json(document)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}", fix="give another --out") from None
    if begun.undisturbed is None:
        # No run of it has ended: there is nothing to keep.
        begun = BegunSoak(key)
        begun.write(out)
    if begun.key != key:
        raise UsageError(
            f"{out} has a soak of another job, mix, length, seed, code or machine",
            fix="give another --out",
        )
    if (out / SOAK_RESULT_FILE_NAME).exists():
        raise UsageError(
            f"this soak has ended: {out / SOAK_RESULT_FILE_NAME}",
            fix="give another --out for a new one",
        )
    return begun
