"""What is wrong with a job, in words: what was wanted, what was given, and what to do.

The words come from the schema itself (types, bounds, choices), so that a new key explains itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from phalanx.core.errors import format_nearest_word_hint
from phalanx.job.key_aliases import KEYS_OF_ALIAS
from phalanx.job.key_suggestions import suggest_key
from phalanx.job.positions import Path
from phalanx.job.schema import Job


@dataclass(frozen=True)
class Finding:
    """One thing wrong with a job, before it is known where it stands.

    `also`: other keys that took part in it.
    """

    path: Path
    what: str
    fix: str = ""
    at_key: bool = False
    also: tuple[Path, ...] = ()
    # The override that could not be read, which has no place in the job.
    override: int | None = None


@cache
def list_keys_by_section() -> dict[str, tuple[str, ...]]:
    """The keys of each section."""
    return {name: tuple(_get_section_class(name).model_fields) for name in Job.model_fields}


def find_key_annotation(path: Path) -> Any:
    """The declared type of `section.key`; None if there is no such key."""
    if len(path) != 2 or path[1] not in list_keys_by_section().get(str(path[0]), ()):
        return None
    return _get_section_class(str(path[0])).model_fields[str(path[1])].annotation


def split_union_types(declared: Any) -> tuple[Any, ...]:
    """The types of a union, without bounds: `int | None` -> (int, None type); anything else stands
    alone."""
    options: tuple[Any, ...] = (declared,)
    if get_origin(declared) in (Union, UnionType):
        options = get_args(declared)
    return tuple(map(_strip_bounds, options))


def _strip_bounds(declared: Any) -> Any:
    if get_origin(declared) is Annotated:
        return get_args(declared)[0]
    return declared


def format_key_path(path: Path) -> str:
    """A path as text: ("observe", "sinks", 1) -> 'observe.sinks[1]'."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif text:
            text += f".{part}"
        else:
            text = part
    return shorten_to_one_line(text)


def shorten_to_one_line(text: str, limit: int = 60) -> str:
    """`text` on one line, without what a terminal cannot print."""
    shown = ""
    for letter in text:
        if not letter.isprintable():  # a name with an escape sequence would recolour the terminal
            letter = ascii(letter)[1:-1]
        shown += letter
    if len(shown) <= limit:
        return shown
    return shown[: limit - 3] + "..."


def describe_schema(schema: dict[str, Any]) -> str:
    """A JSON schema in words: 'a whole number of at least 1 or "none"'."""
    if "anyOf" in schema:
        arms = schema["anyOf"]
        if any("none" in arm.get("enum", ()) for arm in arms):
            # null is written "none", too: it would be offered twice.
            arms = [arm for arm in arms if arm.get("type") != "null"]
        return " or ".join(map(describe_schema, arms))
    if "wanted" in schema:
        return str(schema["wanted"])
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        words = [json.dumps(choice) for choice in choices]
        if len(words) == 1:
            return words[0]
        return f"one of {', '.join(words)}"
    if "$ref" in schema:
        # A section of keys, as the levels of cluster.links are.
        return "a table"
    if "prefixItems" in schema:
        each = sorted({describe_schema(item) for item in schema["prefixItems"]})
        return f"a list of {len(schema['prefixItems'])}, each {' or '.join(each)}"
    kind = schema.get("type", "")
    if kind == "array":
        if not schema.get("items"):
            return "a list"
        return f"a list, each {describe_schema(schema['items'])}"
    words_of = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "null": '"none"',
        "object": "a table",
        "string": "a string",
    }
    return words_of.get(kind, "a value") + _describe_range(schema)


def describe_key(path: Path) -> str:
    """The values that `section.key` takes, in words."""
    return describe_schema(_find_schema(path))


def describe_value(value: Any) -> str:
    """A value as the user wrote it, shortened."""
    if value is None:
        return '"none"'
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, str):
        return f'"{shorten_to_one_line(value)}"'
    # Longer ones would fill the terminal: their length says enough.
    if isinstance(value, list) and len(str(value)) > 40:
        return f"a list of {len(value)}"
    return json.dumps(value)


def explain_wrong_value(path: Path, value: Any) -> Finding:
    """The finding for a value of the wrong type, out of range, or none of the choices."""
    if len(path) == 1:
        fix = f"write [{path[0]}] on a line of its own and its keys below"
        return Finding(path, f"is a section, not {describe_value(value)}", fix, at_key=True)
    schema = _find_schema(path)
    return Finding(
        path,
        f"wanted {describe_schema(schema)}, was given {describe_value(value)}",
        _suggest_smallest_edit(schema, value),
    )


def explain_unknown_key(path: Path, value: Any) -> Finding:
    """The finding for a key or section that does not exist; says where it belongs or what it
    might have meant."""
    name = str(path[-1])
    if len(path) == 1 and isinstance(value, dict):
        return Finding(path, "unknown section", _suggest_section(name, value), at_key=True)
    if len(path) == 1:
        return Finding(
            path,
            "stands outside every section",
            describe_section_of_key(name) or _suggest_for_unknown_key(name),
            at_key=True,
        )
    keys = list_keys_by_section()[str(path[0])]
    suggestion = ""
    if name.lower() not in KEYS_OF_ALIAS:  # which have a better answer than what they look like
        suggestion = format_nearest_word_hint(name, keys)
    fix = (
        describe_section_of_key(name)
        or suggestion
        or _suggest_for_unknown_key(name)
        or f"[{path[0]}] has {', '.join(keys)}"
    )
    return Finding(path, "unknown key", fix, at_key=True)


