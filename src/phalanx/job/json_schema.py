"""The job as a JSON Schema for editors (draft-07, without references: what Taplo and Even Better
TOML read).

It says of keys, types, bounds and choices what `load_job` says; combinations of keys are for
`load_job` alone. TOML has no null, so a key that may be absent takes the word "none".
"""

from __future__ import annotations

from typing import Any

from phalanx.core import registry
from phalanx.job.presets import preset_names
from phalanx.job.schema import Job

DRAFT = "http://json-schema.org/draft-07/schema#"
FILE = "job.schema.json"  # in this folder, in docs/ and beside a job
NONE = "none"

# Keys whose values are the files of a folder, or the user's own "package.module:name".
KINDS = {
    "model.kind": "phalanx.nn.models",
    "optim.kind": "phalanx.optim.optimizers",
    "observe.sinks": "phalanx.observe.sinks",
}

# Keys whose values are "none" or the files of a folder.
FILES = {"parallel.compress": "phalanx.parallel.hooks"}

_KEPT = (
    "description",
    "enum",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minLength",
    "pattern",
)


def job_json_schema() -> dict[str, Any]:
    """The JSON Schema of a job file, keys in the order of the sections."""
    schema = Job.model_json_schema()
    definitions = schema["$defs"]
    return {
        "$schema": DRAFT,
        "title": "phalanx job",
        "description": "What `phalanx train` runs. Every key has a default.",
        "type": "object",
        "properties": {
            name: _section(name, ref, definitions) for name, ref in schema["properties"].items()
        },
        "additionalProperties": False,
    }


def _section(name: str, ref: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    body = definitions[ref["$ref"].rpartition("/")[2]]
    section: dict[str, Any] = {"type": "object"}
    if "description" in body:
        section["description"] = _words(body["description"])
    section["properties"] = {
        key: _key(f"{name}.{key}", schema, definitions)
        for key, schema in body["properties"].items()
    }
    return section | {"additionalProperties": False}


def _key(name: str, schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    body = _value(schema, definitions)
    if name in KINDS:
        _offer(body, [{"enum": registry.names(KINDS[name])}, {"type": "string", "pattern": ":"}])
    if name in FILES:
        body.pop("minLength", None)
        body["enum"] = [NONE, *registry.names(FILES[name])]
    if name == "model.preset":
        _offer(body, [{"enum": preset_names()}])
    default = schema.get("default")
    if default is not None:
        body["default"] = default
    elif "anyOf" in schema and _is_nullable(schema):
        body["default"] = NONE
    return body


def _value(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """pydantic's schema of a value in draft-07: no references, no null, pairs as lists of two."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]] | {
            k: v for k, v in schema.items() if k != "$ref"
        }
    body = {key: schema[key] for key in _KEPT if key in schema}
    if "description" in body:
        body["description"] = _words(body["description"])
    if "const" in schema:
        body["enum"] = [schema["const"]]
    if "anyOf" in schema:
        body["anyOf"] = [_value(arm, definitions) for arm in schema["anyOf"]]
    elif schema.get("type") == "null":
        body["enum"] = [NONE]
    elif "type" in schema:
        body["type"] = schema["type"]
    for key in ("minItems", "maxItems"):
        if key in schema:
            body[key] = schema[key]
    if "prefixItems" in schema:
        each = [_value(item, definitions) for item in schema["prefixItems"]]
        body["items"] = each[0] if all(item == each[0] for item in each) else each
    elif isinstance(schema.get("items"), dict):
        body["items"] = _value(schema["items"], definitions)
    if "properties" in schema:
        body["properties"] = {
            key: _key(key, inner, definitions) for key, inner in schema["properties"].items()
        }
        body["required"] = schema.get("required", [])
        body["additionalProperties"] = False
    return body


def _offer(body: dict[str, Any], choices: list[dict[str, Any]]) -> None:
    """Put `choices` where the schema takes any string."""
    for target_schema in (body, *body.get("anyOf", ())):
        target = target_schema.get("items", target_schema)
        if target.get("type") != "string":
            continue
        if any(target is arm for arm in body.get("anyOf", ())):
            body["anyOf"] = [*choices, *(arm for arm in body["anyOf"] if arm is not target)]
        else:
            del target["type"]
            target.pop("minLength", None)
            target["anyOf"] = choices
        return


def _is_nullable(schema: dict[str, Any]) -> bool:
    return any(arm.get("type") == "null" for arm in schema["anyOf"])


def _words(text: str) -> str:
    return " ".join(text.split())
