"""What a factor between a layout and one process usually means. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.verify.judged_layout import JudgedLayout
from phalanx.verify.trace_facts import Trace

USUAL_LOSS_SCALE = 65536  # the usual first one of float16
MAX_DIGITS = 9
KEY_AND_VALUE_PROJECTIONS = (".k.", ".v.", ".k_proj.", ".v_proj.", ".key.", ".value.")
"""Parts of names of parameters that make keys and values."""
FLOAT32_ROUNDING = 2.0**-24
NO_GRADIENT_CAUSE = (
    "no gradient reaches it: it is cut off from the graph on the way (a cast, a copy or a view of"
    " it is detached), or what it was given is cleared or overwritten"
)
SHARED_FLOAT32_FACTOR = "a factor that all of them share is computed in float32"


class FactorExplainer:
    """Puts a factor into words, by the numbers that a layout has."""

    def __init__(self, trace: Trace, layout: JudgedLayout) -> None:
        self._trace, self._layout = trace, layout

    def describe_gradient(self, name: str, factor: float, step: int) -> str:
        """A sentence: the gradient of `name`, and no other so, is so many times the reference."""
        if factor == 0:
            return f"the gradient of {name} is 0 x the reference: {NO_GRADIENT_CAUSE}"
        queries = self._layout.queries_per_key
        is_of_keys = any(part in f".{name}" for part in KEY_AND_VALUE_PROJECTIONS)
        if is_of_keys and queries > 1 and abs(factor * queries - 1) < 1e-3:
            return (
                f"the gradient of {name} is {format_factor(factor)} the reference: of the {queries}"
                " queries that share a key the mean is taken instead of the sum, or one of them"
                " counts alone"
            )
        return self.describe(f"the gradient of {name}", factor, step)

    def describe(self, subject: str, factor: float, step: int) -> str:
        """A sentence: `subject` is so many times the reference, and what that number is."""
        sentence = f"{subject} is {format_factor(factor)} the reference"
        meanings = self.explain(factor, step)
        if not meanings:
            return sentence
        return f"{sentence}: {meanings}"

    def explain(self, factor: float, step: int) -> str:
        """The usual meaning of the number, by the layout's own numbers; "" where it is none of
        them."""
        meanings = []
        if 0 < abs(factor - 1) <= FLOAT32_ROUNDING * 1.01 and self._trace.dtype == "float64":
            meanings.append(SHARED_FLOAT32_FACTOR)
        for number, words in self._list_known_factors(step):
            # Numbers near 1 (one target of many) are told apart by more digits.
            if abs(factor / number - 1) < min(1e-3, 0.1 * abs(number - 1)):
                meanings.append(words)
        return ", or ".join(dict.fromkeys(meanings))

    def list_degrees(self) -> list[tuple[str, int]]:
        """(axis, number of ranks) of the axes that the layout has."""
        layout = self._layout
        degrees = (("dp", layout.dp), ("tp", layout.tp), ("cp", layout.cp), ("ep", layout.ep))
        return [(axis, degree) for axis, degree in degrees if degree > 1]

    def _list_known_factors(self, step: int) -> Iterator[tuple[float, str]]:
        layout, targets = self._layout, self._trace.steps[step].num_targets
        if layout.dp > 1:
            yield layout.dp, "summed over the data-parallel ranks instead of averaged"
            yield 1 / layout.dp, "divided by the number of data-parallel ranks once too often"
        for name, degree in (("tp", layout.tp), ("cp", layout.cp), ("ep", layout.ep)):
            if degree > 1:
                yield degree, f"counted by each of the {degree} ranks of {name}"
                yield 1 / degree, f"a sum over the {degree} ranks of {name} is missing"
        if layout.num_microbatches > 1:
            count = layout.num_microbatches
            yield count, f"summed over the {count} microbatches instead of averaged"
            yield 1 / count, f"divided by the number of microbatches ({count}) once too often"
        yield USUAL_LOSS_SCALE, "the loss scale was not divided out again"
        yield 1 / USUAL_LOSS_SCALE, "divided by the loss scale, which was never multiplied in"
        if layout.loss_divisor > 1:
            yield (
                layout.loss_divisor,
                "not multiplied by what the backward of the loss begins with (1 /"
                f" {layout.loss_divisor})",
            )
        if targets > 1:
            off_by_one = "divided by a number of targets that is off by one"
            yield targets / (targets - 1), off_by_one
            yield targets / (targets + 1), off_by_one
        yield -1.0, "its sign is wrong"


def format_factor(factor: float) -> str:
    """ "2 x", with as many digits as tell a factor near 1 from it: "0.999 x", "1.00000003 x"."""
    off = abs(factor - 1)
    if not 0 < off < 1e-3:
        return f"{factor:.4g} x"
    digits = 1 - math.floor(math.log10(off))
    if digits > MAX_DIGITS:
        return f"(1 {factor - 1:+.1e}) x"
    return f"{factor:.{digits}f}".rstrip("0") + " x"


def is_nearly_equal(a: float, b: float) -> bool:
    """True if two numbers are equal but for rounding, and `b` is not NaN."""
    return b == b and abs(a - b) <= 1e-6 * max(abs(a), abs(b))
