"""Trains the reference's steps in a ParallelModel and compares each tensor with the trace, block
by block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.mesh.logical import LogicalShard, full_name, local_tensor
from phalanx.parallel.executor import Batch, Objective
from phalanx.parallel.model import ParallelModel
from phalanx.verify.dropout_watch import DropoutWatch
from phalanx.verify.trace import TraceReader
from phalanx.verify.trace_facts import BUFFERS, FINAL, INITIAL, UPDATED, Trace, gradients_of

Dots = tuple[float, float, float, float, float]
"""Over the elements a rank holds: |a - r|^2, |a|^2, a.r, |r|^2, with `a` the layout's and `r` the
reference's.

The last is |r|^2 again, of a block that several ranks hold while they differ in others (fused keys)
its share.
"""


@dataclass
class RankObservations:
    """The observations of one rank.

    `tensors`: set -> name -> dots; `held`: name -> which part this rank holds, in words. `boxes`:
    name -> (offset, size, ranks that hold it while they differ in others) of each block of it.
    `stages`: name -> the pipeline stages that hold it. `wrong_masks`: (step, from 0; dropout layer;
    by how much).
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    num_targets: list[int] = field(default_factory=list)
    evaluation: float = math.nan
    local_means: list[list[float]] = field(default_factory=list)
    tensors: dict[str, dict[str, Dots]] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int]]] = field(
        default_factory=dict
    )
    stages: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    wrong_masks: list[tuple[int, str, float]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    """Name -> digest of the weight after the steps, where ranks that hold it must hold the same
    bits."""
    apart: dict[str, float] = field(default_factory=dict)
    """Errors by design, by what they are of."""

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def follow(
    model: ParallelModel,
    objective: Objective,
    steps: Sequence[Sequence[Batch]],
    trace: Trace,
    *,
    seed: int = 0,
) -> RankObservations:
    """Train `steps` (this rank's microbatches of each) as the reference did, and compare.

    Collective.
    """
    observations = RankObservations()
    shards = model.shards()
    reference_names = set(trace.sizes[INITIAL])
    observations.unknown = sorted(set(list_parameters(model)) - reference_names)
    observations.absent = sorted(reference_names - set(shards))
    observations.held = {name: describe_held(shard) for name, shard in shards.items()}
    observations.boxes = list_boxes(shards)
    if model.pipeline is not None:
        observations.stages = dict(model.pipeline.staged.stages)
    share = {"share": model.mesh.data_parallel_rank, "shares": model.plan.layout.data_parallel_size}
    watch = DropoutWatch(model.module, seed, **share) if trace.dropped else None
    observations.tensors[INITIAL] = compare_blocks(trace, INITIAL, shards)
    # Plain descent, as `train_alone` does: the job's own optimizer is followed by itself.
    optimizer = torch.optim.SGD(list(model.parameters()), lr=trace.lr)
    for number, (microbatches, reference) in enumerate(zip(steps, trace.steps, strict=True)):
        optimizer.zero_grad()
        means: list[float] = []
        if watch is not None:
            watch.begin_step(number + 1, microbatches)
        sums = model.forward_backward(microbatches, record_means(objective, means))
        facts = model.reduce_and_clip(sums, max_norm=reference.max_norm)
        observations.losses.append(facts.loss)
        observations.norms.append(facts.grad_norm)
        observations.num_targets.append(facts.num_targets)
        observations.local_means.append(means)
        # The reference keeps gradients as they were before clipping.
        clipped = 1.0 if reference.max_norm is None else reference.max_norm / reference.grad_norm
        observations.tensors[gradients_of(number)] = compare_blocks(
            trace, gradients_of(number), gradient_shards(model), 1 / clipped
        )
        model.update(optimizer)
    observations.wrong_masks = (
        [(step - 1, name, off) for (step, name), off in watch.wrong.items()] if watch else []
    )
    shards = model.shards()
    observations.tensors[FINAL] = compare_blocks(trace, FINAL, shards)
    if BUFFERS in trace.sizes:
        observations.tensors[BUFFERS] = compare_blocks(trace, BUFFERS, shards)
    model.train(False)
    observations.evaluation, _ = model.reduce_sums(model.evaluate(steps[-1], objective))
    model.train()
    return observations


def list_boxes(
    shards: Mapping[str, LogicalShard],
) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int]]]:
    """The blocks of each shard, as `RankObservations.boxes` has them."""
    return {
        name: [(box.global_offset, box.size, box.num_replicas) for box in shard.boxes]
        for name, shard in shards.items()
    }


