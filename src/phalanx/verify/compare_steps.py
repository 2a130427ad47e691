"""Trains the reference's steps in a ParallelModel and compares each tensor with the trace, block
by block.

Before each update the gradients are replaced by those of the trace. So each step begins with the
weights of one process, and an optimizer that divides a gradient by its size (Adam) does not make a
difference of its rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.core.block_sizes import (
    get_block_sizes,
    restore_shared_memory_sizes,
    use_block_sizes,
)
from phalanx.mesh.logical import LogicalShard, full_name, get_local_tensor
from phalanx.mesh.shared_memory.opening import current_transport
from phalanx.optim.build import set_learning_rate
from phalanx.parallel.executor import Batch, Objective
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.step_stats import StepStats
from phalanx.verify.begin import load_starting_weights_of_trace
from phalanx.verify.dropout_watch import DropoutMaskChecker
from phalanx.verify.kept_errors import CompressionResiduals
from phalanx.verify.outputs import FirstOutput
from phalanx.verify.overflowed_gradients import OverflowFault, find_overflow_faults
from phalanx.verify.plain.training import OptimizerDefinition
from phalanx.verify.row_gradients import FirstWrongGradients
from phalanx.verify.sent_gradients import SentFault, SentGradientChecker
from phalanx.verify.shard_blocks import (
    BlockDigest,
    Dots,
    compute_block_dots,
    compute_relative_distance,
    describe_held_part,
    hash_block_bits,
    list_shard_boxes,
)
from phalanx.verify.trace import AppliedTraceGradients
from phalanx.verify.trace_facts import (
    BEGIN_KIND,
    INITIAL_KIND,
    Trace,
    name_buffers_set,
    name_gradients_set,
    name_weights_set,
)
from phalanx.verify.update_hypotheses import UpdateExaminer
from phalanx.verify.wrong_gradients import (
    LeftDots,
    RowFactor,
    WrongRows,
    examine_wrong_gradients,
)

# One reads in place, one sends messages.
NUM_STEPS_IN_CHUNKS = 2
# The step of six that goes over gloo, counted from 1.
GLOO_STEP = 5


@dataclass
class RankObservations:
    """The observations of one rank.

    `tensors`: set -> name -> dots; `held`: name -> which part this rank holds, in words. `boxes`:
    name -> (offset, size, ranks that hold it while they differ in others) of each block of it.
    `stages`: name -> the pipeline stages that hold it. `wrong_masks`: (step, from 0; dropout layer;
    by how much). `loads`: of each step, router -> how many tokens chose each expert, and how many
    choices were dropped. `digests`: set -> name -> a digest of the bits of each block.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    num_targets: list[int] = field(default_factory=list)
    evaluation: float = math.nan
    num_evaluated: int = 0
    training_in_evaluation: list[str] = field(default_factory=list)
    """Modules that are in training mode while the model evaluates."""
    local_means: list[list[float]] = field(default_factory=list)
    """Of each step, the loss per target of each of this rank's microbatches; NaN without any."""
    local_targets: list[list[int]] = field(default_factory=list)
    """Of each step, the number of targets of each of these."""
    tensors: dict[str, dict[str, Dots]] = field(default_factory=dict)
    left: dict[str, dict[str, LeftDots]] = field(default_factory=dict)
    """Set -> name -> what a wrong gradient is off by, beside that of the step before."""
    wrong_rows: dict[str, dict[str, WrongRows]] = field(default_factory=dict)
    """Set -> name -> the rows in which a gradient is wrong."""
    row_factors: dict[str, dict[str, RowFactor]] = field(default_factory=dict)
    """Set -> name -> the factor that some rows of a wrong gradient have in common."""
    held: dict[str, str] = field(default_factory=dict)
    boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int]]] = field(
        default_factory=dict
    )
    mistakes_of_updates: dict[str, dict[str, str]] = field(default_factory=dict)
    """Set of weights -> name -> the mistake that makes its wrong update, to be read after "as
    if"."""
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of an optimizer of the user's own, by parameter: how many times the job's rate its group was
    built with, and how many a step of the trainer gives it."""
    stages: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    wrong_masks: list[tuple[int, str, float]] = field(default_factory=list)
    loads: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    digests: dict[str, dict[str, list[BlockDigest]]] = field(default_factory=dict)
    outputs: list[FirstOutput] = field(default_factory=list)
    """The first wrong output of each step in which there is one."""
    sent_faults: list[SentFault] = field(default_factory=list)
    """What compression sends and should not, in the order of the steps."""
    overflow_faults: list[OverflowFault] = field(default_factory=list)
    """What a gradient that is not finite does to compression and should not."""
    apart: dict[str, float] = field(default_factory=dict)
    """Errors by design, by what they are of."""

    def add_step_sums(self, facts: StepStats, means: list[float], counts: list[int]) -> None:
        """Add what the ranks sum up in a step, and the mean loss and the number of targets of each
        of this rank's microbatches."""
        self.losses.append(facts.loss)
        self.norms.append(facts.grad_norm)
        self.num_targets.append(facts.num_targets)
        self.local_means.append(means)
        self.local_targets.append(counts)

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def train_beside_reference(
    model: ParallelModel,
    objective: Objective,
    steps: Sequence[Sequence[Batch]],
    trace: Trace,
    build_optimizer: Callable[[float], torch.optim.Optimizer],
    *,
    rule: OptimizerDefinition | None = None,
    seed: int = 0,
    first_wrong: FirstWrongGradients | None = None,
) -> RankObservations:
    """Train `steps` (this rank's microbatches of each) as the reference did, and compare. `rule`:
    the definition of the optimizer, None for a user's own.

    `first_wrong` is given the gradients of the first step in which some are off. Collective.
    """
    observations = _observe_initial_weights(model, trace)
    applied, unsent_errors = AppliedTraceGradients(trace), CompressionResiduals(model)
    share = {"share": model.mesh.data_parallel_rank, "shares": model.plan.layout.data_parallel_size}
    sent_gradients = SentGradientChecker(model)
    watch = DropoutMaskChecker(model.module, seed, **share) if trace.dropped else None
    load_starting_weights_of_trace(model, trace)
    optimizer = build_optimizer(applied.lr)
    if rule is None:
        observations.rates = _observe_rates(model, optimizer, applied.lr)
    examiner = UpdateExaminer(trace, applied, rule, model.mesh.world_size)
    # Once: the places of what is updated stay where they are.
    places = model.trained_shards()
    for number, (microbatches, reference) in enumerate(zip(steps, trace.steps, strict=True)):
        with _exchanging_one_way(number, trace), _exchanging_in_chunks(number):
            optimizer.zero_grad()
            means: list[float] = []
            counts: list[int] = []
            sent_gradients.begin_step(number)
            if watch is not None:
                watch.begin_step(number + 1, microbatches)
            sums = model.forward_backward(
                microbatches, wrap_objective_to_record_means(objective, means, counts)
            )
            facts = model.reduce_and_clip(sums, max_norm=reference.max_norm)
            observations.add_step_sums(facts, means, counts)
            observations.loads.append(_collect_expert_loads(model))
            gradients = collect_gradient_shards(model, places)
            # By its own norm: an error of the norm is not one of every gradient.
            unclipped = _undo_clipping(gradients, facts.grad_norm, reference.max_norm)
            if unsent_errors.are_kept:
                _observe_error_of_sent(observations, trace, number, unclipped)
                unclipped = unsent_errors.restore_full_gradients(facts.num_targets, unclipped)
                observations.norms[-1] = _compute_gradient_norm(unclipped)
            dots_of = _observe_gradients(observations, trace, number, unclipped)
            if first_wrong is not None:
                first_wrong.keep_if_first(trace, number, unclipped, dots_of)
            observations.digests[name_gradients_set(number)] = hash_block_bits(gradients)
            overwrite_step_gradients(applied, number, gradients)
            model.update(optimizer)
            _observe_update(observations, model, trace, number, examiner)
    observations.sent_faults = sent_gradients.faults
    if watch is not None:
        observations.wrong_masks = [
            (step - 1, name, off) for (step, name), off in watch.wrong.items()
        ]
    _observe_evaluation(observations, model, steps[-1], objective)
    if sent_gradients.is_judging:
        observations.overflow_faults = find_overflow_faults(
            model, sent_gradients, objective, steps[-1]
        )
    return observations


