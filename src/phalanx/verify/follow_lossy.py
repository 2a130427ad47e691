"""The same steps with gradients of which a part stays behind: the first is held to the reference, the rest told."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from phalanx.mesh.logical import LogicalShard
from phalanx.parallel.model import Batch, Objective, ParallelModel, StepFacts
from phalanx.verify.follow import (
    Dots,
    Followed,
    boxes_of,
    compare_blocks,
    gradient_shards,
    held_in_words,
    named_tensors,
    noting,
)
from phalanx.verify.trace_facts import FINAL, INITIAL, Trace, gradients_of


def follow_lossy(
    model: ParallelModel, objective: Objective, steps: Sequence[Sequence[Batch]], trace: Trace
) -> Followed:
    """Train `steps` as the reference did. Collective. Judged are initial weights and the first step, where a gradient
    is what was sent and what all ranks kept; `apart` says how far what was sent, and the weights, are from it.
    """
    found = Followed()
    shards, wanted = model.shards(), set(trace.sizes[INITIAL])
    found.unknown, found.absent = sorted(set(named_tensors(model)) - wanted), sorted(wanted - set(shards))
    found.held = {name: held_in_words(shard) for name, shard in shards.items()}
    found.boxes = boxes_of(shards)
    found.tensors[INITIAL] = compare_blocks(trace, INITIAL, shards)
    optimizer = torch.optim.SGD(list(model.parameters()), lr=trace.lr)
    for number, (microbatches, reference) in enumerate(zip(steps, trace.steps, strict=True)):
        optimizer.zero_grad()
        means: list[float] = []
        facts = model.finish_step(
            model.forward_backward(microbatches, noting(objective, means)), max_norm=reference.max_norm
        )
        if number == 0:
            found.losses, found.num_targets, found.local_means = [facts.loss], [facts.num_targets], [means]
            sent = _unclipped(model, facts, reference.max_norm)
            found.apart["sent"] = _distance(compare_blocks(trace, gradients_of(0), sent))
            whole = _with_unsent(model, facts, sent)
            found.norms = [sum(s.tensor.double().square().sum().item() for s in whole.values()) ** 0.5]
            found.tensors[gradients_of(0)] = compare_blocks(trace, gradients_of(0), whole)
        model.update(optimizer)
    found.apart["weight"] = _distance(compare_blocks(trace, FINAL, model.shards()))
    return found


def digests_of(model: ParallelModel) -> dict[str, str]:
    """Of the bytes of each weight that this rank holds."""
    shards = model.shards()
    return {name: _digest(shards[name].tensor) for name in named_tensors(model)}


def _unclipped(model: ParallelModel, facts: StepFacts, max_norm: float | None) -> dict[str, LogicalShard]:
    clipped = 1.0 if max_norm is None or facts.grad_norm <= max_norm else max_norm / facts.grad_norm
    return {name: shard.like(name, shard.tensor / clipped) for name, shard in gradient_shards(model).items()}


def _with_unsent(model: ParallelModel, facts: StepFacts, sent: dict[str, LogicalShard]) -> dict[str, LogicalShard]:
    """What was sent, and the mean over ranks of what each kept, which is one more step from being divided by tokens."""
    plan = model.plan
    per_target = plan.layout.data_parallel_size * plan.targets_per_rank / facts.num_targets
    whole = {}
    unsent = model.unsent_gradients()
    for name, shard in sent.items():
        kept = unsent.get(name, torch.zeros_like(shard.tensor)).clone()
        model.mesh.all_reduce_sum(kept)
        whole[name] = shard.like(name, shard.tensor + kept * (per_target / plan.layout.data_parallel_size))
    return whole


def _distance(dots: dict[str, Dots]) -> float:
    """|a - r| / |r| over all tensors."""
    apart, size = (sum(found[i] for found in dots.values()) for i in (0, 3))
    return float((apart / size) ** 0.5) if size else 0.0


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data)
