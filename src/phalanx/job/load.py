"""From a job file and overrides to a `Job`: strict, and with every problem reported at once,
each with its place."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from phalanx.core.errors import JobError, JobProblem, UsageError, format_nearest_word_hint
from phalanx.core.files import RepeatedKeyError, parse_json, read_whole_regular_file
from phalanx.job.checks.run import run_checks
from phalanx.job.findings import (
    Finding,
    find_key_annotation,
    format_key_path,
    list_keys_by_section,
    shorten_to_one_line,
)
from phalanx.job.overrides import Override, apply_overrides, parse_overrides
from phalanx.job.positions import KeyPlace, Path, TextPosition, locate_toml_keys
from phalanx.job.schema import Job
from phalanx.job.validate import validate_job_tree

MAX_JOB_FILE_BYTES = 4 * 2**20  # a job is a page or two
LEGACY_DEFAULT_COMPUTE = "fp32"  # the precision.compute of a run whose job does not say it


@dataclass(frozen=True)
class JobSource:
    """A job as it was read: its name for messages, its values, and the TOML text that can say
    where they stand."""

    name: str = ""
    tree: dict[str, Any] | None = None
    toml: str | None = None

    def locate_keys(self) -> dict[Path, KeyPlace]:
        if not self.toml:
            return {}
        return locate_toml_keys(self.toml)


def load_job(path: str | FilePath | None = None, overrides: Sequence[str] = ()) -> Job:
    """The job in the TOML file at `path` (or all defaults) with `section.key=value` overrides on
    top.

    Raises JobError with all problems: those of the file in its order, then those of the overrides;
    UsageError for arguments of another type.
    """
    if not isinstance(path, str | FilePath | None):
        raise UsageError(f"load_job takes the path of a file, and got {path!r}")
    # A string is a sequence of its letters.
    if isinstance(overrides, str) or not all(isinstance(each, str) for each in overrides):
        raise UsageError(
            f"overrides are a list of strings, and load_job got {overrides!r}",
            fix='["train.steps=10"], say',
        )
    return _build_job(_read_toml(path), overrides)


def load_job_json(
    path: str | FilePath, overrides: Sequence[str] = (), *, without: Sequence[str] = ()
) -> Job:
    """The resolved job that a run wrote (`Job.to_json()`), with overrides on top.

    Raises JobError like `load_job`.

    The keys `without` ("parallel.tp") have their defaults, whatever the run said.
    """
    source = _read_json(path)
    # Only jobs of older releases lack the key: what they ran with was the default then.
    numbers = (source.tree or {}).setdefault("precision", {})
    if isinstance(numbers, dict):
        # A run keeps the type of numbers that it began with.
        numbers.setdefault("compute", LEGACY_DEFAULT_COMPUTE)
    for section, key in (name.split(".", 1) for name in without):
        table = (source.tree or {}).get(section)
        if isinstance(table, dict):
            table.pop(key, None)
    return _build_job(source, overrides)


def require_job(job: object) -> None:
    """Raise UsageError for anything but a Job."""
    if isinstance(job, Job):
        return
    fix = "phalanx.load_job() gives the default one"
    if isinstance(job, str | FilePath):
        fix = f"phalanx.load_job({str(job)!r}) reads it"
    raise UsageError(f"a phalanx.Job is needed, and not {job!r}", fix=fix)


def check_job(job: Job) -> Job:
    """A job that was made in Python, checked as a loaded one is.

    Raises JobError with all problems, and UsageError for what is no job.
    """
    require_job(job)
    return _build_job(JobSource("the job", job.to_json()), ())


@dataclass(frozen=True)
class ValueOrigin:
    """The origin of a value.

    `kind`: "default", "file" (`where` is "job.toml:12:1"), "run" (a run's own job.json) or
    "override". `shadowed` is what an override hides, if the file says something at
    `shadowed_where`.
    """

    kind: str
    where: str = ""
    shadowed: Any = None
    shadowed_where: str = ""


def find_key_origins(
    path: str | FilePath | None = None, overrides: Sequence[str] = ()
) -> dict[str, ValueOrigin]:
    """The origin of the value of each key of the job.

    `path` may be a run's job.json, too. Does not validate.
    """
    kind_of_file = "file"
    if path is not None and str(path).endswith(".json"):
        # No TOML text, and so no lines to name: the file alone is the origin.
        kind_of_file, source = "run", _read_json(path)
    else:
        source = _read_toml(path)
    places = source.locate_keys()
    given_keys = _find_given_keys(source, ())
    # An override may lie deeper, as model.args.depth does: its key is the first two names.
    laid = {override.path[:2] for override in parse_overrides(overrides)[0]}
    origin_by_key: dict[str, ValueOrigin] = {}
    for section, keys in list_keys_by_section().items():
        for key in keys:
            name = f"{section}.{key}"
            origin = ValueOrigin("default")
            if position := places.get((section, key)):
                origin = ValueOrigin(
                    "file", f"{source.name}:{position.key.line}:{position.key.column}"
                )
            elif name in given_keys:
                origin = ValueOrigin(kind_of_file, source.name)
            if (section, key) in laid:
                hidden = None
                if origin.where:
                    hidden = (source.tree or {}).get(section, {}).get(key)
                origin = ValueOrigin("override", "", hidden, origin.where)
            origin_by_key[name] = origin
    return origin_by_key


def _build_job(source: JobSource, texts: Sequence[str]) -> Job:
    overrides, findings = parse_overrides(texts)
    tree = source.tree or {}
    job, refused = validate_job_tree(apply_overrides(tree, overrides))
    findings += refused
    # `validate` gives a job even of refused values: one call tells all that is wrong.
    findings += run_checks(job, _find_given_keys(source, overrides), _list_refused_keys(refused))
    if findings:
        raise JobError(_list_problems_in_order(findings, source, overrides))
    return job


def _find_given_keys(source: JobSource, overrides: Sequence[Override]) -> set[str]:
    """The dotted keys that the user wrote.

    A run's own job.json holds every key: there, defaults were not written.
    """
    keys = {".".join(map(str, override.path[:2])) for override in overrides}
    for section, table in (source.tree or {}).items():
        if not isinstance(table, dict):
            continue
        for key, value in table.items():
            # In job.json only a value that is no default shows that somebody wrote it.
            if source.toml is not None or not _is_default_value(section, key, value):
                keys.add(f"{section}.{key}")
    return keys


def _is_default_value(section: str, key: str, value: Any) -> bool:
    return (
        find_key_annotation((section, key)) is not None and _DEFAULT_JOB_JSON[section][key] == value
    )


_DEFAULT_JOB_JSON: dict[str, Any] = Job().to_json()


def _list_refused_keys(findings: Sequence[Finding]) -> set[str]:
    """The dotted keys that a finding is about; of a refused section, all of them."""
    refused: set[str] = set()
    for finding in findings:
        section = str(finding.path[0])
        if len(finding.path) > 1:
            refused.add(f"{section}.{finding.path[1]}")
        else:
            refused |= {f"{section}.{name}" for name in list_keys_by_section().get(section, ())}
    return refused


def _list_problems_in_order(
    findings: Sequence[Finding], source: JobSource, overrides: Sequence[Override]
) -> list[JobProblem]:
    """The findings with their places, in the order in which the user wrote the things they are
    about."""
    places = source.locate_keys()
    placed = [_place_finding(finding, source, places, overrides) for finding in findings]
    # By place alone: problems of one place stay in the order in which the checks found them.
    placed.sort(key=lambda pair: pair[0])
    return [problem for _, problem in placed]


_ReportOrder = tuple[int, int, int]


def _place_finding(
    finding: Finding, source: JobSource, places: dict[Path, KeyPlace], overrides: Sequence[Override]
) -> tuple[_ReportOrder, JobProblem]:
    path, index = _choose_blamed_key(finding, source, overrides)
    # Sorted by the first number: places of the file, the file as a whole, then overrides.
    where, order = "override", (2, index, 0)
    if index < 0:
        where, order = source.name, (1, 0, 0)
        spot = _find_nearest_position(path, places, finding.at_key)
        if spot is not None:
            where = f"{source.name}:{spot.line}:{spot.column}"
            order = (0, spot.line, spot.column)
    return order, JobProblem(format_key_path(path), finding.what, where, finding.fix)


def _choose_blamed_key(
    finding: Finding, source: JobSource, overrides: Sequence[Override]
) -> tuple[Path, int]:
    """The key that a finding is told of, and its override's index or -1.

    Of several that disagree: the last override, else its own key, else the first of them that the
    file gives: the others are only defaults.
    """
    if finding.override is not None:
        return finding.path, finding.override
    # The last one wins when they are laid, so it is the one that made the value.
    for override in reversed(overrides):
        if _paths_overlap(override.path, finding.path):
            return finding.path, override.index
        if any(_paths_overlap(override.path, path) for path in finding.also):
            return override.path[:2], override.index
    for path in (finding.path, *finding.also):
        if _has_path(source.tree, path[:2]):
            return path, -1
    return finding.path, -1


def _paths_overlap(override: Path, path: Path) -> bool:
    """True if one of the two paths lies inside the other."""
    # An override of a table covers all inside, and a finding about a table what was laid into it.
    length = min(len(override), len(path))
    return override[:length] == path[:length]


def _has_path(tree: Any, path: Path) -> bool:
    for part in path:
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _find_nearest_position(
    path: Path, places: dict[Path, KeyPlace], at_key: bool
) -> TextPosition | None:
    """The spot of `path`, or of the innermost thing around it that stands somewhere."""
    while path:
        if position := places.get(path):
            if at_key:
                return position.key
            return position.value
        path = path[:-1]
    return None


def _read_toml(path: str | FilePath | None) -> JobSource:
    if path is None:
        return JobSource(toml="")
    name, text = _read_file_text(path)
    # As tomllib counts lines: places are looked up in this text.
    text = text.replace("\r\n", "\n")
    try:
        return JobSource(name, tomllib.loads(text), text)
    except tomllib.TOMLDecodeError as error:
        raise JobError([_format_syntax_problem(name, text, str(error))]) from None
    except RecursionError:
        raise JobError(
            [JobProblem("syntax", "arrays or tables are nested too deeply", name)]
        ) from None
    except ValueError:  # int() refuses more than 4,300 digits
        raise JobError(
            [JobProblem("syntax", "a whole number has thousands of digits", name)]
        ) from None


def _read_json(path: str | FilePath) -> JobSource:
    name, text = _read_file_text(path)
    try:
        tree = parse_json(text, unique_keys=True)
    except RepeatedKeyError as error:
        raise JobError([JobProblem("syntax", str(error), name)]) from None
    except json.JSONDecodeError as error:
        where = f"{name}:{error.lineno}:{error.colno}"
        raise JobError([JobProblem("syntax", f"not JSON: {error.msg}", where)]) from None
    except (ValueError, RecursionError):
        raise JobError(
            [JobProblem("syntax", "a number is too long, or the nesting too deep", name)]
        ) from None
    if not isinstance(tree, dict):
        raise JobError(
            [JobProblem("job file", "is JSON, but not a job", name, "give the job.json of a run")]
        )
    return JobSource(name, tree)


def _read_file_text(path: str | FilePath) -> tuple[str, str]:
    """The file's name for messages and its text.

    Raises JobError if it is missing, a directory or not UTF-8.
    """
    name = shorten_to_one_line(str(path), limit=4096)

    def refuse(problem: str, fix: str = "") -> JobError:
        return JobError([JobProblem("job file", problem, name, fix)])

    try:
        # utf-8-sig: editors of Windows put a byte order mark in front, which TOML does not know.
        return name, read_whole_regular_file(path, MAX_JOB_FILE_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise refuse("does not exist", _suggest_nearest_file(FilePath(path))) from None
    except IsADirectoryError:
        fix = "give a .toml file"
        if jobs := sorted(FilePath(path).glob("*.toml")):
            fix = f"did you mean {str(jobs[0])!r}?"
        raise refuse("is a directory", fix) from None
    except UnicodeDecodeError as error:
        raise refuse(f"is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    except OSError as error:
        raise refuse(f"cannot be read ({error.strerror or error})") from None
    except ValueError:  # a NUL in the path
        raise refuse("is not a possible path") from None


def _suggest_nearest_file(path: FilePath) -> str:
    """'did you mean "job.toml"?' for the nearest file in the same directory; "" if none is near, or
    `path` is a link that leads nowhere."""
    if path.is_symlink():
        return f"it is a link to {shorten_to_one_line(os.readlink(path))!r}, which is not there"
    if not path.parent.is_dir():
        return f"there is no directory {shorten_to_one_line(str(path.parent))!r}"
    try:
        files = [file.name for file in path.parent.iterdir() if file.suffix in (".toml", ".json")]
    except OSError:
        return ""
    return format_nearest_word_hint(path.name, sorted(files))


def _format_syntax_problem(name: str, text: str, message: str) -> JobProblem:
    """tomllib's message with its place in front; "end of document" becomes the end of the last
    line with text."""
    message_text, _, location = message.rpartition(" (at ")
    # "At end of document" has no place of its own: behind the last letter is where it broke off.
    lines = text.rstrip().split("\n")
    if match := re.fullmatch(r"line (\d+), column (\d+)\)", location):
        line, column = int(match[1]), int(match[2])
    else:
        line, column = len(lines), len(lines[-1]) + 1
    fix = ""
    if message_text.startswith("Invalid value"):
        fix = "strings are written in quotes, true and false in lower case"
    elif message_text.startswith("Cannot"):
        # The parser stands after the second one: show where that begins.
        message_text, fix = "a key or section is given twice", "keep one of them"
        shown = text.split("\n")[line - 1]
        column = len(shown) - len(shown.lstrip()) + 1
    return JobProblem(
        "syntax", message_text[:1].lower() + message_text[1:], f"{name}:{line}:{column}", fix
    )
