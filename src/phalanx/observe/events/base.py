"""The class that every event derives from."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """Base of every fact."""

    @classmethod
    def kind(cls) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
