"""`section.key=value` from the command line: read as TOML where the key wants it, laid over the
job file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from phalanx.core.errors import format_nearest_word_hint
from phalanx.job.findings import (
    Finding,
    find_key_annotation,
    list_keys_by_section,
    list_sections_of_keys,
    shorten_to_one_line,
    split_union_types,
)
from phalanx.job.key_suggestions import suggest_key
from phalanx.job.positions import Path

_KEY_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Override:
    """One `section.key=value`; `index` is its place on the command line."""

    path: Path
    value: Any
    index: int


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[Finding]]:
    """The overrides that can be read, in order, and findings about the rest."""
    good: list[Override] = []
    bad: list[Finding] = []
    for index, text in enumerate(texts):
        parsed = _parse_override(text, index)
        if isinstance(parsed, Override):
            good.append(parsed)
        else:
            bad.append(parsed)
    return good, bad


def apply_overrides(tree: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """A copy of `tree` with the overrides laid on top; the last one wins.

    `tree` itself is not changed.
    """
    merged = dict(tree)
    for override in overrides:
        table = merged
        for part in override.path[:-1]:
            inner = table.get(str(part))
            if table is merged and part in merged and not isinstance(inner, dict):
                break  # the file writes the section as something else, which is reported there
            # Each table on the way is a copy: `tree` stays as it is.
            copy = {}
            if isinstance(inner, dict):
                copy = dict(inner)
            table[str(part)] = copy
            table = copy
        else:
            table[str(override.path[-1])] = override.value
    return merged


def _parse_override(text: str, index: int) -> Override | Finding:
    def refuse(key: str, problem: str, fix: str) -> Finding:
        return Finding((key,), problem, fix, override=index)

    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    parts = key.split(".")
    if not equals:
        return refuse(text, 'has no "="', "write section.key=value")
    if not all(_KEY_NAME_PATTERN.fullmatch(part) for part in parts):
        return refuse(key, "is not a key", "write section.key=value")
    if len(parts) == 1:
        return _explain_missing_section(key, raw, index)
    if not raw:
        return refuse(key, "has no value", f"write {shorten_to_one_line(key)}=VALUE")
    path: Path = tuple(parts)
    # Asked first: for such a key 123 and true are text, which TOML would read otherwise.
    if takes_only_strings(path):
        return Override(path, _parse_string_value(raw), index)
    value = _parse_toml_value(raw)
    # Given back as it was, so no TOML: the shell took the quotes inside.
    if isinstance(value, str) and value == raw and raw[0] in "[{":
        fix = f"""strings inside need quotes, and the shell eats them: write '{key}=["a", "b"]'"""
        return refuse(key, f"the value {shorten_to_one_line(raw)} is not valid TOML", fix)
    return Override(path, value, index)


def _explain_missing_section(name: str, raw: str, index: int) -> Finding:
    """The finding for `dim=192`: names the key that was meant, in full and with its value; for a
    section, a key that its value may be of."""
    keys = list_keys_by_section()
    value = shorten_to_one_line(raw)
    if name in keys:
        first = keys[name][0]
        if name == "model" and ":" in raw:  # package.module:factory
            first = "kind"
        fix = f"set its keys one by one: {name}.{first}={value or '...'}"
        return Finding((name,), "is a whole section", fix, override=index)
    fix = suggest_key(name, list_sections_of_keys(), value) or format_nearest_word_hint(
        name, tuple(keys)
    )
    return Finding((name,), "is not section.key", fix or "write section.key=value", override=index)


def takes_only_strings(path: Path) -> bool:
    """True if the key takes strings alone, so that a bare 123, true or a path is one."""
    arms = split_union_types(find_key_annotation(path))
    # A number or a word (lr: 1e-3 or "auto"), or true or a word: as TOML, which leaves a bare word
    # what it is.
    if int in arms or float in arms or bool in arms:
        return False
    return any(map(_is_string_type, arms))


def _is_string_type(arm: Any) -> bool:
    """True for `str`, and for a choice among strings."""
    if get_origin(arm) is Literal:
        return all(isinstance(choice, str) for choice in get_args(arm))
    return arm is str


def _parse_string_value(raw: str) -> str:
    """`raw` itself, or what is inside if it is one TOML string in quotes."""
    if raw[0] in "\"'":
        value = _parse_toml_value(raw)
        if isinstance(value, str):
            return value
    return raw


def _parse_toml_value(raw: str) -> Any:
    """`raw` as one TOML value, or as the bare word that it is."""
    try:
        table = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        # TOMLDecodeError is a ValueError, and so is what int() raises for 5,000 digits.
        return raw
    if len(table) > 1:  # lines after the value, which an argument may have
        return raw
    return table["value"]
