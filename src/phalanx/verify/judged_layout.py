"""What a diagnosis must know of the layout that was judged. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.plan import Plan


@dataclass(frozen=True)
class JudgedLayout:
    """`dp`: shares of the batch's tokens; `tp`: ranks that work on the same one; `cp`: ranks that
    share its sequences; `ep`: ranks that have different experts. `recompute`: parts of the forward
    are computed again for the backward. `pipeline`: how the model is cut."""

    dp: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    num_microbatches: int = 1
    recompute: bool = False
    pipeline: Pipeline | None = None

    @classmethod
    def of_plan(cls, plan: Plan) -> JudgedLayout:
        layout = plan.layout
        return cls(
            dp=layout.reduced.data_parallel_size,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            num_microbatches=plan.num_microbatches,
            recompute=plan.activations.recompute != "none" or plan.activations.offload,
            pipeline=plan.pipeline,
        )
