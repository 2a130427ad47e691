"""Finds the mistake behind wrong gradients after a loss that agrees: in the backward, or in what
follows it.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.verify.compare import TraceComparison
from phalanx.verify.diagnosis_of_backward import BackwardDiagnosis
from phalanx.verify.diagnosis_of_experts import ExpertDiagnosis
from phalanx.verify.diagnosis_of_matrix_rows import MatrixRowDiagnosis
from phalanx.verify.diagnosis_of_rank_parts import RankPartDiagnosis
from phalanx.verify.diagnosis_of_rows import RowDiagnosis
from phalanx.verify.diagnosis_of_scales import ScaleDiagnosis
from phalanx.verify.diagnosis_of_stages import StageDiagnosis
from phalanx.verify.factors import FactorExplainer, format_factor
from phalanx.verify.judged_layout import JudgedLayout

# Of an error, and of the gradient of the step before.
MIN_COSINE_OF_WHAT_IS_LEFT = 0.999
# Of what a gradient is off by: so far a copy of that of the step before is from it.
MAX_SHARE_OF_A_STALE_GRADIENT = 1e-3
# The cosine that rounding of a few dozen elements has by chance.
MAX_CHANCE_COSINE = 0.4
# float32 rounds by 6e-8, float16 by 5e-4 and bfloat16 by 4e-3 at most; sums lose more, or less.
ERROR_RANGE_OF_NARROW_TYPES = (
    (1e-10, 1e-6, "float32"),
    (3e-5, 3e-4, "float16"),
    (3e-4, 1e-2, "bfloat16"),
)

MORE_THAN_ROUNDED_CAUSE = (
    "it is off by more than rounding: ranks scale what they send by numbers of their own, not by"
    " one for all, or what some of them send is left out, counts twice or overflows"
)


class GradientDiagnosis:
    """Explains gradients that differ where the loss agrees."""

    def __init__(
        self,
        compared: TraceComparison,
        layout: JudgedLayout,
        factors: FactorExplainer,
        experts: ExpertDiagnosis,
        stages: StageDiagnosis | None,
        rows: RowDiagnosis,
    ) -> None:
        self._compared, self._layout = compared, layout
        self._trace, self._observations = compared.trace, compared.observations
        self._experts, self._stages, self._rows = experts, stages, rows
        self._scales = ScaleDiagnosis(compared, factors)
        self._matrix_rows = MatrixRowDiagnosis(compared, factors)
        self._rank_parts = RankPartDiagnosis(compared, layout, factors, self._matrix_rows)
        self._backward = BackwardDiagnosis(compared, layout)

    def explain(
        self, kind: str, name: str, off: Sequence[str], ranks: Sequence[int], step: int
    ) -> str:
        """The cause of wrong gradients of tensors `off`, in forward order: that of `name`, which
        is wrong on `ranks`, is reported."""
        cause = (
            self._explain_what_is_left(kind, name, off)
            or self._scales.explain(kind, off, step)
            or self._experts.explain_wrong_gradients(kind, off, ranks)
            or self._rank_parts.explain_unreduced_gradient(kind, name)
            or self._explain_gradients_by_stage(kind, name, off)
            or self._rows.explain(step)
            or self._rank_parts.explain(kind, name, off, ranks, step)
            or self._matrix_rows.explain_one_factor(kind, off, step)
            or self._explain_shared_blocks(off)
            or self._explain_compression_errors(step)
            or self._explain_narrow_rounding(kind, off, ranks)
            or self._explain_sent_gradient(name, step)
        )
        return cause or self._backward.explain(kind, off, step)

    def _explain_what_is_left(self, kind: str, name: str, off: Sequence[str]) -> str:
        """The cause of a gradient that is off by a multiple of that of the step before; "" if it is
        not."""
        sums = [0.0] * 4
        for observation in self._observations:
            dots = observation.get("left", {}).get(kind, {}).get(name, (0.0,) * 4)
            sums = [total + part for total, part in zip(sums, dots, strict=True)]
        error, crossed, before, from_before = sums
        if before and from_before < MAX_SHARE_OF_A_STALE_GRADIENT**2 * error:
            return (
                f"{len(off)} of {len(self._trace.order)} tensors differ, {name} is its gradient of"
                " the step before: a stale copy, or one that arrives a step late"
            )
        if not crossed**2 > MIN_COSINE_OF_WHAT_IS_LEFT**2 * error * before:
            return ""
        return (
            f"{len(off)} of {len(self._trace.order)} tensors differ, {name} by"
            f" {format_factor(crossed / before)} its gradient of the step before: that is left in"
            " gradients, which were not cleared"
        )

    def _explain_compression_errors(self, step: int) -> str:
        """The cause of gradients that are wrong with what compression keeps of them; "" without
        such a compression."""
        if not self._layout.keeps_error:
            return ""
        if step == 0:
            return (
                "what is sent and what the ranks keep do not add up: a part of it is lost, or is"
                " both sent and kept"
            )
        return (
            "in the first step what is sent and what is kept add up, and later they do not: what"
            " was kept is not all sent in the next step"
        )

    def _explain_sent_gradient(self, name: str, step: int) -> str:
        """The cause of a gradient that compression should only round, and sends otherwise."""
        fault = self._compared.find_sent_fault(name, step)
        return fault and f"{fault}, or rather, as {MORE_THAN_ROUNDED_CAUSE}"

    def _explain_gradients_by_stage(self, kind: str, name: str, off: Sequence[str]) -> str:
        if self._stages is None:
            return ""
        cause = self._stages.explain_wrong_gradients(kind, name, off)
        narrow = self._find_narrow_dtype_by_rounding(kind, off)
        if cause and narrow:
            return (
                f"{len(off)} of {len(self._trace.order)} tensors differ, by about the rounding of"
                f" {narrow}: what is computed apart from the others (W), or sent between stages, is"
                f" in {narrow}"
            )
        return cause

    def _explain_shared_blocks(self, off: Sequence[str]) -> str:
        """The cause of gradients that differ only where some ranks of tp hold a block alike; "" if
        others differ, too."""
        if self._layout.tp == 1 or not all(map(self._compared.has_shared_blocks, off)):
            return ""
        return (
            f"{len(off)} of {len(self._trace.order)} tensors differ, all of them shared by some of"
            " the ranks of tp (keys and values of fewer heads than ranks): parts of ranks that hold"
            " the same heads are not added up as they should: over other ranks, or not all of them"
        )

    def _explain_narrow_rounding(self, kind: str, off: Sequence[str], ranks: Sequence[int]) -> str:
        """The narrower type whose rounding has the size of the errors in float64; "" if there is
        none, or if they are not like rounding: in many tensors, on all ranks, and without a
        direction."""
        if self._trace.dtype != "float64" or self._trace.narrows:
            return ""
        if len(off) < max(2, len(self._trace.order) // 4):
            return ""
        if len(ranks) < len(self._compared.find_ranks_holding_parameter(off[-1])):
            return ""
        narrow = self._find_narrow_dtype_by_rounding(kind, off)
        returned = self._layout.describe_returned_tensors()
        if narrow and returned:
            return (
                f"{len(off)} of {len(self._trace.order)} tensors differ: the backward goes wrong"
                f" where it meets {off[-1]}: {returned}, by about the rounding of {narrow}"
            )
        if narrow:
            return (
                f"the errors are of the size of {narrow}'s rounding, in {len(off)} tensors and in"
                f" all directions: computed, or reduced, in {narrow}, or of other weights by as"
                " little"
            )
        return ""

    def _find_narrow_dtype_by_rounding(self, kind: str, off: Sequence[str]) -> str:
        """The type whose rounding has the size of errors in float64 that have no direction; "" if
        there is none."""
        if self._trace.dtype != "float64" or self._trace.narrows:
            return ""
        # An error that grows with the tensor is a wrong factor or a wrong input, not rounding.
        directions = sorted(
            abs(self._compared.cosine_of_error_and_reference(kind, name)) for name in off
        )
        if directions[len(directions) // 2] > MAX_CHANCE_COSINE:
            return ""
        error = self._compared.error(kind, off[-1])
        for low, high, narrow in ERROR_RANGE_OF_NARROW_TYPES:
            if low < error < high:
                return narrow
        return ""