def _exchanging_one_way(number: int, trace: Trace) -> AbstractContextManager[None]:
    """Ranks that share memory read shards and updated rows in place in the first of two steps, and
    send them in the second, as GPUs do; in one step all goes over gloo: each way is judged."""
    transport = current_transport()
    if transport is None:
        return nullcontext()
    if number == GLOO_STEP - 1 and is_gloo_judged(trace):
        return transport.paused()
    return nullcontext() if number % 2 == 0 else transport.sending_messages()


def is_gloo_judged(trace: Trace) -> bool:
    """True where ranks that share memory take a step over gloo, too: gloo sums 16 bits in 16."""
    return not trace.rounding_dtype and trace.num_steps >= GLOO_STEP


def _exchanging_in_chunks(number: int) -> AbstractContextManager[None]:
    """The sizes in force hold in the first steps, and from then on the usual ones for what ranks
    exchange: a chunk more is a turn of Python's on each rank, and what is wrong with one shows at
    once."""
    if number < NUM_STEPS_IN_CHUNKS:
        return nullcontext()
    return use_block_sizes(restore_shared_memory_sizes(get_block_sizes()))


def _observe_initial_weights(model: ParallelModel, trace: Trace) -> RankObservations:
    """The shards that the ranks hold, and their initial weights."""
    observations = RankObservations()
    shards, reference_names = model.shards(), set(trace.sizes[INITIAL_KIND])
    observations.unknown = sorted(set(map_parameters_by_full_name(model)) - reference_names)
    observations.absent = sorted(reference_names - set(shards))
    observations.held = {name: describe_held_part(shard) for name, shard in shards.items()}
    observations.boxes = list_shard_boxes(shards)
    if model.pipeline is not None:
        observations.stages = dict(model.pipeline.staged.stages)
    observations.tensors[INITIAL_KIND] = compute_block_dots(trace, INITIAL_KIND, shards)
    return observations


