"""`SearchResult`: what a search over layouts found, as data; JSON in and out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.units import format_bytes
from phalanx.plan.layout import Layout
from phalanx.plan.timing.step_time import StepTime

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class PeakMemory:
    """The rank that needs most: its bytes by category, of those it may fill."""

    categories: Mapping[str, int]
    capacity_bytes: int
    pipeline_rank: int = 0
    by_pipeline_rank: tuple[Mapping[str, int], ...] = ()
    """Of a pipeline, every rank's."""
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Bytes by category at the highest moment of each phase of a step."""
    host_bytes: int = 0
    """Of a rank in host memory beside its GPU, where something is offloaded."""

    @property
    def total_bytes(self) -> int:
        return sum(self.categories.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.capacity_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "categories": dict(self.categories),
            "total_bytes": self.total_bytes,
            "capacity_bytes": self.capacity_bytes,
            "pipeline_rank": self.pipeline_rank,
            "by_pipeline_rank": [dict(categories) for categories in self.by_pipeline_rank],
            "phases": {phase: dict(categories) for phase, categories in self.phases.items()},
            "host_bytes": self.host_bytes,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> PeakMemory:
        return cls(
            dict(body["categories"]),
            body["capacity_bytes"],
            body["pipeline_rank"],
            tuple(dict(categories) for categories in body["by_pipeline_rank"]),
            # Results of before say no phases, and no host memory.
            body.get("phases", {}),
            body.get("host_bytes", 0),
        )


@dataclass(frozen=True)
class RankedLayout:
    """A layout that was planned exactly and fits: its keys, its memory, its predicted time."""

    family: str
    """The mechanisms that it uses: "zero3", "tp + zero1", "tp + pp"."""
    layout: Layout
    zero_stage: int
    micro_batch_size: int
    num_microbatches: int
    schedule: str
    stages_per_rank: int
    recompute: str
    offload: str
    job_keys: Mapping[str, Any]
    """What a job file must say to train so, by dotted key."""
    memory: PeakMemory
    time: StepTime | None
    """None where nobody knows what the model computes, or how fast the devices are."""
    mfu: float | None = None
    """FLOP/s that the model needs, of those of the data sheet, 0 to 1; without recomputation."""
    tokens_per_s_per_device: float | None = None
    why_not: str = ""
    """Of a runner-up: the one term by which it loses."""

    @property
    def num_mechanisms(self) -> int:
        """The number of mechanisms that a reader must understand: axes above 1, sharding,
        recomputation, ..."""
        layout = self.layout
        axes = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.ep))
        optional_mechanisms = (self.recompute != "none", self.offload != "none")
        return axes + min(self.zero_stage, 1) + (self.zero_stage == 3) + sum(optional_mechanisms)

    @property
    def step_s(self) -> float | None:
        if self.time is None:
            return None
        return self.time.total_s

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self)) | {
            "layout": self.layout.to_json(),
            "job_keys": dict(self.job_keys),
            "memory": self.memory.to_json(),
            "time": None if self.time is None else self.time.to_json(),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> RankedLayout:
        time = body["time"]
        values = dict(body) | {
            "layout": Layout.from_json(body["layout"]),
            "memory": PeakMemory.from_json(body["memory"]),
            "time": None if time is None else StepTime.from_json(time),
        }
        return cls(**values)


@dataclass(frozen=True)
class NearestFit:
    """The nearest change along one axis with which the job fits, planned exactly, and its price."""

    axis: str
    change: str
    """Overrides that, added to the command, give `ranked`: "parallel.tp=8". "" where no key says
    what changes."""
    ranked: RankedLayout
    num_ranks: int
    slowdown: float | None = None
    """Device-seconds of a step, as a multiple of the cheapest change's."""
    host_bytes_per_node: int = 0
    """Host memory that a node needs for what is offloaded to it."""
    words: str = ""
    """The change in words, where it is one of the machine: "16 ranks with as much memory each"."""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self)) | {"ranked": self.ranked.to_json()}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> NearestFit:
        return cls(**(dict(body) | {"ranked": RankedLayout.from_json(body["ranked"])}))


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search over the layouts of a job on a cluster."""

    model: str
    num_params: int
    cluster: str
    num_ranks: int
    seq_len: int
    global_batch_size: int
    winner: RankedLayout | None
    """None where nothing fits."""
    runners_up: tuple[RankedLayout, ...] = ()
    """From other families than the winner's, the fastest first."""
    nearest: tuple[NearestFit, ...] = ()
    """Where nothing fits: the nearest that does along each axis."""
    num_considered: int = 0
    num_fitting: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    """Why layouts that looked good were refused when they were planned, and how many."""
    smallest_bytes: int = 0
    """Bytes of the planned layout that needs least, where memory is what nothing fits; else 0."""
    capacity_bytes: int = 0
    """Bytes that a rank of that layout may fill."""
    smallest_host_bytes: int = 0
    """Where layouts fit their ranks and no node's host memory holds what they offload: bytes of a
    node of the planned one that offloads least; else 0."""
    host_capacity_bytes: int = 0
    """Bytes of host memory of a node then."""
    num_planned: int = 0
    """Layouts that were planned and lack that memory, of which the smallest figure is the least; 0
    in results of before."""
    economics: Mapping[str, Any] = field(default_factory=dict)
    """Goodput, cost and energy of the winner (`phalanx.plan.search.economics`)."""
    remarks: tuple[str, ...] = ()
    precision: str = ""
    """The type that products are computed in, for which times and MFU hold."""
    defaults: tuple[str, ...] = ()
    """Keys of the size of a step that the job leaves out."""
    tokens_per_sample: int = 0
    """Tokens of one sample as the model counts them; 0 in results of before."""
    sample_noun: str = "sequences"
    """What samples are: "sequences", "images", "samples"."""

    @property
    def fits(self) -> bool:
        return self.winner is not None

    @property
    def failure_kind(self) -> str:
        """ "DOES NOT FIT" where memory is what no layout has enough of, else "REFUSED"."""
        return "DOES NOT FIT" if self.smallest_bytes or self.smallest_host_bytes else "REFUSED"

    @property
    def failure(self) -> str:
        """Why there is no winner: the memory that exact plans lack, or else the reason that they
        were refused for most often."""
        if self.smallest_host_bytes:
            fitting = "fits its GPUs" if self.num_planned == 1 else "fit their GPUs"
            return (
                f"{self._least_of_planned} that {fitting} needs"
                f" {format_bytes(self.smallest_host_bytes)} of a node's host memory, and"
                f" {format_bytes(self.host_capacity_bytes)} are there"
            )
        if self.smallest_bytes:
            return (
                f"{self._least_of_planned} needs {format_bytes(self.smallest_bytes)} per rank, and"
                f" a plan may fill {format_bytes(self.capacity_bytes)}"
            )
        if not self.refused:
            return "no layout of the job can be planned"
        return max(self.refused, key=lambda reason: self.refused[reason])

    @property
    def _least_of_planned(self) -> str:
        """Of what `failure` is the least: plans are exact, and only some layouts are planned."""
        if self.num_planned == 1:
            return "the one layout planned"
        return f"the least of {self.num_planned} layouts planned"

    @property
    def sample_tokens(self) -> int:
        """Tokens of one sample as the model counts them: of a picture its patches."""
        return self.tokens_per_sample or self.seq_len

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self)) | {
            "schema_version": SCHEMA_VERSION,
            "fits": self.fits,
            "winner": None if self.winner is None else self.winner.to_json(),
            "runners_up": [ranked.to_json() for ranked in self.runners_up],
            "nearest": [nearest.to_json() for nearest in self.nearest],
            "refused": dict(self.refused),
            "economics": dict(self.economics),
            "remarks": list(self.remarks),
            "defaults": list(self.defaults),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> SearchResult:
        values = {name: body[name] for name in cls.__dataclass_fields__ if name in body}
        winner = values["winner"]
        values["winner"] = None if winner is None else RankedLayout.from_json(winner)
        values["runners_up"] = tuple(map(RankedLayout.from_json, values["runners_up"]))
        values["nearest"] = tuple(map(NearestFit.from_json, values["nearest"]))
        values["remarks"] = tuple(values["remarks"])
        values["defaults"] = tuple(values.get("defaults", ()))
        return cls(**values)
