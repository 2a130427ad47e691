"""Rules of communication: the part of a step that waits for messages, and over which links."""

from __future__ import annotations

from phalanx.core.units import format_seconds
from phalanx.plan.advice.facts import COMMUNICATION_TERMS, PlanFacts
from phalanx.plan.advice.rule import RuleMeasurement, RuleOfThumb
from phalanx.plan.advice.waterfall import TERM_LABELS

MAX_EXPOSED_SHARE = 0.10
MIN_SCALING_EFFICIENCY = 0.80
LARGE_MODEL_PARAMS = 10e9
LARGE_MODEL_MIN_NETWORK_GB_S = 12.5  # 100 Gb/s
# What products reach of the peak where no time was predicted.
USUAL_MATMUL_EFFICIENCY = 0.6
GRADIENT_BYTES = 4


def measure_exposed_communication(facts: PlanFacts) -> RuleMeasurement | None:
    """The part of a step in which ranks do nothing but communicate."""
    if facts.layout.world_size == 1:
        return None
    largest = max(COMMUNICATION_TERMS, key=lambda term: facts.terms_s.get(term, 0.0))
    return RuleMeasurement(
        facts.step_share_of_terms(*COMMUNICATION_TERMS),
        MAX_EXPOSED_SHARE,
        consequence=f"nothing hides it; the largest part is {TERM_LABELS[largest]}",
        remedy=_suggest_remedy_of_term(largest, facts.zero_stage),
        missing="the time of a step",
    )


def _suggest_remedy_of_term(term: str, zero_stage: int) -> str:
    remedies = {
        "tp": "a smaller parallel.tp, with pp or a higher ZeRO stage for the memory",
        "cp": "a smaller parallel.cp, with recomputation for the memory",
        "ep": "parallel.ep inside a node",
        "dp exposed": (
            "a larger micro-batch or more accumulation, a lower ZeRO stage, or shards inside a node"
            " (parallel.dp_shard)"
            if zero_stage > 0
            else "a larger micro-batch or more accumulation"
        ),
    }
    return remedies[term]


def measure_gather_tokens(facts: PlanFacts) -> RuleMeasurement | None:
    """Tokens that a rank computes on while it gathers a block's weights, against those needed."""
    if facts.zero_stage < 3:
        return None
    bandwidth, peak_flops = facts.reduction_gb_s(), facts.hardware.peak_flops
    if bandwidth is None or peak_flops is None:
        return RuleMeasurement(None, 0, missing="the speed of the devices and links")
    efficiency = facts.matmul_efficiency or USUAL_MATMUL_EFFICIENCY
    # 6 FLOPs per parameter and token, forward and backward, for two gathers of its bytes.
    tokens = facts.element_bytes * peak_flops * efficiency / (3 * bandwidth * 1e9)
    return RuleMeasurement(
        facts.tokens_per_rank,
        tokens,
        consequence=(
            f"gathers run at {bandwidth:,.0f} GB/s beside products at {efficiency:.0%} of the peak"
        ),
        remedy=(
            "a larger train.micro_batch_size, shards inside a node (parallel.dp_shard), or"
            " parallel.accumulate=unsharded"
        ),
    )


