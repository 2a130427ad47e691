"""How far something is: a bar on a terminal, a line now and then anywhere else.

On standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, cast

from phalanx.core.units import format_seconds
from phalanx.observe.screen import QuietStream, open_safe_console

if TYPE_CHECKING:
    from phalanx.job.module_probe import TellProgress

REDRAW_INTERVAL_S = 0.1
# Short work says nothing before its summary.
PROGRESS_LINE_INTERVAL_S = 5.0


class ProgressLine:
    """Bytes done of bytes in all, with words beside them. `kept_bytes` were done before this
    began.
    """

    def __init__(
        self,
        verb: str,
        *,
        is_terminal: bool | None = None,
        line_s: float = PROGRESS_LINE_INTERVAL_S,
    ) -> None:
        self._verb, self._line_s = verb, line_s
        self._stream = QuietStream(sys.stderr)
        self._is_terminal = sys.stderr.isatty() if is_terminal is None else is_terminal
        self._bar: Any = None
        self._began = self._told_s = time.monotonic()

    def __enter__(self) -> ProgressLine:
        return self

    def update(
        self,
        done_bytes: float,
        total_bytes: float,
        *,
        kept_bytes: float = 0.0,
        suffix: str = "",
        instead: str = "",
    ) -> None:
        """`suffix` follows the numbers; `instead` is said instead of them, of work that has no
        measure.
        """
        now = time.monotonic()
        if now - self._told_s < (REDRAW_INTERVAL_S if self._is_terminal else self._line_s):
            return
        self._told_s = now
        words = instead or self._describe_progress(
            done_bytes, total_bytes, kept_bytes, now - self._began, suffix
        )
        if self._is_terminal:
            self._draw_bar(done_bytes, total_bytes, words)
        else:
            self._stream.write(
                f"{self._verb} {100 * done_bytes / max(1, total_bytes):3.0f} %  {words}\n"
            )
            self._stream.flush()

    def make_byte_counter(self, total_bytes: float) -> Callable[[int], None]:
        """A function that adds bytes to those that are done, and shows how many of `total_bytes`
        they are.
        """
        done_bytes = 0

        def add(num_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += num_bytes
            self.update(done_bytes, total_bytes)

        return add

    def _describe_progress(
        self, done: float, total: float, skipped: float, elapsed_s: float, words: str
    ) -> str:
        rate, eta = 0.0, "?"
        if elapsed_s > 0:
            # What an earlier command had done took no time of this one.
            rate = (done - skipped) / elapsed_s
        if rate > 0:
            eta = format_seconds((total - done) / rate)
        parts = [f"{done / 1e6:,.0f}/{total / 1e6:,.0f} MB", f"{rate / 1e6:.1f} MB/s"]
        if done < total:
            parts.append(f"eta {eta}")
        return "  ".join(filter(None, [*parts, words]))

    def _draw_bar(self, done: float, total: float, words: str) -> None:
        if self._bar is None:
            self._bar = _open_rich_bar(cast(TextIO, self._stream), self._verb)
        self._bar.update(
            self._bar.task_ids[0], completed=done, total=total, words=words, refresh=True
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The bar goes: the lines after it say it all."""
        self.hide()

    def hide(self) -> None:
        """Take the bar away, so that lines can be printed; the next `update` draws it again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def show_progress_of_module() -> Iterator[TellProgress]:
    """For the body, a function that shows how far the measuring of a user's module is."""
    with ProgressLine("model") as line:
        yield lambda num_done, num_parts, words: line.update(num_done, num_parts, instead=words)


def _open_rich_bar(stream: TextIO, verb: str) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        # Names of files are text: rich would read their brackets as markup.
        TextColumn(verb, markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %", markup=False),
        TextColumn("{task.fields[words]}", markup=False),
        console=open_safe_console(stream),
        # No thread of rich's redraws: `update` does.
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.start()
    bar.add_task(verb, words="")
    return bar
