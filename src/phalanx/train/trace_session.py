"""What is open while a window of steps is traced: the recorder, the profiler, the rank's part."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from phalanx.core.process_memory import ResidentBytesReader
from phalanx.core.step_ranges import StepRange
from phalanx.observe.trace_part import (
    PART_SCHEMA,
    TracePartHeader,
    TracePartWriter,
    trace_part_path,
)
from phalanx.observe.trace_recorder import TraceRecorder
from phalanx.parallel.model import ParallelModel
from phalanx.train.operator_profile import OperatorProfiler


class TraceSession:
    """One rank's recording of a window."""

    def __init__(
        self,
        recorder: TraceRecorder,
        writer: TracePartWriter,
        memory: ResidentBytesReader,
        device: torch.device,
    ) -> None:
        self.recorder, self.writer = recorder, writer
        self._memory, self._device = memory, device
        self._profiler: OperatorProfiler | None = None

    def start_profiler(self) -> None:
        """Begin to profile operators, unless they are profiled already."""
        if self._profiler is None:
            self._profiler = OperatorProfiler(self._device)
            self._profiler.start()

    def stop_profiler(self) -> None:
        """Take what the profiler has seen, if it is on."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            self.recorder.add_operators(profiler.stop())
            self.writer.count_dropped(profiler.num_dropped)

    def write_rows(self, *, is_last: bool = False) -> None:
        for rows in self.recorder.take_rows(is_last=is_last):
            self.writer.write_rows(rows)

    def close(self, *, is_complete: bool) -> None:
        self.writer.close(is_complete=is_complete)
        self._memory.close()


def open_trace_session(
    run_dir: Path,
    model: ParallelModel,
    steps: StepRange,
    *,
    attempt: int,
    clocks: Sequence[str],
    has_operators: bool,
    may_write: bool,
) -> TraceSession:
    """Begin a part of `run_dir`; `clocks` are the names of all ranks' clocks."""
    mesh, memory = model.mesh, ResidentBytesReader()
    axes = [
        f"{axis} {coordinate}"
        for axis, coordinate in mesh.coordinates.items()
        if _is_cut(model, axis)
    ]
    header = TracePartHeader(
        PART_SCHEMA,
        mesh.rank,
        mesh.world_size,
        attempt,
        steps.first,
        steps.last,
        has_operators,
        str(mesh.device),
        platform.node(),
        os.getpid(),
        clocks[mesh.rank],
        clocks[0],
        ", ".join(axes),
    )

    def read_memory() -> tuple[int, int]:
        allocated_bytes = -1
        if mesh.device.type == "cuda":
            allocated_bytes = torch.cuda.memory_allocated(mesh.device)
        return memory.read_resident_bytes(), allocated_bytes

    recorder = TraceRecorder(model.phases, model.phases.black_box, read_memory)
    path = trace_part_path(run_dir, mesh.rank, attempt, steps)
    writer = TracePartWriter(path, header, may_write=may_write)
    return TraceSession(recorder, writer, memory, mesh.device)


def _is_cut(model: ParallelModel, axis: str) -> bool:
    return getattr(model.plan.layout, axis, 1) > 1
