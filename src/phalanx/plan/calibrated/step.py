"""The seconds of a step of a plan on a machine that was measured: blocks, ends, pipeline,
gradients, optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from phalanx.job.work import ModelWork
from phalanx.plan.calibrated.blocks import (
    FP32_BYTES,
    BlockSeconds,
    RankBatch,
    TermSeconds,
    estimate_calibrated_block,
    estimate_matmul_seconds,
)
from phalanx.plan.calibrated.rates import MeasuredRates
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.simulate import StageCosts, simulate_schedule
from phalanx.plan.plan import Plan
from phalanx.plan.profiles import MachineProfile, compute_median_residual
from phalanx.plan.timing.step_time import STEP_TERMS, StepTime

# Half of the logarithm's width of the 80 % interval: what composing operations adds to the
# residuals of their fits; and for a plan whose model nobody has the work of, by FLOPs alone. Set by
# hand: 14 of the 22 configurations of the first campaign (docs/planner-truth.md) are inside.
BAND, FLOPS_BAND = 0.15, 0.4
# Seconds of a step around its microbatches: loader, hooks, one reduction, events. An estimate: no
# part of `bench` measures it.
STEP_OVERHEAD_S = 2.5e-3
# AdamW reads weight, gradient and two moments, and writes three of them; clipping reads gradients
# and writes them.
OPTIMIZER_BYTES, CLIP_BYTES = 28.0, 12.0
BUCKET_BYTES = 25 * 2**20
# Products of a model whose blocks nobody knows: as many rows as tokens, and sides of this length.
TYPICAL_MATMUL_SIDE = 256.0
# What such a model takes beside its products.
TOTAL_TO_MATMUL_TIME_RATIO = 1.3


def estimate_step_from_profile(plan: Plan, profile: MachineProfile) -> StepTime:
    """Seconds of one step of `plan` on the machine of `profile`, by term.

    Of a model without `work` (a module that was not traced) by its FLOPs, with a wide interval.
    Raises LayoutError where the profile lacks what the plan needs.
    """
    return _CalibratedStepEstimator(plan, profile).estimate()


def estimate_processor_seconds(plan: Plan, profile: MachineProfile) -> float:
    """Processor seconds of the mean rank in one step of `plan`, all its threads: what a CPU that
    others use, too, still tells. Raises LayoutError as `estimate_step_from_profile` does."""
    return _CalibratedStepEstimator(plan, profile, counts_processor=True).estimate().total_s


@dataclass(frozen=True)
class _CalibratedStepEstimator:
    plan: Plan
    profile: MachineProfile
    counts_processor: bool = False

    def estimate(self) -> StepTime:
        plan = self.plan
        rates = MeasuredRates(
            self.profile.choose_collectives(plan.parallel.collectives),
            plan.world_size,
            is_low=plan.precision in ("bf16", "fp16"),
            is_compiled=plan.compile,
            counts_processor=self.counts_processor,
        )
        work = plan.model_shape.work(plan.seq_len)
        if work is None:
            terms, band = self._sum_term_seconds_by_flops(rates), FLOPS_BAND
        else:
            terms, band = self._sum_term_seconds_of_work(work, rates), BAND
        self._add_gradient_sync_seconds(terms, rates)
        self._add_optimizer_seconds(terms, rates)
        terms.add("launch", STEP_OVERHEAD_S)
        terms.add("matmul loss", terms.seconds.pop("matmul") - terms.seconds["ideal"])
        return _build_step_time(terms, math.hypot(band, compute_median_residual(self.profile.fits)))

    # Microbatches

    def _build_rank_batch(self, num_tokens: float) -> RankBatch:
        """One microbatch on one rank, of samples of `num_tokens` tokens."""
        plan, layout = self.plan, self.plan.layout
        # "auto": modules of a user's own whose sequence cannot be cut are rare.
        is_cut = plan.parallel.sequence_parallel is not False and layout.tp > 1
        return RankBatch(
            tokens=plan.micro_batch_size * num_tokens / layout.cp,
            sequences=plan.micro_batch_size / layout.cp,
            tp=layout.tp,
            sequence_parallel=is_cut,
            cp=layout.cp,
            cp_attention=plan.parallel.cp_attention,
            ep=layout.ep,
        )

    def _sum_term_seconds_of_work(self, work: ModelWork, rates: MeasuredRates) -> TermSeconds:
        """Seconds of all microbatches of a step, on the mean rank, and waiting for others."""
        plan, batch = self.plan, self._build_rank_batch(work.num_tokens)
        kinds = {
            kind: estimate_calibrated_block(kind, rates, batch) for kind, _ in work.block_kinds
        }
        blocks = []
        for layer, block in enumerate(work.blocks):
            blocks.append(_add_recompute_to_backward(plan, layer, kinds[block]))
        ends = _estimate_embedding_and_head_seconds(work, rates, batch)
        terms = TermSeconds()
        for each in (*blocks, *ends):
            terms.add_scaled(each.forward, plan.num_microbatches / plan.layout.pp)
            terms.add_scaled(each.backward, plan.num_microbatches / plan.layout.pp)
        if plan.pipeline is not None:
            spread = 1
            if batch.sequence_parallel:
                spread = batch.tp
            message_bytes = FP32_BYTES * batch.tokens * work.dim / spread
            send_s = rates.collective_s("send", message_bytes, 2)
            if self.counts_processor:
                terms.add("bubble", 2 * plan.num_microbatches * send_s)
            else:
                step_s = (
                    _simulate_pipeline_step_s(plan.pipeline, blocks, ends, send_s)
                    / rates.ranks_per_device
                )
                terms.add("bubble", max(0.0, step_s - terms.total_s))
        terms.add("ideal", self._compute_ideal_s(work, rates))
        return terms

    def _compute_ideal_s(self, work: ModelWork, rates: MeasuredRates) -> float:
        """Seconds of the model's products at the rate of long ones, on the mean rank."""
        layout = self.plan.layout
        samples = self.plan.micro_batch_size * self.plan.num_microbatches
        flops = 3.0 * work.matmul_flops * samples / (layout.tp * layout.cp * layout.pp)
        return flops / rates.peak_flops()

    def _count_traced_flops_per_token(self) -> float:
        """Three forwards, also of a model with frozen weights, which takes no more; where no trace
        knows them, 6 of each parameter."""
        plan = self.plan
        flops = plan.model_shape.flops(plan.seq_len)
        if flops is None:
            return 6.0 * plan.num_params
        parts = (flops.embedding, *flops.blocks, flops.head)
        return 3.0 * sum(part.matmul + part.attention for part in parts) / plan.seq_len

    def _sum_term_seconds_by_flops(self, rates: MeasuredRates) -> TermSeconds:
        plan = self.plan
        tokens = plan.micro_batch_size * plan.seq_len / plan.layout.cp
        per_token = plan.flops_per_token or self._count_traced_flops_per_token()
        flops = per_token * tokens * plan.num_microbatches / (plan.layout.tp * plan.layout.pp)
        one_s = rates.matmul_s(tokens, TYPICAL_MATMUL_SIDE, TYPICAL_MATMUL_SIDE)
        products_s = flops * one_s / (2.0 * tokens * TYPICAL_MATMUL_SIDE**2)
        terms = TermSeconds()
        terms.add("matmul", products_s)
        terms.add("elementwise", (TOTAL_TO_MATMUL_TIME_RATIO - 1) * products_s)
        terms.add("ideal", flops / rates.peak_flops())
        if plan.layout.pp > 1:
            terms.add("bubble", products_s * (plan.layout.pp - 1) / plan.num_microbatches)
        return terms

    # Gradients and weights

    def _add_gradient_sync_seconds(self, terms: TermSeconds, rates: MeasuredRates) -> None:
        plan, layout = self.plan, self.plan.layout.gradient_reduction_layout
        ranks, stage = layout.data_parallel_size, plan.parallel.zero_stage
        num_bytes = FP32_BYTES * self._count_rank_params()
        # Gradients are added to what earlier microbatches left.
        terms.add("elementwise", (plan.num_microbatches - 1) * rates.copy_s(3 * num_bytes))
        if ranks == 1:
            return
        terms.add("elementwise", rates.copy_s(2 * num_bytes))
        if stage <= 1:
            scatters = plan.scatters_gradients and layout.pp == 1
            kind = "reduce_scatter" if scatters else "all_reduce"
            reduce_s = _estimate_buckets_s(rates, kind, num_bytes, ranks)
            backward_s = terms.total_s / max(1, plan.num_microbatches) * 2 / 3
            hidden_s = rates.hidden_all_reduce_share(ranks) * min(reduce_s, backward_s)
            if plan.layout.pp > 1:
                # After the pipeline's last backward.
                hidden_s = 0.0
            if plan.is_layout_free:
                # After the last backward; each part is copied into a bucket and out of it.
                hidden_s = -rates.copy_s(4 * num_bytes)
            terms.add("dp exposed", reduce_s - hidden_s)
        if stage == 1:
            gather_s = rates.collective_s("all_gather", num_bytes, ranks)
            terms.add("dp exposed", gather_s + rates.copy_s(4 * num_bytes))
        if stage >= 2:
            terms.add("dp exposed", self._estimate_fsdp_sync_s(rates, num_bytes))

    def _estimate_fsdp_sync_s(self, rates: MeasuredRates, num_bytes: float) -> float:
        """FSDP2 on gloo: units are gathered and gradients scattered while nothing else goes on."""
        plan, layout = self.plan, self.plan.layout.gradient_reduction_layout
        units = plan.model_shape.num_layers + 1
        shards = layout.dp_shard
        gathered_bytes = num_bytes / (2 if rates.is_low else 1)
        gather_s = units * rates.collective_s("all_gather", gathered_bytes / units, shards)
        gather_s += rates.copy_s(2 * gathered_bytes)
        scatter_s = units * rates.collective_s("reduce_scatter", num_bytes / units, shards)
        scatter_s += rates.copy_s(2 * num_bytes)
        is_freed = plan.parallel.zero_stage == 3 and plan.layout.pp == 1
        gathers = plan.num_microbatches * (2 if is_freed else 1)
        if plan.layout.pp > 1:
            gathers = 1
        scatters = 1
        if plan.parallel.accumulate == "sharded":
            scatters = plan.num_microbatches
        seconds = gathers * gather_s + scatters * scatter_s
        if layout.dp_replicate > 1:
            seconds += units * rates.collective_s(
                "all_reduce", num_bytes / shards / units, layout.dp_replicate
            )
        return seconds

    def _add_optimizer_seconds(self, terms: TermSeconds, rates: MeasuredRates) -> None:
        plan, layout = self.plan, self.plan.layout.gradient_reduction_layout
        params = self._count_rank_params()
        updated = params / (layout.dp_shard if plan.parallel.zero_stage >= 1 else 1)
        gradients = params / (layout.dp_shard if plan.parallel.zero_stage >= 2 else 1)
        terms.add("optimizer", rates.kernel_s("adamw", "", OPTIMIZER_BYTES * updated))
        terms.add("optimizer", rates.copy_s(CLIP_BYTES * gradients))

    def _count_rank_params(self) -> float:
        """Parameters that the mean rank computes with, before data parallelism divides them."""
        layout, shape = self.plan.layout, self.plan.model_shape
        routed = 0.0
        if shape.experts is not None:
            routed = float(shape.experts.count_chosen_params())
        dense = self.plan.num_params - routed
        return (dense + routed / layout.ep) / (layout.tp * layout.pp)


