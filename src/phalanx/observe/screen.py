"""The one place where rich meets a terminal: bars are drawn around texts that are filtered like
any other output, on streams that may break."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TextIO

from phalanx.core.printable import printable_text
from phalanx.core.secrets import Redactor
from phalanx.core.terminal import unwrap_stream


def open_safe_console(stream: TextIO, **options: Any) -> Any:
    """A rich Console on `stream` that obeys no markup, draws no control characters but rich's own,
    and no secret.

    rich is imported here, and only when something is drawn.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    redactor = Redactor(os.environ)

    class SafeConsole(Console):
        """Everything that is drawn passes `render` as segments: texts, and rich's own movements
        of the cursor."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                # rich's movements of the cursor pass as they are: the filter makes text of them.
                yield Segment(
                    text if control else printable_text(redactor.redact_text(text)), style, control
                )

    return SafeConsole(
        file=unwrap_stream(stream),
        force_terminal=True,
        highlight=False,
        # A text may hold "[/b]" or ":smile:": as markup the first raises, the second changes.
        markup=False,
        emoji=False,
        **options,
    )


class QuietStream:
    """A stream that swallows what is written once it broke: rich would end the process on a
    closed pipe."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        try:
            if self._stream is not None:
                self._stream.write(text)
        # An ASCII log: better a question mark than silence. Before ValueError, of which it is one.
        except UnicodeEncodeError:
            return self.write(text.encode(self.encoding, errors="replace").decode(self.encoding))
        # Python raises ValueError for a stream that somebody has closed.
        except (OSError, ValueError):
            self._stream = None
        return len(text)

    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is broken")
        return self._stream.fileno()