def _observe_rates(
    model: ParallelModel, optimizer: torch.optim.Optimizer, lr: float
) -> dict[str, tuple[float, float]]:
    """`RankObservations.rates`; the groups are as they were."""
    names = {id(p): name for name, p in map_parameters_by_full_name(model).items()}
    before = [dict(group) for group in optimizer.param_groups]
    set_learning_rate(optimizer, lr)
    rates = {}
    for group, built in zip(optimizer.param_groups, before, strict=True):
        # None is that of optimizers that can choose their own.
        rate = lr if built.get("lr") is None else float(built["lr"])
        for parameter in group["params"]:
            if id(parameter) in names:
                rates[names[id(parameter)]] = rate / lr, float(group["lr"]) / lr
        group.clear()
        group.update(built)
    return rates


def _observe_error_of_sent(
    observations: RankObservations, trace: Trace, number: int, sent: Mapping[str, LogicalShard]
) -> None:
    """How far gradients are from the reference's, of which compression has kept a part back."""
    error = compute_relative_distance(compute_block_dots(trace, name_gradients_set(number), sent))
    observations.apart["sent"] = max(observations.apart.get("sent", 0.0), error)


def _observe_gradients(
    observations: RankObservations, trace: Trace, number: int, gradients: Mapping[str, LogicalShard]
) -> dict[str, Dots]:
    """The gradients of a step, before they are clipped, beside the reference's; their dots."""
    kind = name_gradients_set(number)
    dots_of = compute_block_dots(trace, kind, gradients)
    observations.tensors[kind] = dots_of
    wrong = examine_wrong_gradients(trace, number, gradients, dots_of)
    observations.left[kind], observations.wrong_rows[kind] = wrong.left, wrong.rows
    observations.row_factors[kind] = wrong.row_factors
    return dots_of


