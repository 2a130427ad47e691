"""The report of a rank's error: sent to the supervisor, and written as a small JSON file into the
run's logs."""

from __future__ import annotations

import dis
import errno
import importlib
import os
import re
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from phalanx.core import registry
from phalanx.core.disk_errors import PERMANENT_WRITE_ERRNOS, convert_disk_error
from phalanx.core.errors import DataSourceError, DataStorageError, ExitCode, PhalanxError
from phalanx.core.files import write_json_atomically
from phalanx.core.outages import find_outage
from phalanx.core.roll_back import RollBack, RollBackRequest
from phalanx.core.secrets import Redactor
from phalanx.core.uncaught import find_innermost_user_code_line, is_library_file

# Words of torch's errors when the fault lies with another rank. Only torch's own RuntimeErrors are
# looked at: the same words in an OSError are more likely about a file server.
_OTHER_RANK_ERROR_PATTERN = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|closed by peer|socket"
    r" ?closed|pair closure"
    r"|timed out waiting|wait timeout|(socket|store|rendezvous|watchdog).{0,40}time[d ]*out"
    r"|gloo.{0,40}connect.{0,40}fail|failed to (recv|send|connect|accept)"
    r"|remote process exited|ncclRemoteError|ncclSystemError|no error.{0,20}peer",
    re.IGNORECASE | re.DOTALL,
)
# What the system says to a process about its own sockets, files and memory: no other rank can bring
# that about.
_OWN_ERRNOS = (
    *(errno.EBADF, errno.ENOTSOCK, errno.EMFILE),
    *(errno.ENFILE, errno.ENOMEM, errno.EACCES),
)
_OWN_ERROR_PATTERN = re.compile(
    "|".join(re.escape(os.strerror(code)) for code in _OWN_ERRNOS), re.IGNORECASE
)
# Of torch, where a rank does not reach the store.
STORE_ERROR_NAMES = ("DistStoreError", "DistNetworkError")
# An exception may hold a whole batch in its message. More tells nobody anything, and takes long
# enough to send that the rank is taken for one that hangs.
_MAX_MESSAGE_CHARS, _MAX_TRACEBACK_CHARS = 1 << 14, 1 << 17
_LAUNCH_FOLDER = str(Path(__file__).parent)
_IMPORT_MACHINERY_FILES = (importlib.__file__, registry.__file__)


