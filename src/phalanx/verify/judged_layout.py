"""What a diagnosis must know of the layout that was judged. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.plan import Plan
from phalanx.verify.compressed_gradients import is_lossy_compression


@dataclass(frozen=True)
class JudgedLayout:
    """`dp`: shares of the batch's tokens; `tp`: ranks that work on the same one; `cp`: ranks that
    share its sequences; `ep`: ranks that have different experts. `recompute`: parts of the forward
    are computed again for the backward. `keeps_error`: a part of each gradient stays behind by
    design. `pipeline`: how the model is cut."""

    dp: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    num_microbatches: int = 1
    recompute: bool = False
    keeps_error: bool = False
    pipeline: Pipeline | None = None
    has_chunks: bool = False
    """Regions of tp go through a sequence in chunks."""
    pads_sequences: bool = False
    """The ranks of tp do not divide the sequence, which they share."""

    @classmethod
    def from_plan(cls, plan: Plan) -> JudgedLayout:
        layout = plan.layout
        return cls(
            dp=layout.gradient_reduction_layout.data_parallel_size,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            num_microbatches=plan.num_microbatches,
            recompute=plan.activations.recompute != "none" or plan.activations.offload,
            keeps_error=is_lossy_compression(plan.parallel.compress),
            pipeline=plan.pipeline,
            has_chunks=plan.parallel.tp_chunks > 1,
            pads_sequences=plan.parallel.sequence_parallel and plan.seq_len % layout.tp != 0,
        )
