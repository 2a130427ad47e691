"""Shell completion of `[JOB.toml] [KEY=VALUE]...` and of run directories.

Quick: keys come from the schema's file.

Bash splits words at "=" and completes only what is behind it; zsh and fish hand over the whole
word.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

SCHEMA_FILE = Path(__file__).parents[1] / "job" / "job.schema.json"
MAX_COMPLETED_RUNS = 50

Candidates = list[tuple[str, str]]  # what is offered, and its words


class FuzzyCompletion(str):
    """A candidate that does not begin with what was typed. typer drops those; this one stays."""

    def startswith(self, *_: object) -> bool:
        return True


def complete_job_argument(context: typer.Context, incomplete: str) -> Candidates:
    """Job files, keys and values. The nearest keys where none begins with what was typed."""
    key = _find_key_before_cursor(context)
    if key is not None:
        return _complete_values(key, incomplete)
    name, equals, value = incomplete.partition("=")
    if equals:
        return [(f"{name}={text}", help_text) for text, help_text in _complete_values(name, value)]
    return _complete_job_files(incomplete) + (
        _complete_keys(incomplete) if incomplete else _complete_sections()
    )


def complete_run_directory(incomplete: str) -> Candidates:
    """Directories that hold a run: here, below runs/, or below what was typed so far."""
    folder = os.path.dirname(incomplete)
    directories = [Path("."), Path("runs")]
    if folder:
        directories = [Path(folder)]
    runs = []
    for directory in directories:
        for path in _list_directory_or_empty(directory):
            if (path / "job.json").is_file() and str(path).startswith(incomplete):
                runs.append(str(path))
    return [(path, "") for path in sorted(runs)[:MAX_COMPLETED_RUNS]]


def _find_key_before_cursor(context: typer.Context) -> str | None:
    """The key whose value is completed, where the shell has cut "key=value" into words (bash
    does)."""
    # typer's script for bash joins the words by line ends.
    words, cursor = os.environ.get("COMP_WORDS", "").split("\n"), os.environ.get("COMP_CWORD", "")
    if not cursor.isdecimal() or not 1 <= int(cursor) <= len(words):
        return None
    before = words[: int(cursor)]
    if int(cursor) < len(words) and words[int(cursor)] == "=":
        return before[-1]
    if len(before) > 1 and before[-1] == "=":
        return before[-2]
    return None


def _complete_job_files(incomplete: str) -> Candidates:
    """Job files, and directories on the way to one."""
    folder = Path(os.path.dirname(incomplete))
    names = [
        f"{path}/" if path.is_dir() else str(path)
        for path in _list_directory_or_empty(folder)
        if path.suffix == ".toml"
        or (path.is_dir() and incomplete and not path.name.startswith("."))
    ]
    return [(path, "") for path in sorted(names) if path.startswith(incomplete)]


def _list_directory_or_empty(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _complete_sections() -> Candidates:
    return [
        (f"{name}.", section.get("description", "")) for name, section in _load_job_schema().items()
    ]


def _complete_keys(incomplete: str) -> Candidates:
    """`section.key=` for each key that begins so, in full or without its section; else for the
    nearest ones."""
    known = dict(_iterate_schema_keys())
    matches = [key for key in known if key.startswith(incomplete)]
    kind: type[str] = str if matches else FuzzyCompletion
    matches = matches or [key for key in known if key.partition(".")[2].startswith(incomplete)]
    matches = matches or difflib.get_close_matches(incomplete, known, n=3, cutoff=0.7)
    offered = [(kind(f"{key}="), known[key].get("description", "")) for key in matches]
    # A second candidate keeps the shell from setting a space behind the equals sign.
    if len(matches) == 1:
        offered += [
            (kind(f"{matches[0]}={text}"), help_text)
            for text, help_text in _complete_values(matches[0], "")[:1]
        ]
    return offered


def _complete_values(key: str, incomplete: str) -> Candidates:
    """Values that may stand behind `key=`: its choices and its default.

    Files are left to the shell.
    """
    schema = dict(_iterate_schema_keys()).get(key)
    if schema is None:
        return []
    texts = list(_list_choices(schema))
    if "default" in schema:
        texts.insert(0, _format_completed_value(schema["default"]))
    # Each once, for the default is one of the choices, too.
    return [(text, "") for text in dict.fromkeys(texts) if text.startswith(incomplete)]


def _list_choices(schema: dict[str, Any]) -> Iterator[str]:
    if schema.get("type") == "boolean":
        yield from ("true", "false")
    yield from (_format_completed_value(choice) for choice in schema.get("enum", ()))
    for arm in schema.get("anyOf", ()):
        yield from _list_choices(arm)


def _format_completed_value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _iterate_schema_keys() -> Iterator[tuple[str, dict[str, Any]]]:
    for section, body in _load_job_schema().items():
        for key, schema in body["properties"].items():
            yield f"{section}.{key}", schema


def list_job_keys() -> list[str]:
    """Every `section.key` of a job."""
    return [key for key, _ in _iterate_schema_keys()]


def _load_job_schema() -> dict[str, Any]:
    try:
        properties: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))[
            "properties"
        ]
    # Without its file nothing is offered: an error would be printed into the command line.
    except (OSError, ValueError, KeyError):
        return {}
    return properties
