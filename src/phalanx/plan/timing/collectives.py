"""Collectives by level of links. Where a group's ranks stand decides, not how many they are.

A group is `size` ranks that stand `stride` apart. Of these, the innermost domain (NVLink) holds
some together; the rest is reached through each one's share of the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.timing.columns import Column
from phalanx.plan.timing.constants import TimingConstants
from phalanx.plan.timing.machine import MachineRates


@dataclass(frozen=True)
class GroupLinks:
    """The links between the ranks of a group."""

    size: Column
    together: Column
    """Ranks of the group in one link domain."""
    ring_bytes_s: Column
    """Bytes a second that a ring over the group carries."""
    link_bytes_s: Column | float
    network_bytes_s: Column | float
    """Bytes a second of one rank between domains."""
    latency_s: Column
    """Seconds before the first byte has gone around."""
    ring_latency_s: Column
    """Seconds of a message of no bytes that passes every rank of the group, one after the other."""

    @property
    def num_link_domains(self) -> Column:
        """Link domains that the group stands in."""
        return self.size / self.together


def build_group_links(
    size: Column, stride: Column, machine: MachineRates, constants: TimingConstants
) -> GroupLinks:
    """The links of a group of `size` ranks, `stride` apart."""
    inner = machine.links[0]
    together = np.clip(np.floor(inner.num_devices / stride), 1.0, size)
    link = inner.effective_bytes_s * constants.link_efficiency
    network = np.full_like(size, np.inf)
    reach = size * stride
    for level, below in zip(machine.links[1:], machine.links, strict=False):
        # Every NIC of a domain carries a ring of its own, so as many as there are ranks together.
        is_crossed = reach > below.num_devices
        rate = level.effective_bytes_s
        network = np.where(is_crossed, np.minimum(network, rate), network)
    network = network * constants.nic_efficiency
    spans = reach > inner.num_devices
    ring = np.where(together > 1, link, np.inf)
    ring = np.where(spans, np.minimum(ring, together * network), link)
    hops = np.maximum(constants.link_latency_s, inner.latency_s) * (size > 1)
    # The slowest level that the group crosses decides: its ring passes it with every byte.
    stated_s = np.zeros_like(reach)
    for level, below in zip(machine.links[1:], machine.links, strict=False):
        crossed_s = np.where(reach > below.num_devices, level.latency_s, 0.0)
        stated_s = np.maximum(stated_s, crossed_s)
    first_s = np.maximum(constants.nic_latency_s, stated_s)
    hop_s = np.maximum(constants.hop_s, stated_s)
    between = first_s + hop_s * np.maximum(size / together - 1, 0.0)
    latency = hops + np.where(spans, between, 0.0)
    around = latency + (size - 1) * constants.link_hop_s
    return GroupLinks(size, together, ring, link, network, latency, around)


def all_gather_s(group: GroupLinks, num_bytes: Column) -> Column:
    """Seconds to gather `num_bytes` (all parts together), or to reduce and scatter them."""
    share = (group.size - 1) / group.size
    return np.where(group.size > 1, share * num_bytes / group.ring_bytes_s + group.latency_s, 0.0)


def all_reduce_s(group: GroupLinks, num_bytes: Column) -> Column:
    """Seconds to reduce `num_bytes` on every rank: as much as scattering and gathering, with the
    latency of a tree over domains."""
    share = 2.0 * (group.size - 1) / group.size
    return np.where(group.size > 1, share * num_bytes / group.ring_bytes_s + group.latency_s, 0.0)


def all_to_all_s(
    group: GroupLinks,
    num_bytes: Column,
    copies: float,
    sends_by_rank: Column,
    constants: TimingConstants,
) -> Column:
    """Seconds to send `num_bytes` of each rank to all ranks of the group evenly.

    `copies`: experts that a token goes to, of which `num_bytes` has each. Where `sends_by_rank`,
    it travels once to each rank of its own domain that has some of them, and once to each other
    domain.
    """
    domains = group.num_link_domains
    inside, outside = (group.together - 1) / group.size, 1.0 - group.together / group.size
    # Of `copies` drawn evenly, the part that is left of them if each place gets one.
    by_rank = _count_visited(group.size, copies) / copies
    by_domain = _count_visited(domains, copies) / copies
    inside = np.where(sends_by_rank, inside * by_rank, inside)
    outside = np.where(sends_by_rank, outside * by_domain, outside)
    rate = np.where(sends_by_rank, constants.dispatch_efficiency, constants.all_to_all_efficiency)
    within = inside * num_bytes / (group.link_bytes_s * rate)
    between = np.where(domains > 1, outside * num_bytes / (group.network_bytes_s * rate), 0.0)
    return np.where(group.size > 1, np.maximum(within, between) + group.latency_s, 0.0)


def _count_visited(places: Column, copies: float) -> Column:
    """How many of `places` at least one of `copies` goes to, each drawn evenly."""
    return places * (1.0 - (1.0 - 1.0 / places) ** copies)


def estimate_exposed_collective_s(
    collective_s: Column, window_s: Column, constants: TimingConstants
) -> Column:
    """Seconds that a collective beside `window_s` of computation adds to it: what does not fit
    beside, and what the computation loses of its multiprocessors and memory."""
    contention = constants.overlap_contention
    exposed = np.maximum(collective_s * (1.0 + contention) - window_s, 0.0)
    return exposed + contention * np.minimum(collective_s, window_s)


def p2p_send_s(
    num_bytes: Column,
    stride: Column,
    size: Column,
    machine: MachineRates,
    constants: TimingConstants,
) -> Column:
    """Seconds of a message to the next of `size` ranks that stand `stride` apart; over the network
    as soon as one of them is in another domain, for which the others wait."""
    inner = machine.links[0]
    outer = machine.links[1:] or machine.links
    network = min(level.effective_bytes_s for level in outer)
    stated_s = max(level.latency_s for level in outer)
    network_s: Column = np.maximum(constants.nic_latency_s, stated_s)
    link_s: Column = np.maximum(constants.link_latency_s, inner.latency_s)
    seconds: Column = np.where(
        stride * size > inner.num_devices,
        num_bytes / (network * constants.nic_efficiency) + network_s,
        num_bytes / (inner.effective_bytes_s * constants.link_efficiency) + link_s,
    )
    return seconds
