"""Who asked for an operation: the line of phalanx or of the user's code that is nearest to it, and
the part of torch in between."""

from __future__ import annotations

import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import phalanx

PHALANX = str(Path(phalanx.__file__).parent)
_OWN = str(Path(__file__).parent)
_LIBRARIES = tuple(
    {
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        "<",
    }
)
_IN_TORCH = {
    "torch/distributed/fsdp/": "fsdp",
    "torch/optim/": "optim",
    "torch/nn/parallel/": "ddp",
}
_LIBRARY, _DRY_RUN = "", "-"


@dataclass(frozen=True)
class OperationCaller:
    """`line` is "file:number function", the file as phalanx or the user knows it; `through` is the
    part of torch that it called: "fsdp", "optim", "ddp", or empty."""

    file: str
    line: str
    through: str = ""


NO_CALLER = OperationCaller("", "(nobody known)")


class CallerFinder:
    """Finds callers by walking the stack; what it learned of code is remembered."""

    def __init__(self) -> None:
        self._files: dict[CodeType, str] = {}
        self._through: dict[CodeType, str] = {}
        self._callers: dict[tuple[CodeType, int, str], OperationCaller] = {}

    def find(self, depth: int = 2, skips: tuple[str, ...] = ()) -> OperationCaller:
        """The caller of the operation that is under way; `depth` frames are the tracker's own, and
        those in the files `skips` do not count."""
        frame = sys._getframe(depth)
        through = ""
        while frame is not None:
            code = frame.f_code
            file = self._files.get(code)
            if file is None:
                file = self._classify_code_origin(code)
            if file == _LIBRARY:
                through = through or self._through[code]
            elif file != _DRY_RUN and file not in skips:
                key = code, frame.f_lineno, through
                if key not in self._callers:
                    line = f"{file}:{frame.f_lineno} {code.co_name}"
                    self._callers[key] = OperationCaller(file, line, through)
                return self._callers[key]
            frame = frame.f_back  # type: ignore[assignment]
        return NO_CALLER

    def find_source_file(self, code: CodeType) -> str:
        """The file of `code` if it is phalanx's or the user's, and not a part of the dry run; else
        empty."""
        file = self._classify_code_origin(code)
        return "" if file == _DRY_RUN else file

    def _classify_code_origin(self, code: CodeType) -> str:
        """Note of `code` whose it is; the file if it is phalanx's or the user's."""
        path = code.co_filename
        self._through[code] = ""
        # Modes of phalanx hand on what somebody else asked for.
        if path.startswith(_OWN) or code.co_name in ("__torch_dispatch__", "__torch_function__"):
            file = _DRY_RUN
        elif path.startswith(PHALANX):
            file = f"phalanx{path[len(PHALANX) :]}"
        elif path.startswith(_LIBRARIES):
            file = _LIBRARY
            for folder, name in _IN_TORCH.items():
                if folder in path:
                    self._through[code] = name
        else:
            file = path
        self._files[code] = file
        return file
