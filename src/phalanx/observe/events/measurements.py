"""Events of what was measured inside a step: operators, memory, pipelines, experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from phalanx.observe.events.base import Event


@dataclass(frozen=True)
class OperatorsCounted(Event):
    """The cost of calling operators in a step, whatever the size of its tensors: the forward of one
    microbatch has `num_operators` with a backward, a step has `num_microbatches` of them, and one
    operator takes `operator_s` by itself in both. `matmul_flops_per_s` is what large products
    reached on this rank, in the type of the model's products, while other ranks computed or waited.

    From rank 0, once, after the third step of an attempt; on CPUs, without a pipeline.
    """

    step: int
    num_operators: int
    num_microbatches: int
    operator_s: float
    matmul_flops_per_s: float


@dataclass(frozen=True)
class MemoryMeasured(Event):
    """Bytes on top of the runtime (interpreter + torch) that this rank used, beside what the plan
    said.

    Keys of both dicts are the plan's memory categories; "peak" is the sum at the worst moment,
    which was in `peak_phase` of `peak_step` (0: before the first; "": nobody knows).
    `runtime_bytes` is what else there was then, pages of files among it, shared pages by their
    share. `start_bytes`: what the process had of its own when training began, shared pages counted
    whole. `device_bytes`, of a GPU: the peaks "allocated" and "reserved" of this rank's allocator,
    and at the end what is "used" by all its processes of the "total".
    """

    predicted_bytes: dict[str, int]
    measured_bytes: dict[str, int]
    runtime_bytes: int
    peak_step: int = 0
    peak_phase: str = ""
    start_bytes: int = 0
    device_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def moment_in_words(self) -> str:
        """When it was: "step 3, backward", "the start", or "" where nobody knows."""
        if not self.peak_phase:
            return ""
        if self.peak_phase != "startup":
            return f"step {self.peak_step}, {self.peak_phase}"
        return "the start"

    @property
    def is_of_training(self) -> bool:
        """False where the worst moment was in an evaluation or the sample: a plan has none."""
        return self.peak_phase not in ("evaluate", "sample")

    @property
    def predicts_activations(self) -> bool:
        """False for a user's own module: its sum lacks the largest part, and cannot be compared."""
        return self.predicted_bytes.get("activations", 0) > 0


@dataclass(frozen=True)
class PipelineMeasured(Event):
    """One step of a pipeline (steps 5, 50, 500, ... and the last): what each rank computed when,
    and how long it waited, beside what was predicted.

    From rank 0.

    `num_blocks` by stage. `stage_seconds`: by stage the mean seconds of one microbatch, [forward,
    backward of inputs, backward of weights]; without `splits_backward` the second is the whole
    backward and the third 0. `spans`: by pipeline rank (of the first data-parallel and
    tensor-parallel rank) [action, begin, end] in seconds since the first action of the step, in
    order, computation only; "3F0" is stage 3's forward of microbatch 0. The bubble is the part of
    the step in which a rank computes nothing, the mean over ranks, 0 to 1: as measured, as the
    schedule must have it if stages take `stage_seconds` and nothing has to be sent, and as the plan
    said before the run (NaN: it could not). `in_flight`: by pipeline rank, microbatches of a stage
    whose activations were held at once, at most.
    """

    step: int
    schedule: str
    num_blocks: list[int]
    stage_seconds: list[list[float]]
    splits_backward: bool
    spans: list[list[list[Any]]]
    bubble_measured: float
    bubble_predicted: float
    bubble_planned: float
    in_flight: list[int]


@dataclass(frozen=True)
class ExpertsLoaded(Event):
    """The load of a model's experts in a step (the first, each observe.log_every-th and the last),
    over all ranks.

    From the first rank of each stage of a pipeline, of the layers in its stages; else from rank 0.

    `tokens_by_expert`: of each layer ("blocks.3.moe") the tokens of the batch that chose each
    expert, dropped ones too; `dropped`: of each layer how many choices were dropped, because the
    expert was full.
    """

    step: int
    tokens_by_expert: dict[str, list[int]]
    dropped: dict[str, int]

    @property
    def worst(self) -> tuple[str, float]:
        """The layer whose busiest expert has most, and how many times the mean; ("", 0) where
        nothing was counted."""
        ratios = {
            name: max(tokens) * len(tokens) / sum(tokens)
            for name, tokens in self.tokens_by_expert.items()
            if sum(tokens) > 0
        }
        return max(ratios.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def dropped_share(self) -> float:
        """Fraction (0 to 1) of all token-to-expert choices that were dropped."""
        chosen = sum(map(sum, self.tokens_by_expert.values()))
        if chosen > 0:
            return sum(self.dropped.values()) / chosen
        return 0.0


@dataclass(frozen=True)
class BlockNormsMeasured(Event):
    """Norms by block of the model ("blocks.3", "embed"), in its order, each over all ranks: of the
    gradients of `step` before clipping, of its update (what it changed of the trained weights), and
    of these weights before it. From rank 0, every observe.norms_every steps, once the step after
    `step` has added them up.

    `nonfinite`: blocks whose gradients are not finite; they are in no `gradient_norms`.
    `update_norms` and `weight_norms` are empty for a step that was not applied or is the last of an
    attempt, and where a copy of the weights needs more memory than the plan has.
    """

    step: int
    gradient_norms: dict[str, float]
    update_norms: dict[str, float] = field(default_factory=dict)
    weight_norms: dict[str, float] = field(default_factory=dict)
    nonfinite: list[str] = field(default_factory=list)

    @property
    def update_ratios(self) -> dict[str, float]:
        """The norm of the update over that of the weights, by block; without blocks of zeros."""
        return {
            name: norm / self.weight_norms[name]
            for name, norm in self.update_norms.items()
            if self.weight_norms.get(name, 0.0) > 0
        }


@dataclass(frozen=True)
class CollectivesCounted(Event):
    """The collectives, sends and receives of a rank in an attempt, by "axis [ranks]: operation at
    file:line", the line that called them: how many, of how many bytes, and seconds inside of waits
    for them (0 of those that are waited for in C++, as by DDP; without those on a GPU, which nobody
    times).

    From every rank, at the end of its attempt, unless it is killed. Those that were waited for
    longest, 24 at most; `num_left_out` others are left out.
    """

    step: int
    num_calls: dict[str, int]
    num_bytes: dict[str, int]
    wait_s: dict[str, float]
    num_left_out: int = 0


@dataclass(frozen=True)
class GpuMeasured(Event):
    """A rank's GPU, as the driver's NVML says it: `energy_j` in the `seconds` until `step`, of all
    that used the GPU; `busy_share` (0 to 1) of the sample period just before, in which any kernel
    ran, and `memory_busy_share`, in which memory was read or written. NaN: the GPU does not say.

    From every rank with such a GPU, each ten seconds at first and less often later.
    """

    step: int
    seconds: float
    energy_j: float = math.nan
    busy_share: float = math.nan
    memory_busy_share: float = math.nan
