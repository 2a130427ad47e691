"""Digests are equal exactly for equal values, in every process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.digest import (
    ABSENT,
    JsonDifference,
    digest,
    encode_canonical_json,
    find_differences,
    find_differing_dotted_keys,
    hash_to_stable_64_bits,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def test_order_of_keys_does_not_count_and_order_of_lists_does() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    assert digest([1, 2]) != digest([2, 1])
    assert digest({"a": 1}) != digest({"a": 1.5})


def test_golden_values() -> None:
    """Pinned: run.seed, job digests in checkpoints and cached shapes rely on them."""
    assert encode_canonical_json({"b": "é", "a": [1, None]}) == '{"a":[1,null],"b":"\\u00e9"}'
    assert digest({"a": 1}) == "015abd7f5cc57a2d"
    assert hash_to_stable_64_bits("init", 0, "embed.weight") == 9420098701992878862


def test_hashes_are_equal_in_another_process_and_parts_do_not_run_together() -> None:
    code = "from phalanx.core.digest import *; print(hash_to_stable_64_bits('a', 1), digest({'x': 'y'}))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert found == [str(hash_to_stable_64_bits("a", 1)), digest({"x": "y"})]
    assert hash_to_stable_64_bits("ab", "c") != hash_to_stable_64_bits("a", "bc")
    assert 0 <= hash_to_stable_64_bits("a") < 2**64


def test_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="holds NaN or an infinity"):
        digest({"a": float("nan")})


def test_files_that_hold_no_numbers_are_compared_all_the_same() -> None:
    nan, infinity = float("nan"), float("inf")
    assert find_differing_dotted_keys({"a": nan, "b": 1}, {"a": nan, "b": infinity}) == ["b"]


@given(json_values, json_values)
def test_values_differ_somewhere_exactly_if_their_digests_do(a: object, b: object) -> None:
    assert bool(find_differing_dotted_keys(a, b)) == (digest(a) != digest(b))
    assert find_differing_dotted_keys(a, a) == []


def test_paths_of_differences() -> None:
    a = {"train": {"steps": 1, "seed": 2}, "x": [1], "only": 1}
    b = {"train": {"steps": 3, "seed": 2}, "x": [2]}
    assert find_differing_dotted_keys(a, b) == ["only", "train.steps", "x"]
    assert find_differing_dotted_keys(1, 2) == ["."]
    assert find_differing_dotted_keys({"a": 1}, {"a": True}) == [
        "a"
    ]  # equal in Python, and not the same fact


def test_a_difference_has_both_values_and_tells_null_from_absent() -> None:
    a, b = {"x": {"y": 1, "z": None}}, {"x": {"y": 2}, "w": 3}
    assert find_differences(a, b) == [
        JsonDifference("w", ABSENT, 3),
        JsonDifference("x.y", 1, 2),
        JsonDifference("x.z", None, ABSENT),
    ]
