"""Names of modules, "layers.3.attention": which of them lie inside of others."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection


def is_module_inside(name: str, parts: Collection[str]) -> bool:
    """True if the module `name` is one of `parts`, or lies inside of one."""
    # With the dot: blocks.1 is no part of blocks.10.
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def matches_module(name: str, patterns: Collection[str]) -> bool:
    """True if `name` matches one of `patterns`, or lies inside of what does."""
    parts = name.split(".")
    heads = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(head, pattern) for head in heads for pattern in patterns)
