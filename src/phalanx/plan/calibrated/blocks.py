"""Seconds of one block, forward and backward, of one microbatch on one rank: the sum of its
operations as they were measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.job.work import AttentionWork, BlockWork, Matmul
from phalanx.plan.calibrated.rates import MeasuredRates

FP32_BYTES = 4.0
# Bytes that casting one element to a narrower type, or back, reads and writes.
CAST_BYTES_PER_ELEMENT = 6.0
# Tensors of an operation's size that it reads and writes, forward and with its backward, as `bench`
# counts them.
TENSORS_MOVED_BY_OPERATION = {
    "add": (3, 3),
    "rms_norm": (2, 5),
    "gated_activation": (3, 8),
    "rotary": (2, 4),
}
# Inductor makes one kernel of what stands between products; the plain operations read and write
# each step. An estimate: compiled kernels are not measured.
COMPILED_TRAFFIC_SHARE = 0.5


@dataclass(frozen=True)
class RankBatch:
    """One microbatch on one rank: `tokens` before tp divides the sequence, of `sequences`
    samples (their part, with cp)."""

    tokens: float
    sequences: float
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_attention: str = "ring"
    ep: int = 1


class TermSeconds:
    """Seconds by term of a step's time, which are added up."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float, seconds or {})

    def add(self, term: str, seconds: float) -> None:
        self.seconds[term] += seconds

    def add_scaled(self, other: TermSeconds, times: float = 1.0) -> None:
        for term, seconds in other.seconds.items():
            self.seconds[term] += times * seconds

    def scale(self, factor: float) -> None:
        for term in self.seconds:
            self.seconds[term] *= factor

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class BlockSeconds:
    """A block's forward, and its backward without what it recomputes."""

    forward: TermSeconds
    backward: TermSeconds
    weight_grads_s: float = 0.0
    """The part of the backward that a schedule may do later."""
    between_s: float = 0.0
    """Seconds of the forward outside products and attention: what selective recomputation does
    again."""
    second_gather_s: float = 0.0
    """The part of the backward in which inputs of regions are gathered again: a block that is
    recomputed has them from that."""


def estimate_calibrated_block(
    block: BlockWork, rates: MeasuredRates, batch: RankBatch
) -> BlockSeconds:
    """Seconds of one microbatch in `block`, scaled by what whole blocks took beside their parts."""
    forward, backward = TermSeconds(), TermSeconds()
    weight_grads_s = 0.0
    for matmul in block.matmuls:
        times = estimate_matmul_seconds(matmul, rates, batch)
        forward.add("matmul", times[0])
        backward.add("matmul", times[1] + times[2])
        weight_grads_s += times[2]
        cast_s = _estimate_cast_seconds(matmul, rates, batch)
        forward.add("elementwise", cast_s)
        backward.add("elementwise", cast_s)
    if block.attention is not None:
        forward_s, backward_s = _estimate_attention_seconds(block.attention, rates, batch)
        forward.add("attention", forward_s)
        backward.add("attention", backward_s)
    forward_s, backward_s = _estimate_elementwise_seconds(block, rates, batch)
    forward.add("elementwise", forward_s)
    backward.add("elementwise", backward_s)
    correction = rates.block_scale_and_overhead()
    forward.scale(correction["scale"])
    backward.scale(correction["scale"])
    # A third of what a block takes beside its parts is in its forward, as of the parts themselves.
    forward.add("launch", correction["overhead_s"] / 3)
    backward.add("launch", correction["overhead_s"] * 2 / 3)
    between_s = forward.seconds["elementwise"] + forward.seconds["launch"]
    for axis, (forward_s, backward_s) in _estimate_message_seconds_by_axis(
        block, rates, batch
    ).items():
        forward.add(axis, forward_s)
        backward.add(axis, backward_s)
    return BlockSeconds(
        forward,
        backward,
        weight_grads_s * correction["scale"],
        between_s,
        _estimate_second_gather_s(block, rates, batch),
    )


