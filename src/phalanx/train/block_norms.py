"""Norms of gradients, updates and weights by block of the model, every few steps, as an event.

A step's gradients are added up in its own reduction; its update comes after that, and travels in
the reduction of the next step. So there is no collective for them, and nothing waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from phalanx.observe.bus import Bus
from phalanx.observe.events import BlockNormsMeasured
from phalanx.parallel.block_norms import NO_BLOCK_NORMS, BlockNormRequest
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.step_stats import StepStats
from phalanx.plan.plan import Plan

_SIGNIFICANT_DIGITS = 6


class BlockNormRecorder:
    """Measures step 1 and each `interval`-th after it, of all ranks together; 0: none. The event
    comes from rank 0."""

    def __init__(self, interval: int, plan: Plan, model: ParallelModel, bus: Bus) -> None:
        self._every, self._model, self._bus = interval, model, bus
        self._has_room = has_room_for_held_weights(plan)
        self._squares: torch.Tensor | None = None
        # The step whose update has not been reduced yet, with the norms of its gradients.
        self._pending: tuple[int, tuple[float, ...]] | None = None

    def is_due(self, step: int) -> bool:
        """True for a step that is measured. The last step of a job seldom is: no reduction comes
        after its update."""
        return self._every > 0 and (step - 1) % self._every == 0

    def request_norms(self, step: int) -> BlockNormRequest:
        """What the reduction of `step` has to add up."""
        squares, self._squares = self._squares, None
        if squares is None and not self.is_due(step):
            return NO_BLOCK_NORMS
        return BlockNormRequest(self.is_due(step), squares)

    def finish_step(self, step: int, facts: StepStats) -> None:
        """Emit what the reduction of `step` brought of a measured step before it, and keep what it
        says of this one."""
        num_blocks = len(self._model.block_squares.names)
        norms = [math.sqrt(square) for square in facts.block_squares]
        self._emit_pending(norms[:num_blocks], norms[num_blocks:])
        if self.is_due(step):
            self._pending = step, facts.block_grad_norms or (0.0,) * num_blocks
            if self._squares is None:
                # Not applied, or no room: there is no update to wait for.
                self._emit_pending((), ())

    @contextmanager
    def measuring_update(self, step: int) -> Iterator[None]:
        """Around the update of `step`."""
        if not self.is_due(step) or not self._has_room:
            yield
            return
        phases, squares = self._model.phases, self._model.block_squares
        with phases("record"), torch.no_grad():
            squares.hold_weights()
        yield
        with phases("record"), torch.no_grad():
            self._squares = squares.sum_update_squares(self._model.mesh.device)

    def finish(self) -> None:
        """Emit what is known of the last step: no reduction comes after it."""
        self._emit_pending((), ())

    def _emit_pending(self, updates: Sequence[float], weights: Sequence[float]) -> None:
        pending, self._pending = self._pending, None
        if pending is None or self._model.mesh.rank != 0:
            return
        step, gradients = pending
        names = self._model.block_squares.names
        nonfinite = [n for n, norm in zip(names, gradients, strict=True) if not math.isfinite(norm)]
        self._bus.emit(
            BlockNormsMeasured(
                step=step,
                gradient_norms=_map_finite_by_name(names, gradients),
                update_norms=_map_finite_by_name(names, updates),
                weight_norms=_map_finite_by_name(names, weights),
                nonfinite=nonfinite,
            )
        )


def has_room_for_held_weights(plan: Plan) -> bool:
    """True if each rank can hold a copy of its parameters during the update, where the plan's
    activations are free again, without a higher peak than the plan's."""
    num_stages = plan.layout.pp
    for stage in range(num_stages):
        # pp is the outermost axis.
        memory = plan.memory_of_rank(stage * plan.world_size // num_stages)
        copy_bytes = memory.get("parameters", 0)
        if memory.get("activations", 0) > 0:
            room_bytes = memory["activations"] + memory.get("loss", 0)
        else:
            # Nobody knows those of a module that could not be measured.
            room_bytes = plan.capacity_bytes - sum(memory.values())
        if copy_bytes > room_bytes:
            return False
    return True


def _map_finite_by_name(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Those that are finite, rounded; none of no values."""
    rounded = {}
    for name, value in zip(names, values, strict=False):
        if math.isfinite(value):
            rounded[name] = float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
    return rounded
