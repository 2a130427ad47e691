"""Observes an attempt of a judged run between its steps and around its updates, beside the second
loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from phalanx.mesh.logical import LogicalShard, full_name, get_local_tensor
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.expert.router_load import is_router
from phalanx.parallel.step_stats import StepStats
from phalanx.train.state import TrainState
from phalanx.train.stop import StopSignalFlags
from phalanx.verify.shard_blocks import describe_held_part
from phalanx.verify.trainer_cases import REFUSED_STEP
from phalanx.verify.trainer_facts import (
    BUFFER,
    COMPRESSION,
    COPY,
    GRADIENT,
    REFUSAL,
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


@dataclass
class RunObserver:
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
    release_step: int | None = None
    release_hook: Callable[[], None] | None = None
    """Called where `release_step` is done."""
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
        if self.release_hook is not None and num_done == self.release_step:
            self.release_hook()
        # One rank's request is enough.
        if num_done + 1 == self.stop_step and self.mesh.rank == self.mesh.world_size - 1:
            self.stop.sigterm = True

    def reason_to_skip(self, step: int, facts: StepStats) -> str | None:
        """Note the facts of a step, and refuse REFUSED_STEP."""
        refusal = REFUSAL if step == REFUSED_STEP else ""
        self._step = StepObservation(
            step=step,
            loss=facts.loss,
            num_targets=facts.num_targets,
            grad_norm=facts.grad_norm,
            reason=facts.reason_to_skip or refusal,
            loss_scale=facts.loss_scale,
        )
        self.observation.steps += (self._step,)
        return refusal or None

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
        for name, part in self.module.named_modules():
            if is_router(part):
                load: Any = part.load
                if load.counts_E is not None:
                    observed.left_loads[full_name(name)] = float(load.counts_E.sum())
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
        observed.tensors.setdefault(kind, {})[name] = compute_shard_dots(
            self.reader, shard, key, step
        )

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
                step.gradients[name] = compute_shard_dots(self.reader, shard, key, step.step)
            # Zeros in the place of no gradient are nobody's.
            for block, box in _view_blocks(shard):
                block.copy_(self.reader.block(step.step, key, box.global_offset, box.size))

    def _record_update_end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        step = self._step
        if self.last_update_hook is None or step is None:
            return
        if step.step == self.stop_step:
            self.last_update_hook()


def compute_shard_dots(reader: SecondLoopReader, shard: LogicalShard, key: str, step: int) -> Dots:
    """The Dots of a shard beside the second loop's tensor `key` after `step`."""
    before = step - 1 if key.startswith(f"{WEIGHT}/") and step else None
    sums = torch.zeros(4, dtype=torch.float64)
    for actual, box in _view_blocks(shard):
        if not (actual.is_floating_point() or actual.dtype in (torch.int64, torch.bool)):
            continue
        reference = reader.block(step, key, box.global_offset, box.size).double()
        actual = actual.double()
        off = actual - reference
        if before is not None:
            base = reader.block(before, key, box.global_offset, box.size).double()
            actual, reference = actual - base, reference - base
        products = (off * off, actual * actual, actual * reference, reference * reference)
        sums += torch.stack([product.sum() for product in products])
    first, second, third, fourth = sums.tolist()
    return first, second, third, fourth


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


def _view_blocks(shard: LogicalShard) -> Iterator[tuple[torch.Tensor, Any]]:
    """Each block of a shard, as a view of its local tensor, and where it stands."""
    for box in shard.boxes:
        slices = tuple(slice(o, o + n) for o, n in zip(box.local_offset, box.size, strict=True))
        yield shard.tensor[slices], box
