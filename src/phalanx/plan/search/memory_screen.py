"""Memory and time of thousands of layouts at once: a screen, after which few are planned exactly.

Memory counts as `phalanx.plan.memory` does, with pipelines in closed form. What the screen lets
through is planned again, so an error here costs a candidate or a moment, never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from phalanx.plan.pipeline.pipeline_plan import V_SHAPED_SCHEDULES
from phalanx.plan.search.counts_by_degree import CountsByDegree
from phalanx.plan.search.equal_rows import Integers, group_equal_rows
from phalanx.plan.search.space import OFFLOAD_CHOICES, SEARCHED_SCHEDULES, LayoutRows

FITS_IN_NO_MODE = -1

Bytes = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _LastingBytes:
    """Bytes of each row that no recomputation changes: parameters and optimizer state, all
    gradients, and what is gathered or cast where the loss is made and in the backward."""

    held: Bytes
    gradients: Bytes
    gathered_in_forward: Bytes
    gathered_in_backward: Bytes

    def take(self, numbers: npt.NDArray[np.intp]) -> _LastingBytes:
        """Those of rows `numbers`."""
        return _LastingBytes(
            self.held[numbers],
            self.gradients[numbers],
            self.gathered_in_forward[numbers],
            self.gathered_in_backward[numbers],
        )


@dataclass(frozen=True)
class MemoryScreen:
    """Bytes of the rank that needs most, for layouts of one model."""

    counts: CountsByDegree
    rows: LayoutRows
    is_of_last_rank: bool = False
    """Of pipelines, the rank with the head is counted, and not the one with the embedding and most
    microbatches in flight. Where stages lie in a V, that is one rank, counted as the first."""
    _lasting: _LastingBytes | None = field(default=None, repr=False, compare=False)
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
            last = replace(self._take_rows(in_loops), is_of_last_rank=True, _lasting=None)
            total[in_loops] = np.maximum(total[in_loops], last._count_bytes_of_rank())
        return total

    def find_least_recompute(self, limits: Bytes, modes: Sequence[int]) -> tuple[LayoutRows, Bytes]:
        """The rows that fit, each in the first of `modes` in which it does, and their bytes: more
        recomputation only takes longer.

        `limits`: the bytes that each row may have.
        """
        lasting = self._count_lasting_bytes()
        # No recomputation makes states smaller, and those of most layouts of a large model are
        # too large by themselves.
        pending = np.flatnonzero(lasting.held + lasting.gradients <= limits)
        screen = replace(self, _lasting=lasting)._take_rows(pending)
        mode_of_row = np.full(len(self.rows), FITS_IN_NO_MODE)
        bytes_of_row = np.zeros(len(self.rows))
        for mode in modes:
            screen = screen._change_recompute(mode)
            total = screen.total_bytes(limits[pending])
            fits = total <= limits[pending]
            mode_of_row[pending[fits]] = mode
            bytes_of_row[pending[fits]] = total[fits]
            pending = pending[~fits]
            screen = screen._take_rows(np.flatnonzero(~fits))
        fitting = np.flatnonzero(mode_of_row != FITS_IN_NO_MODE)
        rows = replace(self.rows.take(fitting), recompute=mode_of_row[fitting])
        return rows, bytes_of_row[fitting]

    def _take_rows(self, numbers: npt.NDArray[np.intp]) -> MemoryScreen:
        """The screen of rows `numbers`, with what is known of them."""
        lasting = None if self._lasting is None else self._lasting.take(numbers)
        screen = replace(self, rows=self.rows.take(numbers), _lasting=lasting)
        for columns, (combinations, index) in self._groups.items():
            screen._groups[columns] = (combinations, index[numbers])
        return screen

    def _change_recompute(self, mode: int) -> MemoryScreen:
        """The screen of the same rows in another mode of recomputation."""
        modes = np.full(len(self.rows), mode, dtype=np.int64)
        screen = replace(self, rows=replace(self.rows, recompute=modes))
        for columns, group in self._groups.items():
            if "recompute" not in columns:
                screen._groups[columns] = group
        return screen

    def _count_bytes_of_rank(self) -> Bytes:
        lasting = self._lasting or self._count_lasting_bytes()
        gradients = lasting.gradients
        if not self._has_known_activations:
            return np.asarray(lasting.held + gradients)
        standing = np.where(self._has_standing_gradients(), gradients, 0.0)
        forward, backward = self._activation_bytes()
        moments = np.maximum(
            forward + lasting.gathered_in_forward, backward + lasting.gathered_in_backward
        )
        # The first blocks come last, beside the shards of all gradients.
        ends_whole = (self.rows.num_microbatches > 1) & (self.rows.accumulates_sharded == 0)
        first_block = np.where(
            ends_whole | (self.rows.pp > 1),
            0.0,
            self._first_block_bytes() + lasting.gathered_in_backward,
        )
        highest: Bytes = np.maximum(standing + moments, gradients + first_block)
        return lasting.held + highest

    def _map_rows(self, count: Callable[..., float], *columns: str) -> Bytes:
        """`count`, a method of `counts`, of each row's values in `columns`."""
        combinations, index = self._group_rows(*columns)
        return self.counts.tabulate(count, combinations)[index]

    def _group_rows(self, *columns: str) -> tuple[list[tuple[int, ...]], Integers]:
        """The different combinations of values in `columns`, and the index of each row's."""
        if columns not in self._groups:
            self._groups[columns] = group_equal_rows([getattr(self.rows, c) for c in columns])
        return self._groups[columns]

    @property
    def _has_known_activations(self) -> bool:
        return self.counts.shape.activations is not None

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
        head = self._map_rows(self.counts.count_blocks_of_head, "recompute")
        blocks = self.counts.shape.num_layers / rows.pp
        # All ranks share the work evenly, but for a part of a block.
        fewer = blocks - head * (1 - 1 / rows.pp) + 0.5
        return np.clip(fewer / np.maximum(1.0, blocks), 0.0, 1.0)

    @cached_property
    def _block_params(self) -> Bytes:
        """Parameters of a stage's blocks on one rank, with the experts of its coordinate in ep."""
        params = self._map_rows(self.counts.count_params_of_blocks, "tp", "ep")
        return params / self.rows.pp * self._share_of_blocks

    @cached_property
    def _params_outside_blocks(self) -> Bytes:
        """Parameters of a rank outside of blocks: of a pipeline, those of its end; where the first
        and the last stage are on one rank, the larger end's."""
        if self.is_of_last_rank:
            return self._map_rows(self.counts.count_head_params, "tp")
        return self._map_rows(self.counts.count_first_rank_ends, "tp", "pp", "schedule")

    @cached_property
    def _shard_params(self) -> Bytes:
        """Parameters of a rank's shard: cut over all of dp_shard x cp, experts over as many: ep and
        what is left."""
        rows = self.rows
        params_of_blocks = self._map_rows(self.counts.count_split_params_of_blocks, "tp")
        params_of_blocks = params_of_blocks / rows.pp * self._share_of_blocks
        return (params_of_blocks + self._params_outside_blocks) / rows.num_zero_shards

    def _count_lasting_bytes(self) -> _LastingBytes:
        rows, local = self.rows, self._block_params + self._params_outside_blocks
        on_host = np.array([name != "none" for name in OFFLOAD_CHOICES])[rows.offload]
        all_on_host = np.array([name == "parameters" for name in OFFLOAD_CHOICES])[rows.offload]
        optimizer = self.counts.work.optimizer_bytes * np.where(
            rows.zero_stage >= 1, self._shard_params, local
        )
        # Weights and gradients alike.
        whole_or_shard = 4.0 * np.where(rows.zero_stage >= 2, self._shard_params, local)
        weights = np.where(all_on_host, 0.0, whole_or_shard)
        held = np.where(on_host, 0.0, optimizer) + weights
        gathered = (np.zeros(len(rows)),) * 2
        if self._has_known_activations:
            gathered = self._gathered_bytes()
        return _LastingBytes(held, weights, *gathered)

    def _has_standing_gradients(self) -> npt.NDArray[np.bool_]:
        """True where gradients are there before the backward: DDP's buckets, and what earlier
        microbatches left (`StepMoments._standing_gradients`)."""
        rows = self.rows
        accumulates, is_sharded = rows.num_microbatches > 1, rows.zero_stage >= 2
        has_local_gradients = accumulates | (rows.dp_replicate * rows.num_zero_shards > 1)
        kept_shards = accumulates & (rows.accumulates_sharded == 1) & (rows.pp == 1)
        return np.where(is_sharded, kept_shards, has_local_gradients)

    # What is gathered for use, and cast

    def _gathered_bytes(self) -> tuple[Bytes, Bytes]:
        """Bytes that are gathered or cast, where the loss is made, and in the backward."""
        rows, work = self.rows, self.counts.work
        local = self._block_params + self._params_outside_blocks
        # The head has a copy, and the table that is looked up in has none.
        head = self._map_rows(self.counts.count_head_params, "tp")
        if not self.is_of_last_rank:
            head = np.where((rows.pp > 1) & ~self._is_v_shaped, 0.0, head)
        plain = (self._block_params + head) * work.cast_bytes
        plain_backward = self._block_params * work.cast_bytes
        unit = self._map_rows(self.counts.count_params_of_largest_block, "tp", "ep")
        unit = np.minimum(unit * max(1, self._blocks_per_unit), self._block_params)
        accumulated_bytes = np.where(
            (rows.num_microbatches > 1) & (rows.accumulates_sharded == 0), 4.0 * local, 0.0
        )
        prefetch = work.options.prefetch
        num_units = 1 + (int(self.counts.gathers_ahead) if prefetch is None else prefetch)
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
        units = self.counts.work.options.blocks_per_unit
        if units == "all":
            return self.counts.shape.num_layers
        return units

    # Activations

    def _activation_bytes(self) -> tuple[Bytes, Bytes]:
        """Bytes of activations and loss, where the loss is made, and in the backward."""
        rows, counts, micro = self.rows, self.counts, self.rows.micro_batch_size
        of_blocks, outside = ("tp", "cp", "recompute"), ("tp", "cp", "micro_batch_size")
        peak = micro * self._map_rows(counts.count_peak_of_blocks, *of_blocks)
        saved = micro * self._map_rows(counts.count_saved_of_blocks, *of_blocks)
        ends = self._map_rows(counts.count_ends, *outside)
        norm = self._map_rows(counts.count_last_norm, *outside)
        loss = self._map_rows(counts.count_loss, *outside)
        passing = self._map_rows(counts.count_passing, *outside)
        forward, backward = saved + ends + norm + loss, peak + ends + passing
        # Of a pipeline the first rank has most microbatches in flight, and one is recomputed.
        flight = self._microbatches_in_flight()
        redone = peak - saved
        share = self._largest_stage_share() * self._share_of_blocks
        # Each stage keeps what it sends, too.
        message = self._map_rows(counts.count_message, "tp", "cp")
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
        counts, outside = self.counts, ("tp", "cp", "micro_batch_size")
        ends = self._map_rows(counts.count_ends, *outside)
        passing = self._map_rows(counts.count_passing, *outside)
        block = self._map_rows(counts.count_first_segment, "tp", "cp", "recompute")
        return ends + passing + self.rows.micro_batch_size * block

    def _largest_stage_share(self) -> Bytes:
        """The part of the blocks that a rank has, where they do not divide: the one with most."""
        # Of a module without blocks all is at its ends.
        rows, num_layers = self.rows, max(1, self.counts.shape.num_layers)
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
        if self.counts.work.is_compiled:
            splits[:] = False
        bytes_of_sample = self._map_rows(self.counts.count_weight_inputs, "tp", "cp")
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
            "interleaved-zero-bubble": flight * waiting
            + np.minimum(pp / rows.stages_per_rank, rows.num_microbatches) * excess,
        }
        worst_bytes = flight * waiting
        for name, of_schedule in highest.items():
            worst_bytes = np.where(
                rows.schedule == SEARCHED_SCHEDULES.index(name), of_schedule, worst_bytes
            )
        return worst_bytes

    def _microbatches_in_flight(self) -> Bytes:
        """Microbatches of a whole stage's activations on the first rank."""
        rows = self.rows
        pp, v, number = rows.pp, rows.stages_per_rank, rows.num_microbatches
        # Microbatches that go through all stages of a rank in turn.
        round_size = number / np.maximum(1, number // pp)
        interleaved = (2 * (pp - 1) + (v - 1) * round_size + 1) / v
        by_name = {
            "gpipe": number,
            "1f1b": pp,
            "interleaved": interleaved,
            "interleaved-zero-bubble": ((v - 1) * round_size + pp) / v,
            "zb-v": pp,
            "dualpipe-v": pp + 0.5,
        }
        flight = np.zeros(len(rows))
        for index, name in enumerate(SEARCHED_SCHEDULES):
            flight = np.where(rows.schedule == index, by_name[name], flight)
        return np.minimum(flight, number)
