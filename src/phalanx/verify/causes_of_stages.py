"""What goes wrong between the stages of a pipeline, read off which of them differ. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.plan.pipeline.planned import Pipeline
from phalanx.verify.compare import Comparison
from phalanx.verify.trace_facts import gradients_of

OTHER_MICROBATCH = (
    "a stage goes on with hidden states of another microbatch than the one whose targets the last stage reads, or does "
    "not compute its own blocks, in their order"
)


class StageCauses:
    """Words for a difference that follows the stages; empty where it does not."""

    def __init__(self, compared: Comparison, pipeline: Pipeline) -> None:
        self._compared, self._pipeline = compared, pipeline

    def of_norm(self, found: float, step: int) -> str:
        """The norm of a rank's stages alone, or of all with those of one missing or twice."""
        sizes = self._compared.trace.sizes[gradients_of(step)]
        wanted = self._compared.trace.steps[step].grad_norm
        squares: dict[float, str] = {}
        for rank in range(self._pipeline.num_ranks):
            which = _listed("stage", self._pipeline.stages_of(rank))
            held = {name: len(self._ranks_of(name)) for name in sizes if rank in self._ranks_of(name)}
            squares[sum(sizes[name] ** 2 for name in held)] = which
            squares[sum(sizes[name] ** 2 / holders for name, holders in held.items())] = which  # each counts a part
        for square, which in squares.items():
            if _near(found**2, square):
                return f"it is the norm of {which} alone: those of the other stages are missing"
        for square, which in squares.items():
            for sign, words in ((1, "counted twice"), (-1, "left out")):
                if _near(found**2 - wanted**2, sign * square):
                    return f"the gradients of {which} are {words}"
        return ""

    def of_gradient(self, kind: str, name: str, off: Sequence[str]) -> str:
        """`off`: all that differ, after a loss that agrees."""
        stages = self._compared.stages
        if all(len(stages.get(other, ())) > 1 for other in off):
            return (
                f"{_listed('stage', stages[name])} hold {name}, and its gradient is the sum of what each of them has: "
                "they were not added up, or not once"
            )
        late = self._of_late_weights(off)
        if late:
            return late
        wrong = sorted({stage for other in off for stage in stages.get(other, ())[:1]})
        right = {stage for other in set(stages) - set(off) for stage in stages[other]}
        border = wrong[-1] if wrong else -1
        if wrong == list(range(border + 1)) and border + 1 < self._pipeline.num_stages and not right & set(wrong):
            return (
                f"{_listed('stage', wrong)} differ, and later ones agree: what stage {border + 1} sends back to stage "
                f"{border} is the gradient of another microbatch, or of other hidden states"
            )
        return ""

    def _of_late_weights(self, off: Sequence[str]) -> str:
        """Where W is an action of its own it makes matrices' gradients; those of norms come with I."""
        if not any(action.kind == "W" for row in self._pipeline.schedule().actions for action in row):
            return ""
        where = {stage for other in off for stage in self._compared.stages.get(other, ())}
        near = [name for name, stages in self._compared.stages.items() if where & set(stages) and name not in off]
        if not near or not all(self._num_dims(other) >= 2 for other in off):
            return ""
        if all(self._num_dims(other) >= 2 for other in near):
            return ""
        return (
            f"only weights of linear layers differ, in {_listed('stage', sorted(where))}, whose gradients the schedule "
            "makes apart from the others (W): a W is left out or is of another microbatch, or gradients were reduced, "
            "or weights freed, before it"
        )

    def _num_dims(self, name: str) -> int:
        boxes = next((seen["boxes"][name] for seen in self._compared.seen if seen["boxes"].get(name)), None)
        return len(boxes[0][1]) if boxes else 0

    def _ranks_of(self, name: str) -> set[int]:
        return {self._pipeline.rank_of_stage[stage] for stage in self._compared.stages.get(name, ())}


def _listed(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
