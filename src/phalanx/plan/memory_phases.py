"""Bytes of one rank in each phase of a step, by category: what a plan predicts is the highest.

States are there all the time; gradients, activations, the loss and what is gathered come and go,
and their highest points are at different moments. Each moment here is one that a dry run shows
(docs/dry-run.md), which tests and benchmarks/plan_against_dry_run.py compare it with. A pipeline's
ranks are in `plan.pipeline.memory`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from phalanx.core.units import MIB
from phalanx.job.costs import ActivationCosts, ModelCosts
from phalanx.plan.communication import cp_buffer_bytes, ep_buffer_bytes
from phalanx.plan.host_allocator import (
    RETAINED_SHARE_OF_BUCKETS,
    estimate_retained_bytes_of_other_moments,
)
from phalanx.plan.memory import (
    StateBytes,
    activation_bytes,
    activation_bytes_on_device,
    adjust_memory_for_device,
    bytes_at_forward_end,
    count_cast_params,
    count_excess_expert_params,
    count_fsdp_unit_params,
    count_rank_params,
    count_segment_bytes,
    fp8_cast_bytes,
    predict_model_state_bytes,
    staging_bytes,
)
from phalanx.plan.segments import Segment, list_recompute_segments
from phalanx.plan.workload import Workload, shard_shape

BETWEEN_STEPS, FORWARD, BACKWARD, UPDATE = "between steps", "forward", "backward", "update"
MOVING_CATEGORIES = ("gradients", "activations", "loss", "communication")


@dataclass(frozen=True)
class MomentBytes:
    """Bytes at one moment of a step, of what is not there all the time."""

    gradients: float = 0
    activations: float = 0
    loss: float = 0
    communication: float = 0

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.loss + self.communication


@dataclass(frozen=True)
class StepMoments:
    """The moments of a step of one rank without a pipeline, where activations are known.

    `shape`: the rank's part of the model (`shard_shape`); `gradient_bytes`: of all gradients that
    it holds at the end of the backward; `num_readers`: ranks with gradients to average;
    `scatters_messages`: buckets of gradients are copied into messages (`OwnRowsReduction`);
    `gathers_ahead`: where the job does not say, the next unit is gathered while one computes its
    backward, as on GPUs.
    """

    shape: ModelCosts
    work: Workload
    zero_stage: int
    dp_size: int
    num_readers: int
    gradient_bytes: float
    offloads_activations: bool
    scatters_messages: bool
    gathers_ahead: bool

    @property
    def _costs(self) -> ActivationCosts:
        assert self.shape.activations is not None
        return self.shape.activations

    @property
    def _is_sharded(self) -> bool:
        return self.zero_stage >= 2

    @property
    def _accumulates(self) -> bool:
        return self.work.num_microbatches > 1

    @property
    def _standing_gradients(self) -> float:
        """Bytes of gradients that are there before the backward: DDP's buckets, and those of
        earlier microbatches."""
        if self._is_sharded:
            keeps_shards = self._accumulates and self.work.options.accumulate == "sharded"
            return self.gradient_bytes if keeps_shards else 0
        if self.work.gradient_copies:
            # The sums that wait for a neighbour in the tree, at the last microbatch.
            return (self.work.gradient_copies - 1) * self.gradient_bytes
        if self.num_readers > 1 or self._accumulates:
            return self.gradient_bytes
        return 0

    @cached_property
    def _head_gradient(self) -> float:
        """Bytes of the gradient of the head's weight, from its loss to the end of the backward:
        FSDP has it in the compute type."""
        gradient = self._costs.count_loss_bytes(self.work).head_gradient
        if self._is_sharded:
            return gradient * self.work.compute_bytes / 4
        return gradient

    @cached_property
    def _unit(self) -> int:
        return count_fsdp_unit_params(self.shape, self.work.options, self.work.ep)[0]

    @cached_property
    def _root(self) -> int:
        return count_fsdp_unit_params(self.shape, self.work.options, self.work.ep)[1]

    @cached_property
    def _whole_gradients(self) -> float:
        """Bytes of gradients that are not reduced between microbatches, and stay whole: FSDP's,
        and those that DDP cannot add up in its buckets."""
        options = self.work.options
        is_beside = self._is_sharded and options.accumulate == "unsharded"
        if not self._is_sharded and self.num_readers > 1:
            is_beside = options.unused_parameters == "allow" or options.static_graph
        if self._accumulates and is_beside:
            return count_rank_params(self.shape, self.work.ep) * 4
        return 0

    @cached_property
    def _activations_at_forward_end(self) -> int:
        at_end = bytes_at_forward_end(self.shape, self.work)
        if self.offloads_activations:
            return min(at_end, self._bytes_on_device)
        return at_end

    @cached_property
    def _segments(self) -> Sequence[Segment]:
        """Blocks that are recomputed."""
        if self.work.segments is not None:
            return self.work.segments
        return list_recompute_segments(self.work.recompute, self.shape.num_layers)

    @cached_property
    def _freed_weight_bytes(self) -> int:
        """Bytes of gathered weights that are freed once the loss has read them."""
        options = self.work.options
        if not (self._is_sharded and self.work.frees_head) or options.blocks_per_unit == "all":
            return 0
        parts, head = self.shape.count_part_params(), 0
        # A tied head is the table.
        if not parts.both:
            head = self._costs.count_loss_bytes(self.work).head_gradient // 4
        return (parts.looked_up + head) * self.work.compute_bytes

    def _weight_bytes(self, *, in_backward: bool, num_units: int) -> float:
        """Bytes of weights that are gathered or cast, of which `num_units` units of blocks are
        alive."""
        shape, work = self.shape, self.work
        if not self._is_sharded:
            cast = count_cast_params(shape, work, with_ends=not in_backward)
            if in_backward:
                # Blocks that are redone cast their weights again, one at a time.
                redone = sum(each.num_blocks for each in self._segments if each.mode == "full")
                block = cast / max(1, shape.num_layers)
                cast = round(cast - block * max(0, redone - 1))
            return cast * work.cast_bytes
        params = count_rank_params(shape, work.ep)
        if self.zero_stage == 2:
            freed = self._freed_weight_bytes if in_backward else 0
            return params * work.compute_bytes - freed
        # A segment that is redone has all of its blocks gathered.
        longest = max((segment.num_blocks for segment in self._segments), default=1)
        block = shape.count_largest_block_params(work.ep)
        alive = max(num_units * self._unit, longest * block if in_backward else 0)
        gathered_bytes = (self._root + min(alive, params - self._root)) * work.compute_bytes
        return gathered_bytes - (self._freed_weight_bytes if in_backward else 0)

    # The moments

    def forward(self) -> MomentBytes:
        """The end of the forward, where the loss is made: most of its logits, or the gradient of
        the head as it is cast."""
        loss = self._costs.count_loss_bytes(self.work)
        cast = self._head_gradient if self._is_sharded and self.work.compute_bytes < 4 else 0
        gathered_bytes = self._weight_bytes(in_backward=False, num_units=1) + self._whole_gradients
        freed = self._freed_weight_bytes
        with_head, without_head = loss.at_once, loss.waiting + cast
        if freed and self.work.tokens <= self.work.loss_chunk_tokens:
            # Of one chunk the head's gradient comes when the head is gone.
            with_head -= loss.head_gradient
            without_head = max(without_head, loss.at_once)
        moments = (
            MomentBytes(loss=with_head, communication=gathered_bytes),
            MomentBytes(loss=without_head, communication=gathered_bytes - freed),
        )
        return replace(
            max(moments, key=lambda moment: moment.total),
            gradients=self._standing_gradients,
            activations=self._activations_at_forward_end,
        )

    def final_norm(self) -> MomentBytes:
        """The backward of the norm before the head."""
        blocks = self._activations_at_forward_end - self._costs.count_final_norm_bytes(self.work)
        return MomentBytes(
            gradients=self._standing_gradients,
            activations=blocks,
            loss=self._head_gradient + self._costs.count_final_norm_passing_bytes(self.work),
            communication=self._weight_bytes(in_backward=True, num_units=1) + self._whole_gradients,
        )

    def blocks(self) -> Iterator[MomentBytes]:
        """The backward of each block or segment, from the last to the first."""
        costs, work, shape = self._costs, self.work, self.shape
        saved, redone = count_segment_bytes(shape, work)
        if not saved:
            return
        outside = (
            costs.count_bytes_in_every_stage(work)
            + costs.count_embedding_bytes(work)
            + costs.count_block_mask_bytes(work)
        )
        block = costs.block(shape.num_layers - 1, work)
        gathered = self._weight_bytes(in_backward=True, num_units=self._num_units_in_backward())
        gathered += ep_buffer_bytes(shape, work) + fp8_cast_bytes(shape, work)
        # Buffers of cp are there when the backward comes to the attention, where the feed-forward
        # has freed what it had.
        gathered += max(0, cp_buffer_bytes(shape, work) - block.feed_forward - block.passing)
        first = costs.find_freed_gradients(work.ep).first
        first_weight = first * work.compute_bytes
        passing = block.passing
        if not self._is_sharded:
            # The gradient of a weight, before it is added to others, is there while half of the
            # others are.
            passing = max(passing, passing // 2 + first * (4 + work.cast_bytes))
        standing, of_blocks = self._standing_gradients, self._block_gradients
        # Whole ones of earlier microbatches go as a last microbatch makes these.
        is_beside = work.gradient_copies > 0
        grows = is_beside or not (standing or self._whole_gradients)
        loss = self._head_gradient + passing
        saved_so_far = sum(saved)
        for index in reversed(range(len(saved))):
            num_done = len(saved) - 1 - index
            gradients = standing
            if grows:
                gradients += of_blocks * num_done / len(saved)
            communication = gathered + self._whole_gradients
            if num_done:
                communication += self._scattered_message
            if self._is_sharded:
                communication += first_weight
            if self._is_sharded and not self._whole_gradients:
                # The gradients of the unit before are on their way, in fp32.
                communication += self._unit * 4 * min(1, num_done)
            activations = saved_so_far + redone[index] + outside
            if self.offloads_activations:
                activations = min(activations, self._bytes_on_device)
            yield MomentBytes(gradients, activations, loss, communication)
            saved_so_far -= saved[index]

    def _num_units_in_backward(self) -> int:
        """Units of blocks that are whole at one time: the one that computes, and those fetched
        ahead."""
        prefetch = self.work.options.prefetch
        return 1 + (int(self.gathers_ahead) if prefetch is None else prefetch)

    def reduction(self) -> MomentBytes:
        """The end of the backward: FSDP reduces what lies outside of blocks, in fp32 beside the
        gradients themselves."""
        if self.work.gradient_copies:
            return MomentBytes(gradients=self.work.gradient_copies * self.gradient_bytes)
        if not self._is_sharded:
            message = self._scattered_message
            return MomentBytes(gradients=self.gradient_bytes, communication=message)
        reduced = self._root * (self.work.compute_bytes + 4)
        return MomentBytes(gradients=self._block_gradients, communication=reduced)

    @property
    def _block_gradients(self) -> float:
        """Bytes of the gradients of blocks, of `gradient_bytes`."""
        return self.gradient_bytes * self.shape.blocks_params / max(1, self.shape.num_params)

    def update(self) -> MomentBytes:
        """The optimizer's update; of ZeRO-1 the gather of what ranks have updated, and the exchange
        along a tree of gradients, of which two buckets are there at one time."""
        buckets = 0.0
        exchanges = self.work.gradient_copies > 0 and self.num_readers > 1
        if exchanges or (self.zero_stage == 1 and self.dp_size > 1):
            updated_bytes = count_rank_params(self.shape, self.work.ep) * 4
            buckets = min(2 * self.work.options.bucket_mb * MIB, updated_bytes)
        return MomentBytes(gradients=self.gradient_bytes, communication=buckets)

    @cached_property
    def _scattered_message(self) -> float:
        """Bytes of a bucket of ZeRO-1's gradients on its way to the ranks that update them, and of
        what this rank gets of it."""
        if not self.scatters_messages:
            return 0
        num_bytes = min(self.work.options.bucket_mb * MIB, self.gradient_bytes)
        return num_bytes * (1 + 1 / self.dp_size)

    @cached_property
    def _bytes_on_device(self) -> int:
        return activation_bytes_on_device(self.shape, self.work)


def predict_rank_memory_by_phase(
    shape: ModelCosts, work: Workload, zero_stage: int, dp_size: int, device: str, num_ranks: int
) -> dict[str, dict[str, int]]:
    """Bytes of one rank by category (`plan.memory.MEMORY_CATEGORIES`) at the highest moment of each
    phase, on top of interpreter and torch; of a GPU those on it.

    Of a module whose activations are unknown only the states count, all at one time.
    """
    shape = shard_shape(shape, work.tp, work.rules)
    states = _predict_state_bytes(shape, work, zero_stage, dp_size, num_ranks)
    if device == "cpu" and work.copies_state:
        states["staging"] = staging_bytes(shape, work, num_ranks // work.tp)
    if shape.activations is None:
        states["gradients"] *= max(1, work.gradient_copies)
        only = adjust_memory_for_device(dict(states), shape, work, device, zero_stage)
        return {BETWEEN_STEPS: only}
    # FSDP keeps shards, too, and what is gathered of them counts as communication.
    if zero_stage == 2:
        uneven = count_excess_expert_params(shape, zero_stage, dp_size, work.ep)
        states["parameters"] = states["parameters"] / dp_size + uneven * StateBytes().parameters
    num_readers = num_ranks // work.tp
    moments = _build_step_moments(
        shape, work, zero_stage, dp_size, num_readers, states["gradients"], device
    )
    backward = max(
        [moments.final_norm(), *moments.blocks(), moments.reduction()],
        key=lambda moment: moment.total,
    )
    has_buckets = zero_stage <= 1 and num_readers > 1 and not work.gradient_copies
    highest = {
        BETWEEN_STEPS: MomentBytes(gradients=states["gradients"] if has_buckets else 0),
        FORWARD: moments.forward(),
        BACKWARD: backward,
        UPDATE: moments.update(),
    }
    kept_activation_bytes = activation_bytes(shape, work)
    phases = {}
    for phase, moment in highest.items():
        memory = states | {name: getattr(moment, name) for name in MOVING_CATEGORIES}
        phases[phase] = adjust_memory_for_device(
            memory, shape, work, device, zero_stage, activations=kept_activation_bytes
        )
    if device == "cpu":
        retained = _estimate_retained_bytes(list(highest.values()))
        if has_buckets and work.num_microbatches > 1:
            retained += round(RETAINED_SHARE_OF_BUCKETS * states["gradients"])
        # Holes of one moment are there from the second step on, in all of them.
        for memory_of_phase in phases.values():
            memory_of_phase["allocator"] += retained
    return phases


def _build_step_moments(
    shape: ModelCosts,
    work: Workload,
    zero_stage: int,
    dp_size: int,
    num_readers: int,
    gradient_bytes: float,
    device: str,
) -> StepMoments:
    is_on_gpu = device != "cpu"
    scatters_gradients = zero_stage == 1 and 1 < dp_size == num_readers
    return StepMoments(
        shape,
        work,
        zero_stage,
        dp_size,
        num_readers,
        gradient_bytes,
        # A CPU has no other memory to move them to.
        offloads_activations=is_on_gpu and work.offloads_activations,
        # Ranks on CPUs share memory, and read gradients where they lie.
        scatters_messages=is_on_gpu and scatters_gradients and not work.options.static_graph,
        gathers_ahead=is_on_gpu,
    )


def _predict_state_bytes(
    shape: ModelCosts, work: Workload, zero_stage: int, dp_size: int, num_ranks: int
) -> dict[str, float]:
    """Bytes of one rank by category of what is there all the time. `shape` is cut by tp."""
    # Where shards are cut over dp_size ranks, experts are cut as often: over ep, and over dp_size /
    # ep.
    params = count_rank_params(shape, work.ep) if zero_stage <= 1 else shape.num_params
    states = predict_model_state_bytes(
        params,
        zero_stage,
        dp_size,
        StateBytes(optimizer=work.optimizer_bytes),
        count_excess_expert_params(shape, zero_stage, dp_size, work.ep),
        shape.trained_share,
    )
    states["compression"] = 0
    if zero_stage == 0 and num_ranks > 1:
        states["compression"] = shape.num_params * work.error_feedback_bytes
    return states


def _estimate_retained_bytes(moments: Sequence[MomentBytes]) -> int:
    """Bytes that a CPU's allocator keeps in one of `moments` of what was freed in the others."""
    largest = [max(getattr(each, name) for each in moments) for name in MOVING_CATEGORIES]
    total = max(moment.total for moment in moments)
    return round(estimate_retained_bytes_of_other_moments(largest, total))


def find_peak_phase(phases: Mapping[str, Mapping[str, float]]) -> str:
    """The name of the phase with most bytes; the first of several."""
    return max(phases, key=lambda phase: sum(phases[phase].values()))


def predict_rank_memory(
    shape: ModelCosts, work: Workload, zero_stage: int, dp_size: int, device: str, num_ranks: int
) -> dict[str, int]:
    """Bytes of one rank by category at the highest moment of a step; arguments as in
    `predict_rank_memory_by_phase`."""
    phases = predict_rank_memory_by_phase(shape, work, zero_stage, dp_size, device, num_ranks)
    return phases[find_peak_phase(phases)]
