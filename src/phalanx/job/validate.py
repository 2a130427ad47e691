"""A tree of plain values against the schema: every finding, and the best job that can be made
without them."""

from __future__ import annotations

import datetime
import json
import math
import sys
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from phalanx.job.findings import (
    Finding,
    explain_unknown_key,
    explain_wrong_value,
    find_key_annotation,
    split_union_types,
)
from phalanx.job.positions import Path
from phalanx.job.schema import Job

MAX_NESTING_DEPTH = 32


def validate_job_tree(tree: dict[str, Any]) -> tuple[Job, list[Finding]]:
    """The job and its findings.

    With findings, the keys they are about hold their defaults instead.
    """
    unusable: list[Finding] = []
    clean = _remove_unusable_values(replace_none_words(tree), (), unusable)
    try:
        # As JSON: strict models take a list for a tuple in JSON alone.
        job = Job.model_validate_json(json.dumps(clean))
    except ValidationError as error:
        findings = _merge_findings(
            unusable,
            [_explain_pydantic_error(clean, line) for line in error.errors(include_url=False)],
        )
    else:
        if not unusable:
            return job, []
        findings = unusable
    return Job.model_validate_json(json.dumps(_drop_refused_keys(clean, findings))), findings


def replace_none_words(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` with the word "none" as None where a key may be absent: TOML has no null."""
    return {
        section: {
            key: None if value == "none" and _may_be_absent(section, key) else value
            for key, value in keys.items()
        }
        if isinstance(keys, dict)
        else keys
        for section, keys in tree.items()
    }


def _may_be_absent(section: str, key: str) -> bool:
    """True if None is a value of the key, and the word "none" is not one of its choices."""
    options = split_union_types(find_key_annotation((section, key)))
    return type(None) in options and not any("none" in get_args(option) for option in options)


def _remove_unusable_values(value: Any, path: Path, findings: list[Finding]) -> Any:
    """`value` with None for whatever a job cannot hold; each such thing is added to `findings`."""
    if reason := _explain_unusable(value, path):
        findings.append(Finding(path, *reason))
        return None
    if isinstance(value, dict):
        return {
            _escape_unencodable(key): _remove_unusable_values(item, (*path, key), findings)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            _remove_unusable_values(item, (*path, index), findings)
            for index, item in enumerate(value)
        ]
    return value


def _explain_unusable(value: Any, path: Path) -> tuple[str, str] | None:
    """(problem, fix) for a value that TOML or JSON can write and a job cannot hold; None for any
    other."""
    if len(path) > MAX_NESTING_DEPTH:
        return f"is nested more than {MAX_NESTING_DEPTH} deep", ""
    if isinstance(value, datetime.date | datetime.time):
        return "is a date or a time, which no key takes", "put it in quotes to make it a string"
    if isinstance(value, float):
        if not math.isfinite(value):
            return f"wanted a finite number, was given {value}", ""
        types = split_union_types(find_key_annotation(path))
        # pydantic takes 2.0 for Literal[2].
        if float not in types and any(get_origin(arm) is Literal for arm in types):
            finding = explain_wrong_value(path, value)
            return finding.what, finding.fix
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "is a whole number that does not fit in 64 bits", ""
    if isinstance(value, str):
        return _explain_unusable_text(value)
    return None


def _explain_unusable_text(text: str) -> tuple[str, str] | None:
    if "\0" in text:
        return "holds a NUL character", ""
    if _escape_unencodable(text) == text:
        return None
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8":
        # UTF-8 of a command line, taken for something else.
        return f"cannot be read here, where Python takes names for {encoding}", "set PYTHONUTF8=1"
    return "is not valid UTF-8", ""


def _escape_unencodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _explain_pydantic_error(clean: dict[str, Any], line: Any) -> Finding:
    """One of pydantic's errors in our words.

    Its path is cut to what the user wrote: a missing item has no place.
    """
    value: Any = clean
    path: Path = ()
    for part in line["loc"]:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            break
        path = (*path, part)
    if line["type"] == "extra_forbidden":
        return explain_unknown_key(path, value)
    return explain_wrong_value(path, value)


def _merge_findings(unusable: list[Finding], refused: list[Finding]) -> list[Finding]:
    """Both, with one finding per value: an unknown key hides what is in it, else the first thing
    found wins."""
    hidden = [finding.path for finding in refused if finding.at_key]
    merged = [
        finding
        for finding in unusable
        if not any(finding.path[: len(path)] == path for path in hidden)
    ]
    for finding in refused:
        if not any(other.path[: len(finding.path)] == finding.path for other in merged):
            merged.append(finding)
    return merged


def _drop_refused_keys(tree: dict[str, Any], findings: list[Finding]) -> dict[str, Any]:
    """`tree` without the sections and the `section.key`s that the findings are about."""
    # By whole keys: a value without its refused part would be another wish.
    gone = {finding.path[:2] for finding in findings}
    return {
        section: {key: value for key, value in keys.items() if (section, key) not in gone}
        for section, keys in tree.items()
        if (section,) not in gone and isinstance(keys, dict)
    }
