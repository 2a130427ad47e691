"""Explains the wrong gradient of one tensor, by what each rank has of it.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.verify.compare import ZERO_DOTS, TraceComparison
from phalanx.verify.diagnosis_of_matrix_rows import MatrixRowDiagnosis
from phalanx.verify.factors import FactorExplainer
from phalanx.verify.judged_layout import JudgedLayout


class RankPartDiagnosis:
    """Explains gradients that ranks have a wrong part of, or did not put together."""

    def __init__(
        self,
        compared: TraceComparison,
        layout: JudgedLayout,
        factors: FactorExplainer,
        matrix_rows: MatrixRowDiagnosis,
    ) -> None:
        self._compared, self._observations = compared, compared.observations
        self._dp, self._tp = layout.dp, layout.tp
        self._factors, self._matrix_rows = factors, matrix_rows

    def explain_unreduced_gradient(self, kind: str, name: str) -> str:
        if self._dp == 1:
            return ""
        if self._is_mean_over_ranks_right(kind, name):
            return (
                f"each data-parallel rank has a gradient of {name} of its own, and their mean is"
                " right: never averaged"
            )
        if self._is_sum_over_ranks_right(kind, name):
            return (
                f"each data-parallel rank has a part of the gradient of {name} of its own, and what"
                " they have adds up to one process's: not added up over these ranks"
            )
        return ""

    def explain(
        self, kind: str, name: str, off: Sequence[str], ranks: Sequence[int], step: int
    ) -> str:
        """The cause of one tensor's gradient by what each rank has of it; "" if its parts say
        nothing."""
        if len(ranks) < len(self._compared.find_ranks_holding_parameter(name)):
            listed = ", ".join(map(str, ranks))
            if all(self._observations[r]["tensors"][kind][name][1] == 0 for r in ranks):
                return (
                    f"only rank {listed} differs, and has no gradient, or zeros: it is taken there"
                    " for a parameter that nobody uses, or its part was cleared, or not reduced"
                )
            words = self._matrix_rows.describe_few_rows(kind, name, ranks)
            if self._tp > 1 and self._dp == 1:
                words += (
                    ", or a backward cuts what ranks of tp have put together elsewhere than where"
                    " each of them put its part"
                )
            return f"only rank {listed} differs: its part was not reduced, or is stale{words}"
        # A tensor of one element is a multiple on every rank: if each has another factor, that says
        # less than that they have parts of it.
        if not self._have_ranks_same_factor(
            kind, name, ranks
        ) and self._do_tp_parts_sum_to_reference(kind, name):
            return (
                f"each rank of tp has its own part of the gradient of {name}, and nobody added them"
                ' up: a rule "partial" is missing, or parts that ranks hold alike are not summed'
            )
        factor = self._compared.find_multiple_of_reference(kind, [name], ranks[0])
        # Zeros on one rank are no weight that has no gradient.
        if factor == 0 and not self._have_ranks_same_factor(kind, name, ranks):
            return ""
        if factor is not None and abs(factor - 1) > 1e-3:
            return self._explain_factor_of_tp_copies(
                name, factor
            ) or self._factors.describe_gradient(name, factor, step)
        if off == [name] and self._has_size_of_reference(kind, name):
            return (
                f"{name} alone differs, and its gradient is as long as it should be, in another"
                " direction: the same elements in another order (transposed, or as they lie in"
                " memory), or with other signs"
            )
        return ""

    def _explain_factor_of_tp_copies(self, name: str, factor: float) -> str:
        """The cause of a wrong factor of a tensor that all ranks of tp hold alike; "" if it is
        none of theirs."""
        if self._tp > 1 and abs(factor / self._tp - 1) < 1e-3:
            return (
                f"the gradient of {name} is {factor:.4g} x the reference: summed over the ranks of"
                ' tp, which have all of it (a rule "replicate" is missing)'
            )
        return ""

    def _have_ranks_same_factor(self, kind: str, name: str, ranks: Sequence[int]) -> bool:
        """True if each rank's part of a tensor is the same multiple of the reference."""
        factors = []
        for rank in ranks:
            factor = self._compared.find_multiple_of_reference(kind, [name], rank)
            if factor is None:
                return False
            factors.append(factor)
        return max(factors) - min(factors) <= 1e-4 * max(map(abs, factors))

    def _do_tp_parts_sum_to_reference(self, kind: str, name: str) -> bool:
        """True if what the ranks of tp have makes the reference once it is added up."""
        along, size = self._project_rank_sum_on_reference(kind, name)
        if not size:
            return False
        # Several ranks may hold the same part, as many as divide tp.
        for copies in range(2, self._tp + 1):
            if self._tp % copies == 0 and abs(along * copies / size - 1) < 1e-6:
                return True
        return False

    def _is_mean_over_ranks_right(self, kind: str, name: str) -> bool:
        """True if what the ranks have, each something else, makes the reference on average."""
        along, size = self._project_rank_sum_on_reference(kind, name)
        # What ranks see for themselves is far from the mean; rounding is not, and is level too.
        is_far = self._compared.error(kind, name) > 0.05
        return is_far and size > 0 and abs(along / size - 1) < 1e-9

    def _is_sum_over_ranks_right(self, kind: str, name: str) -> bool:
        """True if what the data-parallel ranks have, each something else, adds up to the
        reference."""
        along, size = self._project_rank_sum_on_reference(kind, name)
        if not size or abs(along * self._dp / size - 1) > 1e-9:
            return False
        ranks = self._compared.find_ranks_holding_parameter(name)
        dots_of = [self._observations[rank]["tensors"][kind].get(name, ZERO_DOTS) for rank in ranks]
        # A rank that has all of it, or ranks that have the same, are another mistake.
        is_far = all(dots[0] > 0.05**2 * dots[3] for dots in dots_of)
        return is_far and len({dots[1] for dots in dots_of}) > 1

    def _project_rank_sum_on_reference(self, kind: str, name: str) -> tuple[float, float]:
        """(sum over ranks of the tensor times the reference, and of the reference squared)."""
        dots = [
            observation["tensors"][kind].get(name, ZERO_DOTS) for observation in self._observations
        ]
        return sum(dot[2] for dot in dots), sum(dot[3] for dot in dots)

    def _has_size_of_reference(self, kind: str, name: str) -> bool:
        """True if the norm of a gradient of several elements is right, far from it as it is."""
        dots_of = [
            observation["tensors"][kind].get(name, ZERO_DOTS) for observation in self._observations
        ]
        size, reference_size = (sum(dots[i] for dots in dots_of) for i in (1, 3))
        is_far = self._compared.error(kind, name) > 0.05
        return is_far and abs(size - reference_size) <= 1e-9 * reference_size