@dataclass(frozen=True)
class ErrorReport:
    """The reason why a rank failed. `secondary`: it only noticed that another one had."""

    type: str
    message: str
    traceback: str
    exit_code: int
    is_phalanx_error: bool
    one_line: str
    secondary: bool
    time_monotonic_s: float
    """Monotonic seconds of this machine; -1 if no rank reported it."""
    user_place: str = ""
    """File and line of the user's code that raised the error, or led to it."""
    outage: str = ""
    """The error of a file server or network behind it, in words that stay the same while that
    lasts; empty if there is none."""
    of_rank: int = -1
    """The rank that met it, where another one reports it, too; -1: the one that reports it."""
    roll_back: RollBack | None = None
    """How far all ranks agreed to go back, if that is why this one ended."""

    def write_report_file(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not durable: the rank's way out does not wait for the disk, and the supervisor has it.
        write_json_atomically(path, asdict(self), durable=False)


def build_error_report(
    error: BaseException, run_dir: Path | None = None, doing: str = "training"
) -> ErrorReport:
    """The report of `error`: no frames that only led into the user's code, no secrets of the
    environment.

    A write of the run itself, in `run_dir` or elsewhere, that a disk refuses would be refused
    again: it becomes a ResourceError.
    """
    redactor = Redactor(os.environ)
    # Before `convert_disk_error` puts another error in its place: the traceback is of the first.
    outage = _find_outage_behind(error)
    lines = traceback.format_exception(type(error), error, _skip_startup_frames(error))
    code_place = redactor.redact_text(
        _escape_surrogates(find_innermost_user_code_line(error.__traceback__))
    )
    error = (
        convert_disk_error(error, doing, refusals=PERMANENT_WRITE_ERRNOS, run_dir=run_dir) or error
    )
    is_phalanx_error = isinstance(error, PhalanxError)
    message = _shorten(redactor.redact_text(_format_error_message(error)), _MAX_MESSAGE_CHARS)
    name = type(error).__qualname__
    one_line = message
    if not is_phalanx_error:
        one_line = name
        if message:
            one_line = " ".join(f"{name}: {message}".split())
    exit_code = int(ExitCode.INTERNAL)
    if isinstance(error, PhalanxError):
        exit_code = int(error.exit_code)
    if isinstance(error, SystemExit):
        # Python's own last line would be "SystemExit: 0" alone.
        lines[-1] = f"{name}: {message}\n"
    return ErrorReport(
        type=name,
        message=message,
        traceback=_shorten(
            redactor.redact_text(_escape_surrogates("".join(lines))), _MAX_TRACEBACK_CHARS
        ),
        exit_code=exit_code,
        is_phalanx_error=is_phalanx_error,
        one_line=one_line,
        secondary=is_caused_by_lost_peer(error),
        time_monotonic_s=time.monotonic(),
        user_place=code_place,
        outage=outage,
        of_rank=error.rank if isinstance(error, DataSourceError) else -1,
        roll_back=error.roll_back if isinstance(error, RollBackRequest) else None,
    )


def _find_outage_behind(error: BaseException) -> str:
    if isinstance(error, DataSourceError):
        return error.outage
    if isinstance(error, DataStorageError):
        # What a disk says of itself, it will say again.
        return find_outage(error, of_disk=False)
    # Others are refusals; a store of checkpoints has been tried several times already.
    return "" if isinstance(error, PhalanxError) else find_outage(error)


def _format_error_message(error: BaseException) -> str:
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = ""
        if error.code is not None:
            code = str(error.code)
        return f"sys.exit({code}) was called before the run was done"
    return _format_printable_message(error)


def _skip_startup_frames(error: BaseException) -> TracebackType | None:
    """The traceback of `error` from the first frame that is not of phalanx's own start-up."""
    trace = error.__traceback__
    while (
        trace is not None
        and trace.tb_next is not None
        and _is_startup_file(trace.tb_frame.f_code.co_filename)
    ):
        trace = trace.tb_next
    return trace


def _is_startup_file(filename: str) -> bool:
    return (
        filename.startswith((_LAUNCH_FOLDER, "<frozen importlib"))
        or filename in _IMPORT_MACHINERY_FILES
    )


def is_caused_by_lost_peer(error: BaseException) -> bool:
    """True if `error`, or what it was raised from or while handling, is a connection lost or a
    peer not answering.

    Of several errors of connections the first one counts: a rank whose own sockets broke loses its
    peers, too, and one that lost a peer closes sockets.
    """
    if isinstance(error, DataSourceError):
        # A connection of the user's own: to a file server, say.
        return False
    is_lost = False
    visited: list[BaseException] = []
    link: BaseException | None = error
    # An error may lead back to itself: user code can set `__cause__` to anything.
    while link is not None and link not in visited:
        visited.append(link)
        # Those of the store are RuntimeErrors, too.
        if isinstance(link, RuntimeError) and not _is_raised_by_user_code(link):
            message = _format_printable_message(link)
            is_of_connection = type(link).__name__ in STORE_ERROR_NAMES
            if is_of_connection or _OTHER_RANK_ERROR_PATTERN.search(message) is not None:
                is_lost = _OWN_ERROR_PATTERN.search(message) is None
        link = link.__cause__ or link.__context__
    return is_lost


def _is_raised_by_user_code(error: BaseException) -> bool:
    """True if a `raise` in code of the user's made `error`, whatever its words: what C++ code of
    torch raises comes out of a call."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    is_raised = code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_raised and not is_library_file(code.co_filename)


def is_message_about_lost_peer(text: str) -> bool:
    """True for words of torch's about a connection that was lost or a peer that did not answer,
    and not of the system's about what this process itself has."""
    if _OWN_ERROR_PATTERN.search(text) is not None:
        return False
    return _OTHER_RANK_ERROR_PATTERN.search(text) is not None


def _format_printable_message(error: BaseException) -> str:
    try:
        return _escape_surrogates(str(error))
    except Exception:
        # A broken `__str__` must not hide the error.
        return "<its message cannot be printed>"


def _shorten(text: str, limit: int) -> str:
    """The text, without its middle where it is longer than `limit`."""
    num_more = len(text) - limit
    if num_more <= 0:
        return text
    return f"{text[: limit // 2]} … {num_more:,} characters … {text[-limit // 2 :]}"


def _escape_surrogates(text: str) -> str:
    # Half a letter (a lone surrogate) can be in a string, and not in UTF-8.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
