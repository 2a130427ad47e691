"""Measure what the plan predicted: the memory a rank uses on top of its runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from phalanx.checkpoint.manifest import OPTIMIZER, REDUCTION
from phalanx.mesh.logical import LogicalShard, local_bytes, local_tensor
from phalanx.observe.events import MemoryMeasured
from phalanx.parallel.model import ParallelModel

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryMeter:
    """Peak memory of this rank on top of interpreter and torch; `listen` to phases after `start`.

    On CUDA the allocator knows its peak. On a CPU the process's private pages are read whenever a phase begins (five
    microseconds; activations peak where the backward begins); pages of libraries and mapped files do not count.
    """

    def __init__(self) -> None:
        self.runtime_bytes = 0
        self._device: torch.device | None = None
        self._peak_bytes = 0
        self._statm: int | None = None

    def start(self, device: torch.device) -> None:
        """From here on memory counts as training's."""
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif os.path.exists("/proc/self/statm"):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            self.runtime_bytes = self._private_bytes()

    def listen(self, step: int, phase: str) -> None:
        """A phase listener."""
        if self._statm is not None:
            self._peak_bytes = max(self._peak_bytes, self._private_bytes())

    def _private_bytes(self) -> int:
        assert self._statm is not None
        _, resident, shared, *_ = os.pread(self._statm, 256, 0).split()
        return (int(resident) - int(shared)) * PAGE_BYTES

    def peak_bytes(self) -> int | None:
        """Bytes at the worst moment so far; None where this machine cannot say."""
        if self._device is not None and self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self._peak_bytes - self.runtime_bytes if self._statm is not None else None

    def measure(
        self,
        state_shards: Mapping[str, LogicalShard],
        model: ParallelModel,
        predicted_bytes: Mapping[str, int],
        staging_bytes: int = 0,
    ) -> MemoryMeasured:
        """States, activations and staging are counted from their tensors; "peak" is the whole rank's."""
        optimizer = {name: shard for name, shard in state_shards.items() if name.startswith(OPTIMIZER)}
        reduction = {name: shard for name, shard in state_shards.items() if name.startswith(REDUCTION)}
        measured = {
            "parameters": local_bytes(state_shards) - local_bytes(optimizer) - local_bytes(reduction),
            "gradients": sum(
                local_tensor(p).numel() * p.element_size() for p in model.module.parameters() if p.requires_grad
            ),
            "optimizer": local_bytes(optimizer),
        }
        if reduction:
            measured["compression"] = local_bytes(reduction)
        if model.saved_bytes is not None:
            measured["activations"] = model.saved_bytes
        if predicted_bytes.get("staging"):
            measured["staging"] = staging_bytes
        peak = self.peak_bytes()
        if peak is not None:
            measured["peak"] = peak
        return MemoryMeasured(
            predicted_bytes={**predicted_bytes, "peak": sum(predicted_bytes.values())},
            measured_bytes=measured,
            runtime_bytes=self.runtime_bytes,
        )
