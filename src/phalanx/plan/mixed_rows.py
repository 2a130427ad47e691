"""What is said of a loss whose rows see each other: which numbers change it, and what to do.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.schema import Job
from phalanx.plan.plan import EarlyWarning, Plan

MAX_PROBED_PARAMS = 10**8  # of a module that is built whole, in fp32, to try it: 400 MB
MIXED_ROWS_WARNING = (
    "{subject} lets the rows of a batch see each other: the loss of a batch is not that of its"
    " parts."
    " Of {batch} rows each part of {part} is computed by itself, so {ranks} data-parallel ranks x"
    " {parts} microbatches change the loss, and another number of either changes it again; keep"
    " both (train.micro_batch_size) where losses are to be compared, or take one rank and one"
    " microbatch"
)
COLLECTIVE_IN_LOSS_WARNING = (
    "the loss calls {call}: a sum over ranks comes on top of phalanx's own, a pipeline or an"
    " evaluation may wait in it for ever, and verify cannot judge it; compute the loss of the rows"
    " given"
)


def has_user_loss_code(job: Job) -> bool:
    """True if there is code in the loss that phalanx does not know: what else there is computes
    each row by itself."""
    return job.model.objective is not None or (
        job.model.is_foreign and not is_hugging_face(job.model.kind)
    )


@dataclass(frozen=True)
class BatchRowMixing:
    """`mixes`: what makes the loss of a batch something else than the sum of the losses of its
    rows.

    `collective`: the call of torch.distributed in it. Empty where there is no such thing, or where
    it could not be tried. `unknown`: why the name of the objective leads to nothing.
    """

    mixes: Literal["", "model", "objective"] = ""
    collective: str = ""
    unknown: str = ""


def warn_of_mixed_rows(facts: BatchRowMixing, job: Job, plan: Plan) -> tuple[EarlyWarning, ...]:
    """The warnings that follow from `facts`. Mixed rows are no problem where one rank sees the
    whole batch at once."""
    warnings = []
    ranks, parts = plan.layout.data_parallel_size, plan.num_microbatches
    if facts.mixes and ranks * parts > 1:
        subject = "the loss"
        if job.model.objective is not None:
            subject = f"the objective {job.model.objective}"
        if facts.mixes == "model":
            subject = f"the model {job.model.kind}"
        numbers = {
            "batch": plan.global_batch_size,
            "part": plan.micro_batch_size,
            "ranks": ranks,
            "parts": parts,
        }
        warnings.append(
            EarlyWarning("rows_are_mixed", MIXED_ROWS_WARNING.format(subject=subject, **numbers))
        )
    if facts.collective:
        warnings.append(
            EarlyWarning(
                "collective_in_the_loss", COLLECTIVE_IN_LOSS_WARNING.format(call=facts.collective)
            )
        )
    return tuple(warnings)
