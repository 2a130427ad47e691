"""How `data.source` names a user's own dataset. Imports nothing heavy: loader workers start with it."""

from __future__ import annotations

import os


def is_own_dataset(source: str) -> bool:
    """True for "package.module:factory", unless a file has that name."""
    module, colon, attribute = source.partition(":")
    names = (*module.split("."), *attribute.split("."))
    return bool(colon) and all(name.isidentifier() for name in names) and not os.path.exists(source)
