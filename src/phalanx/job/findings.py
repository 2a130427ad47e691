"""What is wrong with a job, in words: what was wanted, what was given, and what to do.

The words come from the schema itself (types, bounds, choices), so that a new key explains itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from phalanx.core.errors import did_you_mean
from phalanx.job.key_aliases import OTHER_NAMES
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
    override: int | None = (
        None  # the override that could not be read, which has no place in the job
    )


@cache
def keys_by_section() -> dict[str, tuple[str, ...]]:
    """The keys of each section."""
    return {name: tuple(_section(name).model_fields) for name in Job.model_fields}


def find_annotation(path: Path) -> Any:
    """The declared type of `section.key`; None if there is no such key."""
    if len(path) != 2 or path[1] not in keys_by_section().get(str(path[0]), ()):
        return None
    return _section(str(path[0])).model_fields[str(path[1])].annotation


def split_union(declared: Any) -> tuple[Any, ...]:
    """The types of a union, without bounds: `int

    None` -> (int, None type); anything else stands alone.
    """
    options = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    return tuple(get_args(arm)[0] if get_origin(arm) is Annotated else arm for arm in options)


def format_path(path: Path) -> str:
    """A path as text: ("observe", "sinks", 1) -> 'observe.sinks[1]'."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return shorten(text)


def shorten(text: str, limit: int = 60) -> str:
    """`text` on one line, without what a terminal cannot print."""
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def describe_schema(schema: dict[str, Any]) -> str:
    """A JSON schema in words: 'a whole number of at least 1 or "none"'."""
    if "anyOf" in schema:
        offers_none = any("none" in arm.get("enum", ()) for arm in schema["anyOf"])
        return " or ".join(
            describe_schema(arm)
            for arm in schema["anyOf"]
            if not (offers_none and arm.get("type") == "null")
        )
    if "wanted" in schema:
        return str(schema["wanted"])
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        words = [json.dumps(choice) for choice in choices]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if "prefixItems" in schema:
        each = sorted({describe_schema(item) for item in schema["prefixItems"]})
        return f"a list of {len(schema['prefixItems'])}, each {' or '.join(each)}"
    kind = schema.get("type", "")
    if kind == "array":
        return (
            f"a list, each {describe_schema(schema['items'])}" if schema.get("items") else "a list"
        )
    words_of = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "null": '"none"',
    }
    return words_of.get(
        kind, {"object": "a table", "string": "a string"}.get(kind, "a value")
    ) + _bounds(schema)


def describe_key(path: Path) -> str:
    """The values that `section.key` takes, in words."""
    return describe_schema(_schema(path))


def describe_value(value: Any) -> str:
    """A value as the user wrote it, shortened."""
    if value is None:
        return '"none"'
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, str):
        return f'"{shorten(value)}"'
    if isinstance(value, list):
        return f"a list of {len(value)}" if len(str(value)) > 40 else json.dumps(value)
    return json.dumps(value)


def explain_wrong_value(path: Path, value: Any) -> Finding:
    """The finding for a value of the wrong type, out of range, or none of the choices."""
    if len(path) == 1:
        fix = f"write [{path[0]}] on a line of its own and its keys below"
        return Finding(path, f"is a section, not {describe_value(value)}", fix, at_key=True)
    schema = _schema(path)
    return Finding(
        path,
        f"wanted {describe_schema(schema)}, was given {describe_value(value)}",
        _value_fix(schema, value),
    )


def explain_unknown(path: Path, value: Any) -> Finding:
    """The finding for a key or section that does not exist; says where it belongs or what it
    might have meant."""
    name = str(path[-1])
    if len(path) == 1 and isinstance(value, dict):
        return Finding(path, "unknown section", _section_fix(name, value), at_key=True)
    if len(path) == 1:
        return Finding(
            path,
            "stands outside every section",
            find_section_of(name) or _advice(name),
            at_key=True,
        )
    keys = keys_by_section()[str(path[0])]
    suggestion = "" if name.lower() in OTHER_NAMES else did_you_mean(name, keys)
    fix = (
        find_section_of(name) or suggestion or _advice(name) or f"[{path[0]}] has {', '.join(keys)}"
    )
    return Finding(path, "unknown key", fix, at_key=True)


