"""An error of shapes in a forward that rules have cut, as a line about the rule, where it is
one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.errors import LayoutError
from phalanx.mesh.tensor_group import SEQUENCE_DIM, TensorParallelGroup
from phalanx.plan.rule_checks import missing_row_rule_error
from phalanx.plan.rules import ShardingRule

SHAPE_ERROR_PATTERNS = (
    r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)",
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)",
    r"normalized_shape=\[(\d+)\].*input.*of size\s*\[.*?(\d+)\]",
)
"""How torch says that two sizes do not fit."""
SEQUENCE_ERROR_PATTERN = (
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)"
    rf" at non-singleton dimension {SEQUENCE_DIM}$"
)


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


def explain_cut_sequence_mismatch(
    error: Exception, *, module_name: str, group: TensorParallelGroup
) -> LayoutError | None:
    """The refusal of a module that says its tokens are independent outside of its regions, where
    the two sizes that do not fit in torch's message are the sequence and a rank's part of it."""
    message = str(error).splitlines()[0] if str(error) else ""
    sizes = re.search(SEQUENCE_ERROR_PATTERN, message)
    if not group.cuts_sequence or not isinstance(error, RuntimeError) or sizes is None:
        return None
    num_tokens, num_own = group.num_tokens, -(-group.num_tokens // group.size)
    if {int(size) for size in sizes.groups()} != {num_tokens, num_own}:
        return None
    return LayoutError(
        f"{module_name} says is_per_token_outside_regions, and computes with the sequence there:"
        f" {message}",
        why=f"a rank of tp has {num_own} of the {num_tokens} tokens outside of regions, and what"
        " the module adds to them (positions, a mask) is of all",
        fix="take is_per_token_outside_regions away, or set parallel.sequence_parallel=false",
    )


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
