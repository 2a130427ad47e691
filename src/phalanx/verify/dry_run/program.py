"""The program of one rank, built and run for a step or two with fake tensors."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule

from phalanx.core.phases import PhaseTimer
from phalanx.core.registry import import_object_of_kind
from phalanx.job.schema import Job
from phalanx.job.user_dataset import is_given_unknown_samples
from phalanx.mesh.blocks import find_repeated_blocks
from phalanx.mesh.compat import list_unsharded_fsdp_gradients
from phalanx.mesh.devices import treating_cpu_as_gpu
from phalanx.mesh.fake_tensors import hiding_placement_arithmetic_from_modes, open_fake_mesh
from phalanx.mesh.logical import full_name
from phalanx.nn.build import MODELS_PACKAGE, build_objective, build_own_module
from phalanx.parallel.executor import Objective
from phalanx.parallel.step_stats import StepStats
from phalanx.plan.plan import Plan
from phalanx.run.sample_form import read_sample_form
from phalanx.run.weights import build_training_state
from phalanx.train.state import TrainState
from phalanx.verify.dry_run.collectives import CollectiveCall, CollectiveLog
from phalanx.verify.dry_run.ddp_buckets import stand_in_for_ddp_buckets
from phalanx.verify.dry_run.fake_batches import make_fake_microbatches
from phalanx.verify.dry_run.moments import BACKWARD, FORWARD, LOSS, OPTIMIZER, StepMoment
from phalanx.verify.dry_run.stand_ins import StageBoundarySpec, standing_in_for_other_ranks
from phalanx.verify.dry_run.storage_log import (
    COMMUNICATION,
    GRADIENTS,
    PARAMETERS,
    StorageLog,
)
from phalanx.verify.dry_run.storage_log import (
    OPTIMIZER as OPTIMIZER_STATE,
)
from phalanx.verify.dry_run.tracker import StorageTracker

NUM_DIFFERENT = 3
"""Microbatches of a step that can differ: the first, one in the middle, and the last."""
NUM_FLAGS = 7
"""Flags that travel with the facts of a step (train/trainer.py): three of stops, a request to
trace, three of saves."""


class TrackedPhases(PhaseTimer):
    """Phases that tell a tracker where the step is."""

    def __init__(self, tracker: StorageTracker) -> None:
        super().__init__()
        self._tracker = tracker
        self._microbatch = -1
        self.on_microbatch: Callable[[], None] = lambda: None

    def begin_step(self, step: int) -> None:
        self.step, self._microbatch = step, -1

    def leave(self, name: str) -> None:
        super().leave(name)
        self._tracker.purpose = ""

    def enter(self, name: str, words: str = "", *, axis: str = "") -> None:
        super().enter(name, words, axis=axis)
        if name == "collective":
            self._tracker.purpose = words
        # Waiting for others is no moment of its own.
        if name not in (FORWARD, BACKWARD, OPTIMIZER):
            return
        microbatch, stage = self._microbatch, -1
        if name == OPTIMIZER:
            microbatch = -1
        elif words:
            stage, microbatch = _parse_pipeline_action(words)
        elif name == FORWARD:
            microbatch = self._microbatch = self._microbatch + 1
            self.on_microbatch()
        self._tracker.log.moments.enter(
            StepMoment(name, microbatch=microbatch, stage=stage, step=self.step)
        )


def _parse_pipeline_action(action: str) -> tuple[int, int]:
    """(stage, microbatch) of an action of a pipeline: "3F0" is stage 3's forward of microbatch
    0."""
    kind = next(index for index, letter in enumerate(action) if letter.isalpha())
    return int(action[:kind]), int(action[kind + 1 :])


def track_parts(root: nn.Module, tracker: StorageTracker) -> None:
    """Have `tracker` know which block, or which module outside of blocks, computes: forward by
    hooks of modules, backward by hooks of the graph, which they leave as it is."""
    for name, part in list_tracked_parts(root):
        part.register_forward_pre_hook(
            functools.partial(_enter_part_before_forward, tracker, name), prepend=True
        )
        part.register_forward_hook(functools.partial(_leave_part_after_forward, tracker, name))


def list_tracked_parts(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks, and outside of them modules without submodules, by full name."""
    blocks = set(find_repeated_blocks(root))
    inside: set[nn.Module] = set()
    for block in blocks:
        inside.update(part for part in block.modules() if part is not block)
    parts = []
    for raw_name, part in root.named_modules():
        is_leaf = not any(True for _ in part.children())
        if part in blocks or (is_leaf and part not in inside):
            parts.append((full_name(raw_name), part))
    return parts