def _section_fix(name: str, table: dict[str, Any]) -> str:
    """The section that was misspelt, if its keys are that one's; else where the first key of the
    table belongs."""
    suggestion = did_you_mean(name, tuple(keys_by_section()))
    meant = next((section for section in keys_by_section() if f'"{section}"' in suggestion), "")
    if meant and all(key in keys_by_section()[meant] for key in table):
        return suggestion
    inside = next(
        (_advice(key) for key in table if key.lower() in {*list_sections_of_keys(), *OTHER_NAMES}),
        "",
    )
    return (
        inside
        or suggestion
        or find_section_of(name)
        or f"sections are {', '.join(keys_by_section())}"
    )


@cache
def list_sections_of_keys() -> dict[str, tuple[str, ...]]:
    """The sections that have a key, by its name."""
    sections: dict[str, tuple[str, ...]] = {}
    for section, keys in keys_by_section().items():
        for key in keys:
            sections[key] = (*sections.get(key, ()), section)
    return sections


def _advice(name: str, raw: str = "") -> str:
    return suggest_key(name, list_sections_of_keys(), raw)


def find_section_of(name: str) -> str:
    """'belongs in [train]' if a section has a key of exactly this name; else ""."""
    homes = [f"[{section}]" for section, keys in keys_by_section().items() if name in keys]
    return f"belongs in {' or '.join(homes)}" if homes else ""


def _section(name: str) -> Any:
    return Job.model_fields[name].annotation


@cache
def _job_schema() -> dict[str, Any]:
    return Job.model_json_schema()


def _schema(path: Path) -> dict[str, Any]:
    """The part of the job's JSON schema that describes the value at `path`; empty where anything
    goes."""
    definitions = _job_schema()["$defs"]
    schema: dict[str, Any] = _job_schema()
    for part in path:
        schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if isinstance(part, str):
            extra = schema.get(
                "additionalProperties"
            )  # of a table whose keys are free: a schema, or anything
            schema = schema.get("properties", {}).get(
                part, extra if isinstance(extra, dict) else {}
            )
        else:
            schema = next(
                (arm for arm in schema.get("anyOf", ()) if arm.get("type") == "array"), schema
            )
            pair = schema.get("prefixItems", ())
            schema = pair[part] if part < len(pair) else schema.get("items", {})
    return schema


def _bound(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _bounds(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {_bound(low)} to {_bound(high)}"
    words = [
        f"{text} {_bound(schema[bound])}"
        for bound, text in (
            ("minimum", "of at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "of at most"),
            ("exclusiveMaximum", "below"),
        )
        if bound in schema
    ]
    if schema.get("minLength") == 1:
        words.append("that is not empty")
    return " " + " and ".join(words) if words else ""


def _value_fix(schema: dict[str, Any], value: Any) -> str:
    """The smallest edit that makes `value` what `schema` wants, where one is plain to see."""
    options = schema.get("anyOf", [schema])
    kinds = {option.get("type") for option in options}
    choices = [choice for option in options for choice in option.get("enum", [option.get("const")])]
    if isinstance(value, str):
        if "null" in kinds and value.lower() in ("none", "null"):
            return 'write "none"'
        if "boolean" in kinds and value.lower() in ("true", "false"):
            return f"write {value.lower()}, without quotes and in lower case"
        if ({"integer", "number"} & kinds or value in map(str, choices)) and _is_number(value):
            return "write it without quotes"
        if suggestion := did_you_mean(
            value, [choice for choice in choices if isinstance(choice, str)]
        ):
            return suggestion
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return f"write {int(value)}"
    if "array" in kinds and not isinstance(value, list | dict):
        return f"write [{describe_value(value)}]"
    if "string" in kinds and isinstance(value, int | float) and not any(choices):
        return "put it in quotes"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
