"""Finds where a step that is not finite began: which module gave the first value that is none, on
which rank, for which samples.

Nothing is looked at in steps that are finite. Weights are those of before the step, as it was not
applied: the forwards are computed once more, without dropout. Where these are finite the step is
repeated (`step_repeat`), and its backwards are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from phalanx.mesh.logical import full_name, get_local_tensor
from phalanx.observe.events import NonFiniteFound
from phalanx.parallel.executor import Batch, Objective
from phalanx.parallel.pipeline.stage_forward import StageForward
from phalanx.parallel.step_stats import LocalLoss
from phalanx.train.backward_watch import (
    OBJECTIVE,
    BackwardWatch,
    NonFiniteGradient,
    choose_first,
    find_rows_not_finite,
)
from phalanx.train.evaluation import in_evaluation_mode
from phalanx.train.state import TrainState

# Each search costs a forward: in a run that is broken for good the first ones say why.
MAX_SEARCHES = 5
MAX_NAMED_SAMPLES = 16


@dataclass
class _FirstNonFinite:
    """The first output of a rank's forwards that is not finite; `order` counts its outputs, `stage`
    is that of the pipeline that computed it.

    Rows are those of the microbatch, none where the output does not have them.
    """

    order: int
    stage: int
    module: str
    microbatch: int
    rows: list[int]
    why: str


class NonFiniteFinder:
    """Looks for the origin of steps that are not finite. All ranks take part.

    `sample_numbers(step)`: the global numbers of this rank's samples, [microbatches, rows]; None
    where nobody knows them.
    """

    def __init__(
        self,
        state: TrainState,
        objective: Objective,
        sample_numbers: Callable[[int], NDArray[np.int64]] | None,
    ) -> None:
        self._state, self._objective = state, objective
        self._sample_numbers = sample_numbers
        self._num_searches = 0

    @torch.no_grad()
    def find(
        self, step: int, microbatches: Sequence[Batch], sums: LocalLoss
    ) -> NonFiniteFound | None:
        """Find where the non-finite value of `step` began, whose sums were `sums` on this rank;
        None beyond MAX_SEARCHES of them, and where modules are compiled. Collective."""
        model = self._state.model
        if model.plan.compile or self._num_searches >= MAX_SEARCHES:
            return None
        self._num_searches += 1
        gradients = self._find_nonfinite_gradients()
        # Now: evaluation writes all buffers.
        why_done_once = self._state.why_step_is_done_once
        with model.phases("record"), self._watching_outputs() as watch:
            loss_is_finite = True
            for watch.microbatch, batch in enumerate(microbatches):
                # One by one: a pipeline would begin several of them together.
                repeated = model.evaluate([batch], self._objective)
                loss_is_finite &= bool(repeated.loss_sum.isfinite())
        observation = {
            "first": watch.first and asdict(watch.first),
            "samples": self._name_samples(step, watch.first),
            "loss_was_finite": bool(sums.loss_sum.isfinite()),
            "loss_is_finite": loss_is_finite,
            "gradients": gradients,
            "why_done_once": why_done_once,
        }
        observations = model.mesh.gather_json(observation)
        event = _build_event(step, observations)
        if event.origin not in ("gradient", "unknown"):
            return event
        # All ranks repeat a step, or none does.
        reasons = [each["why_done_once"] for each in observations if each["why_done_once"]]
        return replace(event, why_not_repeated=next(iter(reasons), ""))

    def find_in_backward(
        self, origin: NonFiniteFound, watch: BackwardWatch, sums: LocalLoss
    ) -> NonFiniteFound:
        """`origin`, and what is known of it when its step was computed again and is not finite
        either: its sums were `sums`, and `watch` has seen its backwards. Collective."""
        observation = {
            "first": watch.first and asdict(watch.first),
            "samples": self._name_samples(origin.step, watch.first),
            "loss_is_finite": bool(sums.loss_sum.isfinite()),
        }
        return _name_backward(origin, self._state.model.mesh.gather_json(observation))

    @contextmanager
    def _watching_outputs(self) -> Iterator[_OutputWatch]:
        model = self._state.model
        stages = None if model.pipeline is None else model.pipeline.staged.stage_forward
        watch = _OutputWatch(model.plan.micro_batch_size, stages)
        handles = []
        for name, module in model.module.named_modules():
            handles.append(module.register_forward_hook(watch.make_hook(full_name(name))))
        try:
            with in_evaluation_mode(model, model.mesh, self._state.seed):
                yield watch
        finally:
            for handle in handles:
                handle.remove()

    def _find_nonfinite_gradients(self) -> list[str]:
        """Names of this rank's parameters whose gradient is not finite, in the model's order."""
        names = []
        for name, parameter in self._state.model.named_parameters():
            if parameter.grad is None:
                continue
            if not bool(get_local_tensor(parameter.grad).isfinite().all()):
                names.append(full_name(name))
        return names

    def _name_samples(
        self, step: int, first: _FirstNonFinite | NonFiniteGradient | None
    ) -> list[int]:
        if first is None or self._sample_numbers is None:
            return []
        numbers = self._sample_numbers(step)[first.microbatch]
        return [int(numbers[row]) for row in first.rows[:MAX_NAMED_SAMPLES] if row < len(numbers)]


class _OutputWatch:
    """Remembers the first output that is not finite. `stages`: of a pipeline, None without one."""

    def __init__(self, num_rows: int, stages: StageForward | None) -> None:
        self.first: _FirstNonFinite | None = None
        self._stages = stages
        self.microbatch = 0
        self._num_rows, self._order = num_rows, 0

    def make_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look_at_output(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._stages is not None and not self._stages.is_computing_own_part:
                return
            self._order += 1
            if self.first is not None:
                return
            stage = 0 if self._stages is None else self._stages.running_stage
            for tensor in _list_float_tensors(output):
                if bool(tensor.isfinite().all()):
                    continue
                rows = find_rows_not_finite(tensor, self._num_rows)
                why = _explain_by_inputs(module, inputs)
                self.first = _FirstNonFinite(self._order, stage, name, self.microbatch, rows, why)
                return

        return look_at_output


def _explain_by_inputs(module: nn.Module, inputs: Any) -> str:
    """Say what was not finite before the module computed; empty where all of it was."""
    for name, parameter in module.named_parameters(recurse=False):
        if not bool(get_local_tensor(parameter.detach()).isfinite().all()):
            return f"its {full_name(name)} is not finite"
    for tensor in _list_float_tensors(inputs):
        if not bool(tensor.isfinite().all()):
            return "what it was given is not finite"
    return ""


def _list_float_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        local = get_local_tensor(value.detach())
        return [local] if local.is_floating_point() and not local.is_meta else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _list_float_tensors(item)]
    return []


def _build_event(step: int, observations: Sequence[dict[str, Any]]) -> NonFiniteFound:
    """The earliest output of all ranks that is not finite, else what their losses and gradients
    say."""
    outputs = []
    for rank, observation in enumerate(observations):
        if observation["first"]:
            # What a stage of a pipeline is given, those before it have made.
            keys = ("microbatch", "stage", "order")
            outputs.append((*(observation["first"][key] for key in keys), rank))
    if outputs:
        *_, rank = min(outputs)
        first = observations[rank]["first"]
        return NonFiniteFound(
            step=step,
            origin="output",
            found_in=first["module"] or "the model",
            failed_rank=rank,
            microbatch=first["microbatch"],
            samples=observations[rank]["samples"],
            why=first["why"],
        )
    losses = [
        rank for rank, observation in enumerate(observations) if not observation["loss_is_finite"]
    ]
    if losses:
        return NonFiniteFound(step, "loss", OBJECTIVE, losses[0])
    differing = [
        rank for rank, observation in enumerate(observations) if not observation["loss_was_finite"]
    ]
    if differing:
        why = "its loss was not finite in the step, and is when it is computed again"
        return NonFiniteFound(step, "unknown", "", differing[0], why=why)
    for observation in observations:
        if observation["gradients"]:
            # Backward goes from the end of the model to its beginning.
            names = observation["gradients"]
            why = f"the forward is finite; {len(names)} gradients are not, after reduction"
            return NonFiniteFound(step, "gradient", names[-1], -1, why=why)
    return NonFiniteFound(step, "unknown", "", -1, why="forwards and gradients are finite")


def _name_backward(
    origin: NonFiniteFound, observations: Sequence[dict[str, Any]]
) -> NonFiniteFound:
    """`origin` with the module whose backward made the first gradient that is not finite."""
    if not all(observation["loss_is_finite"] for observation in observations):
        # The backward has it from a forward, which is finite without dropout.
        return origin
    by_rank = [
        observation["first"] and NonFiniteGradient(**observation["first"])
        for observation in observations
    ]
    rank = choose_first(by_rank)
    if rank is None:
        if origin.origin != "gradient":
            return origin
        return replace(origin, why=f"{origin.why}, and no module's backward makes one")
    first = by_rank[rank]
    assert first is not None
    why = f"by {first.operation}, of gradients that are finite"
    if first.is_sum:
        why = f"before {first.operation}, by the sum of gradients that are finite or by a hook"
    return replace(
        origin,
        origin="backward",
        found_in=first.module,
        failed_rank=rank,
        microbatch=first.microbatch,
        samples=observations[rank]["samples"],
        why=why,
    )
