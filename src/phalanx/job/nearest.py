"""The legal numbers on both sides of a wish, for messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence


def list_divisors(number: int) -> list[int]:
    """The divisors of `number` in ascending order; those up to a million and their partners."""
    all_divisors = set()
    # A message must not take minutes over a number of 2^60.
    for candidate in range(1, min(int(number**0.5), 10**6) + 1):
        if number % candidate == 0:
            # Divisors come in pairs around the root, so looking up to it finds all.
            all_divisors |= {candidate, number // candidate}
    return sorted(all_divisors)


def format_nearest_values(wish: int, legal: Sequence[int]) -> str:
    """The legal values (ascending) on both sides of `wish`, as text: '4 or 8'."""
    # Slices and not indices: on one side there may be none.
    below = [value for value in legal if value < wish][-1:]
    above = [value for value in legal if value > wish][:1]
    return " or ".join(map(str, below + above)) or "none"


def format_nearest_divisors(number: int, wish: int) -> str:
    """The divisors of `number` on both sides of `wish`: '2 or 4'."""
    return format_nearest_values(wish, list_divisors(number))


def format_nearest_multiples(number: int, of: int) -> str:
    """The multiples of `of` on both sides of `number`: '24 or 32'."""
    below = number // of * of
    return " or ".join(str(multiple) for multiple in (below, below + of) if multiple)


def find_nearest_degrees(
    num_ranks: int, degrees_wanted: Mapping[str, int], *, must_fill: bool
) -> dict[str, int]:
    """Degrees that divide `num_ranks` together (or make it) and are, as factors, least far from
    `degrees_wanted`.

    Of equals the one that keeps inner axes: they are what a node has room for.
    """
    legal = []
    for degrees, remainder in _factorizations(num_ranks, len(degrees_wanted)):
        if remainder == 1 or not must_fill:
            legal.append(degrees)
    wishes = tuple(degrees_wanted.values())

    def distance(degrees: Sequence[int]) -> tuple[float, tuple[float, ...]]:
        factors = []
        for degree, wish in zip(degrees, wishes, strict=True):
            factors.append(abs(math.log2(degree / wish)))
        # Rounded, because sums in another order are not equal; then the innermost axis decides.
        return round(sum(factors), 9), tuple(reversed(factors))

    nearest = min(legal, key=distance)
    return dict(zip(degrees_wanted, nearest, strict=True))


def _factorizations(number: int, num_factors: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every way to take `num_factors` factors out of `number`, and the rest of it."""
    if num_factors == 0:
        yield (), number
        return
    for factor in list_divisors(number):
        for factors, remainder in _factorizations(number // factor, num_factors - 1):
            yield (factor, *factors), remainder
