"""Compares the initial weights of phalanx's own models, in one process, with the distributions that
are declared for them: a width that is wrong everywhere is the same in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import xxhash

from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.vit import VitShape
from phalanx.plan.plan import Plan
from phalanx.verify.plain.initial import InitialDistribution, plain_initial_distribution
from phalanx.verify.plain.settings import BlockSettings
from phalanx.verify.plain_settings import make_plain_decoder_settings, make_plain_vision_settings
from phalanx.verify.trace_facts import InitialFault

# Standard deviations of an estimate: by chance one of 500 million is further off.
MAX_DEVIATIONS = 6.0
# Elements from which the fourth moment tells a normal distribution from a uniform one.
MIN_ELEMENTS_OF_KURTOSIS = 600
KURTOSIS_OF_NORMAL = 3.0


def find_initial_faults(
    job: Job, plan: Plan, initial: Mapping[str, torch.Tensor]
) -> tuple[InitialFault, ...] | None:
    """The parameters that are not drawn as declared; None for a module of which no distribution is
    declared here."""
    settings = _choose_settings(job, plan)
    if settings is None:
        return None
    faults = []
    names_of_bits: dict[str, str] = {}
    for name, tensor in initial.items():
        values = tensor.detach().double()
        declared = plain_initial_distribution(settings, name)
        faults += [InitialFault(name, *fault) for fault in _compare(values, declared)]
        if declared.std > 0 and tensor.numel() > 1:
            bits = xxhash.xxh3_64_hexdigest(values.contiguous().numpy().data)
            other = names_of_bits.setdefault(bits, name)
            if other != name:
                words = f"its values are those of {other}: they do not depend on the name"
                faults.append(InitialFault(name, 1.0, words))
    return tuple(faults)


def _choose_settings(job: Job, plan: Plan) -> BlockSettings | None:
    shape = plan.model_shape
    if job.model.is_foreign:
        return None
    # Not a model of another kind with the same numbers: it draws its weights by itself.
    if isinstance(shape, DecoderShape) and shape.kind == "decoder":
        return make_plain_decoder_settings(shape)
    if isinstance(shape, VitShape) and shape.kind == "vit":
        return make_plain_vision_settings(shape)
    return None


def _compare(values: torch.Tensor, declared: InitialDistribution) -> Iterator[tuple[float, str]]:
    """(relative error, words) of what is not as declared."""
    count, mean = values.numel(), values.mean().item()
    centred = values - mean
    std = centred.square().mean().sqrt().item()
    if declared.std == 0:
        if not bool((values == declared.mean).all()):
            error = max(abs(mean - declared.mean), std) / max(1.0, abs(declared.mean))
            yield error, f"it has mean {mean:.4g} and width {std:.2g}, not {declared.mean:g} only"
        return
    off = std / declared.std - 1
    # So that NaN is a fault, too.
    if not abs(off) <= MAX_DEVIATIONS / math.sqrt(2 * count):
        yield abs(off), f"its standard deviation is {std:.4g}, and {declared.std:.4g} is declared"
    elif not abs(mean - declared.mean) <= MAX_DEVIATIONS * declared.std / math.sqrt(count):
        words = f"its mean is {mean:.2g}, and {declared.mean:g} is declared"
        yield abs(mean - declared.mean) / declared.std, words
    elif count >= MIN_ELEMENTS_OF_KURTOSIS:
        excess = (centred / std).pow(4).mean().item() - KURTOSIS_OF_NORMAL
        if not abs(excess) <= MAX_DEVIATIONS * math.sqrt(24 / count):
            words = f"mean and width are as declared, and its kurtosis is {excess:+.2g} off: it is"
            yield abs(excess) / KURTOSIS_OF_NORMAL, f"{words} no normal distribution"
