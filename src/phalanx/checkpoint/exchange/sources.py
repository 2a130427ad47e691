"""Opens the weights to import by the kind of directory or file that a user names. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from phalanx.checkpoint.exchange.hf_export import CONFIG_FILE_NAME
from phalanx.checkpoint.exchange.importing import (
    WeightsToImport,
    read_hugging_face_directory,
    read_weights_with_own_names,
)
from phalanx.checkpoint.exchange.pickled_weights import (
    UnpickledWeights,
    has_head_of_torch_save,
    open_pickled_weights_in_subprocess,
    untrusted_pickle_error,
)
from phalanx.checkpoint.exchange.tensor_readers import (
    SAFETENSORS_INDEX_FILE_NAME,
    open_safetensors_reader,
)
from phalanx.checkpoint.manifest import MANIFEST_FILE_NAME
from phalanx.core.errors import CheckpointError, UsageError

ACCEPTED_SOURCES_TEXT = (
    "a Hugging Face directory, a .safetensors file, a DCP directory or a file of torch.save"
)

# pathlib leaves one of the slashes.
_URL_WITH_ONE_SLASH = re.compile("[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


@contextmanager
def open_weights_to_import(
    source: Path, *, prefix: str, trust_pickle: bool, parent: Path
) -> Iterator[WeightsToImport]:
    """The weights of `source`, as long as the context lasts.

    Nothing is unpickled without `trust_pickle`, which writes a temporary directory into `parent`.
    `prefix`: take only the names that begin with it, without it; for weights that come without a
    config.json. Raises UsageError, CheckpointError, LayoutError.
    """
    if not source.exists():
        fix = f"give {ACCEPTED_SOURCES_TEXT}"
        if _URL_WITH_ONE_SLASH.match(str(source)):
            fix = f"download it first, then {fix}"
        raise UsageError("no such file or directory", where=str(source), fix=fix)
    if (source / MANIFEST_FILE_NAME).is_file() or (source / "checkpoints").is_dir():
        raise UsageError(
            "it is phalanx's own already",
            where=str(source),
            fix="give it to model.init_from as it is",
        )
    has_config = (source / CONFIG_FILE_NAME).is_file()
    if has_config and prefix:
        raise UsageError("--prefix is for weights without a config.json", where=str(source))
    if not _are_weights_pickled(source):
        if has_config:
            yield read_hugging_face_directory(source)
        else:
            yield read_weights_with_own_names(
                str(source), open_safetensors_reader(source), prefix=prefix
            )
        return
    if not trust_pickle:
        raise untrusted_pickle_error(source)
    with open_pickled_weights_in_subprocess(source, parent=parent) as unpickled:
        if has_config:
            weights = read_hugging_face_directory(source, unpickled.reader)
            yield replace(weights, notes=(*weights.notes, *_describe_unpickling(unpickled)))
        else:
            yield read_weights_with_own_names(
                str(source),
                unpickled.reader,
                prefix=prefix,
                aliases=unpickled.aliases,
                notes=_describe_unpickling(unpickled),
            )


def _are_weights_pickled(source: Path) -> bool:
    """True if the weights are pickled. Raises CheckpointError where there are no weights."""
    if source.is_file():
        if source.suffix == ".safetensors":
            return False
        if has_head_of_torch_save(source):
            return True
        problem = "it is neither safetensors nor a file of torch.save"
        if not source.stat().st_size:
            problem = "it is empty"
        raise CheckpointError(
            problem,
            where=str(source),
            fix=f"give {ACCEPTED_SOURCES_TEXT}",
        )
    # Where a directory has both forms of its weights, the one that cannot run code is read.
    if (source / SAFETENSORS_INDEX_FILE_NAME).is_file() or any(source.glob("*.safetensors")):
        return False
    if (source / ".metadata").is_file() or any(source.glob("pytorch_model*.bin")):
        return True
    raise CheckpointError(
        "there are no weights in it", where=str(source), fix=f"give {ACCEPTED_SOURCES_TEXT}"
    )


def _describe_unpickling(unpickled: UnpickledWeights) -> list[str]:
    notes = []
    if unpickled.num_skipped:
        words = "things in it are no tensors and are"
        if unpickled.num_skipped == 1:
            words = "thing in it is no tensor and is"
        notes.append(f"{unpickled.num_skipped} {words} left out")
    if unpickled.left_out:
        names = ", ".join(unpickled.left_out[:5])
        if len(unpickled.left_out) > 5:
            names += f" and {len(unpickled.left_out) - 5} more"
        notes.append(f"no checkpoint can hold {names}: left out")
    if unpickled.ran_code:
        notes.append(
            "torch cannot read it as mere weights: it was unpickled in full, with whatever that"
            " runs"
        )
    return notes