def follow_optimizer(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    steps: Sequence[Sequence[Batch]],
    trace: Trace,
) -> dict[str, Dots]:
    """Train `steps` with the job's own optimizer: the weights after them beside the reference's.

    Collective.
    """
    for microbatches in steps:
        optimizer.zero_grad()
        model.reduce_and_clip(model.forward_backward(microbatches, objective))
        model.update(optimizer)
    return compare_blocks(trace, UPDATED, model.shards())


def record_means(objective: Objective, means: list[float]) -> Objective:
    """The objective, which also keeps each microbatch's own mean: what a mean of means would be
    made of."""

    def call_and_record(outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, targets = objective(outputs, batch)
        # A pipeline's shape inference has no gradients, and its loss is none.
        if loss.requires_grad:
            means.append(loss.item() / int(targets) if int(targets) else float("nan"))
        return loss, targets

    return call_and_record


def list_parameters(model: ParallelModel) -> dict[str, torch.Tensor]:
    return {full_name(name): parameter for name, parameter in model.named_parameters()}


def gradient_shards(model: ParallelModel) -> dict[str, LogicalShard]:
    """The gradients in the places of what is updated; zeros where a parameter had no part in the
    loss."""
    shards = model.trained_shards()
    gradients = {}
    for name, parameter in list_parameters(model).items():
        local = shards[name].tensor
        gradient = (
            torch.zeros_like(local)
            if parameter.grad is None
            else local_tensor(parameter.grad).detach()
        )
        gradients[name] = shards[name].like(name, gradient)
    return gradients


def compare_blocks(
    trace: Trace, kind: str, shards: Mapping[str, LogicalShard], factor: float = 1.0
) -> dict[str, Dots]:
    """Dots of each tensor that the reference has, over the blocks of this rank; `factor` undoes
    a known scaling."""
    dots_of: dict[str, Dots] = {}
    with TraceReader(trace, kind) as reader:
        for name in trace.sizes[kind]:
            if name not in shards:
                continue
            shard, dots = shards[name], torch.zeros(5, dtype=torch.float64)
            for box in shard.boxes:
                slices = tuple(
                    slice(o, o + n) for o, n in zip(box.local_offset, box.size, strict=True)
                )
                actual = shard.tensor[slices].double().cpu() * factor
                reference_block = reader.block(name, box.global_offset, box.size).double()
                if actual.shape != reference_block.shape:
                    # It stands where no such block is.
                    actual = torch.full_like(reference_block, float("nan"))
                pairs = (
                    (actual - reference_block, actual - reference_block),
                    (actual, actual),
                    (actual, reference_block),
                    (reference_block, reference_block),
                )
                sums = [(a * b).sum() for a, b in pairs]
                dots += torch.stack((*sums, sums[3] / box.num_replicas))
            dots_of[name] = tuple(dots.tolist())
    return dots_of


def describe_held(shard: LogicalShard) -> str:
    """The part of a tensor that a shard holds: "whole", "nothing", or "[0:16, :] of [64, 32]"."""
    if not shard.boxes:
        return "nothing"
    if len(shard.boxes) == 1 and shard.boxes[0].size == shard.global_shape:
        return "whole"
    parts = []
    for box in shard.boxes:
        spans = [
            ":" if size == length else f"{start}:{start + size}"
            for start, size, length in zip(
                box.global_offset, box.size, shard.global_shape, strict=True
            )
        ]
        parts.append(f"[{', '.join(spans)}]")
    return f"{' and '.join(parts)} of {list(shard.global_shape)}"
