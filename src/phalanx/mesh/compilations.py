"""Has the black box of a rank say while torch compiles: that may take minutes in which the rank
writes nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo.callback import callback_handler

from phalanx.core.black_box import BlackBox


@contextlib.contextmanager
def noting_compilations(box: BlackBox) -> Iterator[None]:
    """Note in `box`, during the body, when compiling begins and ends."""

    def begin(args: Any) -> None:
        box.note_compilation(True)

    def end(args: Any) -> None:
        box.note_compilation(False)

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        # A reset of the compiler forgets them, too.
        with contextlib.suppress(ValueError):
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)