def estimate_matmul_seconds(
    matmul: Matmul, rates: MeasuredRates, batch: RankBatch
) -> tuple[float, float, float]:
    """Seconds of a product, of its input's gradient, and of its weight's."""
    rows, count = batch.tokens, 1.0
    if matmul.num_experts > 1:
        count = max(1.0, matmul.num_experts / batch.ep)
        # All ranks of ep send their rows for these experts.
        rows = batch.tokens * matmul.visited * batch.ep / matmul.num_experts
    elif matmul.cut == "none" and batch.sequence_parallel:
        rows = rows / batch.tp
    inputs, outputs = _divide_matmul_sides_by_tp(matmul, batch)
    return (
        rates.matmul_s(rows, outputs, inputs, count),
        rates.matmul_s(rows, inputs, outputs, count),
        rates.matmul_s(outputs, inputs, rows, count),
    )


def _divide_matmul_sides_by_tp(matmul: Matmul, batch: RankBatch) -> tuple[float, float]:
    inputs, outputs = float(matmul.inputs), float(matmul.outputs)
    if matmul.cut == "row":
        inputs /= batch.tp
    elif matmul.cut == "column":
        outputs /= batch.tp
    return inputs, outputs


def _estimate_cast_seconds(matmul: Matmul, rates: MeasuredRates, batch: RankBatch) -> float:
    """Seconds to cast a weight to the compute type, and in the backward its gradient back."""
    if not rates.is_low:
        return 0.0
    inputs, outputs = _divide_matmul_sides_by_tp(matmul, batch)
    elements = inputs * outputs * max(1.0, matmul.num_experts / batch.ep)
    if matmul.cut != "row":
        # What enters a row product comes out of a product, in the compute type already.
        elements += batch.tokens * inputs * matmul.visited
    return rates.copy_s(CAST_BYTES_PER_ELEMENT * elements)


def _estimate_attention_seconds(
    attention: AttentionWork, rates: MeasuredRates, batch: RankBatch
) -> tuple[float, float]:
    flops = attention.flops * batch.sequences / batch.tp
    # Kernels of a causal mask and of none are of one speed; the rest of a mask is computed in full.
    is_masked = not attention.is_causal and not attention.is_computed_as_counted
    if is_masked and attention.kept_share < 1:
        flops /= attention.kept_share
    forward_s = rates.kernel_s("attention", "forward", flops, rates.dtype)
    training_s = rates.kernel_s("attention", "training", 3 * flops, rates.dtype)
    return forward_s, max(0.0, training_s - forward_s)


def _estimate_elementwise_seconds(
    block: BlockWork, rates: MeasuredRates, batch: RankBatch
) -> tuple[float, float]:
    """Seconds of what is read and written between products."""
    spread = 1
    if batch.sequence_parallel:
        spread = batch.tp
    low_bytes = FP32_BYTES
    if rates.is_low:
        low_bytes = 2.0
    # The residual stream stays in fp32 under autocast; heads and activations come out of products.
    parts = (
        ("rms_norm", block.norm_features / spread, FP32_BYTES, "fp32"),
        ("add", block.residual_features / spread, FP32_BYTES, "fp32"),
        ("rotary", block.head_features / batch.tp, low_bytes, rates.dtype),
        ("gated_activation", block.activation_features / batch.tp, low_bytes, rates.dtype),
    )
    forward_s = backward_s = 0.0
    for kind, features, element_bytes, dtype in parts:
        if not features:
            continue
        num_bytes = batch.tokens * features * element_bytes
        in_forward, in_training = TENSORS_MOVED_BY_OPERATION[kind]
        forward_s += rates.kernel_s(kind, "forward", in_forward * num_bytes, dtype)
        backward_s += rates.backward_s(kind, in_forward * num_bytes, in_training * num_bytes, dtype)
    # Two gradients meet where a residual branched off.
    stream_bytes = 3 * FP32_BYTES * batch.tokens * block.residual_features / spread
    backward_s += rates.kernel_s("add", "forward", stream_bytes)
    if block.num_experts:
        # Rows are put into the experts' order, back again, and weighed.
        row_bytes = FP32_BYTES * batch.tokens * block.experts_per_token * block.routed_dim
        forward_s += rates.copy_s(8 * row_bytes)
        backward_s += rates.copy_s(8 * row_bytes)
    if rates.is_compiled:
        return COMPILED_TRAFFIC_SHARE * forward_s, COMPILED_TRAFFIC_SHARE * backward_s
    return forward_s, backward_s


