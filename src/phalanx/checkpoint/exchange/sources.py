"""What somebody means who names a directory or a file of weights to import. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from phalanx.checkpoint.exchange.hf_export import CONFIG
from phalanx.checkpoint.exchange.importing import Weights, read_hugging_face, read_own_names
from phalanx.checkpoint.exchange.pickled_weights import (
    UnpickledWeights,
    open_unpickled,
    refuse_pickle,
)
from phalanx.checkpoint.exchange.tensor_readers import INDEX, open_safetensors
from phalanx.checkpoint.manifest import MANIFEST
from phalanx.core.errors import CheckpointError, UsageError

WANTED = "a Hugging Face directory, a .safetensors file, a DCP directory or a file of torch.save"


@contextmanager
def open_source(
    source: Path, *, prefix: str, trust_pickle: bool, beside: Path
) -> Iterator[Weights]:
    """The weights of `source`, as long as the context lasts.

    Nothing is unpickled without `trust_pickle`.

    `prefix`: take only the names that begin so, and take it away; for weights that come without a
    config.json. Raises UsageError, CheckpointError, LayoutError.
    """
    if not source.exists():
        raise UsageError("no such file or directory", where=str(source), fix=f"give {WANTED}")
    if (source / MANIFEST).is_file() or (source / "checkpoints").is_dir():
        raise UsageError(
            "it is phalanx's own already",
            where=str(source),
            fix="give it to model.init_from as it is",
        )
    has_config = (source / CONFIG).is_file()
    if has_config and prefix:
        raise UsageError("--prefix is for weights without a config.json", where=str(source))
    if not _is_pickled(source):
        yield (
            read_hugging_face(source)
            if has_config
            else read_own_names(str(source), open_safetensors(source), prefix=prefix)
        )
        return
    if not trust_pickle:
        raise refuse_pickle(source)
    with open_unpickled(source, beside=beside) as found:
        if has_config:
            weights = read_hugging_face(source, found.reader)
            yield replace(weights, notes=(*weights.notes, *_notes(found)))
        else:
            yield read_own_names(
                str(source), found.reader, prefix=prefix, aliases=found.aliases, notes=_notes(found)
            )


def _is_pickled(source: Path) -> bool:
    """Raises CheckpointError for a directory that holds no weights at all."""
    if source.is_file():
        return source.suffix != ".safetensors"
    if (source / INDEX).is_file() or any(source.glob("*.safetensors")):
        return False
    if (source / ".metadata").is_file() or any(source.glob("pytorch_model*.bin")):
        return True
    raise CheckpointError("there are no weights in it", where=str(source), fix=f"give {WANTED}")


def _notes(found: UnpickledWeights) -> list[str]:
    notes = []
    if found.num_skipped:
        many = found.num_skipped > 1
        words = "things in it are no tensors and are" if many else "thing in it is no tensor and is"
        notes.append(f"{found.num_skipped} {words} left out")
    if found.left_out:
        more = f" and {len(found.left_out) - 5} more" if len(found.left_out) > 5 else ""
        notes.append(f"no checkpoint can hold {', '.join(found.left_out[:5])}{more}: left out")
    if found.ran_code:
        notes.append(
            "torch cannot read it as mere weights: it was unpickled in full, with whatever that"
            " runs"
        )
    return notes
