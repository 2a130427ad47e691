"""Rules of the batch: how large it may be, its learning rate, and work per byte that is read."""

from __future__ import annotations

from phalanx.core.units import format_count
from phalanx.plan.advice.facts import PlanFacts
from phalanx.plan.advice.rule import RuleMeasurement, RuleOfThumb
from phalanx.plan.rules_of_thumb.tensor_parallel import suggest_smaller_tp

# Kaplan et al. 2020, equation 1.4: B_crit(L) = 2e8 tokens / L^(1/0.21).
CRITICAL_TOKENS_AT_1, CRITICAL_EXPONENT = 2e8, 1 / 0.21
REACHED_LOSS, EARLY_LOSS = 2.0, 3.0
SGD_LIKE_OPTIMIZERS = ("sgd",)
MAX_LR_RATIO = 1.25


def estimate_critical_batch_tokens(loss: float) -> float:
    """Tokens of a batch beyond which more of them save few steps, at a loss in nats per token."""
    return CRITICAL_TOKENS_AT_1 / float(loss**CRITICAL_EXPONENT)


def measure_critical_batch(facts: PlanFacts) -> RuleMeasurement | None:
    """Tokens of a step against the critical batch of language models."""
    if facts.model.reads_images or facts.batch.seq_len <= 1:
        return None
    early = estimate_critical_batch_tokens(EARLY_LOSS)
    return RuleMeasurement(
        facts.batch.num_tokens,
        estimate_critical_batch_tokens(REACHED_LOSS),
        comfortable=early,
        consequence=(
            f"past {format_count(early)} tokens at a loss of {EARLY_LOSS:g} nats, and past"
            f" {format_count(estimate_critical_batch_tokens(REACHED_LOSS))} at {REACHED_LOSS:g}, a"
            " larger"
            " batch saves few steps and costs as many more tokens"
        ),
        remedy="a smaller train.global_batch_size, or one that grows while the loss falls",
    )


def measure_learning_rate_error(facts: PlanFacts) -> RuleMeasurement | None:
    """The ratio by which the learning rate is too high or too low for the batch."""
    exponent, advice = 0.5, "with the square root of the batch (Adam)"
    if facts.optimizer.lower() in SGD_LIKE_OPTIMIZERS:
        exponent, advice = 1.0, "in proportion to the batch (SGD)"
    if facts.reference_batch_size is None:
        return RuleMeasurement(
            None,
            MAX_LR_RATIO,
            missing=(
                "the batch that optim.lr was tuned with (optim.reference_batch_size). The rate"
                f" changes {advice}: twice the batch, {2**exponent:.3g} times the rate"
            ),
        )
    growth = facts.batch.global_batch_size / facts.reference_batch_size
    applied_exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5, "auto": exponent}[facts.lr_scaling]
    error = growth ** (applied_exponent - exponent)
    return RuleMeasurement(
        max(error, 1 / error),
        MAX_LR_RATIO,
        consequence=(
            f"the batch is {growth:.3g} times the one that the rate was tuned with; the rate"
            f" changes {advice}, by {growth**exponent:.3g}"
        ),
        remedy="optim.lr_scaling=auto, with warm-up",
    )


def measure_arithmetic_intensity(facts: PlanFacts) -> RuleMeasurement | None:
    """FLOPs per byte of a rank's smallest square product against the device's ridge."""
    hardware, model = facts.hardware, facts.model
    # Of a module without blocks nobody knows the size of a product.
    if hardware.peak_flops is None or hardware.memory_gb_s is None or not model.hidden_size:
        return None
    rows, columns = facts.tokens_per_rank, model.hidden_size / facts.layout.tp
    num_elements = rows * columns + columns * model.hidden_size + rows * model.hidden_size
    flops = 2 * rows * columns * model.hidden_size
    ridge = hardware.peak_flops / (hardware.memory_gb_s * 1e9)
    return RuleMeasurement(
        flops / (facts.element_bytes * num_elements),
        ridge,
        consequence=(
            "below the ridge (FLOP/s over bytes/s of the device's memory) a product waits for"
            " memory, not for arithmetic"
        ),
        remedy=f"more tokens per micro-batch (train.micro_batch_size){suggest_smaller_tp(facts)}",
    )


def measure_expert_rows(facts: PlanFacts) -> RuleMeasurement | None:
    """Tokens that each expert multiplies with, on average, against the device's ridge."""
    model, hardware = facts.model, facts.hardware
    if not model.num_experts or hardware.peak_flops is None or hardware.memory_gb_s is None:
        return None
    # Ranks of an ep group bring their tokens together: each has num_experts / ep of the experts.
    rows = facts.tokens_per_rank * facts.layout.ep * model.experts_per_token / model.num_experts
    ridge = hardware.peak_flops / (hardware.memory_gb_s * 1e9)
    return RuleMeasurement(
        rows,
        ridge,
        consequence="experts with few tokens are read for little arithmetic",
        remedy="a larger train.micro_batch_size, or a larger parallel.ep",
    )


RULES = (
    RuleOfThumb(
        "critical-batch",
        "The batch is below the critical size",
        "at most",
        "tokens",
        measure_critical_batch,
        evidence="Kaplan et al. 2020 (arXiv 2001.08361), equation 1.4; an order of magnitude",
        correction="Beyond the critical batch no rule for the learning rate holds (E43).",
    ),
    RuleOfThumb(
        "learning-rate",
        "The learning rate follows the batch",
        "at most",
        "times too high or too low",
        measure_learning_rate_error,
        evidence="SGD: Goyal et al. 2017, 1706.02677; Adam: Malladi et al. 2022, 2205.10287",
        correction="The linear rule is SGD's; Adam's is the square root (E43).",
    ),
    RuleOfThumb(
        "arithmetic-intensity",
        "Products are large enough for the device",
        "at least",
        "FLOP/byte",
        measure_arithmetic_intensity,
        evidence="roofline: Williams et al. 2009",
        correction=(
            "An A100's ridge is 156 FLOP/byte, not 0.156 (E53). A product that waits for memory"
            " waits for the device's own, not for the data loader (E54)."
        ),
    ),
    RuleOfThumb(
        "expert-tokens",
        "Experts have enough tokens",
        "at least",
        "tokens per expert",
        measure_expert_rows,
        evidence="roofline: tokens per weight that is read are FLOPs per byte",
    ),
)