def measure_reduction_window(facts: PlanFacts) -> RuleMeasurement | None:
    """Time to reduce gradients, in parts of the backward that hides it."""
    layout = facts.layout
    if layout.gradient_reduction_layout.data_parallel_size == 1 or facts.zero_stage == 3:
        return None
    if layout.pp > 1:
        # Stages end one after the other: those of others hide it, too.
        return None
    bandwidth, peak_flops = facts.reduction_gb_s(), facts.hardware.peak_flops
    if bandwidth is None or peak_flops is None:
        return RuleMeasurement(None, 1, missing="the speed of the devices and links")
    num_params = facts.model.num_params / (layout.tp * layout.pp)
    # A ring sends every byte twice: reduce-scatter, then all-gather, which stage 2 does without.
    num_transfers = 1
    if facts.zero_stage < 2:
        num_transfers = 2
    reduce_s = num_transfers * GRADIENT_BYTES * num_params / (bandwidth * 1e9)
    efficiency = facts.matmul_efficiency or USUAL_MATMUL_EFFICIENCY
    active = facts.model.num_active_params / (layout.tp * layout.pp)
    backward_s = 4 * active * facts.tokens_per_rank / (peak_flops * efficiency)
    return RuleMeasurement(
        reduce_s / backward_s,
        1.0,
        consequence=(
            f"fp32 gradients take {format_seconds(reduce_s)}, the last micro-batch's backward"
            f" {format_seconds(backward_s)}"
        ),
        remedy="a larger train.micro_batch_size, or fewer data-parallel ranks (parallel.tp, pp)",
    )


def measure_network_bandwidth(facts: PlanFacts) -> RuleMeasurement | None:
    """Network bandwidth of each device, for large models on several nodes."""
    hardware = facts.hardware
    if hardware.num_nodes == 1 or facts.model.num_params < LARGE_MODEL_PARAMS:
        return None
    return RuleMeasurement(
        hardware.network_gb_s,
        LARGE_MODEL_MIN_NETWORK_GB_S,
        consequence="gradients and gathered weights of a large model travel over it",
        remedy=(
            "InfiniBand or RoCE with a card per GPU; else shards inside a node (parallel.dp_shard)"
            " and a pipeline between nodes"
        ),
        missing="the network's bandwidth",
    )


def measure_multi_node_efficiency(facts: PlanFacts) -> RuleMeasurement | None:
    """Speed against the same devices, were every link as fast as inside a node."""
    if facts.hardware.num_nodes == 1:
        return None
    return RuleMeasurement(
        facts.single_domain_efficiency,
        MIN_SCALING_EFFICIENCY,
        consequence="the rest of the devices' time is lost to the links between nodes",
        remedy="fewer nodes, a larger batch, or another layout (see the runners-up)",
        missing="the time of a step",
    )


RULES = (
    RuleOfThumb(
        "exposed-communication",
        "Communication is hidden",
        "at most",
        "%",
        measure_exposed_communication,
        evidence="predicted: messages that no computation hides, pipelines' waiting not counted",
        correction=(
            "Utilisation as nvidia-smi shows it counts kernels that wait for others, too, and says"
            " nothing about this (E58)."
        ),
    ),
    RuleOfThumb(
        "fsdp-tokens",
        "Enough tokens hide the gathers of ZeRO-3",
        "at least",
        "tokens per rank and micro-batch",
        measure_gather_tokens,
        evidence="bytes x peak x efficiency / (3 x bandwidth): 6 FLOPs per parameter and token",
        correction=(
            "ZeRO 1 and 2 send what plain data parallelism sends; only stage 3 sends more: 1.5"
            " times as much, and again for each accumulated micro-batch (E17)."
        ),
    ),
    RuleOfThumb(
        "reduction-window",
        "The backward hides the reduction of gradients",
        "at most",
        "times the backward",
        measure_reduction_window,
        evidence="ring: two transfers of every byte; 4 FLOPs per parameter and token",
        correction=(
            "A ring's bytes per rank do not grow with the ranks; its number of messages does, so"
            " that many ranks need trees or hierarchies (E09). Gradients are reduced from the last"
            " layer on (E07)."
        ),
    ),
    RuleOfThumb(
        "large-model-network",
        "Large models have a fast network",
        "at least",
        "GB/s per device",
        measure_network_bandwidth,
        evidence="100 Gb/s per device; from 10 B parameters on",
        correction="Data sheets count both directions: 900 GB/s of NVLink are 450 each way (E62).",
    ),
    RuleOfThumb(
        "scaling-efficiency",
        "The links between nodes cost little",
        "at least",
        "%",
        measure_multi_node_efficiency,
        evidence="the same step with every link as fast as inside a node, by the same model",
    ),
)
