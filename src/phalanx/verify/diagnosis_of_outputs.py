"""Explains a loss by the first output that differs: by the module that makes it, and by the ranks
on which it is right. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phalanx.verify.compare import TraceComparison, replace_nan_by_infinity
from phalanx.verify.factors import is_nearly_equal
from phalanx.verify.judged_layout import JudgedLayout
from phalanx.verify.trace_facts import name_buffers_set

RUNNING_MEAN = "running_mean"
"""What normalisations with running statistics call the first of them."""
OTHER_THAN_RUNNING_CAUSE = (
    "{name} normalises by other statistics than the running ones, which one process takes there (as"
    " in evaluation mode): those of a batch, or of a rank's own rows; or with another eps"
)
OTHER_THAN_BATCH_CAUSE = (
    "{name} normalises by other statistics than those of all rows of a microbatch, which one"
    " process takes there: those of a rank's own rows without the other rows, or the running ones,"
    " or what ranks have of them is put together otherwise; or with another eps"
)
OTHER_STATISTICS_CAUSE = (
    "{name} normalises by other statistics than in one process: those of the batch, of a rank's"
    " own rows without the other rows, or the running ones; or with another eps"
)
NOT_ALIKE_CAUSE = (
    "all ranks of tp are to have the same there, and {whose}: what they add up or gather is not"
    " whole on each of them (a sum is missing, or some have parts that are not reduced, or stale),"
    " or some go on with it otherwise than the others"
)
OTHER_WEIGHTS = ", or with other weights: what is gathered of them is not what ranks hold"


class OutputDiagnosis:
    """Explains the first output of a step that differs on any rank; "" where it shows nothing."""

    def __init__(self, compared: TraceComparison, layout: JudgedLayout) -> None:
        self._compared, self._trace, self._layout = compared, compared.trace, layout

    def find_first_wrong(self, step: int) -> str:
        """The name of the first output of a step that differs on any rank; "" if none does."""
        return self._find_first_wrong_by_rank(step)[0]

    def describe_wrong_ranks(self, step: int) -> str:
        """The ranks on which the first wrong output of a step differs, in words to be read after
        "the forward of"."""
        wrong = self._find_first_wrong_by_rank(step)[1]
        others = [rank for rank in range(len(self._compared.observations)) if rank not in wrong]
        if not wrong or not others or not all(map(self._has_compared, others)):
            return "some rank, or of all,"
        return f"rank {_join(wrong)}, and not of the others,"

    def explain_statistics(self, step: int) -> str:
        """The cause of an output of a normalisation that keeps running statistics."""
        name = self.find_first_wrong(step)
        sizes_of_steps = [
            self._trace.sizes.get(name_buffers_set(number), {}).get(f"{name}.{RUNNING_MEAN}")
            for number in range(self._trace.num_steps)
        ]
        if not name or None in sizes_of_steps:
            return ""
        cause = OTHER_STATISTICS_CAUSE
        if len(set(sizes_of_steps)) > 1:
            cause = OTHER_THAN_BATCH_CAUSE
        # Those of a batch may stay, too: of one step, or with a momentum of 0.
        elif len(sizes_of_steps) > 1 and not self._trace.mixes_rows:
            cause = OTHER_THAN_RUNNING_CAUSE
        if self._layout.gathers_weights:
            cause += OTHER_WEIGHTS
        return cause.format(name=name)

    def explain_unequal_replicas(self, step: int) -> str:
        """The cause of an output that ranks of tp are to have alike and do not; "" where their
        tokens are others, or all of them have the same."""
        if self._layout.tp == 1 or self._layout.shares_sequence:
            return ""
        errors = self._find_first_wrong_by_rank(step)[1]
        for ranks in self._layout.group_ranks_along_axis("tp"):
            wrong = {rank: errors[rank] for rank in ranks if rank in errors}
            right = [rank for rank in ranks if rank not in errors and self._has_compared(rank)]
            if wrong and right:
                whose = f"it is right on rank {_join(right)} and not on rank {_join(wrong)}"
                return NOT_ALIKE_CAUSE.format(whose=whose)
            first = next(iter(wrong.values()), 0.0)
            if not all(error == first or is_nearly_equal(error, first) for error in wrong.values()):
                return NOT_ALIKE_CAUSE.format(whose=f"rank {_join(ranks)} have not")
        return ""

    def _has_compared(self, rank: int) -> bool:
        return bool(self._compared.observations[rank].get("num_outputs", 0))

    def _find_first_wrong_by_rank(self, step: int) -> tuple[str, Mapping[int, float]]:
        """The name of the first output that differs, and by how much on the ranks on which it
        does."""
        outputs = [
            (output[1], rank, output)
            for rank, observation in enumerate(self._compared.observations)
            for output in observation.get("outputs", ())
            if output[0] == step
        ]
        first = min(outputs, default=None)
        if first is None:
            return "", {}
        return first[2][2], {
            rank: replace_nan_by_infinity(output[3])
            for at, rank, output in outputs
            if at == first[0]
        }


def _join(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
