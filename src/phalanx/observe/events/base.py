"""The class that every event derives from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Event:
    """Base of every fact."""

    @classmethod
    def kind(cls) -> str:
        return _name_kind(cls.__name__)


@cache
def _name_kind(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()
