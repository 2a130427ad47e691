"""The time of one block of a model for one microbatch on one rank, by what takes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phalanx.job.work import BlockWork, Matmul
from phalanx.plan.timing import collectives
from phalanx.plan.timing.attention import estimate_attention_times
from phalanx.plan.timing.columns import Column, SetupColumns
from phalanx.plan.timing.constants import TimingConstants
from phalanx.plan.timing.machine import MachineRates
from phalanx.plan.timing.matmul import (
    choose_head_precision,
    compute_alignment_speed_share,
    compute_dense_flops_s,
    count_activation_bytes,
    count_prologue_elements,
    estimate_matmul_s,
)
from phalanx.plan.timing.setup import Precision

BLOCK_TIME_PARTS = ("matmul", "attention", "elementwise", "tp", "cp", "ep", "launch")
# Kernels of a block's forward: what a trace of each kind of code shows.
FUSED_KERNELS, EAGER_KERNELS, COMPILED_KERNELS, EXPERT_KERNELS = 24, 60, 18, 30
# The backward starts two products for each of the forward's, in C++.
BACKWARD_LAUNCH_RATIO = 1.15
# Waiting for the CPU and computing overlap, but not wholly: a norm of this order is between the
# larger of both and their sum.
LAUNCH_OVERLAP_NORM = 6.0


def take_rows(column: Column, rows: npt.NDArray[np.intp]) -> Column:
    """The values of `column` at `rows`; one value that all setups share stays one."""
    if column.shape[-1] == 1:
        return column
    return np.asarray(column[..., rows])


@dataclass(frozen=True)
class BlockPassTimes:
    """Seconds of one pass through a block, by part."""

    matmul: Column
    attention: Column
    elementwise: Column
    tp: Column
    cp: Column
    ep: Column
    launch: Column

    @property
    def total(self) -> Column:
        return sum((getattr(self, part) for part in BLOCK_TIME_PARTS), start=np.zeros(1))

    @property
    def gpu_busy_s(self) -> Column:
        """Seconds in which the GPU computes."""
        return self.matmul + self.attention + self.elementwise

    def take(self, rows: npt.NDArray[np.intp]) -> BlockPassTimes:
        """The times of the setups at `rows`."""
        return BlockPassTimes(*(take_rows(getattr(self, part), rows) for part in BLOCK_TIME_PARTS))

    def add(self, other: BlockPassTimes) -> BlockPassTimes:
        """The times of both, one after the other."""
        return BlockPassTimes(
            *(getattr(self, part) + getattr(other, part) for part in BLOCK_TIME_PARTS)
        )


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one microbatch in one block: forward, and backward with what it recomputes."""

    forward: BlockPassTimes
    backward: BlockPassTimes
    weight_gradients: Column
    """The part of the backward that zero-bubble schedules can do later."""

    def take(self, rows: npt.NDArray[np.intp]) -> BlockTimes:
        """The times of the setups at `rows`."""
        weight_gradients = take_rows(self.weight_gradients, rows)
        return BlockTimes(self.forward.take(rows), self.backward.take(rows), weight_gradients)


