"""Plain values as TOML writes them on one line. Reading is tomllib's."""

from __future__ import annotations

import json
import re
from typing import Any

from phalanx.core.printable import escape_controls

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: Any) -> str:
    """A string, number, truth value, list or table of such as one line of TOML; None is the word
    "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return escape_controls(
            json.dumps(value, ensure_ascii=False)
        )  # JSON's escapes are TOML's, but for DEL
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    assert isinstance(value, dict), f"TOML has no {type(value).__name__}"
    pairs = [
        f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None
    ]
    return f"{{ {', '.join(pairs)} }}" if pairs else "{}"


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)
