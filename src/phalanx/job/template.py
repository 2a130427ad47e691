"""A job file for people: every key with its words, its choices and its default, most of them
commented out.

Prose is behind "# ", a key that can be switched on behind "#" alone, so that taking one letter away
is all it takes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from typing import Any

from phalanx.job.findings import describe_key, list_keys_by_section
from phalanx.job.json_schema import build_job_json_schema
from phalanx.job.schema import Job
from phalanx.job.toml import format_toml_value

MAX_LINE_CHARS = 100

# What people set first. All have defaults, so that a fresh file is the default job.
USUALLY_SET_KEYS = (
    "run.name",
    "data.source",
    "data.seq_len",
    "train.steps",
    "train.global_batch_size",
    "optim.lr",
)
RUN_DIR_KEY = "run.dir"  # of a run that has been: a new run needs another one

TEMPLATE_HEADER = """\
# A job for phalanx.
#
#   phalanx train {file}                  trains it
#   phalanx train {file} --explain        says what it means, and where each value comes from
#   phalanx plan {file} train.steps=100   any key can be given on the command line
"""
FULL_TEMPLATE_NOTE = """\
# Every key is here with its default; take the # before a key away to set it. "none" is as if the
# key were absent: the plan, or the model's preset, decides.
"""
UNINFORMATIVE_TYPES = ("a string", "a string that is not empty", "a table", "a value")


def format_job_template(
    job: Job | None = None,
    *,
    file: str = "job.toml",
    minimal: bool = False,
    schema_file: str | None = None,
) -> str:
    """The text of a job file that loads as `job` (default: the default job), but for where a run
    writes.

    `minimal`: only what is set, without words. `schema_file`: what editors read, named relative to
    the job file.
    """
    job = job or Job()
    values, defaults = job.to_json(), Job().to_json()
    is_set = set(USUALLY_SET_KEYS)
    for section, keys in list_keys_by_section().items():
        changed = [key for key in keys if values[section][key] != defaults[section][key]]
        is_set.update(f"{section}.{key}" for key in changed)
    # Last: a job that was loaded from a run has its directory set.
    is_set.discard(RUN_DIR_KEY)
    parts = []
    if schema_file:
        parts.append(f"#:schema {schema_file}")
    head = TEMPLATE_HEADER.format(file=file)
    if not minimal:
        head += f"#\n{FULL_TEMPLATE_NOTE}"
    parts.append(head)
    schema = build_job_json_schema()["properties"]
    for section in list_keys_by_section():
        if minimal and not any(key.startswith(f"{section}.") for key in is_set):
            continue
        parts.append(_format_section(section, values[section], schema[section], is_set, minimal))
    return "\n".join(parts)


def _format_section(
    name: str,
    values: dict[str, Any],
    schema: dict[str, Any],
    is_set: Collection[str],
    minimal: bool,
) -> str:
    lines = [f"[{name}]"]
    if not minimal and "description" in schema:
        lines.insert(0, _wrap_comment(schema["description"]))
    for key, value in values.items():
        if minimal and f"{name}.{key}" not in is_set:
            continue
        if not minimal:
            lines.append(_wrap_comment(_describe_key_and_values(name, key, schema)))
        if f"{name}.{key}" in is_set:
            lines.append(f"{key} = {format_toml_value(value)}")
        elif f"{name}.{key}" == RUN_DIR_KEY:
            lines.append(f'#{key} = "none"')
        else:
            lines.append(f"#{key} = {format_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _describe_key_and_values(section: str, key: str, schema: dict[str, Any]) -> str:
    """The key's own words, and what may stand behind the equals sign."""
    words: str = schema["properties"][key].get("description", "")
    # What "none" means is said once, at the head of the file.
    kinds = describe_key((section, key)).removesuffix(f" or {format_toml_value(None)}")
    if kinds in UNINFORMATIVE_TYPES:
        return words
    return f"{words} ({kinds})"


def _wrap_comment(text: str) -> str:
    return "\n".join(
        textwrap.wrap(
            text,
            MAX_LINE_CHARS,
            initial_indent="# ",
            subsequent_indent="# ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    )