@dataclass(frozen=True)
class BlockTimeEstimator:
    """The formulas of a block on one machine, for the setups of `columns`."""

    machine: MachineRates
    precision: Precision
    columns: SetupColumns
    constants: TimingConstants
    num_tokens: int
    """Tokens of one sample."""
    _times_of_products: dict[Matmul, tuple[Column, Column, Column]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def tokens(self) -> Column:
        """Tokens of one microbatch that a rank computes, before tp divides the sequence."""
        return self.columns.micro_batch_size * self.num_tokens / self.columns.cp

    @property
    def activation_bytes(self) -> float:
        """Bytes of one element of an activation."""
        return count_activation_bytes(self.precision)

    def memory_traffic_s(self, num_bytes: Column) -> Column:
        return num_bytes / (self.machine.memory_bytes_s * self.constants.memory_efficiency)

    def estimate_block_times(self, block: BlockWork) -> BlockTimes:
        """Seconds of one microbatch in `block`."""
        columns, constants = self.columns, self.constants
        products = [self.estimate_block_matmul_times(matmul) for matmul in block.matmuls]
        forward_matmul = sum((product[0] for product in products), start=np.zeros(1))
        input_matmul = sum((product[1] for product in products), start=np.zeros(1))
        weight_matmul = sum((product[2] for product in products), start=np.zeros(1))
        attention = (np.zeros(1), np.zeros(1))
        if block.attention is not None:
            attention = estimate_attention_times(
                block.attention,
                self.machine,
                choose_head_precision(self.precision),
                columns,
                constants,
            )
        elementwise = self._estimate_elementwise_times(block)
        cp = self._estimate_cp_times(block, attention)
        tp = self._estimate_tp_times(block)
        ep = self._estimate_ep_s(block)
        forward = self._add_launch_wait(
            block,
            BlockPassTimes(
                forward_matmul,
                attention[0],
                elementwise[0],
                tp[0],
                cp[0],
                ep,
                self._estimate_size_reading_s(block),
            ),
            1.0,
        )
        # Recomputing all runs the collectives again; recomputing a part has its inputs.
        recomputed_messages = columns.recomputed_matmul * (columns.recomputed_attention > 0)
        backward = BlockPassTimes(
            matmul=input_matmul + weight_matmul + columns.recomputed_matmul * forward_matmul,
            attention=attention[1] + columns.recomputed_attention * attention[0],
            elementwise=elementwise[1] + columns.recomputed_elementwise * elementwise[0],
            tp=tp[1] + recomputed_messages * tp[0],
            cp=cp[1] + columns.recomputed_attention * cp[0],
            ep=ep * (1.0 + recomputed_messages),
            launch=np.zeros(1),
        )
        launches = BACKWARD_LAUNCH_RATIO + np.maximum(
            columns.recomputed_matmul, 0.5 * columns.recomputed_elementwise
        )
        backward = self._add_launch_wait(block, backward, launches)
        return BlockTimes(forward, backward, weight_matmul)

    def estimate_block_matmul_times(self, matmul: Matmul) -> tuple[Column, Column, Column]:
        """The result of `estimate_matmul_times`, of equal products once: blocks with experts and
        without have the same attention."""
        if matmul not in self._times_of_products:
            self._times_of_products[matmul] = self.estimate_matmul_times(matmul)
        return self._times_of_products[matmul]

    def estimate_matmul_times(
        self, matmul: Matmul, in_blocks: bool = True
    ) -> tuple[Column, Column, Column]:
        """Seconds of a product's forward, of its input's gradient and of its weight's."""
        columns, constants = self.columns, self.constants
        precision: Precision = self.precision
        if not in_blocks or matmul.name == "router":
            precision = choose_head_precision(precision)
        flops_s = compute_dense_flops_s(self.machine, precision, constants)
        if not in_blocks:
            of_blocks = compute_dense_flops_s(self.machine, self.precision, constants)
            flops_s = np.where(columns.head_has_8_bits, of_blocks, flops_s)
        element_bytes = {"fp32": 4.0, "fp8": 1.0, "mxfp8": 1.0, "fp4": 0.5}.get(precision, 2.0)
        parts = columns.tp
        rows, count = self.tokens, np.ones(1)
        if matmul.cut == "none":
            rows = rows / columns.sequence_parts
        if matmul.num_experts > 1:
            parts = np.where(columns.cuts_experts, columns.tp, 1.0)
            senders = np.where(columns.cuts_experts, 1.0, columns.tp)
            count = np.ceil(matmul.num_experts / columns.ep)
            arriving = self.tokens / senders * matmul.visited * columns.imbalance
            rows = np.maximum(1.0, arriving / count)
            flops_s = flops_s * constants.grouped_efficiency
        inputs = np.full_like(rows, matmul.inputs)
        outputs = np.full_like(rows, matmul.outputs)
        if matmul.cut == "row":
            inputs = np.ceil(inputs / parts)
        elif matmul.cut == "column":
            outputs = np.ceil(outputs / parts)
        flops_s = flops_s * compute_alignment_speed_share(inputs, outputs, constants)
        prologue = count_prologue_elements(self.machine, precision, constants)
        shared = (count, flops_s, self.machine, constants, prologue, element_bytes)
        return (
            estimate_matmul_s(rows, outputs, inputs, *shared),
            estimate_matmul_s(rows, inputs, outputs, *shared),
            estimate_matmul_s(inputs, outputs, rows, *shared),
        )

    def count_local_params(self, block: BlockWork) -> tuple[Column, Column]:
        """Parameters of `block` on one rank: what every data-parallel rank has, and experts."""
        columns = self.columns
        cut = block.num_params - block.num_routed_params - block.num_uncut_params
        expert_parts = columns.ep * np.where(columns.cuts_experts, columns.tp, 1.0)
        return (
            cut / columns.tp + block.num_uncut_params,
            block.num_routed_params / expert_parts,
        )

    def _estimate_elementwise_times(self, block: BlockWork) -> tuple[Column, Column]:
        columns, constants = self.columns, self.constants
        spread, tp = columns.sequence_parts, columns.tp
        norms, residuals = block.norm_features / spread, block.residual_features / spread
        heads = block.head_features / tp
        activations = (block.activation_features - self._count_fused_features(block)) / tp
        # Elements that each operation reads and writes; the backward reads its inputs again.
        forward = 2 * norms + 3 * residuals + 2 * heads + (2 + block.is_gated) * activations
        backward = 3 * norms + 2 * residuals + 2 * heads + (3 + 2 * block.is_gated) * activations
        dropped = 1.5 * residuals * columns.extra_dropout
        # Rows are put into the experts' order and back again, or arrive in it.
        moves = np.where(columns.arrives_in_order, 2.0, 4.0)
        rows = moves * block.experts_per_token * block.routed_dim
        routed = rows * constants.expert_traffic / np.where(columns.cuts_experts, 1.0, tp)
        traffic = (
            columns.is_fused * 1.0
            + columns.is_eager * constants.eager_traffic
            + columns.is_compiled * constants.compiled_traffic
        )
        casts = self._count_cast_bytes(block)
        size = self.activation_bytes
        bytes_forward = self.tokens * (size * (traffic * (forward + dropped) + routed) + casts)
        bytes_backward = self.tokens * (size * (traffic * (backward + dropped) + routed) + casts)
        # A weight's gradient is added to what other microbatches left.
        dense, routed_params = self.count_local_params(block)
        grad_bytes = np.where(columns.has_main_grad, 8.0, 6.0) * (dense + routed_params)
        kernels = (
            columns.is_fused * FUSED_KERNELS
            + columns.is_eager * EAGER_KERNELS
            + columns.is_compiled * COMPILED_KERNELS
            + (block.num_experts > 0) * EXPERT_KERNELS
        )
        gap_s = np.where(columns.launches_graphs, constants.graph_gap_s, constants.kernel_gap_s)
        gaps = kernels * gap_s
        return (
            self.memory_traffic_s(bytes_forward) + gaps,
            self.memory_traffic_s(bytes_backward + grad_bytes) + 2 * gaps,
        )

    def _count_cast_bytes(self, block: BlockWork) -> Column:
        """Bytes per token to cast what enters products to 8 bits or fewer."""
        if self.precision not in ("fp8", "mxfp8", "fp4"):
            return np.zeros(1)
        features = -self._count_fused_features(block) / self.columns.tp
        for matmul in block.matmuls:
            parts = self.columns.tp if matmul.cut == "row" else np.ones(1)
            features = features + matmul.inputs * matmul.visited / parts
        return features * self.constants.cast_bytes

    def _count_fused_features(self, block: BlockWork) -> Column:
        """Features of activations that the kernel of an expert's first product writes as the second
        one reads them."""
        features = sum(
            matmul.inputs * matmul.visited
            for matmul in block.matmuls
            if matmul.num_experts > 1 and matmul.cut == "row"
        )
        return np.where(self.columns.fuses_experts, float(features), 0.0)

    def _estimate_tp_times(self, block: BlockWork) -> tuple[Column, Column]:
        columns, constants = self.columns, self.constants
        group = collectives.build_group_links(
            columns.tp, np.ones_like(columns.tp), self.machine, constants
        )
        is_dense = block.num_experts == 0
        has_shared = any(matmul.name.startswith("shared") for matmul in block.matmuls)
        # Experts that tp does not cut get the tokens that a rank has anyway.
        regions = 1.0 + np.where(columns.cuts_experts, 1.0, float(is_dense or has_shared))
        # A product cut by rows leaves sums to reduce; scattered and gathered, they travel as far.
        num_bytes = self.tokens * self.activation_bytes * block.residual_features / 2
        reduce = regions * collectives.all_reduce_s(group, num_bytes)
        exposed = np.where(columns.overlaps_tp, 1.0 - constants.tp_hidden, 1.0)
        # With a part of the sequence, inputs are gathered again for the gradients of weights.
        regather = np.where(columns.sequence_parallel, 0.5 * reduce, 0.0)
        backward = constants.tp_backward_exposed * (reduce + 0.5 * regather)
        return reduce * exposed, backward * exposed

    def _estimate_cp_times(
        self, block: BlockWork, attention_s: tuple[Column, Column]
    ) -> tuple[Column, Column]:
        columns, constants = self.columns, self.constants
        if block.attention is None or not (columns.cp > 1).any():
            return np.zeros(1), np.zeros(1)
        group = collectives.build_group_links(columns.cp, columns.tp, self.machine, constants)
        attention = block.attention
        size = attention.head_dim + attention.value_dim
        kv_heads = np.maximum(1.0, attention.num_kv_heads / columns.tp)
        # Keys and values of the sequence travel around the ring, or are gathered.
        kv_tokens = columns.micro_batch_size * attention.num_tokens
        kv_bytes = self.activation_bytes * kv_tokens * kv_heads * size
        ring = collectives.all_gather_s(group, kv_bytes)
        hops = (columns.cp - 1) * constants.link_latency_s
        forward, backward = (
            np.maximum(moved - window, constants.cp_exposed * moved) + hops
            for moved, window in zip((ring, 2 * ring), attention_s, strict=True)
        )
        # Ulysses: heads for tokens and back, queries and outputs as well.
        heads = attention.num_heads + attention.num_kv_heads
        sent = self.activation_bytes * self.tokens * heads * size / columns.tp
        share = (columns.cp - 1) / columns.cp
        exchange = share * sent / (group.ring_bytes_s * constants.all_to_all_efficiency)
        exchange = exchange + 2 * group.latency_s
        is_apart = columns.cp == 1
        times = []
        for by_ring, gathered in ((forward, ring), (backward, ring)):
            seconds = np.where(
                columns.is_ring, by_ring, np.where(columns.is_gathered_cp, gathered, exchange)
            )
            times.append(np.where(is_apart, 0.0, seconds))
        return times[0], times[1]

    def _estimate_ep_s(self, block: BlockWork) -> Column:
        """Seconds of the two all-to-all of one pass."""
        columns, constants = self.columns, self.constants
        if not block.num_experts:
            return np.zeros(1)
        stride = np.where(columns.cuts_experts, columns.tp, 1.0)
        group = collectives.build_group_links(columns.ep, stride, self.machine, constants)
        senders = np.where(columns.cuts_experts, 1.0, columns.tp)
        rows = self.tokens / senders * block.experts_per_token
        sent = self.activation_bytes * rows * block.routed_dim
        seconds = collectives.all_to_all_s(
            group,
            sent * columns.imbalance,
            block.experts_per_token,
            columns.sends_by_rank,
            constants,
        )
        exposed = np.where(columns.overlaps_ep, 1.0 - constants.ep_hidden, 1.0)
        # Beside another microbatch's computation, which takes longer, only contention is left.
        exposed = np.where(columns.overlaps_experts, constants.overlap_contention, exposed)
        return 2 * seconds * exposed

    def _estimate_size_reading_s(self, block: BlockWork) -> Column:
        """Seconds of a forward in which the GPU has no work, for the CPU waits to read the sizes of
        experts, and starts what follows only then."""
        columns = self.columns
        reads = columns.reads_expert_sizes & ~columns.launches_graphs & (block.num_experts > 0)
        return np.where(reads, self.constants.expert_sync_s, 0.0)

    def _add_launch_wait(
        self, block: BlockWork, times: BlockPassTimes, launches: Column | float
    ) -> BlockPassTimes:
        """`times` with what a rank waits for its CPU beyond that, which starts `launches` forwards'
        worth of kernels."""
        columns, constants = self.columns, self.constants
        base = np.where(columns.is_eager, constants.launch_eager_s, constants.launch_fused_s)
        weight = columns.launch_weight * np.where(
            columns.launches_in_order, constants.launch_ordered, 1.0
        )
        # Ranks of tp wait for each other twice a block: for the slowest CPU of all.
        weight = weight * (1.0 + constants.launch_tp * (columns.tp - 1) / 3)
        weight = weight * (1.0 + constants.launch_experts * (block.num_experts > 0))
        cpu = np.where(columns.launches_graphs, 0.0, base * weight * launches)
        busy = times.total - times.launch
        both = (busy**LAUNCH_OVERLAP_NORM + cpu**LAUNCH_OVERLAP_NORM) ** (1 / LAUNCH_OVERLAP_NORM)
        return BlockPassTimes(
            times.matmul,
            times.attention,
            times.elementwise,
            times.tp,
            times.cp,
            times.ep,
            times.launch + both - busy,
        )
