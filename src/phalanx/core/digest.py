"""Canonical JSON and digests: the one way phalanx decides that two things are the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any


def encode_canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text on every rank.

    Raises ValueError for NaN and infinities.
    """
    try:
        # NaN is no JSON, and equal to nothing.
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
        )
    except ValueError:
        raise ValueError("it holds NaN or an infinity, which JSON has not") from None


def digest(value: Any) -> str:
    """Sixteen hex digits of SHA-256 over the canonical JSON of `value`."""
    return hashlib.sha256(encode_canonical_json(value).encode()).hexdigest()[:16]


def hash_to_stable_64_bits(*parts: object) -> int:
    """A 64-bit number from `parts`, equal in every process and release (unlike `hash`)."""
    # With a separator that no part has by accident: ("ab", "c") is not ("a", "bc").
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class JsonDifference:
    """Values of two JSON texts under one dotted key; ABSENT where one has no such key."""

    key: str
    a: Any
    b: Any


class _Absent(Enum):
    ABSENT = "absent"


# What no JSON holds: null is a value.
ABSENT = _Absent.ABSENT


def find_differences(a: Any, b: Any, prefix: str = "") -> list[JsonDifference]:
    """Where two JSON values differ, in sorted order of keys; NaN is equal to NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        differences: list[JsonDifference] = []
        for key in sorted(set(a) | set(b)):
            path = f"{prefix}.{key}" if prefix else str(key)
            if key in a and key in b:
                differences += find_differences(a[key], b[key], path)
            else:
                differences.append(JsonDifference(path, a.get(key, ABSENT), b.get(key, ABSENT)))
        return differences
    # Not the canonical form, which has no NaN: what a file says may be one.
    if json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True):
        return []
    return [JsonDifference(prefix or ".", a, b)]


def find_differing_dotted_keys(a: Any, b: Any) -> list[str]:
    """Dotted paths at which two JSON values differ, in sorted order."""
    return [difference.key for difference in find_differences(a, b)]
