"""What becomes of a refusal that a script of the library's users does not catch: one line from one
rank, and its code.

Python shows an exception that nobody catches through `sys.excepthook`. There a PhalanxError needs
no traceback, which every rank would print; anything else is the user's, and shown as ever. Where
somebody has a hook of their own (a notebook, a crash reporter), or catches it (pytest), there is
nothing to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import TracebackType

from phalanx.core.errors import JobError, PhalanxError

# A variable: show the traceback all the same.
TRACEBACK_VARIABLE = "PHALANX_TRACEBACK"
# torchrun shows this file of a rank that failed.
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# A marker this old is of ranks before these.
STALE_REPORT_MARKER_S = 60.0
_PACKAGE_DIR = str(Path(__file__).parents[1])
# Not "/lib/python" everywhere: Red Hat's is in /usr/lib64.
_STANDARD_LIBRARY_DIR = os.path.join(os.path.dirname(os.__file__), "")


def install_one_line_refusal_hook() -> None:
    """Have refusals that nobody catches shown in a line, unless somebody has a hook already."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_uncaught_error


def _print_uncaught_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive or sys.flags.inspect
    if not isinstance(error, PhalanxError) or is_interactive or os.environ.get(TRACEBACK_VARIABLE):
        sys.__excepthook__(kind, error, trace)
        return
    rank = os.environ.get("RANK", "0")
    lines = [str(error)]
    if isinstance(error, JobError):
        lines = str(error).splitlines()
    if _is_first_rank_to_report(str(error)):
        _print_refusal(lines, rank, trace)
    _write_torchrun_error_file("; ".join(lines))
    # Python obeys it in an excepthook: without it the exit code would be 1.
    raise SystemExit(int(error.exit_code))


def _print_refusal(lines: list[str], rank: str, trace: TracebackType | None) -> None:
    # Only now: nobody pays for what is not needed.
    from phalanx.core.terminal import filtering_standard_streams

    prefix = "phalanx: "
    if rank not in ("", "0"):
        prefix += f"rank {rank}: "
    location = find_innermost_user_code_line(trace)
    if lines and location:
        lines = [*lines[:-1], f"{lines[-1]} ({Path(location).name})"]
    with filtering_standard_streams():
        for line in lines:
            print(f"{prefix}{line}", file=sys.stderr)


def find_innermost_user_code_line(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code, "/home/me/train.py:12"; empty if there is none."""
    for frame in reversed(traceback.extract_tb(trace)):
        if not is_library_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def is_library_file(name: str) -> bool:
    """True for the name of a source file that is phalanx's, an installed package's or Python's,
    and for one that names no file that somebody could open."""
    return name.startswith((_PACKAGE_DIR, _STANDARD_LIBRARY_DIR, "<")) or any(
        folder in name for folder in ("site-packages", "dist-packages", "/lib/python")
    )


def _is_first_rank_to_report(text: str) -> bool:
    """True if no other rank on this machine has reported the same error: each rank refuses a bad
    job for itself."""
    # Only now: nobody pays for what is not needed.
    from phalanx.core.clocks import build_monotonic_clock_id
    from phalanx.core.files import write_bytes_atomically

    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        return True
    try:
        marker = _build_report_marker_path(text)
        own_marker = marker.with_name(f"{marker.name}-{os.getpid()}")
        if _is_marker_of_earlier_ranks(marker):
            marker.unlink(missing_ok=True)
        write_bytes_atomically(
            own_marker, f"{build_monotonic_clock_id()} {time.monotonic()}".encode(), durable=False
        )
        try:
            # A link has the content from the start, and fails where another rank was first.
            os.link(own_marker, marker)
        finally:
            own_marker.unlink()
    except FileExistsError:
        return False
    except OSError:
        # Better said twice than never.
        return True
    return True


def _is_marker_of_earlier_ranks(marker: Path) -> bool:
    """True for a marker of ranks before these. Clocks that people set have no part in it."""
    from phalanx.core.clocks import build_monotonic_clock_id
    from phalanx.core.files import read_whole_regular_file

    try:
        clock, said_s = read_whole_regular_file(marker, 1000).decode().split()
        age_s = time.monotonic() - float(said_s)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        # No marker of ours.
        return True
    return clock != build_monotonic_clock_id() or not 0 <= age_s <= STALE_REPORT_MARKER_S


def _build_report_marker_path(text: str) -> Path:
    """A file of the ranks that were started together: in torchrun's own folder of them, if there
    is one. Raises OSError where no temporary file can be written."""
    from phalanx.core.digest import digest

    folder = Path(tempfile.gettempdir())
    # torchrun's error file lies in a folder for each rank, inside of one for all of an attempt.
    parents = Path(os.environ.get(ERROR_FILE_VARIABLE, "")).parents
    if len(parents) > 2 and parents[1].is_dir():
        folder = parents[1]
    variables = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    group = [os.environ.get(name, "") for name in variables]
    return folder / f"phalanx-refusal-{os.getuid()}-{digest([group, os.getppid(), text])}"


def _write_torchrun_error_file(text: str) -> None:
    """torchrun's summary shows this line instead of a hint on how to get a traceback."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path:
        from phalanx.core.secrets import Redactor

        body = {
            "message": Redactor(os.environ).redact_text(f"phalanx: {text}"),
            "timestamp": int(time.time()),
        }
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(body), encoding="utf-8")
