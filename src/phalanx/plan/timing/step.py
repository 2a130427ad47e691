"""`estimate_step_times` and `estimate_steps_of_setups`: the seconds of a step, by term, of one
setup and of many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.core.errors import LayoutError
from phalanx.job.costs import ModelCosts
from phalanx.job.work import BlockWork, ModelWork
from phalanx.plan.timing import collectives
from phalanx.plan.timing.block import (
    BLOCK_TIME_PARTS,
    BlockPassTimes,
    BlockTimeEstimator,
    BlockTimes,
)
from phalanx.plan.timing.columns import Column, SetupColumns, build_setup_columns
from phalanx.plan.timing.constants import TimingConstants, load_timing_constants
from phalanx.plan.timing.data_parallel import (
    ShardUnit,
    build_data_parallel_links,
    estimate_exposed_communication_s,
    estimate_optimizer_s,
)
from phalanx.plan.timing.machine import MachineRates
from phalanx.plan.timing.matmul import (
    choose_head_precision,
    choose_peak_precision,
)
from phalanx.plan.timing.pipeline import StageTimes, estimate_bubble_s
from phalanx.plan.timing.setup import Precision, StepSetup
from phalanx.plan.timing.step_time import STEP_TERMS, StepTime

# The loss in eager kernels: logits in fp32, their softmax, and its gradient are written apart.
EAGER_LOSS_SLOWDOWN = 2.5
# Terms in which a GPU waits for something else.
WAITING_TERMS = ("tp", "cp", "ep", "bubble", "dp exposed", "offload", "launch")


@dataclass(frozen=True)
class StepTimeColumns:
    """Seconds of a step for many setups: one column a term, in the order of STEP_TERMS."""

    terms: dict[str, Column]
    band: Column
    """Half of the logarithm's width of the 80 % interval."""

    @property
    def total_s(self) -> Column:
        return sum((self.terms[term] for term in STEP_TERMS), start=np.zeros(1))

    def take(self, row: int) -> StepTime:
        """The times of the setup at `row`."""
        terms = {term: float(self.terms[term][row]) for term in STEP_TERMS}
        total, factor = sum(terms.values()), math.exp(float(self.band[row]))
        return StepTime(terms, total / factor, total * factor)


def estimate_step_times(
    model: ModelCosts,
    machine: MachineRates,
    setup: StepSetup,
    constants: TimingConstants | None = None,
) -> StepTime:
    """The seconds of one step of `setup`, by term. Raises LayoutError where nobody knows the
    model's work."""
    return estimate_steps_of_setups(model, machine, [setup], constants).take(0)


def estimate_steps_of_setups(
    model: ModelCosts,
    machine: MachineRates,
    setups: Sequence[StepSetup],
    constants: TimingConstants | None = None,
) -> StepTimeColumns:
    """The seconds of one step of each of `setups`, which have one seq_len and one precision."""
    seq_len, precision = setups[0].seq_len, setups[0].precision
    assert all(setup.seq_len == seq_len for setup in setups), "one seq_len a call"
    assert all(setup.precision == precision for setup in setups), "one precision a call"
    work = model.work(seq_len)
    if work is None:
        raise LayoutError(
            f"the time of a step cannot be predicted for model.kind={model.kind}",
            why="only a trace of the built module says what it computes",
        )
    return estimate_step_columns(work, machine, precision, build_setup_columns(setups), constants)


def estimate_step_columns(
    work: ModelWork,
    machine: MachineRates,
    precision: Precision,
    columns: SetupColumns,
    constants: TimingConstants | None = None,
) -> StepTimeColumns:
    """The seconds of one step for each setup of `columns`."""
    constants = constants or load_timing_constants()
    return _StepTimeEstimator(work, machine, precision, columns, constants).estimate()


@dataclass(frozen=True)
class _EmbeddingAndHeadTimes:
    """Seconds of one microbatch in what is not in blocks: the embedding, and the head with the
    loss, forward and backward."""

    first: BlockPassTimes
    last_forward: BlockPassTimes
    last_backward: BlockPassTimes


