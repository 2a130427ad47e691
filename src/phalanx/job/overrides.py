"""`section.key=value` from the command line: read as TOML where the key wants it, laid over the
job file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from phalanx.core.errors import did_you_mean
from phalanx.job.findings import (
    Finding,
    find_annotation,
    keys_by_section,
    list_sections_of_keys,
    shorten,
    split_union,
)
from phalanx.job.key_aliases import suggest_key
from phalanx.job.positions import Path

_NAME = re.compile(r"[A-Za-z0-9_-]+")


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
        parsed = _parse(text, index)
        if isinstance(parsed, Override):
            good.append(parsed)
        else:
            bad.append(parsed)
    return good, bad


def overlay(tree: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
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
            table[str(part)] = table = dict(inner) if isinstance(inner, dict) else {}
        else:
            table[str(override.path[-1])] = override.value
    return merged


def _parse(text: str, index: int) -> Override | Finding:
    def refuse(key: str, problem: str, fix: str) -> Finding:
        return Finding((key,), problem, fix, override=index)

    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    parts = key.split(".")
    if not equals:
        return refuse(text, 'has no "="', "write section.key=value")
    if not all(_NAME.fullmatch(part) for part in parts):
        return refuse(key, "is not a key", "write section.key=value")
    if len(parts) == 1:
        return _refuse_without_section(key, raw, index)
    if not raw:
        return refuse(key, "has no value", f"write {shorten(key)}=VALUE")
    path: Path = tuple(parts)
    value = _text_value(raw) if wants_text(path) else _toml_value(raw)
    if isinstance(value, str) and value == raw and raw[0] in "[{" and not wants_text(path):
        fix = f"""strings inside need quotes, and the shell eats them: write '{key}=["a", "b"]'"""
        return refuse(key, f"the value {shorten(raw)} is not valid TOML", fix)
    return Override(path, value, index)


def _refuse_without_section(name: str, raw: str, index: int) -> Finding:
    """The finding for `dim=192`: names the key that was meant, in full and with its value; for a
    section, a key that its value may be of."""
    if name in keys_by_section():
        first = "kind" if name == "model" and ":" in raw else keys_by_section()[name][0]
        problem, fix = (
            "is a whole section",
            f"set its keys one by one: {name}.{first}={shorten(raw) or '...'}",
        )
    else:
        fix = suggest_key(name, list_sections_of_keys(), shorten(raw)) or did_you_mean(
            name, tuple(keys_by_section())
        )
        problem, fix = "is not section.key", fix or "write section.key=value"
    return Finding((name,), problem, fix, override=index)


def wants_text(path: Path) -> bool:
    """True if the key takes strings alone, so that a bare 123, true or a path is one."""
    types = split_union(find_annotation(path))
    return not any(arm in (int, float) for arm in types) and any(
        arm is str
        or (get_origin(arm) is Literal and all(isinstance(choice, str) for choice in get_args(arm)))
        for arm in types
    )


def _text_value(raw: str) -> str:
    """`raw` itself, or what is inside if it is one TOML string in quotes."""
    value = _toml_value(raw) if raw[0] in "\"'" else raw
    return value if isinstance(value, str) else raw


def _toml_value(raw: str) -> Any:
    """`raw` as one TOML value, or as the bare word that it is."""
    try:
        table = tomllib.loads(f"value = {raw}")
    except (
        ValueError,
        RecursionError,
    ):  # TOMLDecodeError is a ValueError, and so is an integer of 5,000 digits
        return raw
    return table["value"] if len(table) == 1 else raw
