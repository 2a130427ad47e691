"""The one place where rich meets a terminal: bars are drawn around texts that are filtered like any other output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

from phalanx.core.printable import printable_text
from phalanx.core.terminal import unfiltered


def open_screen(stream: TextIO, **options: Any) -> Any:
    """A rich Console on `stream` that obeys no markup, and draws no control characters but rich's own.

    rich is imported here, and only when something is drawn.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class SafeConsole(Console):
        """Everything that is drawn passes `render` as segments: texts, and rich's own movements of the cursor."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable_text(text), style, control)

    return SafeConsole(
        file=unfiltered(stream), force_terminal=True, highlight=False, markup=False, emoji=False, **options
    )
