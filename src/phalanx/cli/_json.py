"""`--json`: facts for programs on standard output, each with a versioned schema; everything else
goes to stderr."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.cli._os_errors import convert_uncaught_os_error
from phalanx.core.errors import PhalanxError
from phalanx.core.output import redirect_stream_to_devnull
from phalanx.core.secrets import Redactor
from phalanx.core.terminal import print_document

JSON_SCHEMA_VERSION = 1


def print_json(
    kind: str,
    facts: Mapping[str, Any],
    *,
    indent: int | None = None,
    raises_without_reader: bool = False,
) -> None:
    """Print `build_json_body` of `kind` and `facts`, where anybody still reads: what the verb ends
    with does not hang on that.

    With `raises_without_reader` BrokenPipeError is raised: of a verb that does nothing but print.
    """
    body = build_json_body(kind, facts)
    try:
        # Not print, whose filter would shorten long lines.
        print_document(json.dumps(body, indent=indent, allow_nan=False, ensure_ascii=False))
    except BrokenPipeError:
        if raises_without_reader:
            raise
        redirect_stream_to_devnull(sys.stdout)


def build_json_body(kind: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One object with `"schema": "phalanx.KIND/1"` first; NaN and infinities become null,
    secrets `***`."""
    body: dict[str, Any] = Redactor(os.environ).redact_value(
        _replace_nonfinite({"schema": f"phalanx.{kind}/{JSON_SCHEMA_VERSION}", **facts})
    )
    return body


@contextlib.contextmanager
def print_errors_as_json(as_json: bool) -> Iterator[None]:
    """Inside, an error is an object on standard output, too (phalanx.error/1), if `as_json`; one,
    however many verbs it leaves on its way."""
    try:
        yield
    except PhalanxError as error:
        if as_json and not error.is_printed_as_json:
            error.is_printed_as_json = True
            print_json("error", error.to_json())
        # Raised on: the words for stderr and the exit code are the caller's.
        raise
    except OSError as error:
        problem = convert_uncaught_os_error(error) if as_json else None
        if problem is None:
            raise
        problem.is_printed_as_json = True
        print_json("error", problem.to_json())
        raise problem from None


@contextlib.contextmanager
def redirect_text_to_stderr(as_json: bool) -> Iterator[None]:
    """Inside, what is meant for people goes to standard error if `as_json`."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(item) for item in value]
    return value
