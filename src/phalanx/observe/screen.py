"""The one place where rich meets a terminal: bars are drawn around texts that are filtered like
any other output."""

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
