"""Measures the memory that the plan predicts: what a rank uses on top of its runtime, at the worst
moment of a run."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import torch

from phalanx.checkpoint.manifest import COMPRESSION_TENSOR_PREFIX, OPTIMIZER_TENSOR_PREFIX
from phalanx.core.process_memory import (
    BytesOfOthers,
    PeriodicSampler,
    ProcessMemoryReader,
    ResidentMemory,
)
from phalanx.core.units import MIB
from phalanx.mesh.logical import LogicalShard, count_local_shard_bytes, get_local_tensor
from phalanx.observe.events import MemoryMeasured
from phalanx.parallel.model import ParallelModel

# Of the peak it says for a thread what it says for all of them, without adding up what each of them
# has run.
_RUSAGE_WITH_PEAK = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

# The kernel counts pages per core, and adds them up now and then: readings differ by that.
READING_SLACK_BYTES = 4 * MIB


@dataclass(frozen=True)
class RankMemory:
    """Memory of this rank until now, in bytes.

    `peak_bytes`: the most in all, shared pages by their share; on a GPU, the most that its
    allocator gave out. `reserved_bytes`: the most that a GPU's allocator reserved for that.
    `own_bytes`: of those resident now, the pages that no file backs. 0: not known.
    """

    rss_bytes: int
    peak_bytes: int = 0
    reserved_bytes: int = 0
    own_bytes: int = 0


@dataclass(frozen=True)
class MemoryBefore:
    """What a process has before it trains, in bytes: pages that no file backs, and those of them in
    shared memory that count for other processes."""

    own_bytes: int
    shared_by_others_bytes: int


class MemoryMeter:
    """Peak memory of this rank on top of interpreter and torch; `listen` to phases after `start`.

    phalanx.core.process_memory says what counts. The kernel keeps the peak; a phase that begins
    asks whether there is a new one (a microsecond or two), so that its step and phase are known.
    Where the kernel's mark cannot be set back, a thread samples. On CUDA it is the allocator that
    knows, and the phase is not known.
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._process = ProcessMemoryReader()
        self._psutil = psutil.Process()
        # True: the kernel keeps the peak.
        self._keeps_peak = False
        self._sampler: PeriodicSampler | None = None
        # getrusage cannot say when there is a new peak: look each time.
        self._counts_all = True
        self._known_maxrss = 0
        self.before = MemoryBefore(0, 0)
        # Of its own, and all that was resident at that moment.
        self._peak_bytes = 0
        self._in_all_bytes = 0
        self._most_resident_bytes = 0
        self._file_bytes = 0
        self._of_others = BytesOfOthers()
        self._moment = self._peak_moment = (0, "startup")
        self._num_steps = 0

    def start(self, device: torch.device, before: MemoryBefore | None = None) -> None:
        """Count memory as training's from here on.

        `before`: what this process had before it first trained, where it has trained already: what
        it holds of that is memory of training, too.
        """
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        # The mark is set back first: what the reading shows must be of after it.
        can_reset, now = self._process.reset_peak_resident_bytes(), self._process.read()
        self._keeps_peak = (
            can_reset and now is not None and now.peak_bytes <= now.all_bytes + READING_SLACK_BYTES
        )
        if not self._keeps_peak:
            now = self._sample_resident_memory()
            self._sampler = PeriodicSampler(self._update_memory_peak)
            self._sampler.start()
        assert now is not None
        # One call that tells of a new peak: cheaper than to read and parse /proc/self/status.
        self._known_maxrss = resource.getrusage(_RUSAGE_WITH_PEAK).ru_maxrss
        # A process that was started by another one's exec begins with that one's peak, which no
        # reset lowers.
        # `ru_maxrss` is in KiB on Linux.
        self._counts_all = self._known_maxrss * 1024 > now.all_bytes + READING_SLACK_BYTES
        self._peak_bytes = now.own_bytes
        self._file_bytes = now.file_bytes
        self._most_resident_bytes = self._in_all_bytes = now.all_bytes
        self._measure_bytes_of_others()
        self.before = before or MemoryBefore(now.own_bytes, self._of_others.shared_bytes)

    def stop(self) -> None:
        """Stop to measure; results so far stay."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None
        self._keeps_peak = False
        self._process.close()

    def begin_phase(self, step: int, phase: str) -> None:
        """Listen to a phase that begins: a new peak until now belongs to the phase before."""
        # The peak is the kernel's: what is read here, where phases begin, would miss what a loss
        # takes and gives back within one.
        if self._keeps_peak:
            maxrss = resource.getrusage(_RUSAGE_WITH_PEAK).ru_maxrss
            # Only then is /proc read: a phase begins many times in a step.
            if self._counts_all or maxrss > self._known_maxrss:
                self._known_maxrss = maxrss
                self._update_memory_peak()
        self._moment = (step, phase)

    def _update_memory_peak(self) -> ResidentMemory | None:
        now = self._read_or_sample_resident_memory()
        if now is None:
            return None
        self._most_resident_bytes = max(self._most_resident_bytes, now.peak_bytes)
        own_bytes = now.compute_anonymous_peak_bytes(self._file_bytes)
        if own_bytes > self._peak_bytes:
            self._peak_bytes, self._peak_moment = own_bytes, self._moment
            self._in_all_bytes = own_bytes + now.file_bytes
        # Once pages of files went, the mark no longer says how many of those at the peak were the
        # process's own.
        if self._keeps_peak and now.file_bytes < self._file_bytes - READING_SLACK_BYTES:
            self._process.reset_peak_resident_bytes()
            # It may have fallen with the mark.
            self._known_maxrss = resource.getrusage(_RUSAGE_WITH_PEAK).ru_maxrss
        self._file_bytes = now.file_bytes
        return now

    def _read_or_sample_resident_memory(self) -> ResidentMemory | None:
        """The resident memory now; None if the kernel, which keeps the peak, cannot be read."""
        if self._keeps_peak:
            return self._process.read()
        return self._sample_resident_memory()

    def _sample_resident_memory(self) -> ResidentMemory:
        """The resident memory now, where the kernel keeps no peak or does not tell kinds of pages
        apart."""
        now = self._process.read()
        if now is not None:
            return ResidentMemory(
                now.all_bytes, now.anonymous_bytes, now.file_bytes, now.shared_bytes
            )
        memory = self._psutil.memory_info()
        files = min(getattr(memory, "shared", 0), memory.rss)
        return ResidentMemory(memory.rss, memory.rss - files, files, 0)

    def read_rank_memory(self) -> RankMemory:
        """The memory until now, for the record of a step."""
        if self._device is None:
            return RankMemory(self._psutil.memory_info().rss)
        if self._device.type == "cuda":
            # These are of the allocator: nothing is waited for.
            stats = torch.cuda.memory_stats(self._device)
            resident = self._psutil.memory_info()
            files = min(getattr(resident, "shared", 0), resident.rss)
            return RankMemory(
                resident.rss,
                own_bytes=resident.rss - files,
                peak_bytes=stats.get("allocated_bytes.all.peak", 0),
                reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
            )
        now = self._update_memory_peak()
        self._num_steps += 1
        # By the end of the first step the pages that are written to are no longer shared; by that
        # of the third ranks have mapped what they show each other, as DDP makes its buckets anew
        # after the first backward. Not each time: it walks the page tables.
        if self._num_steps in (1, 3):
            self._measure_bytes_of_others()
        resident_bytes = own_bytes = 0
        if now is not None:
            resident_bytes = now.all_bytes
            own_bytes = now.own_bytes - min(now.shared_bytes, self._of_others.shared_bytes)
        return RankMemory(
            resident_bytes,
            self._compute_own_share_of_bytes(self._most_resident_bytes),
            own_bytes=own_bytes,
        )

    def _compute_own_share_of_bytes(self, resident_bytes: int) -> int:
        """The part of `resident_bytes` that counts for this process: its share of shared pages."""
        return max(resident_bytes - self._of_others.all_bytes, 0)

    def _measure_bytes_of_others(self) -> None:
        self._of_others = self._process.measure_bytes_of_others() or self._of_others

    def peak_bytes(self) -> int | None:
        """Bytes at the worst moment so far, on top of the runtime; None before `start`."""
        if self._device is None:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        # What other ranks show this one has counted as its own since it was mapped.
        mapped = self._of_others.shared_bytes - self.before.shared_by_others_bytes
        return max(0, self._peak_bytes - self.before.own_bytes - max(0, mapped))

    @property
    def runtime_bytes(self) -> int:
        """Other memory at the worst moment: interpreter, torch and pages of files, by this
        process's share."""
        return max(
            0,
            self._compute_own_share_of_bytes(self._in_all_bytes) - (self.peak_bytes() or 0),
        )

    def _read_device_bytes(self) -> dict[str, int]:
        """Bytes of a GPU: used by all its processes, in total, and the peaks of this rank's
        allocator."""
        if self._device is None or self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "allocated": torch.cuda.max_memory_allocated(self._device),
            "reserved": torch.cuda.max_memory_reserved(self._device),
            "used": total - free,
            "total": total,
        }

    def build_memory_event(
        self,
        state_shards: Mapping[str, LogicalShard],
        model: ParallelModel,
        predicted_bytes: Mapping[str, int],
        staging_bytes: int = 0,
    ) -> MemoryMeasured:
        """Build the event of measured memory.

        States, activations and staging are counted from their tensors; "peak" is the whole rank's.
        """
        measured = _sum_state_bytes_by_category(state_shards, model)
        if model.saved_bytes is not None:
            measured["activations"] = model.saved_bytes
        if predicted_bytes.get("staging"):
            measured["staging"] = staging_bytes
        if self._keeps_peak or self._sampler is not None:
            self._update_memory_peak()
            self._measure_bytes_of_others()
        peak = self.peak_bytes()
        if peak is not None:
            measured["peak"] = peak
        # A GPU's allocator knows no moment of its peak.
        runtime_bytes, step, phase = 0, 0, ""
        if self._device is not None and self._device.type != "cuda":
            runtime_bytes, (step, phase) = self.runtime_bytes, self._peak_moment
        return MemoryMeasured(
            predicted_bytes={**predicted_bytes, "peak": sum(predicted_bytes.values())},
            measured_bytes=measured,
            runtime_bytes=runtime_bytes,
            peak_step=step,
            peak_phase=phase,
            start_bytes=self.before.own_bytes,
            device_bytes=self._read_device_bytes(),
        )


def _sum_state_bytes_by_category(
    state_shards: Mapping[str, LogicalShard], model: ParallelModel
) -> dict[str, int]:
    """Bytes of this rank's state by category, counted from its tensors."""
    optimizer: dict[str, LogicalShard] = {}
    reduction: dict[str, LogicalShard] = {}
    parameters: dict[str, LogicalShard] = {}
    for name, shard in state_shards.items():
        if name.startswith(OPTIMIZER_TENSOR_PREFIX):
            optimizer[name] = shard
        elif name.startswith(COMPRESSION_TENSOR_PREFIX):
            reduction[name] = shard
        else:
            parameters[name] = shard
    gradient_bytes = 0
    for parameter in model.module.parameters():
        if parameter.requires_grad:
            gradient_bytes += get_local_tensor(parameter).numel() * parameter.element_size()
    measured = {
        "parameters": count_local_shard_bytes(parameters),
        "gradients": gradient_bytes,
        "optimizer": count_local_shard_bytes(optimizer),
    }
    if reduction:
        measured["compression"] = count_local_shard_bytes(reduction)
    return measured