def _observe_evaluation(
    observations: RankObservations,
    model: ParallelModel,
    microbatches: Sequence[Batch],
    objective: Objective,
) -> None:
    """The loss of an evaluation, and the modules that do not know of it. Collective."""
    model.train(False)
    observations.training_in_evaluation = [
        full_name(name) for name, part in model.module.named_modules() if part.training
    ]
    observations.evaluation, observations.num_evaluated = model.reduce_sums(
        model.evaluate(microbatches, objective)
    )
    model.train()


def _observe_update(
    observations: RankObservations,
    model: ParallelModel,
    trace: Trace,
    number: int,
    examiner: UpdateExaminer,
) -> None:
    """Weights and buffers after the update of a step."""
    shards = model.shards()
    kinds = [name_weights_set(number)]
    if trace.has_buffers:
        kinds.append(name_buffers_set(number))
    for kind in kinds:
        # Of weights how they moved: what an update did is not lost in what they were.
        since = BEGIN_KIND if kind == name_weights_set(number) else None
        dots_of = compute_block_dots(trace, kind, shards, since=since)
        observations.tensors[kind] = dots_of
        if since is not None:
            observations.mistakes_of_updates[kind] = examiner.examine(number, shards, dots_of)
        if number == trace.num_steps - 1:
            shards_of_kind = {name: shards[name] for name in trace.sizes[kind] if name in shards}
            observations.digests[kind] = hash_block_bits(shards_of_kind)


def _collect_expert_loads(model: ParallelModel) -> dict[str, tuple[int, ...]]:
    return {name: (*load.counts, load.dropped) for name, load in model.expert_load.items()}


def _undo_clipping(
    gradients: Mapping[str, LogicalShard], norm: float, max_norm: float | None
) -> dict[str, LogicalShard]:
    if max_norm is None or not norm > max_norm:
        return dict(gradients)
    return {
        name: shard.like(name, shard.tensor * (norm / max_norm))
        for name, shard in gradients.items()
    }


@torch.no_grad()
def overwrite_step_gradients(
    applied: AppliedTraceGradients, number: int, gradients: Mapping[str, LogicalShard]
) -> None:
    """Write the gradients of a step that are to be applied over those of this rank."""
    factor = applied.clipping_factor(number)
    with applied.open(number) as reader:
        for name, shard in gradients.items():
            # A name that the reference does not have is a difference of its own.
            if name not in applied.names:
                continue
            for box in shard.boxes:
                local_block = shard.tensor[box.slices_in_local_tensor]
                block = reader.block(name, box.global_offset, box.size)
                # Of another shape it stands where no such block is, which is found by itself.
                if local_block.shape == block.shape:
                    local_block.copy_(block * factor)


def wrap_objective_to_record_means(
    objective: Objective, means: list[float], counts: list[int]
) -> Objective:
    """The objective, which also keeps each microbatch's own mean and number of targets: what a mean
    of means would be made of."""

    # With its marks: by them a layout chooses in which form it hands over a head's outputs.
    @functools.wraps(objective)
    def call_and_record(outputs: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss, targets = objective(outputs, batch)
        # A pipeline's shape inference has no gradients, and its loss is none.
        if loss.requires_grad:
            counts.append(int(targets))
            means.append(loss.item() / counts[-1] if counts[-1] else math.nan)
        return loss, targets

    return call_and_record


def map_parameters_by_full_name(model: ParallelModel) -> dict[str, torch.Tensor]:
    return {full_name(name): parameter for name, parameter in model.named_parameters()}


def collect_gradient_shards(
    model: ParallelModel, places: Mapping[str, LogicalShard]
) -> dict[str, LogicalShard]:
    """The gradients in the `places` of what is updated (`ParallelModel.trained_shards`); zeros
    where a parameter had no part in the loss."""
    gradients = {}
    for name, parameter in map_parameters_by_full_name(model).items():
        local = places[name].tensor
        if parameter.grad is None:
            gradient = torch.zeros_like(local)
        else:
            gradient = get_local_tensor(parameter.grad).detach()
        gradients[name] = places[name].like(name, gradient)
    return gradients


def _compute_gradient_norm(gradients: Mapping[str, LogicalShard]) -> float:
    """The norm of tensors that this rank has whole."""
    squares = [shard.tensor.double().square().sum().item() for shard in gradients.values()]
    return float(sum(squares)) ** 0.5
