"""The section [cluster], and the levels of its network."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from phalanx.job.schema.base import Positive, PositiveFloat, Section, Text


class Link(Section):
    """One level of a cluster's network."""

    name: Text
    """What it is called in reports: nvlink, rail, spine."""
    num_devices: Positive
    """Devices that it joins: 8 GPUs of a node, all 256 of a cluster."""
    gb_s: PositiveFloat
    """GB (1e9 bytes) a second, of one device and in one direction."""
    latency_us: PositiveFloat | None = None
    """Microseconds until a small message has arrived; where nothing says, a usual value."""
    oversubscription: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """How many times more the level below can send than this one can carry, when all send."""
    topology: Literal["switch", "rail", "fat-tree", "torus", "dragonfly"] = "switch"
    """How it joins them. The time of a step reads gb_s and oversubscription alone: a torus or a
    dragonfly counts as a switch, and a remark says so."""


class Cluster(Section):
    """The machine, where it should not be found out; or the one that a plan is for."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device that the ranks compute on."""
    memory_gib: PositiveFloat | None = None
    """Memory one rank may use; default what the machine has, divided by its ranks."""
    gpu: Text | None = None
    """Plan for a cluster of this kind of GPU, wherever the plan is made: "h100-sxm" (docs/plan.md
    lists them)."""
    instance: Text | None = None
    """Plan for machines of this type: "p5.48xlarge". Its GPUs, network and price are known
    (docs/plan.md)."""
    file: Text | None = None
    """Plan for the cluster that this TOML file describes: keys of this section, at its top."""
    nodes: Positive | None = None
    """Machines of the cluster; default what parallel.ranks take, else 1."""
    gpus_per_node: Positive | None = None
    """GPUs of one machine; default what it is usually sold with."""
    links: tuple[Link, ...] = ()
    """Levels of the network, from the innermost outwards: [[cluster.links]] tables.

    Default: what the GPU or the instance is usually sold with.
    """
    host_memory_gib: PositiveFloat | None = None
    """Memory of one machine, for what is offloaded to it."""
    price_per_hour: PositiveFloat | None = None
    """US dollars for one machine and hour; default that of cluster.instance."""
    spot_price_per_hour: PositiveFloat | None = None
    """The same where a machine may be taken away at any time."""
    watts: PositiveFloat | None = None
    """Watts of one GPU at work; default what its data sheet allows it."""

    @property
    def has_described_machine(self) -> bool:
        """True where the section says for which GPUs a plan is, instead of this machine's."""
        return any((self.gpu, self.instance, self.file))
