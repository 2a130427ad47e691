"""Lines that verbs print: strangers may have written names in them, and any terminal may show
them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.cli._json import print_errors_as_json
from phalanx.core.errors import PhalanxError
from phalanx.core.printable import printable


def print_line(text: str, *, as_problem: bool = False) -> None:
    """Print one line; a problem goes to standard error."""
    print(_make_safe_to_print(text), file=sys.stderr if as_problem else sys.stdout)


@contextmanager
def make_errors_printable(as_json: bool) -> Iterator[None]:
    """Inside, the texts of a PhalanxError are made safe; with `as_json` it is printed as an
    object, too."""
    try:
        with print_errors_as_json(as_json):
            yield
    except PhalanxError as error:
        error.what = _make_safe_to_print(error.what)
        error.where, error.why, error.fix = (
            part and _make_safe_to_print(part) for part in (error.where, error.why, error.fix)
        )
        raise


def _make_safe_to_print(text: str) -> str:
    # A limit above the length: nothing is cut.
    return printable(text, max(1, len(text) + 100))