def _suggest_section(name: str, table: dict[str, Any]) -> str:
    """The section that was misspelt, if its keys are that one's; else where the first key of the
    table belongs."""
    suggestion = format_nearest_word_hint(name, tuple(list_keys_by_section()))
    for section, keys in list_keys_by_section().items():
        if f'"{section}"' in suggestion:
            if set(table) <= set(keys):
                return suggestion
            break
    inside = ""
    for key in table:
        if key.lower() in list_sections_of_keys() or key.lower() in KEYS_OF_ALIAS:
            inside = _suggest_for_unknown_key(key)
            break
    return (
        inside
        or suggestion
        or describe_section_of_key(name)
        or f"sections are {', '.join(list_keys_by_section())}"
    )


@cache
def list_sections_of_keys() -> dict[str, tuple[str, ...]]:
    """The sections that have a key, by its name."""
    sections: dict[str, tuple[str, ...]] = {}
    for section, keys in list_keys_by_section().items():
        for key in keys:
            sections[key] = (*sections.get(key, ()), section)
    return sections


def _suggest_for_unknown_key(name: str, raw: str = "") -> str:
    return suggest_key(name, list_sections_of_keys(), raw)


def describe_section_of_key(name: str) -> str:
    """'belongs in [train]' if a section has a key of exactly this name; else ""."""
    sections = list_sections_of_keys().get(name, ())
    if not sections:
        return ""
    return f"belongs in {' or '.join(f'[{section}]' for section in sections)}"


def _get_section_class(name: str) -> Any:
    return Job.model_fields[name].annotation


@cache
def _build_job_schema() -> dict[str, Any]:
    return Job.model_json_schema()


def _find_schema(path: Path) -> dict[str, Any]:
    """The part of the job's JSON schema that describes the value at `path`; empty where anything
    goes."""
    definitions = _build_job_schema()["$defs"]
    schema: dict[str, Any] = _build_job_schema()
    for part in path:
        if "$ref" in schema:
            schema = definitions[schema["$ref"].rpartition("/")[2]]
        if isinstance(part, str):
            schema = _find_property_schema(schema, part)
        else:
            schema = _find_item_schema(schema, part)
    return schema


def _find_property_schema(schema: dict[str, Any], name: str) -> dict[str, Any]:
    properties: dict[str, Any] = schema.get("properties", {})
    if name in properties:
        return dict(properties[name])
    # Of a table whose keys are free: a schema of all of them, or True for anything.
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        return extra
    return {}


def _find_item_schema(schema: dict[str, Any], index: int) -> dict[str, Any]:
    for arm in schema.get("anyOf", ()):
        if arm.get("type") == "array":
            schema = arm
            break
    items: list[dict[str, Any]] = schema.get("prefixItems", [])
    if index < len(items):
        return items[index]
    return dict(schema.get("items", {}))


def _format_bound(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:g}"


def _describe_range(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {_format_bound(low)} to {_format_bound(high)}"
    words = []
    for bound, text in (
        ("minimum", "of at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "of at most"),
        ("exclusiveMaximum", "below"),
    ):
        if bound in schema:
            words.append(f"{text} {_format_bound(schema[bound])}")
    if schema.get("minLength") == 1:
        words.append("that is not empty")
    if not words:
        return ""
    return " " + " and ".join(words)


def _suggest_smallest_edit(schema: dict[str, Any], value: Any) -> str:
    """The smallest edit that makes `value` what `schema` wants, where one is plain to see."""
    kinds: set[Any] = set()
    choices: list[Any] = []
    for option in schema.get("anyOf", [schema]):
        kinds.add(option.get("type"))
        choices += option.get("enum", [option.get("const")])
    if isinstance(value, str) and (fix := _suggest_text_edit(value, kinds, choices)):
        return fix
    # The schema is strict: 16.0 is no whole number, though it looks like one.
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    if is_whole and "integer" in kinds:
        return f"write {int(value)}"
    if "array" in kinds and not isinstance(value, list | dict):
        return f"write [{describe_value(value)}]"
    if "string" in kinds and isinstance(value, int | float) and not any(choices):
        return "put it in quotes"
    return ""


def _suggest_text_edit(text: str, kinds: set[Any], choices: list[Any]) -> str:
    if "null" in kinds and text.lower() in ("none", "null"):
        return 'write "none"'
    if "boolean" in kinds and text.lower() in ("true", "false"):
        return f"write {text.lower()}, without quotes and in lower case"
    if ({"integer", "number"} & kinds or text in map(str, choices)) and _is_number_text(text):
        return "write it without quotes"
    return format_nearest_word_hint(text, [choice for choice in choices if isinstance(choice, str)])


def _is_number_text(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
