"""Explains the gradient of a matrix of which some rows are wrong, by which these are.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.verify.compare import TraceComparison
from phalanx.verify.factors import FactorExplainer, format_factor, is_nearly_equal

# A mistake of some tokens, or of the border of a part, is in few rows of a matrix.
MAX_SHARE_OF_FEW_ROWS = 0.25


class MatrixRowDiagnosis:
    """Explains gradients by the rows of a matrix that are wrong."""

    def __init__(self, compared: TraceComparison, factors: FactorExplainer) -> None:
        self._observations, self._factors = compared.observations, factors

    def explain_one_factor(self, kind: str, off: Sequence[str], step: int) -> str:
        """The cause of a matrix that alone differs, and of which some rows are one multiple of the
        reference; "" of all others."""
        if len(off) > 1:
            return ""
        (name,) = off
        of_ranks = [
            observation["row_factors"][kind][name]
            for observation in self._observations
            if name in observation.get("row_factors", {}).get(kind, {})
        ]
        if not of_ranks or not all(is_nearly_equal(of_ranks[0][2], other[2]) for other in of_ranks):
            return ""
        num_alike, num_rows, factor = of_ranks[0]
        meaning = self._factors.explain(factor, step)
        return (
            f"{name} alone differs: {num_alike} of {num_rows} rows are {format_factor(factor)} the"
            " reference, and the others by no one factor: it has two uses (a head that is tied with"
            " an embedding), and in its gradient the part of one, which these rows have alone, has"
            f" another factor than that of the other{meaning and f': {meaning}'}"
        )

    def describe_few_rows(self, kind: str, name: str, ranks: Sequence[int]) -> str:
        """Say in which rows a matrix is wrong, where these are few on each of `ranks`; else ""."""
        wrong_rows = [
            self._observations[rank].get("wrong_rows", {}).get(kind, {}) for rank in ranks
        ]
        if not all(name in of_rank for of_rank in wrong_rows):
            return ""
        num_rows, num_wrong, num_zero, _ = (
            sum(numbers) for numbers in zip(*(of_rank[name] for of_rank in wrong_rows), strict=True)
        )
        if not 0 < num_wrong <= MAX_SHARE_OF_FEW_ROWS * num_rows:
            return ""
        first = min(of_rank[name][3] for of_rank in wrong_rows)
        words = f", or few of its rows have another gradient: {num_wrong} of {num_rows} differ"
        if num_zero == num_wrong:
            words += " and are zero, as those of a padding token are"
        return f"{words}, row {first} the first"
