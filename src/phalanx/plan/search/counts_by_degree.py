"""`CountsByDegree`: parameters and bytes of a rank by the degrees and choices that they depend on.

Thousands of layouts share them, so each is counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from phalanx.job.costs import ActivationCosts, ModelCosts
from phalanx.plan.memory import count_segment_bytes, peak_segment_bytes
from phalanx.plan.pipeline.pipeline_plan import V_SHAPED_SCHEDULES
from phalanx.plan.search.space import RECOMPUTE_CHOICES, SEARCHED_SCHEDULES
from phalanx.plan.segments import list_recompute_segments
from phalanx.plan.workload import Workload, shard_shape


@dataclass(frozen=True)
class _SegmentBytes:
    """Bytes of the blocks of a microbatch of one sample: at the worst moment of the backward, saved
    for it, and what the first segment saves or makes again."""

    peak: float
    saved: float
    first: float


@dataclass(frozen=True)
class CountsByDegree:
    """What one rank has at given degrees. `work` is any rank's work: what it says beside degrees
    and batch holds for all. `mode` and `schedule` are indices into RECOMPUTE_CHOICES and
    SEARCHED_SCHEDULES, `micro` is sequences of a microbatch."""

    shape: ModelCosts
    work: Workload
    gathers_ahead: bool
    """ZeRO 3 gathers the next unit while one computes its backward, as `StepMoments` has it."""
    _shapes: dict[int, ModelCosts] = field(default_factory=dict, repr=False, compare=False)
    _works: dict[tuple[int, int, int, int], Workload] = field(
        default_factory=dict, repr=False, compare=False
    )
    _segments: dict[tuple[int, int, int], _SegmentBytes] = field(
        default_factory=dict, repr=False, compare=False
    )
    _values: dict[str, dict[tuple[int, ...], float]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Of each method: its value by arguments."""

    def tabulate(
        self, count: Callable[..., float], combinations: Sequence[tuple[int, ...]]
    ) -> npt.NDArray[np.float64]:
        """The value of `count`, a method of this object, for each of `combinations` of its
        arguments."""
        values = self._values.setdefault(count.__name__, {})
        for arguments in combinations:
            if arguments not in values:
                values[arguments] = count(*arguments)
        return np.array([values[arguments] for arguments in combinations], dtype=np.float64)

    # Parameters

    def count_params_of_blocks(self, tp: int, ep: int) -> float:
        """Parameters of all blocks, with the experts of one coordinate in ep."""
        return self._shard_shape(tp).count_all_blocks_params(ep)

    def count_split_params_of_blocks(self, tp: int) -> float:
        """Parameters of all blocks, with all experts: what ZeRO splits."""
        return self._shard_shape(tp).blocks_params

    def count_params_of_largest_block(self, tp: int, ep: int) -> float:
        return self._shard_shape(tp).count_largest_block_params(ep)

    def count_head_params(self, tp: int) -> float:
        return self._shard_shape(tp).count_part_params().after

    def count_first_rank_ends(self, tp: int, pp: int, schedule: int) -> float:
        """Parameters outside of blocks on a pipeline's first rank; where that has the last stage,
        too, the larger end's. Without a pipeline all of them."""
        shape = self._shard_shape(tp)
        if pp == 1:
            return float(shape.num_params - shape.blocks_params)
        parts = shape.count_part_params()
        if SEARCHED_SCHEDULES[schedule] in V_SHAPED_SCHEDULES:
            return float(max(parts.before, parts.after))
        return float(parts.before)

    def count_blocks_of_head(self, mode: int) -> float:
        """The number of blocks that take as long as the head, by what stages are cut by."""
        flops, num_layers = self.shape.flops(self.work.seq_len), max(1, self.shape.num_layers)
        if flops is None:
            parts = self.shape.count_part_params()
            return parts.after * num_layers / max(1, sum(parts.blocks))
        recompute, recompute_every = RECOMPUTE_CHOICES[mode]
        recomputed = 1 / recompute_every if recompute in ("mixed", "full") else 0.0
        training = sum(block.training for block in flops.blocks)
        return flops.head.training * num_layers / max(1, training * (1 + recomputed / 3))

    # Bytes of the blocks of a microbatch of one sample

    def count_peak_of_blocks(self, tp: int, cp: int, mode: int) -> float:
        """Bytes at the worst moment of the backward."""
        return self._count_segments(tp, cp, mode).peak

    def count_saved_of_blocks(self, tp: int, cp: int, mode: int) -> float:
        """Bytes that are saved for the backward."""
        return self._count_segments(tp, cp, mode).saved

    def count_first_segment(self, tp: int, cp: int, mode: int) -> float:
        """Bytes that the first segment saves or makes again."""
        return self._count_segments(tp, cp, mode).first

    def count_weight_inputs(self, tp: int, cp: int) -> float:
        """Bytes that the gradients of weights are computed from."""
        activations, work = self._get_activations(tp), self._build_workload(tp, cp)
        # Of each kind of blocks one is counted.
        counted: dict[Hashable, int] = {}
        total = 0
        for layer, kind in enumerate(activations.list_block_kinds(work)):
            if kind not in counted:
                counted[kind] = activations.block(layer, work).weight_inputs
            total += counted[kind]
        return float(total)

    def count_message(self, tp: int, cp: int) -> float:
        """Bytes that a stage sends to the next."""
        return float(self._get_activations(tp).count_message_bytes(self._build_workload(tp, cp)))

    # Bytes of a microbatch outside of blocks

    def count_ends(self, tp: int, cp: int, micro: int) -> float:
        activations, work = self._get_activations(tp), self._build_workload(tp, cp, micro)
        ends = activations.count_bytes_in_every_stage(work) + activations.count_embedding_bytes(
            work
        )
        return float(ends + activations.count_block_mask_bytes(work))

    def count_last_norm(self, tp: int, cp: int, micro: int) -> float:
        work = self._build_workload(tp, cp, micro)
        return float(self._get_activations(tp).count_final_norm_bytes(work))

    def count_passing(self, tp: int, cp: int, micro: int) -> float:
        """Bytes of gradients on their way in the backward of a block, or of the last norm."""
        activations, work = self._get_activations(tp), self._build_workload(tp, cp, micro)
        norm = activations.count_final_norm_passing_bytes(work)
        if not self.shape.num_layers:
            return float(norm)
        return float(max(norm, activations.block(self.shape.num_layers - 1, work).passing))

    def count_loss(self, tp: int, cp: int, micro: int) -> float:
        work = self._build_workload(tp, cp, micro)
        return float(self._get_activations(tp).count_loss_bytes(work).at_once)

    def _shard_shape(self, tp: int) -> ModelCosts:
        # Here by degree: `shard_shape` would compute a digest of the whole shape each time.
        if tp not in self._shapes:
            self._shapes[tp] = shard_shape(self.shape, tp, self.work.rules)
        return self._shapes[tp]

    def _get_activations(self, tp: int) -> ActivationCosts:
        activations = self._shard_shape(tp).activations
        assert activations is not None, "the caller asks"
        return activations

    def _build_workload(self, tp: int, cp: int, micro: int = 1, mode: int = 0) -> Workload:
        key = (tp, cp, micro, mode)
        if key not in self._works:
            recompute, recompute_every = RECOMPUTE_CHOICES[mode]
            self._works[key] = replace(
                self.work,
                tp=tp,
                cp=cp,
                micro_batch_size=micro,
                recompute=recompute,
                segments=_list_segments(recompute, self.shape.num_layers, recompute_every),
            )
        return self._works[key]

    def _count_segments(self, tp: int, cp: int, mode: int) -> _SegmentBytes:
        key = (tp, cp, mode)
        if key not in self._segments:
            saved, redone = count_segment_bytes(
                self._shard_shape(tp), self._build_workload(tp, cp, 1, mode)
            )
            first = float(saved[0] + redone[0]) if saved else 0.0
            peak = peak_segment_bytes(saved, redone)
            self._segments[key] = _SegmentBytes(peak, sum(saved), first)
        return self._segments[key]


_list_segments = lru_cache(maxsize=len(RECOMPUTE_CHOICES))(list_recompute_segments)
