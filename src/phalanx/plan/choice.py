"""A chosen value together with why it was chosen. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

REASON_JOB_SAYS = "as the job says"
REASON_DEFAULT = "the default"
# The value of what the plan leaves to torch, or to the module on the ranks.
AUTO: Final = "auto"


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value that the plan chose, and the reason in words, for a person."""

    value: T
    why: str
