"""An error of shapes in a forward that rules have cut, as a line about the rule, where it is
one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.errors import LayoutError
from phalanx.plan.rule_checks import missing_row_rule_error
from phalanx.plan.rules import ShardingRule

SHAPE_ERROR_PATTERNS = (
    r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)",
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)",
    r"normalized_shape=\[(\d+)\].*input.*of size\s*\[.*?(\d+)\]",
)
"""How torch says that two sizes do not fit."""


@dataclass(frozen=True)
class UngatheredColumnLayer:
    """A layer of which a rank puts out `rank_size` of `full_size` features, for others to take.

    `has_row`: beside it in the same part of the model there is a layer that can.
    """

    name: str
    rule: ShardingRule
    full_size: int
    rank_size: int
    has_row: bool


def explain_shard_width_mismatch(
    error: Exception, columns: Sequence[UngatheredColumnLayer]
) -> LayoutError | None:
    """The refusal of a column whose width and whose part on this rank are the two sizes that do not
    fit in torch's message: what it puts out has met something whole.

    Of several those without a row beside them.
    """
    message = str(error).splitlines()[0] if str(error) else ""
    shapes = next(
        (
            match.groups()
            for pattern in SHAPE_ERROR_PATTERNS
            if (match := re.search(pattern, message))
        ),
        (),
    )
    if not isinstance(error, RuntimeError) or not shapes:
        return None
    sizes = {int(size) for size in shapes}
    matches = []
    for column in columns:
        widths = {column.full_size, column.rank_size}
        if len(widths) == 2 and widths <= sizes:
            matches.append(column)
    if not matches:
        return None
    column = min(matches, key=lambda column: column.has_row)
    return missing_row_rule_error(
        column.rule,
        f"those of {column.name}, {column.rank_size} of {column.full_size}, meet what is whole:"
        f" {message}",
    )
