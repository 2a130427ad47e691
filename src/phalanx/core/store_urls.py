"""Which URLs may name a place for checkpoints: object stores, and directories of this machine.

Nothing is opened here.

fsspec opens much more: URLs that wrap others (`simplecache::`, `zip::`), files that say what else
to open (`reference://`), hosts to log in to. A run's directory may come from a stranger, and its
job names a URL: what a verb opens for it must be a plain store, and nothing but one.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

# Each of them puts an object as a whole or not at all: that is what a checkpoint's manifest relies
# on.
OBJECT_STORE_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "oci", "oss", "tos")
DIRECTORY_PROTOCOLS = ("file", "local")
MEMORY_PROTOCOL = "memory"
_URL_PATTERN = re.compile(r"([a-z][a-z0-9+.-]*)://.+", re.DOTALL)
_URL_FIX = "as s3://bucket/run-7; without it checkpoints are in the run's directory"


@dataclass(frozen=True)
class StoreUrlProblem:
    """Why a URL is none of a store, and what to do."""

    what: str
    fix: str


def find_url_problem(url: str, *, in_job: bool = False) -> StoreUrlProblem | None:
    """The reason to refuse a URL; None for one that may be opened.

    A job's store is shared by its processes, which memory:// is not.
    """
    if "::" in url:
        return StoreUrlProblem("is a chain of URLs", "give the store's own URL, without ::")
    match = _URL_PATTERN.fullmatch(url)
    if match is None:
        return StoreUrlProblem("is not a URL", _URL_FIX)
    protocol = match[1]
    if protocol in DIRECTORY_PROTOCOLS and parse_file_url_directory(url) is None:
        return StoreUrlProblem("is not an absolute path", "as file:///data/run-7")
    if protocol == MEMORY_PROTOCOL and in_job:
        return StoreUrlProblem(
            "is memory of one process: the ranks would each save into their own, and it ends with"
            " them",
            _URL_FIX,
        )
    if protocol not in (*OBJECT_STORE_PROTOCOLS, *DIRECTORY_PROTOCOLS, MEMORY_PROTOCOL):
        schemes = ", ".join(f"{name}://" for name in OBJECT_STORE_PROTOCOLS)
        return StoreUrlProblem(
            f"is of no store for checkpoints ({schemes})",
            "mount it, and give the directory: file:///...",
        )
    return None


def parse_file_url_directory(url: str) -> Path | None:
    """The directory that a file:// URL names, its path taken to the letter; None for other URLs."""
    protocol, slashes, path = url.partition("://")
    if (
        not slashes
        or protocol not in DIRECTORY_PROTOCOLS
        or not path.startswith("/")
        or "\0" in path
    ):
        return None
    return Path(os.path.normpath(path))
