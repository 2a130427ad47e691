"""What verbs share of their arguments: `[JOB.toml] [key=value ...]`."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.core.errors import UsageError, format_nearest_word_hint
from phalanx.core.files import read_whole_regular_file
from phalanx.core.registry import is_foreign

# "job.toml" is no key, but a file that is not there.
_JOB_KEY_PATTERN = re.compile(r"[A-Za-z_]+\.(?!toml$)[A-Za-z_]+")
_OVERRIDE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*=")


def split_job_file_and_overrides(
    arguments: Sequence[str], *, allow_file: bool = True
) -> tuple[str | None, list[str]]:
    """(job file or None, overrides). Raises UsageError (exit 2) for a second file."""
    files, overrides = [], []
    for argument in arguments:
        if _OVERRIDE_PATTERN.match(argument):
            overrides.append(argument)
        else:
            files.append(argument)
    if not files:
        return None, overrides
    job_file = files[0]
    if not allow_file:
        raise UsageError(f"{job_file!r}: a run has its own job", fix="give only key=value")
    # Before files are counted: a key without its value is told as such, not as a second file.
    for word in files:
        _refuse_misspelt_file_or_key(word)
    if not job_file.endswith((".toml", ".json")):
        from phalanx.cli._spelling import refuse_non_job_file

        refuse_non_job_file(job_file)
    if len(files) > 1:
        raise UsageError(
            f"{files[1]!r}: one job file is enough", fix="overrides are written section.key=value"
        )
    _say_if_file_sets_nothing(job_file)
    return job_file, overrides


def _say_if_file_sets_nothing(job_file: str) -> None:
    try:
        content = read_whole_regular_file(job_file)
    except OSError:
        # Whoever loads it says what is wrong with it.
        return
    lines = [line.strip() for line in content.splitlines()]
    if all(not line or line.startswith(b"#") for line in lines):
        print(f"{job_file} sets no key: the job has the defaults of all", file=sys.stderr)


def _refuse_misspelt_file_or_key(word: str) -> None:
    """Raise UsageError for what is no file, and looks like a job file's name or a key."""
    if os.path.exists(word):
        return
    ending = Path(word).suffix
    if ending != ".toml" and difflib.get_close_matches(ending, [".toml"], cutoff=0.7):
        suggestion = format_nearest_word_hint(
            word, sorted(path.name for path in Path().glob("*.toml"))
        )
        raise UsageError(f"{word!r}: no such job file", fix=suggestion or "phalanx init writes one")
    if _JOB_KEY_PATTERN.fullmatch(word):
        raise UsageError(
            f"{word!r}: neither a job file nor an override", fix=f"an override is {word}=VALUE"
        )


def refuse_options_without_effect(cause: str, given: Mapping[str, bool]) -> None:
    """Raise UsageError for the first option that is `given` though `cause` leaves it without
    effect: it is not ignored in silence."""
    for option, is_given in given.items():
        if is_given:
            raise UsageError(f"{option} has no effect {cause}", fix=f"leave {option} out")


def build_overrides_of_model(model: str | None, overrides: list[str]) -> list[str]:
    """The overrides of a job whose model is named on the command line: a preset, or
    package.module:factory. Raises UsageError where a key among them names another one."""
    from phalanx.cli._plan_keys import check_options_against_keys

    if model is None:
        return overrides
    key = "model.preset"
    if is_foreign(model):
        key = "model.kind"
    check_options_against_keys({}, f"{key}={model}", overrides)
    return [f"{key}={model}", *overrides]
