"""Tells when torch compiles: that may take minutes in which a rank writes nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.callback import callback_handler

from phalanx.core.black_box import BlackBox


@contextlib.contextmanager
def noting_compilations(box: BlackBox) -> Iterator[None]:
    """Note in `box`, during the body, when compiling begins and ends."""
    with watching_compilations(box.note_compilation):
        yield


@contextlib.contextmanager
def watching_compilations(tell: Callable[[bool], None]) -> Iterator[None]:
    """Tell, during the body, when compiling begins (True) and ends (False), tracing included."""

    def begin(args: Any) -> None:
        tell(True)

    def end(args: Any) -> None:
        tell(False)

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        # A reset of the compiler forgets them, too.
        with contextlib.suppress(ValueError):
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)