def _add_recompute_to_backward(plan: Plan, layer: int, block: BlockSeconds) -> BlockSeconds:
    """A block whose backward computes again what the plan says."""
    backward = TermSeconds(block.backward.seconds)
    for segment in plan.activations.recompute_segments:
        if segment.start <= layer < segment.stop:
            if segment.mode == "full":
                backward.add_scaled(block.forward)
                if block.second_gather_s:
                    backward.add("tp", -block.second_gather_s)
            else:
                backward.add("elementwise", block.between_s)
    return replace(block, backward=backward)


def _simulate_pipeline_step_s(
    pipeline: Pipeline,
    blocks: list[BlockSeconds],
    ends: tuple[BlockSeconds, BlockSeconds],
    send_s: float,
) -> float:
    """Seconds until the last rank has done its last action."""
    costs = []
    for first, end in pipeline.stages.block_ranges:
        parts = list(blocks[first:end])
        if first == 0:
            parts.append(ends[0])
        if end == len(blocks):
            parts.append(ends[1])
        weights_s = sum(part.weight_grads_s for part in parts)
        backward_s = sum(part.backward.total_s for part in parts)
        forward_s = sum(part.forward.total_s for part in parts)
        costs.append(StageCosts(forward_s, max(0.0, backward_s - weights_s), weights_s))
    by_kind = [cost.by_kind_s for cost in costs]
    result = simulate_schedule(pipeline.schedule(), by_kind, send_s)
    return max(float(spans[-1][1]) for spans in result.spans_s if spans)


