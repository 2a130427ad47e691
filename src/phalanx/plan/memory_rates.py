"""`MemoryRates`: how fast each of some ranks reads and writes memory while the others do, too.

From copies that `phalanx bench` has timed on this machine, else from the data sheet of its GPUs.
Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import EnvironmentProblem
from phalanx.plan.accelerators import GB
from phalanx.plan.cluster import Cluster, detect_cluster
from phalanx.plan.profiles import (
    PROCESSOR,
    MachineProfile,
    ProfileSection,
    TimedOperation,
    find_profile_of_cluster,
)
from phalanx.plan.timing.constants import load_timing_constants

# More than the caches of the GPUs in the table hold.
_DATA_SHEET_BYTES = 256 * 2**20
# A core reads the line that it will write, which a copy's bytes do not count: three are moved for
# two. Where stores pass the caches by, the rate is lower than this says, and less is claimed.
_MOVED_BY_CPU_COPY = 1.5


@dataclass(frozen=True)
class CopyRate:
    """A copy that reads and writes `num_bytes` in all; memory moved `bytes_per_s` for each rank."""

    num_bytes: float
    bytes_per_s: float


@dataclass(frozen=True)
class MemoryRates:
    """Rates of copies, smaller ones first. `basis`: where they are from, in words; `is_measured`:
    on this machine, and not taken from a data sheet."""

    copies: tuple[CopyRate, ...]
    basis: str
    is_measured: bool

    def find_rate(self, touched_bytes: float) -> float:
        """Bytes a second of something that touches so many different bytes: the rate of the largest
        copy that touches no more. 0 without such a copy: a cache may hold what is smaller."""
        rates = [copy.bytes_per_s for copy in self.copies if copy.num_bytes <= touched_bytes]
        return rates[-1] if rates else 0.0


def find_memory_rates(device: str, num_ranks: int) -> MemoryRates | None:
    """The rates of `num_ranks` ranks on the devices of this machine; None where nothing was
    measured and no data sheet is known, and for more ranks on a CPU than it has cores."""
    try:
        cluster = detect_cluster(device)
    except EnvironmentProblem:
        return None
    if device == "cpu" and num_ranks > cluster.num_devices:
        return None
    profile = find_profile_of_cluster(cluster)
    if profile is not None and (rates := select_memory_rates(profile, num_ranks)) is not None:
        return rates
    return _take_data_sheet_rates(cluster)


def select_memory_rates(profile: MachineProfile, num_ranks: int) -> MemoryRates | None:
    """The rates of a profile for `num_ranks` ranks on its machine; None without copies in it."""
    section = profile.sections.get("gemm")
    if section is None:
        return None
    rows = [
        row for row in section.rows if row.kind == "copy" and row.num_bytes > 0 and row.seconds > 0
    ]
    if not rows:
        return None
    measured_ranks = min({row.num_ranks for row in rows}, key=lambda n: abs(n - num_ranks))
    together = [row for row in rows if row.num_ranks == measured_ranks]
    # Cores of a CPU share one memory, so what ranks have together is divided anew; a GPU has its
    # own.
    factor = 1.0
    if profile.device == "cpu":
        factor = _MOVED_BY_CPU_COPY * measured_ranks / num_ranks
    copies = [
        CopyRate(row.num_bytes, factor * row.num_bytes / _choose_seconds(row, section))
        for row in together
    ]
    copies.sort(key=lambda copy: copy.num_bytes)
    basis = f"copies that phalanx bench timed on {section.measured_at[:10]}"
    if profile.device == "cpu":
        basis += ", their targets read before they are written"
    if section.basis == PROCESSOR:
        basis += " while others used the machine, too"
    return MemoryRates(tuple(copies), basis, is_measured=True)


def _choose_seconds(row: TimedOperation, section: ProfileSection) -> float:
    """The median. Where others used the machine, too, the least that is known: memory gives more
    than what they left."""
    if section.basis != PROCESSOR:
        return row.seconds
    known_s = [row.seconds, row.low_s]
    # Several threads spend processor seconds on waiting for each other.
    if row.num_threads == 1:
        known_s.append(row.cpu_s)
    return min(seconds for seconds in known_s if seconds > 0)


def _take_data_sheet_rates(cluster: Cluster) -> MemoryRates | None:
    if cluster.accelerator is None:
        return None
    gb_s = cluster.accelerator.memory_gb_s
    efficiency = load_timing_constants().memory_efficiency
    copy = CopyRate(_DATA_SHEET_BYTES, gb_s * GB * efficiency)
    basis = (
        f"the data sheet's {gb_s:,.0f} GB/s, of which kernels reach {100 * efficiency:.0f} % by the"
        " planner's constant: nothing was measured here"
    )
    return MemoryRates((copy,), basis, is_measured=False)