def _enter_part_before_forward(tracker: StorageTracker, name: str, *_: Any) -> None:
    tracker.enter_part(name)


def _leave_part_after_forward(
    tracker: StorageTracker, name: str, part: nn.Module, args: Any, output: Any
) -> None:
    track_backward_of_output(tracker, name, output)
    tracker.enter_part("")


def track_backward_of_output(tracker: StorageTracker, name: str, output: Any) -> None:
    """Have `tracker` know when the backward comes to what made `output`."""
    if isinstance(output, tuple | list):
        for value in output:
            track_backward_of_output(tracker, name, value)
    elif isinstance(output, torch.Tensor) and output.grad_fn is not None:
        output.grad_fn.register_prehook(lambda _: tracker.enter_part(name))


def wrap_objective_for_tracker(objective: Objective, tracker: StorageTracker) -> Objective:
    """The same objective, which `tracker` knows as the part LOSS."""

    @functools.wraps(objective, updated=())
    def compute_tracked_loss(outputs: Any, batch: Mapping[str, torch.Tensor]) -> Any:
        tracker.enter_part(LOSS)
        result = objective(outputs, batch)
        track_backward_of_output(tracker, LOSS, result)
        tracker.enter_part("")
        return result

    # What transforms read of it: attributes of a function, or of an object that is called.
    for name in dir(objective):
        if not name.startswith("__") and not hasattr(compute_tracked_loss, name):
            setattr(compute_tracked_loss, name, getattr(objective, name))
    return compute_tracked_loss


@dataclass(frozen=True)
class DryStepResult:
    """The record of a dry run of one rank.

    `first_moment`: where the step begins. `num_traced`: microbatches that were run; the others do
    what the second one did, and are counted so.
    """

    log: StorageLog
    counts: Counter[CollectiveCall]
    stats: StepStats
    first_moment: int
    num_traced: int
    num_operations: int


def run_dry_step(
    job: Job,
    plan: Plan,
    rank: int,
    boundary: StageBoundarySpec | None = None,
    tell: Callable[[str], None] = lambda words: None,
) -> DryStepResult:
    """Build the program of `rank` and run it for one step.

    `boundary`: of a pipeline, which a rank with the first stage fills in and others need.
    Raises LayoutError for a program that needs numbers to go on.
    """
    boundary = boundary or StageBoundarySpec()
    # A compiler would trace fake tensors itself.
    plan = replace(plan, compile=False)
    with open_fake_mesh(plan.layout, rank, plan.parallel.collectives) as mesh:
        tracker = StorageTracker(StorageLog(), CollectiveLog(mesh), is_dry=True)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            tracker.tracking_storage_resizes(),
            hiding_placement_arithmetic_from_modes(),
            treating_cpu_as_gpu(plan.device != "cpu"),
            standing_in_for_other_ranks(boundary, tracker),
            tracker,
        ):
            tell("build")
            phases = TrackedPhases(tracker)
            module = _build_fake_module(job, plan)
            state = build_training_state(job, plan, mesh, phases, module=module)
            runner = DryStepRunner(job, plan, state, tracker, phases)
            stand_in_for_ddp_buckets(state.model, tracker)
            tell("step")
            step = runner.run_step_of_all_microbatches()
    return step


def _build_fake_module(job: Job, plan: Plan) -> nn.Module:
    """The module of the job, of fake tensors."""
    if job.model.is_foreign:
        return build_own_module(job.model, job.run.seed)
    shape = plan.model_shape
    module: nn.Module = import_object_of_kind(shape.kind, MODELS_PACKAGE, "build")(shape)
    return module


