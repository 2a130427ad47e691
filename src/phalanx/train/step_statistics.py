"""Statistics of batches that the forward of a step has moved, such as the running mean of a batch
norm: they go back where the step is left out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from phalanx.parallel.model import ParallelModel


class StepStatistics:
    """Copies of the buffers that steps move, as they were before the step that goes on.

    All buffers that a checkpoint holds are copied before the first step; later only those that a
    step has moved.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._held: list[torch.Tensor | None] = []
        self._marks: list[tuple[int, int]] = []
        # By name: the buffers that no checkpoint holds, with their versions. Kept for the step:
        # another one could have the address of one that is gone.
        self._never_saved: dict[str, tuple[torch.Tensor, int]] = {}
        self._parts: list[nn.Module] = []
        self._places_never_saved: list[tuple[nn.Module, str, str]] = []
        self._moving: set[int] = set()
        self._has_seen_step = False

    def hold(self) -> None:
        """Copy what a step may move, before it."""
        buffers = self._model.persistent_buffers()
        marks = [(id(buffer), buffer._version) for buffer in buffers]
        if self._has_seen_step and len(marks) == len(self._marks):
            for index, (now, before) in enumerate(zip(marks, self._marks, strict=True)):
                if now != before:
                    self._moving.add(index)
        self._held = [
            buffer.clone() if index in self._moving or not self._has_seen_step else None
            for index, buffer in enumerate(buffers)
        ]
        self._marks, self._has_seen_step = marks, True
        self._parts = self._parts or list(self._model.module.modules())
        # A forward may have registered more, such as tables that it makes when it needs them. Of
        # 1,000 modules counting takes 0.04 ms a step, and listing places ten times that.
        num_places = sum(len(part._non_persistent_buffers_set) for part in self._parts)
        if num_places != len(self._places_never_saved):
            self._places_never_saved = self._model.list_places_never_saved()
        self._never_saved = _read_buffers(self._places_never_saved)

    @property
    def why_not_restorable(self) -> str:
        """The reason why `restore` does not put back all buffers that the step has changed; empty
        if it does."""
        if len(self._model.persistent_buffers()) != len(self._held):
            return "a forward has made buffers"
        for name, (now, version) in _read_buffers(self._model.list_places_never_saved()).items():
            before = self._never_saved.get(name)
            if before is None or before[0] is not now or before[1] != version:
                return f"a forward writes into {name}, a buffer that is not saved"
        return ""

    def restore(self) -> None:
        """Write the copies back into what the step has moved."""
        buffers = self._model.persistent_buffers()
        if len(buffers) != len(self._held):
            # A module has made some in its forward: which is which is not known.
            return
        with torch.no_grad():
            for buffer, copy, mark in zip(buffers, self._held, self._marks, strict=True):
                if copy is not None and (id(buffer), buffer._version) != mark:
                    buffer.copy_(copy)


def _read_buffers(
    places: Iterable[tuple[nn.Module, str, str]],
) -> dict[str, tuple[torch.Tensor, int]]:
    """The buffers of these places that are there, by whole name, each with its version."""
    buffers = {}
    for part, name, whole_name in places:
        buffer = part._buffers.get(name)
        if buffer is not None:
            # Tensors made in inference mode count no versions.
            version = -1 if buffer.is_inference() else buffer._version
            buffers[whole_name] = (buffer, version)
    return buffers
