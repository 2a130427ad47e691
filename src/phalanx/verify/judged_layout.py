"""What a diagnosis must know of the layout that was judged. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.plan import Plan
from phalanx.verify.compressed_gradients import is_lossy_compression


@dataclass(frozen=True)
class JudgedLayout:
    """`dp`: shares of the batch's tokens; `tp`: ranks that work on the same one; `cp`: ranks that
    share its sequences; `ep`: ranks that have different experts. `recompute`: parts of the forward
    are computed again for the backward; `offload`: what it saves waits for it in host memory.
    `keeps_error`: a part of each gradient stays behind by design. `pipeline`: how the model is
    cut."""

    dp: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    num_microbatches: int = 1
    recompute: bool = False
    offload: bool = False
    keeps_error: bool = False
    pipeline: Pipeline | None = None
    has_chunks: bool = False
    """Regions of tp go through a sequence in chunks."""
    pads_sequences: bool = False
    """The ranks of tp do not divide the sequence, which they share."""
    gathers_weights: bool = False
    """Forwards read copies of weights that are gathered from other ranks (ZeRO-2 and 3)."""
    queries_per_key: int = 1
    """Query heads that share a head of keys and values."""
    loss_divisor: int = 0
    """What a loss is divided by before its backward, which gradients are multiplied by behind it;
    0 where that is not known."""
    rank_coordinates: tuple[Mapping[str, int], ...] = ()
    """Of each rank, its coordinate on each axis of the mesh; empty where that is not known."""
    shares_sequence: bool = False
    """Ranks of tp have other tokens of a sequence each between its regions."""

    @property
    def is_plainly_data_parallel(self) -> bool:
        """True if ranks share the batch and nothing else, and compute nothing twice."""
        is_cut = self.tp * self.cp * self.ep > 1 or self.pipeline is not None
        return self.dp > 1 and not is_cut and self.keeps_saved_tensors and not self.keeps_error

    @property
    def keeps_saved_tensors(self) -> bool:
        """True if a backward reads what its forward has saved where that was saved."""
        return not self.recompute and not self.offload

    def group_ranks_along_axis(self, axis: str) -> list[list[int]]:
        """The ranks that differ in their coordinate on `axis` alone, in its order; empty where
        coordinates are not known."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinates in enumerate(self.rank_coordinates):
            others = tuple(number for name, number in coordinates.items() if name != axis)
            groups.setdefault(others, []).append(rank)
        return list(groups.values())

    def describe_returned_tensors(self) -> str:
        """What may be wrong with what a backward reads, where it is not what was saved where it was
        saved: "" if it is."""
        words = []
        if self.recompute:
            words.append("what is recomputed there is not what the forward computed")
        if self.offload:
            words.append("what comes back there from host memory is not what the forward saved")
        return ", or ".join(words)

    @classmethod
    def from_plan(cls, plan: Plan) -> JudgedLayout:
        layout = plan.layout
        return cls(
            dp=layout.gradient_reduction_layout.data_parallel_size,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            num_microbatches=plan.num_microbatches,
            recompute=plan.activations.recompute != "none",
            offload=plan.activations.offload,
            keeps_error=is_lossy_compression(plan.parallel.compress),
            pipeline=plan.pipeline,
            has_chunks=plan.parallel.tp_chunks > 1,
            gathers_weights=(
                plan.parallel.zero_stage >= 2 and layout.gradient_reduction_layout.dp_shard > 1
            ),
            queries_per_key=_count_queries_per_key(plan),
            loss_divisor=_find_loss_divisor(plan),
            pads_sequences=plan.parallel.sequence_parallel and plan.seq_len % layout.tp != 0,
            rank_coordinates=tuple(map(layout.coordinates, range(layout.world_size))),
            shares_sequence=plan.parallel.sequence_parallel is True,
        )


def _find_loss_divisor(plan: Plan) -> int:
    """About the number of targets of a rank."""
    if plan.is_layout_free:
        return plan.targets_per_rank // plan.num_microbatches
    return plan.targets_per_rank


def _count_queries_per_key(plan: Plan) -> int:
    """Query heads for each head of keys and values; 1 for a model whose heads are not known."""
    heads = plan.model_shape.heads
    if heads is None or not heads.keys:
        return 1
    return max(1, heads.queries // heads.keys)