def _estimate_embedding_and_head_seconds(
    work: ModelWork, rates: MeasuredRates, batch: RankBatch
) -> tuple[BlockSeconds, BlockSeconds]:
    """Seconds of one microbatch in the embedding, and in head and loss. The loss makes both
    gradients of the head in its forward."""
    first, last = TermSeconds(), TermSeconds()
    whole = replace(batch, tp=1, sequence_parallel=False)
    share = work.num_head_tokens / work.num_tokens
    tokens = batch.tokens * share
    head_batch = RankBatch(tokens, batch.sequences, batch.tp)
    last.add("matmul", sum(estimate_matmul_seconds(work.head, rates, head_batch)))
    vocab = work.head.outputs
    if work.head.cut == "column":
        vocab //= batch.tp
    # The head's gradient is added up in fp32, scaled, and handed on.
    last.add(
        "elementwise", rates.loss_s(tokens, vocab) + rates.copy_s(4 * FP32_BYTES * vocab * work.dim)
    )
    if work.embedding is not None:
        patches = batch.tokens * work.num_embedding_tokens / work.num_tokens
        patch_batch = RankBatch(patches, batch.sequences)
        first.add("matmul", sum(estimate_matmul_seconds(work.embedding, rates, patch_batch)))
    else:
        table = work.num_embedding_params / batch.tp
        num_bytes = FP32_BYTES * (3 * batch.tokens * work.dim + table)
        first.add("elementwise", rates.kernel_s("embedding", "training", num_bytes))
    if batch.tp > 1:
        reduce_s = rates.collective_s("all_reduce", FP32_BYTES * batch.tokens * work.dim, batch.tp)
        first.add("tp", reduce_s)
        last.add("tp", reduce_s)
    for ends, blocks in ((first, work.before_blocks), (last, work.after_blocks)):
        for block in blocks:
            is_cut = any(matmul.cut != "none" for matmul in block.matmuls)
            seconds = estimate_calibrated_block(block, rates, batch if is_cut else whole)
            ends.add_scaled(seconds.forward)
            ends.add_scaled(seconds.backward)
    return BlockSeconds(first, TermSeconds()), BlockSeconds(last, TermSeconds())


def _estimate_buckets_s(rates: MeasuredRates, kind: str, num_bytes: float, ranks: int) -> float:
    """Seconds of collectives of a `kind` that reduce gradients in buckets."""
    buckets = max(1.0, math.ceil(num_bytes / BUCKET_BYTES))
    return buckets * rates.collective_s(kind, num_bytes / buckets, ranks)


def _build_step_time(terms: TermSeconds, band: float) -> StepTime:
    in_order = {term: terms.seconds.get(term, 0.0) for term in STEP_TERMS}
    total_s = sum(in_order.values())
    return StepTime(in_order, total_s / math.exp(band), total_s * math.exp(band))
