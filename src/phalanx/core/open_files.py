"""How many files a process may have open: RLIMIT_NOFILE, `ulimit -n`."""

from __future__ import annotations

import contextlib
import os
import resource

from phalanx.core.errors import EnvironmentProblem

# Enough for any run. Not the hard limit whatever it is: programs that close all descriptors one by
# one would take minutes over a billion.
_MOST_OPEN_FILES = 65_536


def raise_open_file_limit() -> int:
    """Raise this process's limit, which those that it starts inherit, as far as it may; the limit
    that holds then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_OPEN_FILES
    raised = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        return raised
    return soft


def require_open_files(needed: int, purpose: str) -> None:
    """Raise EnvironmentProblem (exit 6) where `purpose`, as messages call it, needs more open files
    than this process may have; its limit is raised before that."""
    limit = raise_open_file_limit()
    if limit < needed:
        raise EnvironmentProblem(
            f"ulimit -n is {limit}, and {purpose} needs about {needed} open files in a process",
            fix=f"raise the hard limit (ulimit -Hn) to {needed} or more",
        )


def check_free_descriptors(count: int) -> None:
    """Raise OSError (EMFILE or ENFILE) where this process cannot open `count` more files by now.
    None is left open."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(count):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            # Without the file's name, which had no part in it.
            raise OSError(error.errno, error.strerror) from None
