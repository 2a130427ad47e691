"""The legal numbers on both sides of a wish, for messages."""

from __future__ import annotations

from collections.abc import Sequence


def divisors(number: int) -> list[int]:
    """In ascending order; those up to a million and their partners."""
    low = [candidate for candidate in range(1, min(int(number**0.5), 10**6) + 1) if number % candidate == 0]
    return sorted({*low, *(number // candidate for candidate in low)})


def nearest(wish: int, legal: Sequence[int]) -> str:
    """Of legal values in ascending order, those on both sides of `wish`: '4 or 8'."""
    below = [value for value in legal if value < wish][-1:]
    above = [value for value in legal if value > wish][:1]
    return " or ".join(map(str, below + above)) or "none"


def divisors_near(number: int, wish: int) -> str:
    """The divisors of `number` on both sides of `wish`: '2 or 4'."""
    return nearest(wish, divisors(number))


def multiples_near(number: int, of: int) -> str:
    """The multiples of `of` on both sides of `number`: '24 or 32'."""
    below = number // of * of
    return " or ".join(str(multiple) for multiple in (below, below + of) if multiple)
