"""Trains the reference's steps with gradients of which a part stays behind; only the first step
is compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from phalanx.mesh.logical import LogicalShard
from phalanx.parallel.executor import Batch, Objective
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.step_stats import StepStats
from phalanx.verify.follow import (
    Dots,
    RankObservations,
    compare_blocks,
    describe_held,
    gradient_shards,
    list_boxes,
    list_parameters,
    record_means,
)
from phalanx.verify.trace_facts import FINAL, INITIAL, Trace, gradients_of


def follow_lossy(
    model: ParallelModel, objective: Objective, steps: Sequence[Sequence[Batch]], trace: Trace
) -> RankObservations:
    """Train `steps` as the reference did.

    Collective. Judged are initial weights and the first step, where a gradient is what was sent and
    what all ranks kept; `apart` says how far what was sent, and the weights, are from it.
    """
    observations = RankObservations()
    shards, reference_names = model.shards(), set(trace.sizes[INITIAL])
    observations.unknown = sorted(set(list_parameters(model)) - reference_names)
    observations.absent = sorted(reference_names - set(shards))
    observations.held = {name: describe_held(shard) for name, shard in shards.items()}
    observations.boxes = list_boxes(shards)
    observations.tensors[INITIAL] = compare_blocks(trace, INITIAL, shards)
    optimizer = torch.optim.SGD(list(model.parameters()), lr=trace.lr)
    for number, (microbatches, reference) in enumerate(zip(steps, trace.steps, strict=True)):
        optimizer.zero_grad()
        means: list[float] = []
        facts = model.reduce_and_clip(
            model.forward_backward(microbatches, record_means(objective, means)),
            max_norm=reference.max_norm,
        )
        # Later steps have no reference: what stayed behind in this one is in their gradients.
        if number == 0:
            observations.losses, observations.num_targets = [facts.loss], [facts.num_targets]
            observations.local_means = [means]
            sent = _undo_clipping(model, facts, reference.max_norm)
            observations.apart["sent"] = _distance(compare_blocks(trace, gradients_of(0), sent))
            complete = _add_unsent(model, facts, sent)
            observations.norms = [
                sum(s.tensor.double().square().sum().item() for s in complete.values()) ** 0.5
            ]
            observations.tensors[gradients_of(0)] = compare_blocks(trace, gradients_of(0), complete)
        model.update(optimizer)
    observations.apart["weight"] = _distance(compare_blocks(trace, FINAL, model.shards()))
    return observations


def digest_weights(model: ParallelModel) -> dict[str, str]:
    """The digest of each weight that this rank holds, by its name."""
    shards = model.shards()
    return {name: _digest(shards[name].tensor) for name in list_parameters(model)}


def _undo_clipping(
    model: ParallelModel, facts: StepStats, max_norm: float | None
) -> dict[str, LogicalShard]:
    # What was sent may be less than the reference's bound, and is not clipped then.
    clipped = 1.0 if max_norm is None or facts.grad_norm <= max_norm else max_norm / facts.grad_norm
    return {
        name: shard.like(name, shard.tensor / clipped)
        for name, shard in gradient_shards(model).items()
    }


def _add_unsent(
    model: ParallelModel, facts: StepStats, sent: dict[str, LogicalShard]
) -> dict[str, LogicalShard]:
    """The gradients that were sent, plus the mean over ranks of what each kept.

    What a rank keeps is not divided by tokens yet.
    """
    plan = model.plan
    per_target = plan.layout.data_parallel_size * plan.targets_per_rank / facts.num_targets
    complete = {}
    unsent = {} if model.compression is None else model.compression.errors()
    for name, shard in sent.items():
        # A copy: the ranks' sum is taken in place, and the layout goes on with what it keeps.
        unsent_part = unsent.get(name, torch.zeros_like(shard.tensor)).clone()
        model.mesh.all_reduce_sum(unsent_part)
        complete[name] = shard.like(
            name, shard.tensor + unsent_part * (per_target / plan.layout.data_parallel_size)
        )
    return complete


def _distance(dots: dict[str, Dots]) -> float:
    """The error |a - r| / |r| over all tensors."""
    error, size = (sum(values[i] for values in dots.values()) for i in (0, 3))
    return float((error / size) ** 0.5) if size else 0.0


def _digest(tensor: torch.Tensor) -> str:
    # As bytes, for numpy has no bfloat16. torch views only contiguous memory with a dimension so.
    return xxhash.xxh3_64_hexdigest(
        tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data
    )
