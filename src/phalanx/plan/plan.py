"""Plan: what follows from a job on a cluster, and the candidates it was chosen from, as data.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.core.deprecated import warn_renamed
from phalanx.core.digest import digest
from phalanx.job.costs import ModelCosts
from phalanx.job.schema import Job
from phalanx.job.shapes.stored import parse_stored_shape
from phalanx.plan.layout import Layout
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.resolved_parallel import (
    TOP_LEVEL_STORED_KEYS,
    ResolvedParallel,
    parse_stored_parallel,
)
from phalanx.plan.segments import Segment
from phalanx.plan.timing.step_time import StepTime


@dataclass(frozen=True)
class EarlyWarning:
    """`code` is stable; `text` holds the number and the remedy."""

    code: str
    text: str


@dataclass(frozen=True)
class Candidate:
    """One layout that was evaluated. `predicted_bytes` by category, on top of the runtime, at the
    highest moment of a step; `phases`: at that of each phase, where they were counted.
    `host_bytes`: of a rank in host memory beside its GPU, where something is offloaded; counted of
    the chosen one alone."""

    name: str  # ddp, zero1, zero2, zero3, or one (a single rank)
    zero_stage: int
    layout: Layout
    predicted_bytes: dict[str, int]
    fits: bool
    chosen: bool = False
    why: str = ""
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.predicted_bytes.values())

    def to_json(self) -> dict[str, Any]:
        body = asdict(self) | {"layout": self.layout.to_json(), "total_bytes": self.total_bytes}
        # A plan of before has neither, and is written as it was read.
        for name in ("phases", "host_bytes"):
            if not body[name]:
                del body[name]
        return body


@dataclass(frozen=True)
class ActivationPolicy:
    """The activations that are recomputed in the backward, and those that wait in host memory."""

    recompute: str = "none"
    recompute_every: int = 1
    recompute_segments: tuple[Segment, ...] = ()
    offload: bool = False
    """True where those that are kept wait in host memory."""


@dataclass(frozen=True)
class LossScaling:
    """The factor that the loss is multiplied by before the backward with fp16."""

    initial: float
    growth_steps: int = 0
    """Steps without an overflow after which it doubles. 0: the scale is fixed."""


# Until 0.2 these are attributes of a plan still; where each is now.
_MOVED_FIELD_PATHS = {
    **{key: f"parallel.{key}" for key in TOP_LEVEL_STORED_KEYS},
    "data_parallel": "parallel",
    "recompute": "activations.recompute",
    "recompute_every": "activations.recompute_every",
    "recompute_segments": "activations.recompute_segments",
    "offload_activations": "activations.offload",
    "loss_scale": "loss_scaling.initial",
    "loss_scale_growth_steps": "loss_scaling.growth_steps",
    "predicted_of": "memory_of_rank",
}


@dataclass(frozen=True)
class Plan:
    """The decisions that follow from a job on a cluster. Frozen; `to_json` and `from_json` are
    inverses."""

    job_digest: str
    layout: Layout
    device: str
    precision: str
    compile: bool
    seed: int
    global_batch_size: int
    micro_batch_size: int
    num_microbatches: int
    seq_len: int
    peak_lr: float
    vocab_size: int
    num_params: int
    flops_per_token: float | None
    capacity_bytes: int
    hardware_flops_per_token: float | None = None
    """`flops_per_token` and the forwards that recompute does again in the backward."""
    peak_flops_per_s: float | None = None
    """FLOP/s of products in the plan's precision by the data sheet of one device; None where that
    is not known, as on CPUs."""
    parallel: ResolvedParallel = field(default_factory=ResolvedParallel)
    alternatives: tuple[Candidate, ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[EarlyWarning, ...] = ()
    shape: dict[str, Any] = field(default_factory=dict)
    loss_scaling: LossScaling | None = None
    """None: nothing is scaled."""
    activations: ActivationPolicy = field(default_factory=ActivationPolicy)
    precision_is_auto: bool = False
    """True where the job leaves precision.compute to the machine that a run begins on."""
    pipeline: Pipeline | None = None
    """None where pp is 1."""
    value_reasons: dict[str, str] = field(default_factory=dict)
    """Why a key of the job outside [parallel] has the value that the plan chose for it."""
    is_layout_free: bool = False
    """True where gradients are added along one tree, whatever rank has them."""
    step_time: StepTime | None = None
    """Predicted seconds of a step by term; None where nobody knows the devices or the model."""

    if not TYPE_CHECKING:  # with it, a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """The value of an attribute under its old name, with a warning."""
            if name not in _MOVED_FIELD_PATHS:
                raise AttributeError(f"Plan has no {name!r}")
            warn_renamed(f"Plan.{name}", f"Plan.{_MOVED_FIELD_PATHS[name]}")
            noun, _, attribute = _MOVED_FIELD_PATHS[name].partition(".")
            value = getattr(self, noun)
            if value is None or not attribute:
                return value
            return getattr(value, attribute)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def targets_per_rank(self) -> int:
        """Targets of one rank in one step when none is masked: tokens of its part of sequences,
        or labels of images."""
        per_sample = self.model_shape.count_targets(self.seq_len // self.layout.cp)
        return self.num_microbatches * self.micro_batch_size * per_sample

    @property
    def scatters_gradients(self) -> bool:
        """True where a rank needs of averaged gradients only what it updates (ZeRO-1), and gets no
        more of them on GPUs.

        Not where they are added along a tree, where shards have several copies, and with a static
        graph: DDP averages a step's first gradients there, and those again with the rest.
        """
        layout = self.layout.gradient_reduction_layout
        return (
            self.parallel.zero_stage == 1
            and layout.dp_shard > 1
            and layout.dp_replicate == 1
            and not self.parallel.static_graph
            and not self.is_layout_free
        )

    @property
    def model_shape(self) -> ModelCosts:
        """The shape of the model, as far as the plan knows it."""
        return parse_stored_shape(self.shape)

    @property
    def chosen(self) -> Candidate:
        return next(candidate for candidate in self.alternatives if candidate.chosen)

    def memory_of_rank(self, rank: int) -> dict[str, int]:
        """Bytes of `rank` by category: of a pipeline its stages', else what every rank needs."""
        if self.pipeline is None or not self.pipeline.rank_memory:
            return self.chosen.predicted_bytes
        return self.pipeline.rank_memory[self.layout.coordinates(rank)["pp"]]

    def to_json(self) -> dict[str, Any]:
        body = asdict(self) | {"layout": self.layout.to_json(), "world_size": self.world_size}
        body |= self.parallel.to_stored_keys() | {"parallel": self.parallel.to_json()}
        body["alternatives"] = [candidate.to_json() for candidate in self.alternatives]
        body["reasons"] = list(self.reasons)
        body["warnings"] = [asdict(warning) for warning in self.warnings]
        # These lie flat in stored plans, as they did before they were objects.
        policy = body.pop("activations")
        policy["recompute_segments"] = [
            segment.to_json() for segment in self.activations.recompute_segments
        ]
        scaling = body.pop("loss_scaling") or {"initial": None, "growth_steps": 0}
        body |= policy | {
            "offload_activations": policy.pop("offload"),
            "loss_scale": scaling["initial"],
            "loss_scale_growth_steps": scaling["growth_steps"],
        }
        if self.step_time is not None:
            body["step_time"] = self.step_time.to_json()
        body["pipeline"] = None if self.pipeline is None else self.pipeline.to_json()
        chosen = self.chosen
        body["memory"] = {
            "predicted_bytes": chosen.predicted_bytes,
            "total_bytes": chosen.total_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": chosen.fits,
        }
        return body

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Plan:
        # Older plans say less, and newer ones more.
        values = {name: body[name] for name in cls.__dataclass_fields__ if name in body}
        values["layout"] = Layout.from_json(body["layout"])
        values["parallel"] = parse_stored_parallel(body)
        fields = Candidate.__dataclass_fields__
        values["alternatives"] = tuple(
            Candidate(
                # Stored candidates have their `total_bytes`, too, which follow from the rest.
                **{k: v for k, v in c.items() if k in fields}
                | {"layout": Layout.from_json(c["layout"])}
            )
            for c in body["alternatives"]
        )
        values["reasons"] = tuple(body["reasons"])
        values["warnings"] = tuple(EarlyWarning(**warning) for warning in body["warnings"])
        values["activations"] = ActivationPolicy(
            body["recompute"],
            body.get("recompute_every", 1),
            tuple(map(Segment.from_json, body.get("recompute_segments", ()))),
            body.get("offload_activations", False),
        )
        if body.get("loss_scale") is not None:
            values["loss_scaling"] = LossScaling(
                body["loss_scale"], body["loss_scale_growth_steps"]
            )
        step_time = body.get("step_time")
        values["step_time"] = StepTime.from_json(step_time) if step_time else None
        pipeline = body.get("pipeline")
        values["pipeline"] = Pipeline.from_json(pipeline) if pipeline else None
        return cls(**values)


def compute_job_digest(job: Job) -> str:
    """The digest that a run is known by: that of its job, wherever it runs."""
    body = job.to_json()
    # A run that is moved, or continued from another directory, stays the same run.
    del body["run"]["dir"]
    return digest(body)
