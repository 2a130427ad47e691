"""What differs where ranks should have the same facts, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.core.digest import find_differing_keys

# So many of a rank, in a message of one line.
_MAX_SHOWN_KEYS = 4


def describe_differing_ranks(digests: Sequence[str], facts: Sequence[Any]) -> str:
    """The ranks whose facts are not those of most ranks, with the keys that differ.

    `facts` and their `digests` are by rank; at least two ranks differ.
    """
    # Of two that are equally frequent, rank 0's is taken for right.
    majority = max(set(digests), key=lambda digest: (digests.count(digest), digest == digests[0]))
    reference = facts[digests.index(majority)]
    differences = []
    for rank, (rank_digest, value) in enumerate(zip(digests, facts, strict=True)):
        if rank_digest != majority:
            differences.append(f"rank {rank}: {_describe_difference(value, reference)}")
    return "; ".join(differences)


def _describe_difference(value: Any, reference: Any) -> str:
    """The first keys in which `value` differs from `reference`, with both values, in words."""
    keys = find_differing_keys(reference, value)
    parts = [
        f"{key} = {_find_value_at_path(value, key)!r}, not {_find_value_at_path(reference, key)!r}"
        for key in keys[:_MAX_SHOWN_KEYS]
    ]
    text = ", ".join(parts)
    if len(keys) > _MAX_SHOWN_KEYS:
        text += f" and {len(keys) - _MAX_SHOWN_KEYS} more"
    return text


def _find_value_at_path(value: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value
