"""Ctrl-C and signals that ask for a stop, of a verb whose runs `--resume` does not go on from."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import typer

from phalanx.core.errors import ExitCode


@contextlib.contextmanager
def telling_stops(words: str) -> Iterator[None]:
    """Inside, Ctrl-C and signals that ask for a stop end the verb, with `words` on what is left and
    how it goes on. Exit code 130 after Ctrl-C, 75 after a signal."""
    from phalanx.run.stop_signals import raising_on_stop_signals

    try:
        with raising_on_stop_signals(advice=words):
            yield
    except KeyboardInterrupt:
        print(f"stopped; {words}", file=sys.stderr)
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
