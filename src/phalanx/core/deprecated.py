"""Names that changed: the old one still works, warns, and goes with the next minor version."""

from __future__ import annotations

import warnings


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn the caller of the alias `old` that it is now called `new`."""
    message = f"{old} is now {new}; the old name goes with 0.2"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