class MicrobatchRepeatDetector:
    """Remembers what was there, and what had been said to other ranks, when each microbatch
    began."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker
        self._sizes: list[Counter[int]] = []
        self._counts: list[Counter[CollectiveCall]] = []

    def clear(self) -> None:
        self._sizes.clear()
        self._counts.clear()

    def begin(self) -> None:
        assert self._tracker.collectives is not None
        self._sizes.append(self._tracker.count_storages_by_size())
        self._counts.append(Counter(self._tracker.collectives.counts))

    def has_unchanged_storages(self, index: int) -> bool:
        """True if the microbatch `index` left as many storages of each size as it found."""
        return self._sizes[index] == self._sizes[index + 1]

    def get_collective_counts(self, index: int) -> Counter[CollectiveCall]:
        """The messages of a microbatch to other ranks."""
        return self._counts[index + 1] - self._counts[index]


class DryStepRunner:
    """Runs steps as `Trainer.step` does, and tells the tracker whose memory is whose.

    `buckets` stand for those of DDP in a dry run.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        state: TrainState,
        tracker: StorageTracker,
        phases: TrackedPhases,
    ) -> None:
        self._job, self._plan, self._state = job, plan, state
        self._sample_form = read_sample_form(job) if is_given_unknown_samples(job) else None
        self._tracker, self._phases = tracker, phases
        self._objective = wrap_objective_for_tracker(build_objective(job), tracker)
        self.first_moment = 0
        self._watch = MicrobatchRepeatDetector(tracker)
        phases.on_microbatch = self._begin_microbatch
        module = state.model.module
        track_parts(module, tracker)
        tracker.mark((*module.parameters(), *module.buffers()), PARAMETERS)
        self._categorize_optimizer_state()

    def run_step_of_all_microbatches(self) -> DryStepResult:
        """A step of all microbatches of the plan, as far as they differ.

        A microbatch is a function of what is there when it begins. Where the second one leaves
        what it found, every further one but the last, in which ranks reduce, repeats it.
        """
        num_microbatches, collectives = self._plan.num_microbatches, self._tracker.collectives
        assert collectives is not None
        num_traced = num_microbatches
        # Along a tree of gradients each microbatch leaves other sums.
        if self._plan.layout.pp == 1 and not self._plan.is_layout_free:
            num_traced = min(num_microbatches, NUM_DIFFERENT)
        stats = self.run(1, num_traced)
        if num_traced < num_microbatches:
            if not self._watch.has_unchanged_storages(1):
                num_traced = num_microbatches
                stats = self.run(2, num_traced)
            else:
                for collective, count in self._watch.get_collective_counts(1).items():
                    collectives.counts[collective] += count * (num_microbatches - num_traced)
        return DryStepResult(
            self._tracker.log,
            collectives.counts,
            stats,
            self.first_moment,
            num_traced,
            self._tracker.num_operations,
        )

    def run(self, step: int, num_microbatches: int) -> StepStats:
        """One step of so many microbatches, and what it says to other ranks."""
        model, optimizer, tracker = self._state.model, self._state.optimizer, self._tracker
        self._phases.begin_step(step)
        tracker.log.moments.enter(StepMoment("data", step=step))
        self.first_moment = tracker.log.moments.index
        if tracker.collectives is not None:
            tracker.collectives.counts.clear()
        self._watch.clear()
        microbatches = make_fake_microbatches(
            self._job, self._plan, num_microbatches, self._sample_form
        )
        local_loss = model.forward_backward(microbatches, self._objective, step=step)
        self._categorize_gradients()
        stats = model.reduce_and_clip(
            local_loss, max_norm=self._job.optim.clip_norm, flags=(0.0,) * NUM_FLAGS
        )
        self._categorize_gradients()
        with self._phases(OPTIMIZER):
            model.update(optimizer)
            self._categorize_optimizer_state()
            optimizer.zero_grad(set_to_none=True)
        return stats

    def _categorize_gradients(self) -> None:
        parameters = [*self._state.model.module.parameters(), *self._iterate_trained_parameters()]
        self._tracker.mark((parameter.grad for parameter in parameters), GRADIENTS, overrides=True)

    def _begin_microbatch(self) -> None:
        """Gradients of earlier microbatches lie beside those that the step ends with, whole: they
        are a part of communication, as a plan counts them."""
        self._watch.begin()
        root = self._state.model._context.root
        unsharded_gradients = [parameter.grad for parameter in root.parameters()]
        if isinstance(root, FSDPModule):
            unsharded_gradients += list_unsharded_fsdp_gradients(root)
        self._tracker.mark(unsharded_gradients, COMMUNICATION)

    def _iterate_trained_parameters(self) -> Iterator[nn.Parameter]:
        for group in self._state.optimizer.param_groups:
            yield from group["params"]

    def _categorize_optimizer_state(self) -> None:
        for values in self._state.optimizer.state.values():
            tensors = (value for value in values.values() if isinstance(value, torch.Tensor))
            self._tracker.mark(tensors, OPTIMIZER_STATE)
