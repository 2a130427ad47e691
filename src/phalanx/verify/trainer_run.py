"""Runs the real Trainer in a layout: stopped, resumed in the same and in another layout, and
observed between its steps beside the second loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.checkpoint.run_storage import RunStorage
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.core.errors import CheckpointError, LayoutError, NumericsError
from phalanx.core.phases import PhaseTimer
from phalanx.job.schema import Job
from phalanx.mesh.logical import LogicalShard, full_name, get_local_tensor
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn.build import build_objective
from phalanx.observe.bus import Bus
from phalanx.observe.events import EvalFinished
from phalanx.observe.tail import read_recorded_events
from phalanx.parallel.step_stats import StepStats
from phalanx.plan.plan import Plan
from phalanx.run.build_trainer import build_trainer
from phalanx.run.one_process.original_module import build_original_module
from phalanx.run.weights import (
    build_training_state,
    list_checkpoints_newest_first,
    restore_newest_readable_checkpoint,
)
from phalanx.train.state import TrainState
from phalanx.train.stop import StopSignalFlags
from phalanx.train.training_data import TrainingData
from phalanx.verify.compare_steps import describe_held_part
from phalanx.verify.late_store import DelayedCheckpointStore
from phalanx.verify.trainer_batches import (
    SOURCE_WEIGHTS,
    GradientInjector,
    RankBatches,
    TrainerRunBatches,
)
from phalanx.verify.trainer_cases import (
    SAME_LAYOUT,
    SAVE_EVERY,
    STOP_STEP,
    TrainerCase,
    choose_step_factors,
)
from phalanx.verify.trainer_facts import (
    BUFFER,
    COMPRESSION,
    COPY,
    GRADIENT,
    STATE,
    WEIGHT,
    AttemptObservation,
    Dots,
    StateObservation,
    StepObservation,
)
from phalanx.verify.trainer_reference import SecondLoopReader

COUNTER_SLOT = "step"
"""What an optimizer keeps of a parameter and counts: compared as a number, exactly."""
CompressionStates = dict[int, dict[str, torch.Tensor]]
"""Step -> NAME/SLOT -> what the compression of gradients keeps on this rank after it."""


@dataclass(frozen=True)
class TrainerRunResult:
    """One observation of this rank for each attempt that began. `other_refusal`: why the module
    cannot be resumed in the other layout; empty if it can."""

    attempts: list[AttemptObservation]
    other_refusal: str = ""


@dataclass(frozen=True)
class TrainerRun:
    """The attempts of one case. `reference` is that of the case's layout, `other_reference` that
    of the layout it is resumed in: of as many microbatches as those have."""

    job: Job
    case: TrainerCase
    batches: TrainerRunBatches
    run_dir: Path
    reference: SecondLoopReader
    other_reference: SecondLoopReader
    _compression_states: CompressionStates = field(init=False, default_factory=dict)

    def run(self) -> TrainerRunResult:
        """Train until the stop, resume in the same layout, and in the other; where that one refuses
        the module, in the same layout from the first checkpoint. Collective."""
        case = self.case
        observed = [self._run_trainer_attempt("", case.plan, self.reference, attempt=0)]
        if observed[0].error:
            return TrainerRunResult(observed)
        resumed = self._run_trainer_attempt(
            SAME_LAYOUT, case.plan, self.reference, attempt=1, from_newest=True
        )
        observed.append(resumed)
        if resumed.error:
            return TrainerRunResult(observed)
        refusal, reader = "", self.other_reference
        try:
            elsewhere = self._resume_from_first_checkpoint(case, reader, attempt=2)
        except LayoutError as error:
            # About the module, before any step, and the same on every rank.
            refusal, reader = str(error), self.reference
            own_case = case.without_other_layout()
            elsewhere = self._resume_from_first_checkpoint(own_case, reader, attempt=3)
        return TrainerRunResult([*observed, elsewhere], refusal)

    def _resume_from_first_checkpoint(
        self, case: TrainerCase, reader: SecondLoopReader, *, attempt: int
    ) -> AttemptObservation:
        name = f"resumed in {case.other_name}"
        return self._run_trainer_attempt(name, case.other_plan, reader, attempt=attempt)

    def _run_trainer_attempt(
        self,
        name: str,
        plan: Plan,
        reader: SecondLoopReader,
        *,
        attempt: int,
        from_newest: bool = False,
    ) -> AttemptObservation:
        collectives = plan.parallel.collectives
        with open_mesh(plan.layout, device="cpu", collectives=collectives) as mesh:
            bus = Bus(rank=mesh.rank, attempt=attempt, run_dir=self.run_dir)
            observation = AttemptObservation(name, first_step=1)
            try:
                self._run_trainer_attempt_in_mesh(
                    mesh, plan, reader, bus, observation, from_newest=from_newest
                )
            # Both are raised on every rank alike.
            except (CheckpointError, NumericsError) as error:
                observation.error = f"{type(error).__name__}: {error}"
            finally:
                bus.close()
            if mesh.rank == 0:
                for event in _read_evaluations(self.run_dir, attempt):
                    observation.evaluations[str(event.step)] = event.loss
                    observation.evaluated_targets[str(event.step)] = event.num_targets
            return observation

    def _run_trainer_attempt_in_mesh(
        self,
        mesh: Mesh,
        plan: Plan,
        reader: SecondLoopReader,
        bus: Bus,
        observation: AttemptObservation,
        *,
        from_newest: bool,
    ) -> None:
        is_resumed = bool(observation.name)
        job = self._make_attempt_job(reader, saves=not is_resumed)
        storage, phases = self._open_run_storage(is_resumed), PhaseTimer()
        module, _ = build_original_module(self.job, plan, "float64", materialize=False)
        # With weights of its own, also where all of them are restored: they must not stay.
        state = build_training_state(job, plan, mesh, phases, module=module)
        if is_resumed:
            names = list_checkpoints_newest_first(storage, mesh)
            folders = [storage.store.folder(checkpoint) for checkpoint in names]
            observation.checkpoints = tuple(folder.step for folder in folders)
            if not names:
                return
            chosen = names[:1] if from_newest else names[-1:]
            restored = restore_newest_readable_checkpoint(
                storage, chosen, state, bus, fallback=False
            )
            observation.first_step = restored.step + 1
        stop = StopSignalFlags()
        observer = _RunObserver(
            state, module, reader, observation, mesh, stop, self._compression_states
        )
        if not is_resumed:
            observer.stop_step = STOP_STEP
        if isinstance(storage.store, DelayedCheckpointStore):
            observer.last_update_hook = storage.store.release
        observation.why_not_repeated = _explain_no_repeated_step(plan, state, mesh)
        batches = RankBatches(self.batches, plan, mesh, observer.begin_step)
        injector = GradientInjector(
            batches, choose_step_factors(job), not observation.why_not_repeated
        )
        data = TrainingData(
            batches,
            injector.wrap_objective(build_objective(job)),
            batches.held_out(),
            source_weights=SOURCE_WEIGHTS,
        )
        trainer = build_trainer(
            job, plan, state, bus, data, storage=storage, stop=stop, guards=(observer,)
        )
        with observer.observing_updates():
            observation.end = trainer.run()
        observer.compare_state_with_second_loop(state.step)

    def _open_run_storage(self, is_resumed: bool) -> RunStorage:
        """The run's storage. What the first attempt saves in the background is written when the
        update of its last step is made: a copy of the state does not know of that."""
        storage = RunStorage.open(self.run_dir)
        if is_resumed or not isinstance(storage.store, LocalStore):
            return storage
        return replace(storage, store=DelayedCheckpointStore(storage.store, SAVE_EVERY))

    def _make_attempt_job(self, reader: SecondLoopReader, *, saves: bool) -> Job:
        """The job, which clips to what half of the steps exceed, or nothing as it says itself; an
        attempt that is resumed saves nothing."""
        body = self.job.to_json()
        body["optim"]["clip_norm"] = reader.recording_phase.max_norm
        if not saves:
            body["checkpoint"]["every_steps"] = None
        return Job.model_validate_json(json.dumps(body))


@dataclass
class _RunObserver:
    """Observes one attempt: as a guard, as a hook of the optimizer, and between steps.

    Before each update it gives the optimizer the second loop's gradients: rounding then does not
    grow from step to step, and each update is judged by itself.
    """

    state: TrainState
    module: nn.Module
    reader: SecondLoopReader
    observation: AttemptObservation
    mesh: Mesh
    stop: StopSignalFlags
    compression_states: CompressionStates
    """Of all attempts until now, each step as the first of them had it."""
    stop_step: int | None = None
    last_update_hook: Callable[[], None] | None = None
    """Called after the update of `stop_step`."""
    _modes: dict[str, bool] = field(default_factory=dict)
    _step: StepObservation | None = None
    _num_begun: int = 0

    def __post_init__(self) -> None:
        self._modes = {name: part.training for name, part in self.module.named_modules()}

    def observing_updates(self) -> Any:
        """A context in which updates are observed."""
        return _OptimizerHook(
            self.state.optimizer, self._compare_and_replace_gradients, self._record_update_end
        )

    def begin_step(self, step: int) -> None:
        """Observe the state where the trainer asks for the data of `step`; ask for a stop after the
        last step."""
        # Counted here: that the trainer's own count is right is observed, too.
        num_done = self.observation.first_step - 1 + self._num_begun
        self._num_begun += 1
        self.compare_state_with_second_loop(num_done, asked_step=step)
        # One rank's request is enough.
        if num_done + 1 == self.stop_step and self.mesh.rank == self.mesh.world_size - 1:
            self.stop.sigterm = True

    def reason_to_skip(self, step: int, facts: StepStats) -> str | None:
        """Note the facts of a step; None: a guard that never objects."""
        self._step = StepObservation(
            step=step,
            loss=facts.loss,
            num_targets=facts.num_targets,
            grad_norm=facts.grad_norm,
            reason=facts.reason_to_skip or "",
            loss_scale=facts.loss_scale,
        )
        self.observation.steps += (self._step,)
        return None

    def compare_state_with_second_loop(self, step: int, *, asked_step: int = 0) -> None:
        """Compare the state with the second loop's after `step`."""
        state = self.state
        observed = StateObservation(
            step, state.step, state.tokens_seen, state.samples_seen, asked_step
        )
        shards = state.model.shards()
        self.observation.held = {name: describe_held_part(shard) for name, shard in shards.items()}
        for name, shard in shards.items():
            kind = WEIGHT if self.reader.has(step, f"{WEIGHT}/{name}") else BUFFER
            self._compare_shard(observed, kind, name, shard, step)
        trained = state.model.trained_shards()
        for raw_name, parameter in state.model.named_parameters():
            name = full_name(raw_name)
            copy = trained[name].like(name, get_local_tensor(parameter).detach())
            self._compare_shard(observed, COPY, name, copy, step)
            self._compare_optimizer_slots(observed, name, parameter, trained[name], step)
            if parameter.grad is not None:
                norm = get_local_tensor(parameter.grad).norm().item()
                if norm != 0:
                    observed.left[name] = norm
        self._compare_compression_state(observed, step)
        modes = {name: part.training for name, part in self.module.named_modules()}
        observed.modes = tuple(name for name, mode in modes.items() if mode != self._modes[name])
        self.observation.states += (observed,)

    def _compare_compression_state(self, observed: StateObservation, step: int) -> None:
        """Compare what compression keeps with what it kept after the same step in an earlier
        attempt; keep it where none has had the step."""
        compression = self.state.model.compression
        if compression is None:
            return
        # All that it has in memory: what checkpoints leave out must show.
        state = compression.map_state_tensors()
        earlier = self.compression_states.get(step)
        if earlier is None:
            copies = {key: tensor.clone() for key, tensor in state.items()}
            self.compression_states[step] = copies
            return
        for key, tensor in state.items():
            name, _, slot = key.rpartition("/")
            off = float((tensor - earlier[key]).norm())
            size = float(earlier[key].norm()) or 1.0
            observed.compression[f"{COMPRESSION}/{slot}/{name}"] = off / size

    def _compare_optimizer_slots(
        self,
        observed: StateObservation,
        name: str,
        parameter: nn.Parameter,
        owner: LogicalShard,
        step: int,
    ) -> None:
        for slot, value in self.state.optimizer.state.get(parameter, {}).items():
            # Before the first step there is nothing in it.
            if not isinstance(value, torch.Tensor) or not step:
                continue
            key = f"{STATE}/{slot}/{name}"
            # Of a parameter without dimensions moments have its shape, and so has the counter.
            if value.shape == parameter.shape and slot != COUNTER_SLOT:
                shard = owner.like(name, get_local_tensor(value).detach())
                self._compare_shard(observed, f"{STATE}/{slot}", name, shard, step)
            elif self.reader.has(step, key):
                expected = self.reader.block(step, key, (), ())
                observed.numbers[f"{slot}/{name}"] = float(get_local_tensor(value)) - float(
                    expected
                )

    def _compare_shard(
        self, observed: StateObservation, kind: str, name: str, shard: LogicalShard, step: int
    ) -> None:
        reference_kind = WEIGHT if kind == COPY else kind
        key = f"{reference_kind}/{name}"
        # Buffers have no record of the beginning.
        if not self.reader.has(step, key):
            return
        before = f"{step - 1}" if reference_kind == WEIGHT and step else None
        observed.tensors.setdefault(kind, {})[name] = self._compute_shard_dots(
            shard, key, step, before
        )

    def _compute_shard_dots(
        self, shard: LogicalShard, key: str, step: int, before: str | None
    ) -> Dots:
        sums = torch.zeros(4, dtype=torch.float64)
        for actual, box in _view_blocks(shard):
            if not (actual.is_floating_point() or actual.dtype in (torch.int64, torch.bool)):
                continue
            reference = self.reader.block(step, key, box.global_offset, box.size).double()
            actual = actual.double()
            off = actual - reference
            if before is not None:
                base = self.reader.block(int(before), key, box.global_offset, box.size).double()
                actual, reference = actual - base, reference - base
            products = (off * off, actual * actual, actual * reference, reference * reference)
            sums += torch.stack([product.sum() for product in products])
        first, second, third, fourth = sums.tolist()
        return first, second, third, fourth

    def _compare_and_replace_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Compare the gradients that the optimizer is given, and put the second loop's in their
        place."""
        step = self._step
        assert step is not None, "an update comes after the facts of its step"
        step.num_updates += 1
        rates = [group["lr"] for group in optimizer.param_groups if group["params"]]
        step.rates = tuple(map(float, rates))
        # A second update of a step: its gradients are in place already.
        if step.num_updates > 1:
            return
        trained = self.state.model.trained_shards()
        # Compressed ones are others by design: rows of layouts judge them.
        is_compared = self.state.model.compression is None
        for raw_name, parameter in self.state.model.named_parameters():
            name = full_name(raw_name)
            key = f"{GRADIENT}/{name}"
            if not self.reader.has(step.step, key):
                continue
            gradient = torch.zeros_like(trained[name].tensor)
            if parameter.grad is not None:
                gradient = get_local_tensor(parameter.grad).detach()
            shard = trained[name].like(name, gradient)
            if is_compared:
                step.gradients[name] = self._compute_shard_dots(shard, key, step.step, None)
            # Zeros in the place of no gradient are nobody's.
            for block, box in _view_blocks(shard):
                block.copy_(self.reader.block(step.step, key, box.global_offset, box.size))

    def _record_update_end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        step = self._step
        if self.last_update_hook is None or step is None:
            return
        if step.step == self.stop_step:
            self.last_update_hook()


@dataclass
class _OptimizerHook:
    """A context with hooks before and after each update of an optimizer."""

    optimizer: torch.optim.Optimizer
    before: Any
    get_step_record: Any
    _handles: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._handles = (
            self.optimizer.register_step_pre_hook(self.before),
            self.optimizer.register_step_post_hook(self.get_step_record),
        )

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()


def _explain_no_repeated_step(plan: Plan, state: TrainState, mesh: Mesh) -> str:
    """Why the trainer does not repeat a step that was not finite; empty if it does. Collective."""
    if plan.compile:
        return "in compiled modules nothing is looked for"
    if plan.loss_scaling is not None and plan.loss_scaling.growth_steps:
        return "a smaller loss scale answers it"
    return next(filter(None, mesh.gather_json(state.why_step_is_done_once)), "")


def _view_blocks(shard: LogicalShard) -> Iterator[tuple[torch.Tensor, Any]]:
    """Each block of a shard, as a view of its local tensor, and where it stands."""
    for box in shard.boxes:
        slices = tuple(slice(o, o + n) for o, n in zip(box.local_offset, box.size, strict=True))
        yield shard.tensor[slices], box


def _read_evaluations(run_dir: Path, attempt: int) -> Iterator[EvalFinished]:
    """The evaluations that rank 0 has recorded in an attempt."""
    for envelope in read_recorded_events(run_dir, EvalFinished):
        if envelope.attempt == attempt and isinstance(envelope.event, EvalFinished):
            yield envelope.event