def _estimate_message_seconds_by_axis(
    block: BlockWork, rates: MeasuredRates, batch: RankBatch
) -> dict[str, tuple[float, float]]:
    """Seconds of messages by axis, forward and backward."""
    times = {}
    element_bytes = FP32_BYTES
    if rates.is_low:
        element_bytes = 2.0
    if batch.tp > 1:
        times["tp"] = _estimate_tp_message_seconds(block, rates, batch, element_bytes)
    if batch.cp > 1 and block.attention is not None:
        times["cp"] = _estimate_cp_message_seconds(block.attention, rates, batch, element_bytes)
    if batch.ep > 1 and block.num_experts:
        rows = batch.tokens * block.experts_per_token * block.routed_dim
        # To the experts and back; how many come is told before.
        once_s = rates.collective_s("all_to_all", rows * element_bytes, batch.ep)
        counts_s = rates.collective_s("all_to_all", 64.0, batch.ep)
        times["ep"] = (2 * once_s + counts_s, 2 * once_s)
    return times


def _estimate_tp_message_seconds(
    block: BlockWork, rates: MeasuredRates, batch: RankBatch, element_bytes: float
) -> tuple[float, float]:
    """A region of columns and rows: its input is gathered or there already, its sum reduced."""
    width = block.residual_features / 2
    num_bytes = batch.tokens * width * element_bytes
    regions = 2.0
    if batch.sequence_parallel:
        gather_s = _estimate_sequence_gather_s(block, rates, batch, element_bytes)
        scatter_s = rates.tensor_gather_slowdown * rates.collective_s(
            "reduce_scatter", num_bytes, batch.tp
        )
        once_s = regions * (gather_s + scatter_s)
        return once_s, once_s + _estimate_second_gather_s(block, rates, batch)
    once_s = regions * rates.collective_s("all_reduce", num_bytes, batch.tp)
    return once_s, once_s


def _estimate_second_gather_s(block: BlockWork, rates: MeasuredRates, batch: RankBatch) -> float:
    """Seconds in which the backward of a block that is not recomputed gathers again what entered
    its regions. A region of experts, whose router reads all of it, has kept it, as has compiled
    code."""
    if not batch.sequence_parallel or rates.is_compiled:
        return 0.0
    regions = 1.0 if block.num_experts else 2.0
    return regions * _estimate_sequence_gather_s(
        block, rates, batch, 2.0 if rates.is_low else FP32_BYTES
    )


def _estimate_sequence_gather_s(
    block: BlockWork, rates: MeasuredRates, batch: RankBatch, element_bytes: float
) -> float:
    """Seconds in which ranks of tp gather what enters one region."""
    num_bytes = batch.tokens * block.residual_features / 2 * element_bytes
    return rates.tensor_gather_slowdown * rates.collective_s("all_gather", num_bytes, batch.tp)


def _estimate_cp_message_seconds(
    attention: AttentionWork, rates: MeasuredRates, batch: RankBatch, element_bytes: float
) -> tuple[float, float]:
    size = attention.head_dim + attention.value_dim
    kv_bytes = batch.tokens * attention.num_kv_heads / batch.tp * size * element_bytes
    q_bytes = batch.tokens * attention.num_heads / batch.tp * size * element_bytes
    if batch.cp_attention == "ulysses":
        once_s = 2 * rates.collective_s("all_to_all", (kv_bytes + q_bytes) / 2, batch.cp)
        return once_s, once_s
    if batch.cp_attention == "all-gather":
        gather_s = rates.collective_s("all_gather", kv_bytes * batch.cp, batch.cp)
        scatter_s = rates.collective_s("reduce_scatter", kv_bytes * batch.cp, batch.cp)
        return gather_s, gather_s + scatter_s
    # Keys and values go round; in the backward their gradients do, too, in fp32.
    hop_s = rates.collective_s("send", kv_bytes, 2)
    grads_s = rates.collective_s("send", kv_bytes * FP32_BYTES / element_bytes, 2)
    return (batch.cp - 1) * hop_s, (batch.cp - 1) * (hop_s + grads_s)
