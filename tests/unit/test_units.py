"""Numbers as people read them, also where rounding reaches the next unit."""

from __future__ import annotations

import pytest

from phalanx.core.units import (
    MIB,
    describe_predicted_bytes_error,
    describe_prediction_error,
    format_bytes,
    format_count,
    format_seconds,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.9, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**30, "1.0 GiB"),
        (1000 * 2**40, "1000.0 TiB"),
        (5000 * 2**40, "4.9 PiB"),
        (5000 * 2**60, "5000.0 EiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.7, "1.00 K"),
        (1234, "1.23 K"),
        (9_996, "10.0 K"),
        (12_345, "12.3 K"),
        (99_960, "100 K"),
        (123_456, "123 K"),
        (999_999, "1.00 M"),
        (1_234_567, "1.23 M"),
        (7e9, "7.00 B"),
        (15e15, "15000 T"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 us"),
        (12e-6, "12 us"),
        (0.0009999, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.0 s"),
        (1.25, "1.2 s"),
        (59.97, "1 m 00 s"),
        (75, "1 m 15 s"),
        (3599.6, "1 h 00 m"),
        (3725, "1 h 02 m"),
        (float("inf"), "?"),
        (float("nan"), "?"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("predicted", "measured", "text"),
    [
        (158, 165, "4 % too low"),
        (291.5, 52.8, "452 % too high"),
        (100.4, 100, "right to 1 %"),
        (0, 0, "right to 1 %"),
        (0, 5, "100 % too low"),
        (5, 0, "–"),
        (float("nan"), 5, "–"),
        (5, float("inf"), "–"),
    ],
)
def test_the_error_of_a_prediction_says_which_way(
    predicted: float, measured: float, text: str
) -> None:
    assert describe_prediction_error(predicted, measured) == text


@pytest.mark.parametrize(
    ("predicted", "measured", "text"),
    [
        (11 * MIB, 166 * MIB, "155.0 MiB too low"),  # 93 %: of what a larger job has besides
        (9.2 * MIB, 3.6 * MIB, "5.6 MiB too high"),
        (3.9 * MIB, 4.4 * MIB, "11 % too low"),
        (900 * MIB, 500 * MIB, "80 % too high"),
        (0, 0, "right to 1 %"),
        (5, 0, "–"),
    ],
)
def test_an_error_of_little_memory_is_told_in_bytes(
    predicted: float, measured: float, text: str
) -> None:
    assert describe_predicted_bytes_error(predicted, measured) == text
