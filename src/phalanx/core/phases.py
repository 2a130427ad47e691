"""`phase(name)`: the one seam through which spans, faults, guards and progress reach the step loop.

A `Phases` object belongs to one rank. `with phases("forward"): ...` charges the wall-clock seconds inside to
"forward", minus those of phases nested in it, so that the phases of a step never count a second twice. Listeners
(fault injection, a watchdog) are called on entry. Step, phase and collective are also written to a small
memory-mapped black box that another process can read after this one was stopped or killed.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

# What a step's seconds are charged to; "optimizer" includes the gradients' norm and clipping, "pipeline" is waiting for
# another stage: the bubble as this rank sees it. Another name is a bug.
PHASES = (
    "startup",
    "data",
    "forward",
    "backward",
    "collective",
    "pipeline",
    "optimizer",
    "evaluate",
    "ckpt_stage",
    "ckpt_write",
    "before_commit",
    "after_commit",
    "ckpt_load",
)

Listener = Callable[[int, str], None]


class BlackBox:
    """The last known place of a rank: 128 bytes, memory-mapped, written without a system call.

    Layout: step int64 | monotonic seconds float64 | phase 32 bytes | collective 80 bytes.
    """

    _HEAD = struct.Struct("<qd32s80s")

    def __init__(self, path: Path) -> None:
        self._map = _map_file(path, self._HEAD.size)

    def write(self, step: int, phase: str, collective: str = "") -> None:
        self._HEAD.pack_into(self._map, 0, step, time.monotonic(), phase.encode()[:32], collective.encode()[:80])

    def close(self) -> None:
        self._map.close()


def _map_file(path: Path, num_bytes: int) -> mmap.mmap:
    """Map `num_bytes` zeros of a new file; memory that nobody else sees where the disk refuses them.

    The zeros are written: a page of a file that only was made longer has no room on a full disk, and the first write
    to its mapping would kill the process (SIGBUS).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w+b") as file:
            file.write(bytes(num_bytes))
            file.flush()
            return mmap.mmap(file.fileno(), num_bytes)
    except OSError:
        return mmap.mmap(-1, num_bytes)


class Place(NamedTuple):
    """What a black box says: where a rank was last seen, and when (monotonic seconds of that machine)."""

    step: int
    monotonic_s: float
    phase: str
    collective: str


def read_black_box(path: Path) -> Place | None:
    """The last place a rank wrote, or None if it never wrote one."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    if len(raw) < BlackBox._HEAD.size:
        return None
    step, seconds, phase, collective = BlackBox._HEAD.unpack_from(raw)
    if not phase.strip(b"\0"):
        return None
    return Place(step, seconds, _text(phase), _text(collective))


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")  # the writer cuts where the field ends


class Phases:
    """Times the phases of one rank and tells listeners where it is. `take()` returns and clears the seconds."""

    def __init__(self, black_box: BlackBox | None = None, listeners: tuple[Listener, ...] = ()) -> None:
        self.step = 0
        self._black_box = black_box
        self._listeners = listeners
        self._seconds: dict[str, float] = {}
        self._stack: list[tuple[str, str]] = []
        self._since = 0.0

    def beside(self, step: int) -> Phases:
        """For another thread of this rank, at work on `step`: the same listeners, seconds of its own. The black box
        goes on telling where training is.
        """
        found = Phases(None, self._listeners)
        found.step = step
        return found

    @contextmanager
    def __call__(self, name: str, collective: str = "") -> Iterator[None]:
        depth = len(self._stack)
        try:
            self.enter(name, collective)  # a listener may raise
            yield
        except BaseException:
            if len(self._stack) > depth:
                self._close(name)  # the black box goes on telling where it was raised
            raise
        if len(self._stack) > depth:
            self.leave(name)

    def enter(self, name: str, collective: str = "") -> None:
        """Begin a phase; the enclosing one stops counting. For places where a `with` cannot stand (hooks)."""
        assert name in PHASES, name
        now = time.perf_counter()
        if self._stack:
            self._charge(now)
        self._stack.append((name, collective))
        self._since = now
        if self._black_box is not None:
            self._black_box.write(self.step, name, collective)
        for listener in self._listeners:
            listener(self.step, name)

    def leave(self, name: str) -> None:
        """End phase `name` and any that an exception left open inside it."""
        self._close(name)
        if self._black_box is not None:  # after the outermost phase its collective, too, lies behind this rank
            self._black_box.write(self.step, *(self._stack[-1] if self._stack else (name, "")))

    def _close(self, name: str) -> None:
        now = time.perf_counter()
        assert any(name == open_name for open_name, _ in self._stack), (name, self._stack)
        self._charge(now)
        while self._stack.pop()[0] != name:
            pass
        self._since = now

    def _charge(self, now: float) -> None:
        name = self._stack[-1][0]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since

    @property
    def current(self) -> str:
        return self._stack[-1][0] if self._stack else ""

    @contextmanager
    def apart(self) -> Iterator[dict[str, float]]:
        """For what is no part of a step (an evaluation between two): its seconds go to the dict that is yielded, when
        it ends, and what was charged before stays as it was."""
        before = self.take()
        inside: dict[str, float] = {}
        try:
            yield inside
        finally:
            inside.update(self.take())
            for name, seconds in before.items():
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last `take`; open phases are charged up to now."""
        if self._stack:
            now = time.perf_counter()
            self._charge(now)
            self._since = now
        taken, self._seconds = self._seconds, {}
        return taken
