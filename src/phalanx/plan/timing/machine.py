"""`MachineRates`: what the formulas read of a cluster: peaks, bandwidths and levels of links."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.accelerators import GB, Accelerator


@dataclass(frozen=True)
class LinkRate:
    """One level of links, which joins `num_devices`: bytes a second of one device in one
    direction."""

    num_devices: int
    bytes_s: float
    oversubscription: float = 1.0
    latency_s: float = 0.0
    """Seconds of an empty message as the cluster's description says; 0 where it does not. It makes
    a link slower than usual ones, never faster: software takes its time on any link."""

    @property
    def effective_bytes_s(self) -> float:
        """Bytes a second where all devices send at once."""
        return self.bytes_s / self.oversubscription


@dataclass(frozen=True)
class MachineRates:
    """A GPU and the links around it, from the innermost level outwards."""

    accelerator: Accelerator
    links: tuple[LinkRate, ...]
    gpus_per_node: int
    power_share: float = 1.0
    """The power limit, as a part of the data sheet's."""

    @property
    def gpu_generation(self) -> int:
        """70, 80, 90 or 100, after the compute capability."""
        major = int(self.accelerator.compute_capability.split(".")[0])
        return min(100, max(70, 10 * major))

    @property
    def is_blackwell_ultra(self) -> bool:
        return self.accelerator.compute_capability == "10.3"

    @property
    def memory_bytes_s(self) -> float:
        return self.accelerator.memory_gb_s * GB


def build_rates_of_accelerator(
    accelerator: Accelerator,
    *,
    gpus_per_node: int = 0,
    link_domain: int = 0,
    link_gb_s: float = 0.0,
    nic_gb_s: float = 0.0,
    power_share: float = 1.0,
) -> MachineRates:
    """The rates of `accelerator` with the links that it is usually sold with, but for what is
    given (0: as usual)."""
    num_devices = gpus_per_node or accelerator.gpus_per_node
    domain = link_domain
    if not domain:
        # NVLink joins a node, or a rack of them.
        is_rack = accelerator.link_domain > accelerator.gpus_per_node
        domain = accelerator.link_domain if is_rack else num_devices
    inner = LinkRate(domain, (link_gb_s or accelerator.link_gb_s) * GB)
    outer = LinkRate(2**31, (nic_gb_s or accelerator.nic_gb_s) * GB)
    return MachineRates(accelerator, (inner, outer), num_devices, power_share)
