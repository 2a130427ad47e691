"""Finds the line of Python that a person would look at: the call of a collective or of a phase."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType
from typing import NamedTuple

_SKIP, _OURS, _STOP, _THEIRS = range(4)
_MAX_FRAMES = 128
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
# What these call is the step itself: a line of the user's above them says nothing of it.
_LOOP_ROOMS = ("train", "run", "launch", "cli", "verify", "bench", "__main__.py")
# They only pass calls on.
_PASSING_ROOMS = (
    os.path.join("core", "phases.py"),
    os.path.join("core", "black_box.py"),
    os.path.join("core", "call_site.py"),
    os.path.join("mesh", "c10d_calls.py"),
    os.path.join("mesh", "collective_recorder.py"),
    os.path.join("mesh", "reduce_ops.py"),
)


class CallSite(NamedTuple):
    """A line of a file; of neither where none is known."""

    file: str
    line: int


UNKNOWN_CALL_SITE = CallSite("", 0)
# Without the function that NamedTuple makes, whose call costs more than the walk over a frame.
_make_call_site = tuple.__new__


class CallSiteFinder:
    """Finds call sites; what kind of file a frame is of is looked up once per file."""

    def __init__(self) -> None:
        self._kinds: dict[str, int] = {}

    def find(self, depth: int = 1) -> CallSite:
        """The innermost line of code that is neither phalanx's nor torch's, below the training
        loop; where there is none, the innermost line of phalanx.

        `phalanx.nn` counts as a model, and so as the former. `depth`: frames to skip.
        """
        frame: FrameType | None = sys._getframe(depth)
        innermost_phalanx_frame: FrameType | None = None
        kinds = self._kinds
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            file = frame.f_code.co_filename
            kind = kinds.get(file)
            if kind is None:
                kind = kinds[file] = _classify_file(file)
            if kind == _THEIRS:
                return _make_call_site(CallSite, (file, frame.f_lineno))
            if kind != _SKIP and innermost_phalanx_frame is None:
                innermost_phalanx_frame = frame
            if kind == _STOP:
                break
            frame = frame.f_back
        if innermost_phalanx_frame is None:
            return UNKNOWN_CALL_SITE
        return _make_call_site(
            CallSite,
            (innermost_phalanx_frame.f_code.co_filename, innermost_phalanx_frame.f_lineno),
        )


def _classify_file(file: str) -> int:
    if file.startswith("<"):
        return _SKIP
    if file.startswith(_PACKAGE):
        inside = file[len(_PACKAGE) :]
        if inside in _PASSING_ROOMS:
            return _SKIP
        room = inside.partition(os.sep)[0]
        if room == "nn":
            return _THEIRS
        if room in _LOOP_ROOMS:
            return _STOP
        return _OURS
    if _is_of_torch(file) or os.path.basename(file) == "typing_extensions.py":
        # The latter has the decorator of torch's deprecated functions.
        return _SKIP
    if file.startswith(_STDLIB) and "site-packages" not in file:
        return _SKIP
    return _THEIRS


def _is_of_torch(file: str) -> bool:
    torch = sys.modules.get("torch")
    origin = getattr(torch, "__file__", None)
    if origin is None:
        return False
    return file.startswith(os.path.dirname(origin) + os.sep)
