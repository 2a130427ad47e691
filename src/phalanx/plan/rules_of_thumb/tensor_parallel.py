"""Rules of tensor parallelism: where its group lies, and how much is left for each rank."""

from __future__ import annotations

from phalanx.plan.advice.facts import PlanFacts
from phalanx.plan.advice.rule import RuleMeasurement, RuleOfThumb

MIN_FEATURES_PER_RANK = 1024
MAX_WAVE_LOSS = 0.10
VOCAB_MULTIPLE = 128
MAX_PADDING_SHARE = 0.01


def measure_tp_ranks_per_link_domain(facts: PlanFacts) -> RuleMeasurement | None:
    """Ranks of a tp group against the devices that fast links join."""
    tp, hardware = facts.layout.tp, facts.hardware
    if tp == 1:
        return None
    domain = hardware.link_domain or hardware.devices_per_node
    share = facts.step_share_of_terms("tp")
    cost = ""
    if share is not None:
        cost = f"; they take {share:.1%} of the step"
    links = "the network"
    if hardware.network_gb_s is not None and hardware.link_gb_s is not None:
        links = f"{hardware.network_gb_s:.3g} GB/s instead of {hardware.link_gb_s:.3g} GB/s"
    return RuleMeasurement(
        tp,
        domain,
        consequence=(
            "each block exchanges its activations four times, over"
            f" {links if tp > domain else 'fast links'}{cost}"
        ),
        remedy=f"parallel.tp={domain} or less, and parallel.pp or dp_shard between nodes",
    )


def measure_hidden_features_per_rank(facts: PlanFacts) -> RuleMeasurement | None:
    """Hidden features that remain for each rank."""
    tp, hidden_size = facts.layout.tp, facts.model.hidden_size
    if tp == 1:
        return None
    nearest = max(1, hidden_size // MIN_FEATURES_PER_RANK)
    return RuleMeasurement(
        hidden_size / tp,
        MIN_FEATURES_PER_RANK,
        consequence="narrower products fill the device less and are read more than computed with",
        remedy=f"parallel.tp={nearest} or less",
    )


def suggest_smaller_tp(facts: PlanFacts) -> str:
    """The rest of a remedy; "" for a plan that has no tp to make smaller."""
    return ", or a smaller parallel.tp" if facts.layout.tp > 1 else ""


def measure_wave_quantization(facts: PlanFacts) -> RuleMeasurement | None:
    """Time of matrix products that partly filled waves of tiles lose."""
    if facts.layout.tp == 1 and facts.wave_loss is None:
        return None
    return RuleMeasurement(
        facts.wave_loss,
        MAX_WAVE_LOSS,
        consequence="in the last wave of tiles some multiprocessors have nothing to do",
        remedy=f"a larger train.micro_batch_size{suggest_smaller_tp(facts)}",
        missing="the tiles of this device's matrix products",
    )


def measure_kv_heads_per_rank(facts: PlanFacts) -> RuleMeasurement | None:
    """Heads of keys and values against the ranks that share them."""
    tp = facts.layout.tp
    if tp == 1 or facts.model.num_kv_heads is None:
        return None
    return RuleMeasurement(
        facts.model.num_kv_heads,
        tp,
        consequence="with fewer heads than ranks, some ranks compute and store the same head",
        remedy=f"parallel.tp={facts.model.num_kv_heads} or less",
    )


def measure_activation_copies(facts: PlanFacts) -> RuleMeasurement | None:
    """Copies of the activations between the products, one per rank without sequence parallelism."""
    tp = facts.layout.tp
    if tp == 1:
        return None
    copies = 1
    if not facts.sequence_parallel:
        copies = tp
    return RuleMeasurement(
        copies,
        1,
        consequence="norms and residual sums are computed, and their inputs stored, once per copy",
        remedy="parallel.sequence_parallel=true: as many bytes are sent",
    )


def measure_vocab_padding(facts: PlanFacts) -> RuleMeasurement | None:
    """Rows that are missing for each rank's part of the vocabulary to be whole tiles."""
    tp, vocab_size = facts.layout.tp, facts.model.vocab_size
    if not vocab_size or facts.model.reads_images:
        return None
    multiple = VOCAB_MULTIPLE * tp
    missing_rows = -vocab_size % multiple
    consequence = f"{vocab_size:,} is a multiple of {multiple:,} ({VOCAB_MULTIPLE} x tp)"
    if missing_rows:
        consequence = (
            f"the head's last tiles are partly empty: {vocab_size:,} is no multiple of"
            f" {multiple:,} ({VOCAB_MULTIPLE} x tp)"
        )
    return RuleMeasurement(
        missing_rows / vocab_size,
        MAX_PADDING_SHARE,
        consequence=consequence,
        remedy=f"model.vocab_size={vocab_size + missing_rows} where the tokenizer is still open",
    )


RULES = (
    RuleOfThumb(
        "tp-in-link-domain",
        "Tensor parallelism stays where fast links are",
        "at most",
        "ranks",
        measure_tp_ranks_per_link_domain,
        evidence="Narayanan et al. 2021 (arXiv 2104.04473), takeaway 1",
        correction=(
            "The number of GPUs in a node bounds tp; it is not a recommendation. The smallest tp x"
            " pp that fits sends least (E24)."
        ),
    ),
    RuleOfThumb(
        "tp-width",
        "Enough features remain for each rank",
        "at least",
        "features",
        measure_hidden_features_per_rank,
        evidence="tiles of 128 to 256 columns; a rank of eight tiles' width keeps a device busy",
    ),
    RuleOfThumb(
        "matmul-waves",
        "Matrix products come out even",
        "at most",
        "%",
        measure_wave_quantization,
        evidence="NVIDIA, Matrix Multiplication Background: tile and wave quantization",
    ),
    RuleOfThumb(
        "kv-heads",
        "Every rank has a head of keys and values of its own",
        "at least",
        "heads",
        measure_kv_heads_per_rank,
        evidence="grouped-query attention: Ainslie et al. 2023 (arXiv 2305.13245)",
    ),
    RuleOfThumb(
        "sequence-parallel",
        "tp comes with sequence parallelism",
        "at most",
        "copies",
        measure_activation_copies,
        evidence="Korthikanti et al. 2022 (arXiv 2205.05198)",
        correction=(
            "This splits activations inside the tp group. It is not the way to long sequences: that"
            " is cp (E27)."
        ),
    ),
    RuleOfThumb(
        "vocab-padding",
        "The vocabulary divides into whole tiles",
        "at most",
        "%",
        measure_vocab_padding,
        evidence="NVIDIA, Matrix Multiplication Background: sizes that are multiples of a tile",
    ),
)
