"""What must hold of counts in every step: the loss has the targets of the batch, and experts the
choices of its tokens.

The batch is counted on the host, where the loader leaves it, before anything is cut or copied; the
counts of all ranks travel with the step's one reduction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from phalanx.core.batch import IGNORE_INDEX
from phalanx.mesh.logical import full_name
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.call.check_indices import TARGETS_ARE_CLASSES_ATTRIBUTE
from phalanx.parallel.executor import Batch, Objective
from phalanx.parallel.expert.router_load import RouterStepLoad, is_router


def is_rank_counting_its_samples(mesh: Mesh) -> bool:
    """False for a rank whose samples another one counts: ranks of tp, cp and pp read the same, all
    of each."""
    coordinates = mesh.coordinates
    return coordinates["tp"] == coordinates["cp"] == coordinates["pp"] == 0


def count_targets_and_tokens(
    microbatches: Sequence[Batch], objective: Objective
) -> tuple[float, float]:
    """(targets, tokens) of `microbatches` as the data has them; NaN for what cannot be told."""
    num_targets = num_tokens = 0.0
    for batch in microbatches:
        num_targets += _count_targets_of_batch(batch, objective)
        num_tokens += _count_tokens_of_batch(batch)
    return num_targets, num_tokens


def _count_targets_of_batch(batch: Batch, objective: Objective) -> float:
    keys = [key for key in ("targets", "labels") if key in batch]
    # An objective that does not take every target for a class knows alone what it counts.
    if not getattr(objective, TARGETS_ARE_CLASSES_ATTRIBUTE, False) or len(keys) != 1:
        return math.nan
    targets = batch[keys[0]]
    # What lies on a device the host would have to wait for.
    if targets.device.type != "cpu":
        return math.nan
    return float(torch.count_nonzero(targets != IGNORE_INDEX))


def _count_tokens_of_batch(batch: Batch) -> float:
    if "inputs" not in batch or batch["inputs"].ndim != 2:
        return math.nan
    return float(batch["inputs"].numel())


@dataclass
class RouterLoadMismatches:
    """The routers of this rank whose experts' loads do not add up: names; the sums of all that
    were compared, and what they should be. `uncounted`: names of routers that say nothing."""

    wrong: list[str] = field(default_factory=list)
    expected: float = 0.0
    actual: float = 0.0
    num_compared: int = 0
    uncounted: list[str] = field(default_factory=list)


def map_routers_by_name(module: nn.Module) -> dict[str, nn.Module]:
    return {full_name(name): part for name, part in module.named_modules() if is_router(part)}


def find_router_load_mismatches(
    routers: Mapping[str, nn.Module], loads: Mapping[str, RouterStepLoad], num_tokens: float
) -> RouterLoadMismatches:
    """Compare the loads of a step with `num_tokens` x experts of a token, over all ranks."""
    findings = RouterLoadMismatches()
    for name, load in loads.items():
        router = routers[name]
        per_token = getattr(router, "per_token", None)
        # Loads are counted in the backward, which does not reach what is frozen.
        is_trained = any(parameter.requires_grad for parameter in router.parameters())
        if not isinstance(per_token, int) or not is_trained or math.isnan(num_tokens):
            findings.uncounted.append(name)
            continue
        expected, actual = num_tokens * per_token, sum(load.counts)
        findings.num_compared += 1
        if actual != expected or not _is_drop_count_possible(router, load):
            # The first says by how much.
            if not findings.wrong:
                findings.expected, findings.actual = expected, float(actual)
            findings.wrong.append(name)
    return findings


def _is_drop_count_possible(router: nn.Module, load: RouterStepLoad) -> bool:
    """False for more dropped choices than there were, and for any without a capacity."""
    if not getattr(router, "capacity_factor", 0.0):
        return load.dropped == 0
    return 0 <= load.dropped <= sum(load.counts)