@dataclass(frozen=True)
class _StepTimeEstimator:
    """The formulas of a whole step."""

    work: ModelWork
    machine: MachineRates
    precision: Precision
    columns: SetupColumns
    constants: TimingConstants

    def estimate(self) -> StepTimeColumns:
        columns, constants = self.columns, self.constants
        timer = BlockTimeEstimator(
            self.machine, self.precision, columns, constants, self.work.num_tokens
        )
        kinds, ends = self._estimate_microbatch(timer)
        terms = self._sum_block_parts(kinds, ends)
        units = self._list_shard_units(timer, kinds, ends)
        groups = build_data_parallel_links(columns, self.machine, constants)
        terms["bubble"] = self._estimate_bubble_s(timer, kinds, ends)
        terms["dp exposed"] = estimate_exposed_communication_s(units, columns, groups, constants)
        terms["optimizer"], terms["offload"] = estimate_optimizer_s(
            units, columns, groups, self.machine, constants
        )
        terms["launch"] = terms["launch"] + constants.step_overhead_s
        ideal = self._ideal_s()
        terms["ideal"] = ideal
        terms["matmul loss"] = terms.pop("matmul") - ideal
        subtotal = sum(terms.values(), start=np.zeros(1))
        terms["jitter"] = subtotal * self._jitter_share()
        shape = np.broadcast_shapes(*(term.shape for term in terms.values()), columns.pp.shape)
        in_order = {term: np.broadcast_to(terms[term], shape) for term in STEP_TERMS}
        return StepTimeColumns(
            in_order, np.broadcast_to(self._interval_half_width(in_order), shape)
        )

    def _estimate_microbatch(
        self, timer: BlockTimeEstimator
    ) -> tuple[list[tuple[int, BlockTimes]], _EmbeddingAndHeadTimes]:
        """Seconds of one microbatch in each kind of blocks, of which there are so many, and in what
        is beside them: computed once for the setups in which they are equal."""
        if len(self.columns) == 1:
            kinds = [(n, timer.estimate_block_times(block)) for block, n in self.work.block_kinds]
            return kinds, self._estimate_embedding_and_head(timer)
        columns, rows = self.columns.group_by_block_times()
        timer = replace(timer, columns=columns)
        kinds = [
            (count, timer.estimate_block_times(block).take(rows))
            for block, count in self.work.block_kinds
        ]
        ends = self._estimate_embedding_and_head(timer)
        return kinds, _EmbeddingAndHeadTimes(
            ends.first.take(rows), ends.last_forward.take(rows), ends.last_backward.take(rows)
        )

    def _interval_half_width(self, terms: dict[str, Column]) -> Column:
        """Half of the logarithm's width of the 80 % interval: parts that do not depend on each
        other add up as squares."""
        constants = self.constants
        total = sum(terms.values(), start=np.zeros(1))
        waiting = sum((terms[term] for term in WAITING_TERMS), start=np.zeros(1)) / total
        has_experts = any(block.num_experts for block, _ in self.work.block_kinds)
        return np.sqrt(
            constants.band**2
            + (constants.band_experts * has_experts) ** 2
            + (constants.band_waiting * waiting) ** 2
        )

    def _ideal_s(self) -> Column:
        """Seconds of the model's products, without any recomputation, at the data sheet's peak."""
        columns, work = self.columns, self.work
        peak = self.machine.accelerator.peak_flops
        outside = work.num_head_tokens * work.head.flops_per_token
        outside += work.num_tokens * sum(
            matmul.flops_per_token
            for block in (*work.before_blocks, *work.after_blocks)
            for matmul in block.matmuls
        )
        seconds = (work.matmul_flops - outside) / peak(
            choose_peak_precision(self.machine, self.precision)
        )
        outside_precision = choose_head_precision(self.precision)
        seconds += outside / peak(choose_peak_precision(self.machine, outside_precision))
        sequences = columns.micro_batch_size * columns.num_microbatches
        parts = columns.pp * columns.cp * columns.tp
        return np.asarray(3.0 * seconds * sequences / parts)

    def _sum_block_parts(
        self, kinds: list[tuple[int, BlockTimes]], ends: _EmbeddingAndHeadTimes
    ) -> dict[str, Column]:
        """Seconds of one step of each part, on the mean rank."""
        columns = self.columns
        terms = {}
        for part in BLOCK_TIME_PARTS:
            seconds = getattr(ends.first, part) + getattr(ends.last_forward, part)
            seconds = seconds + getattr(ends.last_backward, part)
            for count, times in kinds:
                seconds = seconds + count * (
                    getattr(times.forward, part) + getattr(times.backward, part)
                )
            terms[part] = seconds * columns.num_microbatches / columns.pp
        return terms

    def _estimate_embedding_and_head(self, timer: BlockTimeEstimator) -> _EmbeddingAndHeadTimes:
        columns, constants, work = timer.columns, self.constants, self.work
        share = work.num_head_tokens / work.num_tokens
        head = timer.estimate_matmul_times(work.head, in_blocks=False)
        logits = timer.tokens * share * work.head.outputs
        if work.head.cut == "column":
            logits = logits / columns.tp
        # The constant is that of 16-bit logits.
        logit_bytes = constants.loss_bytes * timer.activation_bytes / 2
        loss = timer.memory_traffic_s(logits * logit_bytes)
        loss = loss * np.where(columns.is_head_fused, 1.0, EAGER_LOSS_SLOWDOWN)
        zero = np.zeros(1)
        # What is looked up is written, and its gradient is added to the table.
        looked_up = timer.memory_traffic_s(timer.tokens * work.dim * 12.0)
        group = collectives.build_group_links(
            columns.tp, np.ones_like(columns.tp), self.machine, constants
        )
        reduce = collectives.all_reduce_s(group, timer.tokens * work.dim * timer.activation_bytes)
        embedding: Column = zero
        if work.embedding is not None:
            part = work.num_embedding_tokens / work.num_tokens
            embedding = (
                np.sum(timer.estimate_matmul_times(work.embedding, in_blocks=False), axis=0) * part
            )

        def build(matmul: Column, elementwise: Column, tp: Column) -> BlockPassTimes:
            return BlockPassTimes(matmul, zero, elementwise, tp, zero, zero, zero)

        first = build(embedding, looked_up, reduce)
        for times in self._estimate_outer_blocks(timer, work.before_blocks):
            first = first.add(times.forward).add(times.backward)
        last_forward = build(head[0] * share, 0.4 * loss, zero)
        last_backward = build((head[1] + head[2]) * share, 0.6 * loss, reduce)
        for times in self._estimate_outer_blocks(timer, work.after_blocks):
            last_forward = last_forward.add(times.forward)
            last_backward = last_backward.add(times.backward)
        return _EmbeddingAndHeadTimes(first, last_forward, last_backward)

    def _estimate_outer_blocks(
        self, timer: BlockTimeEstimator, blocks: Sequence[BlockWork]
    ) -> Iterator[BlockTimes]:
        """Seconds of one microbatch in what is computed outside of the blocks: once, and whole on
        each rank of tp where no rule cuts it."""
        # Blocks alone multiply in fp8.
        precision = choose_head_precision(timer.precision)
        zero = np.zeros_like(timer.columns.tp)
        once = replace(
            timer.columns,
            recomputed_matmul=zero,
            recomputed_attention=zero,
            recomputed_elementwise=zero,
        )
        for block in blocks:
            columns = once
            if all(matmul.cut == "none" for matmul in block.matmuls):
                columns = replace(once, tp=np.ones_like(once.tp))
            outside = replace(timer, columns=columns, precision=precision)
            yield outside.estimate_block_times(block)

    def _list_shard_units(
        self,
        timer: BlockTimeEstimator,
        kinds: list[tuple[int, BlockTimes]],
        ends: _EmbeddingAndHeadTimes,
    ) -> tuple[ShardUnit, ...]:
        columns, work = self.columns, self.work
        units = []
        for (block, count), (_, times) in zip(work.block_kinds, kinds, strict=True):
            dense, experts = timer.count_local_params(block)
            units.append(
                ShardUnit(
                    dense,
                    experts + np.zeros_like(columns.pp),
                    times.forward.total,
                    times.backward.total,
                    count / columns.pp,
                    block.num_tensors,
                )
            )
        embedding, head = work.num_embedding_params, work.num_head_params
        tied = work.num_tied_params
        # Of a pipeline, the end with more; a tied table is at both.
        apart = max(embedding, head + tied)
        outside = np.where(columns.pp > 1, apart, embedding + head) / columns.tp
        forward = ends.first.total + ends.last_forward.total
        units.append(
            ShardUnit(
                outside,
                np.zeros_like(columns.pp),
                forward,
                ends.last_backward.total,
                np.ones_like(columns.pp),
            )
        )
        return tuple(units)

    def _estimate_bubble_s(
        self,
        timer: BlockTimeEstimator,
        kinds: list[tuple[int, BlockTimes]],
        ends: _EmbeddingAndHeadTimes,
    ) -> Column:
        if not (self.columns.pp > 1).any():
            return np.zeros(1)
        num_layers = self.work.num_layers
        forward, backward, weights = np.zeros(1), np.zeros(1), np.zeros(1)
        for count, times in kinds:
            forward = forward + count / num_layers * times.forward.total
            backward = backward + count / num_layers * times.backward.total
            weights = weights + count / num_layers * times.weight_gradients
        work = self.work
        first_flops, last_flops = work.flops_before_blocks, work.flops_after_blocks
        ends_flops = first_flops + last_flops
        stage = StageTimes(
            num_layers,
            forward,
            backward,
            weights,
            ends.first.total,
            ends.last_forward.total + ends.last_backward.total,
            (work.matmul_flops - ends_flops + work.attention_flops) / max(1, num_layers),
            first_flops,
            last_flops,
        )
        num_bytes = timer.activation_bytes * timer.tokens * self.work.dim
        num_bytes = num_bytes / self.columns.sequence_parts
        return estimate_bubble_s(stage, num_bytes, self.columns, self.machine, self.constants)

    def _jitter_share(self) -> Column:
        """The part by which the slowest of all ranks is slower than the mean one."""
        ranks = self.columns.num_ranks
        nodes = np.maximum(1.0, ranks / self.machine.gpus_per_node)
        spread = self.constants.clock_spread * (1.0 - 1.0 / ranks)
        # The expected maximum of n draws from a normal distribution.
        return spread + self.constants.jitter * np.sqrt(2.0 * np.log(nodes))
