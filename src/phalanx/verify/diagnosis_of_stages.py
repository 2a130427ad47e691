"""Explains differences between the stages of a pipeline, by which of them differ. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.verify.compare import TraceComparison
from phalanx.verify.trace_facts import name_gradients_set
from phalanx.verify.wrong_tokens import ALONE, TokenEvidence

WRONG_MICROBATCH_CAUSE = (
    "a stage goes on with hidden states of another microbatch than the one whose targets the last"
    " stage reads, or does not compute its own blocks, in their order"
)
OTHER_TARGETS_CAUSE = (
    "the last stage reads the targets of another microbatch than that of its hidden states"
)
OTHER_INPUTS_CAUSE = (
    "stage {stage} reads another microbatch than that of its hidden states: its tokens are those of"
    " the microbatch from row {other} on, in place of row {own}, and so are {reads} and documents"
)
FIRST_MASKS_CAUSE = (
    "a stage is given the right hidden states, its first microbatch agrees, and of later ones just"
    " those whose documents are the same: masks or positions of the first microbatch are kept for"
    " all"
)
OTHER_MASKS_CAUSE = (
    "a stage is given the right hidden states, and masks, documents or positions of another"
    " microbatch"
)


class StageDiagnosis:
    """Explains a difference that follows the stages; "" where it does not."""

    def __init__(self, compared: TraceComparison, pipeline: Pipeline, recomputes: bool) -> None:
        """`recomputes`: parts of a forward are computed again for the backward."""
        self._compared, self._pipeline, self._recomputes = compared, pipeline, recomputes

    def explain_wrong_inputs(self) -> str:
        """The cause of a wrong loss where a later stage reads another microbatch's tokens; "" where
        none does, or nobody can tell."""
        for observation in self._compared.observations:
            if mix_up := observation.get("other_microbatch"):
                stage, own_number, other_number = mix_up
                is_last = stage + 1 == self._pipeline.num_stages
                reads = "targets, positions" if is_last else "positions"
                return OTHER_INPUTS_CAUSE.format(
                    stage=stage, own=own_number, other=other_number, reads=reads
                )
        return ""

    @staticmethod
    def list_causes_of_wrong_attention(evidence: TokenEvidence) -> list[str]:
        """What the cut into stages can have to do with an attention that differs."""
        if not evidence.has_right_input:
            return [WRONG_MICROBATCH_CAUSE]
        # A token that sees itself alone has no use for masks and positions.
        return [] if evidence.count_wrong(ALONE) else [OTHER_MASKS_CAUSE]

    def explain_wrong_grad_norm(self, norm: float, step: int) -> str:
        """The cause of a norm that is one of some stages alone, or that lacks or doubles those
        of one rank."""
        sizes = self._compared.trace.sizes[name_gradients_set(step)]
        reference = self._compared.trace.steps[step].grad_norm
        squares: dict[float, str] = {}
        for rank in range(self._pipeline.num_ranks):
            stages = _format_numbered_noun("stage", self._pipeline.stages_of_rank(rank))
            holders_of = {
                name: len(self._find_pipeline_ranks_of(name))
                for name in sizes
                if rank in self._find_pipeline_ranks_of(name)
            }
            squares[sum(sizes[name] ** 2 for name in holders_of)] = stages
            # Or each of a parameter's holders counts a part of it.
            squares[sum(sizes[name] ** 2 / count for name, count in holders_of.items())] = stages
        for square, stages in squares.items():
            if _is_nearly_equal(norm**2, square):
                return f"it is the norm of {stages} alone: those of the other stages are missing"
        for square, stages in squares.items():
            for sign, words in ((1, "counted twice"), (-1, "left out")):
                if _is_nearly_equal(norm**2 - reference**2, sign * square):
                    return f"the gradients of {stages} are {words}"
        return ""

    def explain_wrong_gradients(self, kind: str, name: str, off: Sequence[str]) -> str:
        """`off`: all that differ, after a loss that agrees."""
        stages = self._compared.stages
        if all(len(stages.get(other, ())) > 1 for other in off):
            return (
                f"{_format_numbered_noun('stage', stages[name])} hold {name}, and its gradient is"
                " the sum of what each of them has: they were not added up, or not once"
            )
        late = self._explain_wrong_matrix_gradients(off)
        if late:
            return late
        # Gradients run from the last stage to the first: a wrong one spoils every stage before it.
        wrong = sorted({stage for other in off for stage in stages.get(other, ())[:1]})
        right = {stage for other in set(stages) - set(off) for stage in stages[other]}
        border = wrong[-1] if wrong else -1
        if (
            wrong == list(range(border + 1))
            and border + 1 < self._pipeline.num_stages
            and not right & set(wrong)
        ):
            recomputed = ""
            if self._recomputes:
                recomputed = (
                    f"; or what stage {border} recomputes is not what its forward computed (the"
                    " masks of dropout, say, or the hidden states of another microbatch)"
                )
            return (
                f"{_format_numbered_noun('stage', wrong)} differ, and later ones agree: what stage"
                f" {border + 1} sends back to stage {border} is the gradient of another microbatch,"
                f" or of other hidden states{recomputed}"
            )
        return ""

    def _explain_wrong_matrix_gradients(self, off: Sequence[str]) -> str:
        """The cause of wrong gradients of matrices alone.

        W, where it is an action, makes those; gradients of norms come with I.
        """
        if not any(
            action.kind == "W" for row in self._pipeline.schedule().actions for action in row
        ):
            return ""
        stages_off = {stage for other in off for stage in self._compared.stages.get(other, ())}
        right = []
        for name, stages in self._compared.stages.items():
            if stages_off & set(stages) and name not in off:
                right.append(name)
        if not right or not all(self._count_tensor_dims(other) >= 2 for other in off):
            return ""
        if all(self._count_tensor_dims(other) >= 2 for other in right):
            return ""
        return (
            "only weights of linear layers differ, in"
            f" {_format_numbered_noun('stage', sorted(stages_off))}, whose gradients the schedule"
            " makes apart from the others (W): a W is left out or is of another microbatch, or"
            " gradients were reduced, or weights freed, before it"
        )

    def _count_tensor_dims(self, name: str) -> int:
        for observation in self._compared.observations:
            boxes = observation["boxes"].get(name)
            if boxes:
                return len(boxes[0][1])
        return 0

    def _find_pipeline_ranks_of(self, name: str) -> set[int]:
        return {
            self._pipeline.rank_of_stage[stage] for stage in self._compared.stages.get(name, ())
        }


def _format_numbered_noun(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _is_nearly_equal(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
