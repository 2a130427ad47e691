"""Writes docs/reference.md (job keys, verbs, exit codes, events, kinds), the JSON Schema of job
files and the tables of other pages from the code.

`--check` only compares.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from phalanx.cli._app import read_help_line
from phalanx.core.errors import EXIT_CODE_MEANING
from phalanx.core.phases import PHASES
from phalanx.core.registry import list_modules_of_registry
from phalanx.job.json_schema import (
    PACKAGE_OF_OPEN_KEY,
    SCHEMA_FILE_NAME,
    build_job_json_schema,
    read_key_descriptions,
)
from phalanx.job.presets.table import replace_presets_table
from phalanx.job.schema import Job, Section
from phalanx.observe.events import EVENT_CLASS_OF_KIND

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "src" / "phalanx" / "job"


def type_words(annotation: Any) -> str:
    """A field's type as people write it in TOML."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_words(args[0])
    if origin in (typing.Union, types.UnionType):
        words = ["none" if part is type(None) else type_words(part) for part in args]
        return " or ".join(
            word for word in words if word != "none" or "`none`" not in " ".join(words)
        )
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin is tuple:
        inner = [part for part in args if part is not Ellipsis]
        return "list of " + type_words(inner[0])
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        keys = ", ".join(f"`{key}`" for key in annotation.model_fields)
        return f"table of {keys}"
    return {int: "integer", float: "number", str: "string", bool: "true or false"}[annotation]


def default_words(default: Any) -> str:
    if default is None:
        return "none"
    if default is PydanticUndefined or default == {}:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f"`{list(default) if isinstance(default, tuple) else default}`"


def job_tables() -> list[str]:
    lines = []
    for section, field in Job.model_fields.items():
        lines += [f"### [{section}]", "", "| key | type | default | what |", "|---|---|---|---|"]
        assert field.annotation is not None
        if words := " ".join((field.annotation.__doc__ or "").split()):
            lines[-2:-2] = [words, ""]
        descriptions = read_key_descriptions(field.annotation)
        for key, item in field.annotation.model_fields.items():
            what = " ".join(descriptions.get(key, "").split()).replace("|", "\\|")
            lines.append(
                f"| `{key}` | {type_words(item.annotation)} | {default_words(item.default)} |"
                f" {what} |"
            )
        lines.append("")
    return lines


def table(head: tuple[str, str], rows: list[tuple[str, str]]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows), ""]


def reference() -> str:
    lines = [
        "# Reference",
        "",
        "Generated from the code by `make docs`; a test holds it to the code.",
        "",
    ]
    lines += ["## Verbs", ""]
    lines += table(
        ("verb", "what it does"),
        [(f"`phalanx {v}`", read_help_line(v)) for v in list_modules_of_registry("phalanx.cli")],
    )
    lines += ["## Exit codes", ""]
    lines += table(
        ("code", "meaning"), [(str(int(code)), text) for code, text in EXIT_CODE_MEANING.items()]
    )
    lines += [
        "## The job file",
        "",
        "TOML. Every key can be overridden on the command line as `section.key=value`.",
        "",
    ]
    lines += job_tables()
    lines += [
        "## Kinds",
        "",
        "Each is one file of a folder; `package.module:name` reaches your own.",
        "",
    ]
    folders = {**PACKAGE_OF_OPEN_KEY, "resilience.inject": "phalanx.resilience.faults"}
    lines += table(
        ("key", "kinds"),
        [
            (f"`{k}`", ", ".join(f"`{n}`" for n in list_modules_of_registry(p)))
            for k, p in folders.items()
        ],
    )
    lines += [
        "## Phases",
        "",
        "Where a fault can strike and what a step's seconds are charged to: ",
    ]
    lines += [", ".join(f"`{phase}`" for phase in PHASES) + ".", ""]
    lines += ["## Events", "", "One line of JSON each, in `RUN/events/`.", ""]
    words = {
        kind: " ".join((cls.__doc__ or "").split()) for kind, cls in EVENT_CLASS_OF_KIND.items()
    }
    rows = [(f"`{kind}`", text.replace("|", "or")) for kind, text in words.items()]
    lines += table(("event", "fact"), rows)
    return "\n".join(lines).rstrip() + "\n"


