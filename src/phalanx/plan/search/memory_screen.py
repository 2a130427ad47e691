"""Memory and time of thousands of layouts at once: a screen, after which few are planned exactly.

Memory counts as `phalanx.plan.memory` does, with pipelines in closed form. What the screen lets
through is planned again, so an error here costs a candidate or a moment, never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from phalanx.job.costs import ModelCosts
from phalanx.plan.memory import count_segment_bytes, peak_segment_bytes
from phalanx.plan.pipeline.pipeline_plan import V_SHAPED_SCHEDULES
from phalanx.plan.search.equal_rows import Integers, group_equal_rows
from phalanx.plan.search.space import (
    OFFLOAD_CHOICES,
    RECOMPUTE_CHOICES,
    SEARCHED_SCHEDULES,
    LayoutRows,
)
from phalanx.plan.segments import list_recompute_segments
from phalanx.plan.workload import Workload, shard_shape

Bytes = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _SegmentBytes:
    """Bytes of the blocks of a microbatch of one sample: at the worst moment of the backward, saved
    for it, and what the first segment saves or makes again."""

    peak: float
    saved: float
    first: float


@dataclass(frozen=True)
class _CountedOnce:
    """What is equal for many rows, by the degrees and choices that it depends on."""

    shapes: dict[int, ModelCosts] = field(default_factory=dict)
    works: dict[tuple[int, int, int, int], Workload] = field(default_factory=dict)
    segments: dict[tuple[int, int, int], _SegmentBytes] = field(default_factory=dict)
    values: dict[str, dict[tuple[int, ...], float]] = field(default_factory=dict)
    """Of each method that counts: its value by arguments."""


@dataclass(frozen=True)
class MemoryScreen:
    """Bytes of the rank that needs most, for layouts of one model. `work` is any rank's work: what
    it says beside degrees and batch holds for all."""

    shape: ModelCosts
    work: Workload
    rows: LayoutRows
    is_of_last_rank: bool = False
    """Of pipelines, the rank with the head is counted, and not the one with the embedding and most
    microbatches in flight. Where stages lie in a V, that is one rank, counted as the first."""
    _counted: _CountedOnce = field(default_factory=_CountedOnce, repr=False, compare=False)
    _groups: dict[tuple[str, ...], tuple[list[tuple[int, ...]], Integers]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def total_bytes(self, limits: Bytes | float = np.inf) -> Bytes:
        """Bytes of each layout, on top of the runtime, at the highest moment of a step: where the
        loss is made, in the backward of the last block, or at the end of the backward. Of a
        pipeline whose first rank has more than its limit the last is not looked at."""
        total = self._count_bytes_of_rank()
        in_loops = np.flatnonzero((self.rows.pp > 1) & ~self._is_v_shaped & (total <= limits))
        if len(in_loops):
            last = self._take_rows(in_loops, is_of_last_rank=True)
            total[in_loops] = np.maximum(total[in_loops], last._count_bytes_of_rank())
        return total

    def find_least_recompute(
        self, limits: Bytes, num_modes: int
    ) -> tuple[npt.NDArray[np.intp], Bytes]:
        """Numbers, and bytes, of the rows that fit with the least recomputation, of each
        `num_modes` rows in turn, which differ in nothing else: more of it only takes longer.

        `limits`: the bytes that each of so many rows may have.
        """
        pending = np.arange(len(limits))
        # No recomputation makes states smaller, and those of most layouts of a large model are
        # too large by themselves.
        pending = pending[self._take_rows(num_modes * pending)._state_bytes() <= limits]
        fitting, fitting_bytes = [], []
        for mode in range(num_modes):
            numbers = num_modes * pending + mode
            total = self._take_rows(numbers).total_bytes(limits[pending])
            fits = total <= limits[pending]
            fitting.append(numbers[fits])
            fitting_bytes.append(total[fits])
            pending = pending[~fits]
        numbers = np.concatenate(fitting)
        order = np.argsort(numbers)
        return numbers[order], np.concatenate(fitting_bytes)[order]

    def _take_rows(
        self, numbers: npt.NDArray[np.intp], *, is_of_last_rank: bool = False
    ) -> MemoryScreen:
        """The screen of rows `numbers`, which shares what is counted once for many rows."""
        screen = replace(self, rows=self.rows.take(numbers), is_of_last_rank=is_of_last_rank)
        for columns, (combinations, inverse) in self._groups.items():
            screen._groups[columns] = (combinations, inverse[numbers])
        return screen

    def _count_bytes_of_rank(self) -> Bytes:
        gradients = self._gradient_bytes()
        parameter_and_optimizer_bytes = self._held_bytes()
        if self.shape.activations is None:
            return np.asarray(parameter_and_optimizer_bytes + gradients)
        standing = np.where(self._has_standing_gradients(), gradients, 0.0)
        forward, backward = self._activation_bytes()
        gathered_in_forward, gathered_in_backward = self._communication_bytes()
        moments = np.maximum(forward + gathered_in_forward, backward + gathered_in_backward)
        # The first blocks come last, beside the shards of all gradients.
        ends_whole = (self.rows.num_microbatches > 1) & (self.rows.accumulates_sharded == 0)
        first_block = np.where(
            ends_whole | (self.rows.pp > 1), 0.0, self._first_block_bytes() + gathered_in_backward
        )
        highest: Bytes = np.maximum(standing + moments, gradients + first_block)
        return parameter_and_optimizer_bytes + highest

    def _map_distinct_rows(self, count: Callable[..., float], *columns: str) -> Bytes:
        """`count` of each row's values in `columns`, called once for each different combination.
        What a method counts is kept: other rows, and the last rank of a pipeline, share it."""
        combinations, inverse = self._group_rows(*columns)
        known: dict[tuple[int, ...], float] = {}
        if getattr(count, "__self__", None) is self:
            known = self._counted.values.setdefault(count.__name__, known)
        for values in combinations:
            if values not in known:
                known[values] = count(*values)
        table = np.array([known[values] for values in combinations], dtype=np.float64)
        return table[inverse]

    def _group_rows(self, *columns: str) -> tuple[list[tuple[int, ...]], Integers]:
        """The different combinations of values in `columns`, and the index of each row's."""
        if columns not in self._groups:
            self._groups[columns] = group_equal_rows([getattr(self.rows, c) for c in columns])
        return self._groups[columns]

    def _shard_shape(self, tp: int) -> ModelCosts:
        # Here by degree: `shard_shape` would compute a digest of the whole shape each time.
        if tp not in self._counted.shapes:
            self._counted.shapes[tp] = shard_shape(self.shape, tp, self.work.rules)
        return self._counted.shapes[tp]

    def _build_workload(self, tp: int, cp: int = 1, micro: int = 1, mode: int = 0) -> Workload:
        key = (tp, cp, micro, mode)
        if key not in self._counted.works:
            recompute, recompute_every = RECOMPUTE_CHOICES[mode]
            self._counted.works[key] = replace(
                self.work,
                tp=tp,
                cp=cp,
                micro_batch_size=micro,
                recompute=recompute,
                segments=_list_segments(recompute, self.shape.num_layers, recompute_every),
            )
        return self._counted.works[key]

    # States

    @property
    def _is_v_shaped(self) -> npt.NDArray[np.bool_]:
        return np.array([name in V_SHAPED_SCHEDULES for name in SEARCHED_SCHEDULES])[
            self.rows.schedule
        ]

    @cached_property
    def _share_of_blocks(self) -> Bytes:
        """The blocks of the rank that is counted, as a part of the mean rank's: a pipeline's last
        one has fewer, since it has the head."""
        if not self.is_of_last_rank:
            return np.ones(len(self.rows))
        rows = self.rows
        head = self._map_distinct_rows(self._count_blocks_of_head, "recompute")
        blocks = self.shape.num_layers / rows.pp
        # All ranks share the work evenly, but for a part of a block.
        fewer = blocks - head * (1 - 1 / rows.pp) + 0.5
        return np.clip(fewer / np.maximum(1.0, blocks), 0.0, 1.0)

    def _count_blocks_of_head(self, mode: int) -> float:
        """The number of blocks that take as long as the head, by what stages are cut by."""
        flops, num_layers = self.shape.flops(self.work.seq_len), max(1, self.shape.num_layers)
        if flops is None:
            parts = self.shape.count_part_params()
            return parts.after * num_layers / max(1, sum(parts.blocks))
        recompute, recompute_every = RECOMPUTE_CHOICES[mode]
        recomputed = 1 / recompute_every if recompute in ("mixed", "full") else 0.0
        training = sum(block.training for block in flops.blocks)
        return flops.head.training * num_layers / max(1, training * (1 + recomputed / 3))

    @cached_property
    def _block_params(self) -> Bytes:
        """Parameters of a stage's blocks on one rank, with the experts of its coordinate in ep."""
        params = self._map_distinct_rows(
            lambda tp, ep: self._shard_shape(tp).count_all_blocks_params(ep), "tp", "ep"
        )
        return params / self.rows.pp * self._share_of_blocks

    @cached_property
    def _params_outside_blocks(self) -> Bytes:
        """Parameters of a rank outside of blocks: of a pipeline, those of its end; where the first
        and the last stage are on one rank, the larger end's."""

        def count(tp: int, pp: int, schedule: int) -> float:
            shape = self._shard_shape(tp)
            if pp == 1:
                return float(shape.num_params - shape.blocks_params)
            parts = shape.count_part_params()
            if SEARCHED_SCHEDULES[schedule] in V_SHAPED_SCHEDULES:
                return float(max(parts.before, parts.after))
            return float(parts.after if self.is_of_last_rank else parts.before)

        return self._map_distinct_rows(count, "tp", "pp", "schedule")

    @cached_property
    def _shard_params(self) -> Bytes:
        """Parameters of a rank's shard: cut over all of dp_shard x cp, experts over as many: ep and
        what is left."""
        rows = self.rows
        params_of_blocks = self._map_distinct_rows(
            lambda tp: self._shard_shape(tp).blocks_params, "tp"
        )
        params_of_blocks = params_of_blocks / rows.pp * self._share_of_blocks
        return (params_of_blocks + self._params_outside_blocks) / rows.num_zero_shards

    def _held_bytes(self) -> Bytes:
        """Bytes of parameters and optimizer state, which are there all the time."""
        rows, local = self.rows, self._block_params + self._params_outside_blocks
        on_host = np.array([name != "none" for name in OFFLOAD_CHOICES])[rows.offload]
        all_on_host = np.array([name == "parameters" for name in OFFLOAD_CHOICES])[rows.offload]
        optimizer = self.work.optimizer_bytes * np.where(
            rows.zero_stage >= 1, self._shard_params, local
        )
        weights = 4.0 * np.where(rows.zero_stage >= 2, self._shard_params, local)
        return np.where(on_host, 0.0, optimizer) + np.where(all_on_host, 0.0, weights)

    def _state_bytes(self) -> Bytes:
        """Bytes of a rank at the end of the backward beside activations: no total is less."""
        return self._held_bytes() + self._gradient_bytes()

    def _gradient_bytes(self) -> Bytes:
        """Bytes of all gradients at the end of the backward."""
        rows, local = self.rows, self._block_params + self._params_outside_blocks
        all_on_host = np.array([name == "parameters" for name in OFFLOAD_CHOICES])[rows.offload]
        gradients = 4.0 * np.where(rows.zero_stage >= 2, self._shard_params, local)
        return np.where(all_on_host, 0.0, gradients)

    def _has_standing_gradients(self) -> npt.NDArray[np.bool_]:
        """True where gradients are there before the backward: DDP's buckets, and what earlier
        microbatches left (`StepMoments._standing_gradients`)."""
        rows = self.rows
        accumulates, is_sharded = rows.num_microbatches > 1, rows.zero_stage >= 2
        has_local_gradients = accumulates | (rows.dp_replicate * rows.num_zero_shards > 1)
        kept_shards = accumulates & (rows.accumulates_sharded == 1) & (rows.pp == 1)
        return np.where(is_sharded, kept_shards, has_local_gradients)

    # What is gathered for use, and cast

    def _communication_bytes(self) -> tuple[Bytes, Bytes]:
        """Bytes that are gathered or cast, where the loss is made, and in the backward."""
        rows, work = self.rows, self.work
        local = self._block_params + self._params_outside_blocks
        # The head has a copy, and the table that is looked up in has none.
        head = self._map_distinct_rows(
            lambda tp: self._shard_shape(tp).count_part_params().after, "tp"
        )
        if not self.is_of_last_rank:
            head = np.where((rows.pp > 1) & ~self._is_v_shaped, 0.0, head)
        plain = (self._block_params + head) * work.cast_bytes
        plain_backward = self._block_params * work.cast_bytes
        unit = self._map_distinct_rows(
            lambda tp, ep: self._shard_shape(tp).count_largest_block_params(ep), "tp", "ep"
        )
        unit = np.minimum(unit * max(1, self._blocks_per_unit), self._block_params)
        accumulated_bytes = np.where(
            (rows.num_microbatches > 1) & (rows.accumulates_sharded == 0), 4.0 * local, 0.0
        )
        num_units = 2 if work.options.prefetch is None else 1 + work.options.prefetch
        alive = np.minimum(unit * num_units, self._block_params)
        stage_3 = (self._params_outside_blocks + unit) * work.compute_bytes + accumulated_bytes
        stage_3_backward = (
            self._params_outside_blocks + alive
        ) * work.compute_bytes + accumulated_bytes
        stage_2 = local * work.compute_bytes + accumulated_bytes
        # A pipeline gathers its stages once for a step, and reduces gradients at its end.
        piped = local * (work.compute_bytes + 4.0)
        forward = np.where(rows.zero_stage >= 3, stage_3, stage_2)
        backward = np.where(rows.zero_stage >= 3, stage_3_backward, stage_2)
        forward, backward = (np.where(rows.pp > 1, piped, each) for each in (forward, backward))
        return (
            np.where(rows.zero_stage >= 2, forward, plain),
            np.where(rows.zero_stage >= 2, backward, plain_backward),
        )

    @property
    def _blocks_per_unit(self) -> int:
        units = self.work.options.blocks_per_unit
        if units == "all":
            return self.shape.num_layers
        return units

    # Activations

    def _activation_bytes(self) -> tuple[Bytes, Bytes]:
        """Bytes of activations and loss, where the loss is made, and in the backward."""
        rows = self.rows
        micro = rows.micro_batch_size
        peak = micro * self._map_distinct_rows(
            lambda *values: self._count_segments(*values).peak, "tp", "cp", "recompute"
        )
        saved = micro * self._map_distinct_rows(
            lambda *values: self._count_segments(*values).saved, "tp", "cp", "recompute"
        )
        ends = self._map_distinct_rows(
            self._embedding_and_head_bytes, "tp", "cp", "micro_batch_size"
        )
        norm = self._map_distinct_rows(self._norm_bytes, "tp", "cp", "micro_batch_size")
        loss = self._map_distinct_rows(self._loss_bytes, "tp", "cp", "micro_batch_size")
        passing = self._map_distinct_rows(self._passing_bytes, "tp", "cp", "micro_batch_size")
        forward, backward = saved + ends + norm + loss, peak + ends + passing
        # Of a pipeline the first rank has most microbatches in flight, and one is recomputed.
        flight = self._microbatches_in_flight()
        redone = peak - saved
        share = self._largest_stage_share() * self._share_of_blocks
        # Each stage keeps what it sends, too.
        message = self._map_distinct_rows(self._message_bytes, "tp", "cp")
        waiting = saved * share + rows.stages_per_rank * rows.micro_batch_size * message
        deferred = self._deferred_weight_grad_bytes() * share
        first = self._bytes_in_flight(flight, waiting, deferred) + redone + ends
        # The forwards that an interleaved schedule does ahead, even on the last rank.
        v = rows.stages_per_rank
        flight = np.minimum(flight, np.maximum(2.0, ((v - 1) * rows.pp + 1) / v))
        last = flight * waiting + redone + ends + norm + loss
        piped = np.where(self._is_v_shaped, np.maximum(first, last), first)
        if self.is_of_last_rank:
            piped = last
        return np.where(rows.pp > 1, piped, forward), np.where(rows.pp > 1, piped, backward)

    def _first_block_bytes(self) -> Bytes:
        """Bytes of activations in the backward of the first block."""
        rows = self.rows
        ends = self._map_distinct_rows(
            self._embedding_and_head_bytes, "tp", "cp", "micro_batch_size"
        )
        passing = self._map_distinct_rows(self._passing_bytes, "tp", "cp", "micro_batch_size")
        block = self._map_distinct_rows(
            lambda *values: self._count_segments(*values).first, "tp", "cp", "recompute"
        )
        return ends + passing + rows.micro_batch_size * block

    def _count_segments(self, tp: int, cp: int, mode: int) -> _SegmentBytes:
        key = (tp, cp, mode)
        if key not in self._counted.segments:
            saved, redone = count_segment_bytes(
                self._shard_shape(tp), self._build_workload(tp, cp, 1, mode)
            )
            first = float(saved[0] + redone[0]) if saved else 0.0
            peak = peak_segment_bytes(saved, redone)
            self._counted.segments[key] = _SegmentBytes(peak, sum(saved), first)
        return self._counted.segments[key]

    def _largest_stage_share(self) -> Bytes:
        """The part of the blocks that a rank has, where they do not divide: the one with most."""
        # Of a module without blocks all is at its ends.
        rows, num_layers = self.rows, max(1, self.shape.num_layers)
        stages = rows.pp * rows.stages_per_rank
        # Blocks move to where the least is in flight, so that only half of the excess counts.
        even = num_layers / stages
        return (even + 0.5 * (np.ceil(even) - even)) * rows.stages_per_rank / num_layers

    def _deferred_weight_grad_bytes(self) -> Bytes:
        """Bytes of a microbatch that wait for the gradients of weights, where a schedule puts these
        off: what recomputation frees is made for them, and stays."""
        rows = self.rows
        splits = np.array(
            ["zero-bubble" in name or name in V_SHAPED_SCHEDULES for name in SEARCHED_SCHEDULES]
        )
        if self.work.is_compiled:
            splits[:] = False
        bytes_of_sample = self._map_distinct_rows(self._weight_input_bytes, "tp", "cp")
        return np.where(splits[rows.schedule], rows.micro_batch_size * bytes_of_sample, 0.0)

    def _bytes_in_flight(self, flight: Bytes, waiting: Bytes, deferred: Bytes) -> Bytes:
        """Bytes of the microbatches in flight on the first rank at the worst moment: `waiting` of
        each whose backward is to come, `deferred` of each that lacks only the gradients of weights.

        As the generated schedules have them, of which each has its own worst moment.
        """
        rows = self.rows
        pp, excess = rows.pp, np.maximum(0.0, deferred - waiting)
        num_deferred = np.minimum(rows.num_microbatches - pp, pp - 1) + 0.5
        highest = {
            "zb-v": np.maximum(flight * waiting + 0.5 * excess, num_deferred * deferred),
            "dualpipe-v": np.maximum(flight * waiting, 0.5 * pp * deferred),
            "interleaved-zero-bubble": flight * waiting + pp / rows.stages_per_rank * excess,
        }
        worst_bytes = flight * waiting
        for name, of_schedule in highest.items():
            worst_bytes = np.where(
                rows.schedule == SEARCHED_SCHEDULES.index(name), of_schedule, worst_bytes
            )
        return worst_bytes

    def _message_bytes(self, tp: int, cp: int) -> float:
        activations = self._shard_shape(tp).activations
        assert activations is not None
        return float(activations.count_message_bytes(self._build_workload(tp, cp)))

    def _weight_input_bytes(self, tp: int, cp: int) -> float:
        activations, work = self._shard_shape(tp).activations, self._build_workload(tp, cp)
        assert activations is not None
        # Of each kind of blocks one is counted.
        counted: dict[Hashable, int] = {}
        total = 0
        for layer, kind in enumerate(activations.list_block_kinds(work)):
            if kind not in counted:
                counted[kind] = activations.block(layer, work).weight_inputs
            total += counted[kind]
        return float(total)

    def _microbatches_in_flight(self) -> Bytes:
        """Microbatches of a whole stage's activations on the first rank."""
        rows = self.rows
        pp, v, number = rows.pp, rows.stages_per_rank, rows.num_microbatches
        interleaved = (2 * (pp - 1) + (v - 1) * pp + 1) / v
        by_name = {
            "gpipe": number,
            "1f1b": pp,
            "interleaved": interleaved,
            "interleaved-zero-bubble": pp,
            "zb-v": pp,
            "dualpipe-v": pp + 0.5,
        }
        flight = np.zeros(len(rows))
        for index, name in enumerate(SEARCHED_SCHEDULES):
            flight = np.where(rows.schedule == index, by_name[name], flight)
        return np.minimum(flight, number)

    def _embedding_and_head_bytes(self, tp: int, cp: int, micro: int) -> float:
        activations, work = self._shard_shape(tp).activations, self._build_workload(tp, cp, micro)
        assert activations is not None
        ends = activations.count_bytes_in_every_stage(work) + activations.count_embedding_bytes(
            work
        )
        return float(ends + activations.count_block_mask_bytes(work))

    def _norm_bytes(self, tp: int, cp: int, micro: int) -> float:
        activations = self._shard_shape(tp).activations
        assert activations is not None
        return float(activations.count_final_norm_bytes(self._build_workload(tp, cp, micro)))

    def _passing_bytes(self, tp: int, cp: int, micro: int) -> float:
        """Bytes of gradients on their way in the backward of a block, or of the last norm."""
        shape, work = self._shard_shape(tp), self._build_workload(tp, cp, micro)
        activations = shape.activations
        assert activations is not None
        norm = activations.count_final_norm_passing_bytes(work)
        if not shape.num_layers:
            return float(norm)
        return float(max(norm, activations.block(shape.num_layers - 1, work).passing))

    def _loss_bytes(self, tp: int, cp: int, micro: int) -> float:
        activations = self._shard_shape(tp).activations
        assert activations is not None
        return float(activations.count_loss_bytes(self._build_workload(tp, cp, micro)).at_once)


_list_segments = lru_cache(maxsize=len(RECOMPUTE_CHOICES))(list_recompute_segments)
