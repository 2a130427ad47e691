"""What transformers says of settings that it cannot take, in one line that names the file, the
setting, its value and what is wanted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from phalanx.core.errors import LayoutError, format_nearest_word_hint
from phalanx.job.hugging_face_checks import format_setting

_FIELD_PATTERN = re.compile(r"for field '([^']+)'")
# A model of another size, if these are missing: transformers has a number for each. Beside each,
# names that configs of older releases have for it.
_NEEDED_SIZE_KEYS = {
    "hidden_size": ("n_embed", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "vocab_size": (),
}
# What follows are frames of C++.
_FRAMES_BEGIN = "Exception raised from"
_MAX_WORDS_LENGTH = 300
_WORDS_OF_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "dict": "an object",
    "NoneType": "null",
    "None": "null",
}


class SeparateWeightsError(LayoutError):
    """Two weights that config.json says are one differ in the files: a head that was trained
    apart from the embedding."""


def build_separate_weights_error(directory: Path, name: str, kept_name: str) -> LayoutError:
    """The error for the weight `name` of `directory`, which `kept_name` would take the place of."""
    return SeparateWeightsError(
        f"{name} is not {kept_name}, and config.json ties the two (tie_word_embeddings)",
        where=str(directory),
        why="one of the two would be left out",
        fix="set model.args = { tie_word_embeddings = false }",
    )


def build_refused_config_error(
    path: Path, config_class: Any, values: Mapping[str, Any], error: Exception
) -> LayoutError:
    """The error for settings that the class of a config does not take."""
    model_type = values["model_type"]
    match = _FIELD_PATTERN.search(str(error))
    if match is not None and match[1] in values:
        wanted_type = _describe_wanted_type(config_class, match[1])
        value = f"{match[1]} is {format_setting(values[match[1]])}"
        if isinstance(error.__cause__, TypeError) and wanted_type:
            return LayoutError(f"{path}: {value}", fix=f"give {wanted_type}")
        return LayoutError(f"{path}: {value}", why=describe_library_error(error.__cause__ or error))
    if (unknown := _find_unknown_word_error(path, values, error)) is not None:
        return unknown
    return LayoutError(
        f"{path}, a {model_type}, is refused by transformers",
        why=describe_library_error(error.__cause__ or error),
    )


def build_unbuildable_model_error(
    path: Path, config: Any, values: Mapping[str, Any], error: Exception
) -> LayoutError:
    """The error for a config of which the class of its model cannot be built."""
    if (unknown := _find_unknown_word_error(path, values, error)) is not None:
        return unknown
    if "padding_idx" in str(error).lower() and "pad_token_id" in values:
        return LayoutError(
            f"{path}: pad_token_id is {format_setting(values['pad_token_id'])}",
            why=f"vocab_size is {format_setting(values.get('vocab_size'))}",
            fix="give a token below that, or null",
        )
    return LayoutError(
        f"transformers cannot build {path}, a {config.model_type}",
        why=f"{type(error).__name__}: {describe_library_error(error)}",
        fix=_build_fix_for_missing_setting(config, error),
    )


def require_sizes_are_said(path: Path, config: Any, values: Mapping[str, Any]) -> None:
    """Raise LayoutError where transformers would take a size of its own for one that the file does
    not say: the plan would be that of another model. `values`: model.args among them."""
    try:
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
    except TypeError:
        return
    # A model of several parts says most in those.
    if any(isinstance(value, dict) and key.endswith("_config") for key, value in values.items()):
        return
    names = getattr(config, "attribute_map", {})
    missing = [
        names.get(key, key)
        for key, older_names in _NEEDED_SIZE_KEYS.items()
        if not values.keys() & {key, names.get(key, key), *older_names}
        and isinstance(defaults.get(names.get(key, key)), int)
    ]
    if missing:
        key = missing[0]
        raise LayoutError(
            f"{path} says no {key}",
            why=f"transformers would take {defaults[key]:,}",
            fix=f"add {key}, or set it in model.args",
        )


def describe_library_error(error: BaseException) -> str:
    """The message of a library's error on one line, without frames of C++, cut if it is long."""
    message = str(error)
    # str() of a KeyError is the repr of its message.
    if isinstance(error, KeyError) and error.args:
        message = str(error.args[0])
    words = " ".join(message.partition(_FRAMES_BEGIN)[0].split())
    if len(words) > _MAX_WORDS_LENGTH:
        words = f"{words[:_MAX_WORDS_LENGTH]} ..."
    return words


def _describe_wanted_type(config_class: Any, name: str) -> str:
    """What a field of a config's class may be, in words; "" if its type is not that simple."""
    for field in dataclasses.fields(config_class):
        if field.name == name:
            text = field.type if isinstance(field.type, str) else _format_type(field.type)
            words = [_WORDS_OF_TYPES.get(part.partition("[")[0]) for part in text.split(" | ")]
            known = list(dict.fromkeys(word for word in words if word))
            return " or ".join(known) if len(known) == len(set(words)) else ""
    return ""


def _format_type(annotation: Any) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation)


def _find_unknown_word_error(
    path: Path, values: Mapping[str, Any], error: Exception
) -> LayoutError | None:
    """The error for a setting whose word a table of a library does not have: an activation, a kind
    of rotation, a type of numbers. None if no setting is that word."""
    word = None
    if isinstance(error, KeyError) and error.args:
        word = error.args[0]
    elif isinstance(error, AttributeError) and error.obj is torch:
        word = error.name
    if not isinstance(word, str):
        return None
    for name in _iterate_names_of_word(values, word):
        key = name.rpartition(".")[2]
        known = _list_known_words(key)
        fix = format_nearest_word_hint(word, sorted(known))
        if not fix and known:
            fix = f"one of {', '.join(sorted(known))}"
        return LayoutError(f"{path}: {name} is {format_setting(word)}", fix=fix or None)
    return None


def _iterate_names_of_word(values: Mapping[str, Any], word: str, prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if value == word:
            yield f"{prefix}{key}"
        elif isinstance(value, dict):
            yield from _iterate_names_of_word(value, word, f"{prefix}{key}.")


def _list_known_words(key: str) -> list[str]:
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if key in ("rope_type", "type"):
        return ["default", *ROPE_INIT_FUNCTIONS]
    if "act" in key:
        return list(ACT2FN)
    if key.endswith("dtype"):
        return ["float32", "bfloat16", "float16"]
    return []


def _build_fix_for_missing_setting(config: Any, error: Exception) -> str | None:
    """A fix for an AttributeError of a setting that is missing in the config, or in one inside it;
    None for other errors."""
    if not isinstance(error, AttributeError) or error.obj is None:
        return None
    if error.obj is config:
        return f"its config.json must say {error.name}"
    for key, part in vars(config).items():
        if part is error.obj:
            return f"its config.json must say {key}.{error.name}"
    return None