def schema_text() -> str:
    """The JSON Schema of job files: in docs/ for people, in the package for `phalanx init` and
    shell completion."""
    return json.dumps(build_job_json_schema(), indent=1, ensure_ascii=False) + "\n"


def with_examples(text: str) -> str:
    """A page with each block after `<!-- from FILE [REGION] -->` as that file of the repository
    says today.

    A region lies between the lines "# [name]" and "# [/name]".
    """

    def block(match: re.Match[str]) -> str:
        source = (HERE.parent / match["file"]).read_text(encoding="utf-8")
        if name := match["region"]:
            source = source.split(f"# [{name}]\n")[1].split(f"# [/{name}]\n")[0]
        return f"{match['mark']}\n```{match['kind']}\n{source.strip()}\n```\n"

    mark = (
        r"(?P<mark><!-- from (?P<file>\S+)(?: \[(?P<region>\w+)\])?"
        r" -->)\n```(?P<kind>\w+)\n.*?```\n"
    )
    return re.sub(mark, block, text, flags=re.DOTALL)


def targets() -> dict[Path, str]:
    """Every generated file and its text."""
    schema = schema_text()
    models, own_code, costs = HERE / "models.md", HERE / "own-code.md", HERE / "strategies.md"
    checkpoints, pipeline = HERE / "checkpoint-format.md", HERE / "pipeline.md"
    found, rules = HERE / "found.md", HERE / "rules-of-thumb.md"
    with_tables = runpy.run_path(str(HERE / "strategies.py"))["with_tables"]
    with_schedules = runpy.run_path(str(HERE / "pipeline_table.py"))["with_schedules"]
    with_rules = runpy.run_path(str(HERE / "rules_table.py"))["with_rules"]
    with_clusters = runpy.run_path(str(HERE / "cluster_tables.py"))["with_clusters"]
    plan = HERE / "plan.md"
    metrics = HERE / "metrics.md"
    with_metrics = runpy.run_path(str(HERE / "metrics_table.py"))["with_metrics"]
    drills = HERE / "drills.md"
    with_drills = runpy.run_path(str(HERE / "drills_table.py"))["with_drills"]
    with_counts = runpy.run_path(str(HERE / "layout_counts.py"))["with_counts"]
    return {
        HERE / "reference.md": reference(),
        HERE / SCHEMA_FILE_NAME: schema,
        PACKAGE / SCHEMA_FILE_NAME: schema,
        models: replace_presets_table(models.read_text(encoding="utf-8")),
        own_code: with_examples(own_code.read_text(encoding="utf-8")),
        found: with_examples(found.read_text(encoding="utf-8")),
        costs: with_tables(costs.read_text(encoding="utf-8")),
        rules: with_rules(rules.read_text(encoding="utf-8")),
        plan: with_clusters(plan.read_text(encoding="utf-8")),
        pipeline: with_schedules(pipeline.read_text(encoding="utf-8")),
        metrics: with_metrics(metrics.read_text(encoding="utf-8")),
        drills: with_drills(drills.read_text(encoding="utf-8")),
        checkpoints: with_counts(checkpoints.read_text(encoding="utf-8")),
    }


def is_same(page: str, text: str) -> bool:
    """True for equal texts, but for how many trials are of today's code, and whether the soak is:
    any change of code changes that, and `make docs` says it when it is run."""
    of_today = re.compile(
        r"(of today's code, by their digest: |Of today's recovery code, by its digest: )\w+"
    )
    return of_today.sub(r"\1n", page) == of_today.sub(r"\1n", text)


if __name__ == "__main__":
    for path, text in targets().items():
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
            print(path)
        elif not path.exists() or not is_same(path.read_text(encoding="utf-8"), text):
            sys.exit(f"{path} is not what the code says; run make docs")
