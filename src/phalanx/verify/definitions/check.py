"""A part of training that is compared with its definition. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from phalanx.job.schema import Job
from phalanx.verify.row import NO_STEP, Difference

FindDifferences = Callable[[Job], Iterator[Difference]]
"""The differences of a part from its definition, for the job that a person asks for."""


@dataclass(frozen=True)
class DefinitionCheck:
    """`judged`: what is compared, in words."""

    judged: str
    find_differences: FindDifferences


def make_difference(quantity: str, name: str, error: float, cause: str) -> Difference:
    """The difference of something that is no step's and no rank's."""
    return Difference(quantity, name, NO_STEP, error, 0, (0,), "as defined", cause)
