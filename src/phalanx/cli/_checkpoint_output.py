"""What the verbs on checkpoints print: a stranger may have written the names in it, and any terminal may read them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.cli._json import printing_json
from phalanx.core.errors import PhalanxError
from phalanx.core.printable import printable


def tell(text: str, *, as_problem: bool = False) -> None:
    """One line; a problem goes to standard error."""
    print(_safe(text), file=sys.stderr if as_problem else sys.stdout)


@contextmanager
def refusing(as_json: bool) -> Iterator[None]:
    """As `printing_json`; what an error says for people is safe, too."""
    try:
        with printing_json(as_json):
            yield
    except PhalanxError as error:
        error.what = _safe(error.what)
        error.where, error.why, error.fix = (part and _safe(part) for part in (error.where, error.why, error.fix))
        raise


def _safe(text: str) -> str:
    return printable(text, max(1, len(text) + 100))
