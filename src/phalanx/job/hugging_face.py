"""`model.kind = "hf:PATH"`: a Hugging Face model by its config.json.

Torch-free; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.core.files import read_json
from phalanx.core.places import expand_home
from phalanx.job.hugging_face_checks import require_possible_settings

HUGGING_FACE_PREFIX = "hf:"
CONFIG_FILE_NAME = "config.json"
# transformers: {"__float__": "Infinity"} for math.inf, since its version 5.
_FLOAT_TAG_KEY = "__float__"
_FLOAT_OF_TAG = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
SAFETENSORS_FILE_NAMES = ("model.safetensors", "model.safetensors.index.json")
PICKLED_FILE_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def is_hugging_face(kind: str | None) -> bool:
    """True for `hf:PATH`, the directory of a model or its config.json."""
    return kind is not None and kind.startswith(HUGGING_FACE_PREFIX)


def find_config_file(kind: str) -> Path:
    """The config.json that `kind` names. Raises LayoutError if there is none."""
    path = expand_home(kind.removeprefix(HUGGING_FACE_PREFIX))
    file = path
    if path.is_dir():
        file = path / CONFIG_FILE_NAME
    # "hf:" alone is no name, though Path("") is the current directory.
    if not kind.removeprefix(HUGGING_FACE_PREFIX) or not file.is_file():
        if file.exists():
            why = f"{file} is not a regular file"
        elif path.is_dir() or path.suffix:
            why = f"{file} is not there"
        else:
            why = f"there is no directory {str(path)!r} here"
        raise LayoutError(
            f"{kind} is no Hugging Face model",
            why=why,
            fix="give a local directory with config.json, or that file",
        )
    return file


def find_weights_directory(kind: str) -> Path | None:
    """The directory of weights beside config.json; None for a bare config, or if `kind` names
    the file itself.

    Raises LayoutError for a directory whose only weights are pickled.
    """
    directory = expand_home(kind.removeprefix(HUGGING_FACE_PREFIX))
    if not directory.is_dir():
        return None
    if any((directory / name).is_file() for name in SAFETENSORS_FILE_NAMES):
        _require_regular_files(directory)
        return directory
    if any((directory / name).is_file() for name in PICKLED_FILE_NAMES):
        raise LayoutError(
            f"{kind} has pickled weights, which are not read",
            fix=(
                "convert them to safetensors, or name the config.json itself to begin from random"
                " weights"
            ),
        )
    return None


def _require_regular_files(directory: Path) -> None:
    """Raise LayoutError for what a library would wait for without end: it opens whatever has the
    right name."""
    for path in sorted(directory.iterdir()):
        # A pipe or a device: opening it waits for a writer that may never come.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise LayoutError(
                f"{path} is not a regular file", fix="remove it, or give another directory"
            )


def read_model_config(kind: str, args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The values of config.json.

    Raises LayoutError for a file that is none, that names no model_type, or whose settings, with
    `args` (model.args) on top, no model has.
    """
    path = find_config_file(kind)
    try:
        values = read_config_values(path)
    except (OSError, ValueError) as error:
        raise LayoutError(f"{path} cannot be read", why=" ".join(str(error).split())) from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise LayoutError(
            f"{path} names no model_type", fix="it is the config.json that save_pretrained writes"
        )
    require_possible_settings(path, values, args or {})
    return values


def read_config_values(path: Path) -> Any:
    """What stands in the file config.json, with numbers for the tags that transformers writes in
    place of inf and NaN.

    Raises OSError for what cannot be read, ValueError for what is no JSON.
    """
    return read_json(path, object_hook=_decode_tagged_float, unique_keys=True)


def _decode_tagged_float(value: dict[str, Any]) -> Any:
    tag = value.get(_FLOAT_TAG_KEY)
    if len(value) == 1 and isinstance(tag, str):
        return _FLOAT_OF_TAG.get(tag, value)
    return value


def list_transformers_modules(kind: str | None) -> tuple[str, ...]:
    """Modules of transformers that the ranks' server imports once, for a model of it; none if it
    is missing."""
    if not is_hugging_face(kind) or importlib.util.find_spec("transformers") is None:
        return ()
    return ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")


def find_vocab_size(kind: str, args: dict[str, Any]) -> int | None:
    """Rows of the embedding by config.json or `args`; None if these do not say it."""
    size = {**read_model_config(kind, args), **args}.get("vocab_size")
    # config.json may hold anything; what is no number decides nothing.
    if isinstance(size, int):
        return size
    return None
