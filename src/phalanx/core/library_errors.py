"""What a disk said to a library, read from the library's error: those of Rust and C++ have no
errno to look at."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection

LIBRARY_MODULE_NAMES = ("numpy", "pyarrow", "safetensors", "tokenizers", "torch")

# "No space left on device (os error 28)" of Rust, "... Detail: [errno 28] ..." of Arrow
_ERRNO_PATTERN = re.compile(r"\b(?:os error|errno) (\d+)\b", re.IGNORECASE)
# A network says "Input/output error", too: of torch's errors only those that are about a file count
# for such a code. These say the same whatever was opened or written.
_PLAIN_ERRNOS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG),
    *(errno.EMFILE, errno.ENFILE),
)
_FILE_ERROR_PATTERN = re.compile(r"\bfd \d+ failed with|\bstrerror\b")
_PATH_PATTERN = re.compile(r'\bat path "([^"]+)"')
# A write that ended early, by the words of numpy's tofile and of torch.save: neither asks the
# system for the reason.
_TRUNCATED_WRITE_PATTERN = re.compile(
    r"^\d+ requested and \d+ written$|\bunexpected pos \d+ vs \d+"
)


def find_os_error_behind(error: BaseException, codes: Collection[int]) -> OSError | None:
    """The OSError with one of `codes` that a library met when it raised `error`; None where it met
    none.

    Its errno is None where the library tells only that a write was cut short. Errors of Python's
    own kinds, ValueError say, are never looked at: any text may stand in them.
    """
    if not _may_be_library_disk_error(error):
        return None
    lines = [line.strip() for line in _error_text(error).splitlines()]
    for line in lines:
        is_of_disk = (
            not isinstance(error, RuntimeError) or _FILE_ERROR_PATTERN.search(line) is not None
        )
        for code in codes:
            if (is_of_disk or code in _PLAIN_ERRNOS) and _find_os_error_codes_in_text(line, code):
                path = _PATH_PATTERN.search(line)
                return OSError(code, os.strerror(code), path and path[1])
    for line in lines:
        if _TRUNCATED_WRITE_PATTERN.search(line):
            return OSError(line)
    return None


def _may_be_library_disk_error(error: BaseException) -> bool:
    """True for errors of the libraries, and of the kinds that they raise where they have none of
    their own."""
    kind = type(error)
    if isinstance(error, OSError):
        return error.errno is None
    return (
        isinstance(error, RuntimeError)
        or kind is Exception
        or kind.__module__.partition(".")[0] in LIBRARY_MODULE_NAMES
    )


def _find_os_error_codes_in_text(line: str, code: int) -> bool:
    return os.strerror(code) in line or any(
        int(number) == code for number in _ERRNO_PATTERN.findall(line)
    )


def _error_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        # A broken `__str__` must not hide the error.
        return ""
