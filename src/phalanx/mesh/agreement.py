"""What differs where ranks should have the same facts, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.core.digest import find_differing_dotted_keys

# So many of a rank, in a message of one line.
_MAX_SHOWN_DIFFERING_KEYS = 4


def describe_ranks_that_differ_from_majority(digests: Sequence[str], facts: Sequence[Any]) -> str:
    """The ranks whose facts are not those of most ranks, with the keys that differ.

    `facts` and their `digests` are by rank; at least two ranks differ.
    """
    # Of two that are equally frequent, rank 0's is taken for right.
    majority = max(set(digests), key=lambda digest: (digests.count(digest), digest == digests[0]))
    reference = facts[digests.index(majority)]
    differences = []
    for rank, (rank_digest, value) in enumerate(zip(digests, facts, strict=True)):
        if rank_digest != majority:
            differences.append(f"rank {rank}: {_describe_differing_values(value, reference)}")
    return "; ".join(differences)


def _describe_differing_values(value: Any, reference: Any) -> str:
    """The first keys in which `value` differs from `reference`, with both values, in words."""
    keys = find_differing_dotted_keys(reference, value)
    parts = []
    for key in keys[:_MAX_SHOWN_DIFFERING_KEYS]:
        differing = _get_value_at_dotted_path(value, key)
        expected = _get_value_at_dotted_path(reference, key)
        parts.append(f"{key} = {differing!r}, not {expected!r}")
    text = ", ".join(parts)
    if len(keys) > _MAX_SHOWN_DIFFERING_KEYS:
        text += f" and {len(keys) - _MAX_SHOWN_DIFFERING_KEYS} more"
    return text


def _get_value_at_dotted_path(value: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value
