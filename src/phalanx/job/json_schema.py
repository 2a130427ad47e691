"""The job as a JSON Schema for editors (draft-07, without references: what Taplo and Even Better
TOML read).

It says of keys, types, bounds and choices what `load_job` says; combinations of keys are for
`load_job` alone. TOML has no null, so a key that may be absent takes the word "none".
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Any

from phalanx.core import registry
from phalanx.job import schema as job_schema
from phalanx.job.presets import list_preset_names
from phalanx.job.schema import Job, Section

DRAFT_07_URI = "http://json-schema.org/draft-07/schema#"
SCHEMA_FILE_NAME = "job.schema.json"  # in this folder, in docs/ and beside a job
NONE_VALUE = "none"

# Keys whose values are the files of a folder, or the user's own "package.module:name".
PACKAGE_OF_OPEN_KEY = {
    "model.kind": "phalanx.nn.models",
    "optim.kind": "phalanx.optim.optimizers",
    "observe.sinks": "phalanx.observe.sinks",
}

# Keys whose values are "none" or the files of a folder.
PACKAGE_OF_CLOSED_KEY = {"parallel.compress": "phalanx.parallel.hooks"}

# What pydantic says as draft-07 does.
_KEYWORDS_COPIED_FROM_PYDANTIC = (
    "description",
    "enum",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minLength",
    "pattern",
)


def build_job_json_schema() -> dict[str, Any]:
    """The JSON Schema of a job file, keys in the order of the sections."""
    schema = Job.model_json_schema()
    _add_key_descriptions(schema["$defs"])
    sections = {}
    for name, ref in schema["properties"].items():
        sections[name] = _build_section_schema(name, ref, schema["$defs"])
    return {
        "$schema": DRAFT_07_URI,
        "title": "phalanx job",
        "description": "What `phalanx train` runs. Every key has a default.",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }


def _add_key_descriptions(definitions: dict[str, dict[str, Any]]) -> None:
    for section in _list_section_classes():
        for key, description in read_key_descriptions(section).items():
            definitions[section.__name__]["properties"][key]["description"] = description


def _list_section_classes() -> list[type[Section]]:
    """The classes of all tables of a job file."""
    classes = [each for each in vars(job_schema).values() if isinstance(each, type)]
    return [each for each in classes if issubclass(each, Section) and each not in (Section, Job)]


def read_key_descriptions(section: type[Section]) -> dict[str, str]:
    """The string that stands under each key of a section's class, by key."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    descriptions = {}
    for statement, after in pairwise(body):
        match statement, after:
            case (
                ast.AnnAssign(target=ast.Name(id=key)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                descriptions[key] = inspect.cleandoc(text)
    return descriptions


def _build_section_schema(
    name: str, ref: dict[str, Any], definitions: dict[str, Any]
) -> dict[str, Any]:
    body = _find_definition(ref, definitions)
    section: dict[str, Any] = {"type": "object"}
    if "description" in body:
        section["description"] = _collapse_whitespace(body["description"])
    section["properties"] = _build_section_properties(body["properties"], definitions, f"{name}.")
    section["additionalProperties"] = False
    return section


def _build_section_properties(
    schemas: dict[str, Any], definitions: dict[str, Any], prefix: str = ""
) -> dict[str, Any]:
    keys = {}
    for key, schema in schemas.items():
        keys[key] = _build_key_schema(f"{prefix}{key}", schema, definitions)
    return keys


def _build_key_schema(
    name: str, schema: dict[str, Any], definitions: dict[str, Any]
) -> dict[str, Any]:
    body = _build_value_schema(schema, definitions)
    if name in PACKAGE_OF_OPEN_KEY:
        _add_choices(
            body,
            [
                {"enum": registry.list_modules_of_registry(PACKAGE_OF_OPEN_KEY[name])},
                {"type": "string", "pattern": ":"},
            ],
        )
    if name in PACKAGE_OF_CLOSED_KEY:
        body.pop("minLength", None)
        body["enum"] = [NONE_VALUE, *registry.list_modules_of_registry(PACKAGE_OF_CLOSED_KEY[name])]
    if name == "model.preset":
        _add_choices(body, [{"enum": list_preset_names()}])
    default = schema.get("default")
    if default is not None:
        body["default"] = default
    elif "anyOf" in schema and _is_nullable(schema):
        # TOML cannot write null: the word stands for it in a file.
        body["default"] = NONE_VALUE
    return body


def _build_value_schema(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """pydantic's schema of a value in draft-07: no references, no null, pairs as lists of two."""
    schema = _resolve_reference(schema, definitions)
    body = {key: schema[key] for key in _KEYWORDS_COPIED_FROM_PYDANTIC if key in schema}
    if "description" in body:
        body["description"] = _collapse_whitespace(body["description"])
    if "const" in schema:
        body["enum"] = [schema["const"]]
    if "anyOf" in schema:
        body["anyOf"] = [_build_value_schema(arm, definitions) for arm in schema["anyOf"]]
    elif schema.get("type") == "null":
        body["enum"] = [NONE_VALUE]
    elif "type" in schema:
        body["type"] = schema["type"]
    body |= {key: schema[key] for key in ("minItems", "maxItems") if key in schema}
    if "prefixItems" in schema:
        # A list under `items` is draft-07's prefixItems.
        body["items"] = _build_list_schema(schema["prefixItems"], definitions)
    elif isinstance(schema.get("items"), dict):
        body["items"] = _build_value_schema(schema["items"], definitions)
    if "properties" in schema:
        body["properties"] = _build_section_properties(schema["properties"], definitions)
        body["required"] = schema.get("required", [])
        body["additionalProperties"] = False
    return body


def _resolve_reference(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """`schema` with the definition that it refers to in place of the reference."""
    if "$ref" not in schema:
        return schema
    # A reference's own words win: they are those of the key, the definition's of its type.
    siblings = {key: value for key, value in schema.items() if key != "$ref"}
    return _find_definition(schema, definitions) | siblings


def _find_definition(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    definition: dict[str, Any] = definitions[schema["$ref"].rpartition("/")[2]]
    return definition


def _build_list_schema(items: list[dict[str, Any]], definitions: dict[str, Any]) -> Any:
    """The schema of a list with these items, in the shorter form if all are alike."""
    schemas = [_build_value_schema(item, definitions) for item in items]
    if schemas.count(schemas[0]) == len(schemas):
        return schemas[0]
    return schemas


def _add_choices(body: dict[str, Any], choices: list[dict[str, Any]]) -> None:
    """Put `choices` where the schema takes any string."""
    for target_schema in (body, *body.get("anyOf", ())):
        target = target_schema.get("items", target_schema)
        if target.get("type") != "string":
            continue
        # Of a union only the string is replaced: "none" and numbers stay.
        if any(target is arm for arm in body.get("anyOf", ())):
            body["anyOf"] = [*choices, *(arm for arm in body["anyOf"] if arm is not target)]
        else:
            del target["type"]
            target.pop("minLength", None)
            target["anyOf"] = choices
        return


def _is_nullable(schema: dict[str, Any]) -> bool:
    return any(arm.get("type") == "null" for arm in schema["anyOf"])


def _collapse_whitespace(text: str) -> str:
    return " ".join(text.split())
