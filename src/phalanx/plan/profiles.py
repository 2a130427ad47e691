"""What `phalanx bench` has measured of a machine: rows, fits of them, and the file that plans read.

Torch-free. The fits are data here; `phalanx.bench` makes them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from phalanx.core.errors import UsageError
from phalanx.core.files import read_whole_regular_file, write_json_atomically
from phalanx.core.typed_json import JsonRecord, TypedJsonError
from phalanx.plan.cluster import Cluster

PROFILE_SCHEMA = "phalanx.profile/1"
PROFILE_FOLDER = "~/.cache/phalanx/profiles"
PROCESSOR = "processor"
"""The mode of fits of a collective's processor seconds, and the basis of a busy machine's fits."""
COMM_SECTION = "comm"
PROFILE_SECTIONS = ("gemm", COMM_SECTION, "storage")
GLOO_COMM_SECTION = "comm_gloo"
"""The section of collectives that were asked to go through gloo, where they else do not."""
GLOO, SHARED_MEMORY = "gloo", "shared memory"
MATMUL_CONSTANTS = frozenset(("overhead_s", "flops_per_s", "rows_half", "cols_half", "inner_half"))
MAX_CONSTANT = 1e30  # no machine moves or computes as much in a second


@dataclass(frozen=True)
class TimedOperation(JsonRecord):
    """One measured operation: the median of its repeats, and the tenths at both ends.

    `size` means what `kind` says (docs/bench.md). `num_ranks` did it at once, each with
    `num_threads` on a CPU; `seconds` is the median over them, `slowest_s` the slowest one's.
    `cpu_s`: processor seconds of a rank for it, all threads together.
    """

    kind: str
    mode: str
    dtype: str
    size: tuple[int, ...]
    num_ranks: int
    num_threads: int
    seconds: float
    low_s: float
    high_s: float
    slowest_s: float
    cpu_s: float
    num_repeats: int
    flops: float = 0.0
    num_bytes: float = 0.0


@dataclass(frozen=True)
class FittedRate(JsonRecord):
    """The constants of one kind of operation, and how far they are from what was measured.

    `residual` is the median of |predicted / measured - 1| over the points of the fit, `worst` the
    largest; None where there are no more points than constants. What `values` hold is said by
    their names and units.
    """

    kind: str
    mode: str
    dtype: str
    num_ranks: int
    num_threads: int
    values: dict[str, float]
    residual: float | None
    worst: float | None
    num_points: int


@dataclass(frozen=True)
class ProfileSection(JsonRecord):
    """One of PROFILE_SECTIONS, and when it was measured.

    `busy_share`: of the machine's processor time, what other programs used meanwhile (0 to 1).
    `basis`: "wall", or "processor": what fits are of (`phalanx.bench.sections`).
    `num_skipped`: operations that were left out because time was up.
    `collectives`: what ranks exchanged tensors through ("shared memory", "gloo", "nccl"); empty
    where they did not, and in files from before it was written down.
    """

    measured_at: str  # ISO 8601, UTC
    busy_share: float
    is_quick: bool
    num_skipped: int
    basis: str
    fits: tuple[FittedRate, ...]
    rows: tuple[TimedOperation, ...]
    collectives: str = ""


@dataclass(frozen=True)
class MachineProfile(JsonRecord):
    """All that was measured of one machine with one torch."""

    device: str  # "cpu" | "cuda"
    name: str
    num_devices: int
    torch: str
    sections: dict[str, ProfileSection] = field(default_factory=dict)

    @property
    def measured_on(self) -> str:
        """The date of the newest section, "2026-11-24"; empty without any."""
        dates = [section.measured_at[:10] for section in self.sections.values()]
        return max(dates, default="")

    @property
    def fits(self) -> tuple[FittedRate, ...]:
        """The fits of all sections."""
        all_fits: list[FittedRate] = []
        for section in self.sections.values():
            all_fits += section.fits
        return tuple(all_fits)

    def find_rate(
        self, kind: str, mode: str = "", *, dtype: str = "", num_ranks: int = 0
    ) -> FittedRate | None:
        """The fit of an operation; where it was not measured with `num_ranks`, that with the
        nearest number of ranks (the larger of two). None if the operation has no fit."""
        nearest: FittedRate | None = None
        for fit in self.fits:
            if (fit.kind, fit.mode) != (kind, mode) or (dtype and fit.dtype != dtype):
                continue
            if nearest is None or _rank_count_distance(fit, num_ranks) < _rank_count_distance(
                nearest, num_ranks
            ):
                nearest = fit
        return nearest

    @property
    def collectives(self) -> str:
        """What the collectives of this profile went through; empty where it does not say."""
        section = self.sections.get(COMM_SECTION)
        return "" if section is None else section.collectives

    def choose_collectives(self, choice: str) -> MachineProfile:
        """This profile with the collectives that ranks use under parallel.collectives = `choice`;
        without their fits where those were not measured. What no file says may be either."""
        sections = dict(self.sections)
        over_gloo = sections.pop(GLOO_COMM_SECTION, None)
        usual = sections.get(COMM_SECTION)
        if choice == GLOO and usual is not None and usual.collectives.startswith(SHARED_MEMORY):
            unmeasured = replace(usual, fits=(), rows=(), collectives=GLOO)
            sections[COMM_SECTION] = over_gloo or unmeasured
        return replace(self, sections=sections)

    def with_sections(self, sections: Mapping[str, ProfileSection]) -> MachineProfile:
        """This profile with `sections` in place of its own of the same names."""
        return replace(self, sections={**self.sections, **sections})


def _rank_count_distance(fit: FittedRate, num_ranks: int) -> tuple[float, int]:
    return abs(fit.num_ranks - num_ranks), -fit.num_ranks


def build_empty_profile(cluster: Cluster) -> MachineProfile:
    """A profile without measurements, of the machine and the torch that this process would use."""
    try:
        torch_version = version("torch").partition("+")[0]
    except PackageNotFoundError:
        torch_version = ""
    name = cluster.name
    if cluster.device == "cpu":
        name = read_cpu_name()
    return MachineProfile(cluster.device, name, cluster.num_devices, torch_version)


def read_cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model of this machine's CPU as its maker calls it; "CPU" where nobody says."""
    try:
        lines = read_whole_regular_file(cpuinfo).decode(errors="replace").splitlines()
    except OSError:
        return "CPU"
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model") and value.strip():
            return " ".join(value.split())
    return "CPU"


def get_profile_path(profile: MachineProfile) -> Path:
    """The file of a machine's profile: its device, how many, and torch's version are its name."""
    words = f"{profile.name}-{profile.num_devices}x-torch-{profile.torch}".lower()
    slug = re.sub(r"[^a-z0-9.]+", "-", words).strip("-")
    return Path(os.path.expanduser(PROFILE_FOLDER)) / f"{slug}.json"


def load_profile(path: Path) -> MachineProfile:
    """Read a profile. Raises UsageError for a file that is none, OSError for one that cannot be
    read."""
    try:
        body = json.loads(read_whole_regular_file(path))
        if not isinstance(body, dict) or body.pop("schema", None) != PROFILE_SCHEMA:
            raise TypedJsonError(f"its schema is not {PROFILE_SCHEMA}")
        profile = MachineProfile.from_json(body)
        for fit in profile.fits:
            _require_possible_constants(fit)
        return profile
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "it is not a profile", where=str(path), why=str(error), fix="run phalanx bench all"
        ) from None


def _require_possible_constants(fit: FittedRate) -> None:
    """Raise TypedJsonError for constants that no fit has: one missing, or of nothing a second."""
    missing = MATMUL_CONSTANTS - set(fit.values) if fit.kind == "matmul" else set()
    if missing or not fit.values:
        raise TypedJsonError(f"{fit.kind}: no {', '.join(sorted(missing)) or 'constants'}")
    for name, value in fit.values.items():
        # How much of something is hidden may be negative: it takes longer then.
        least = -1.0 if name.endswith("_share") else 0.0
        is_rate = name.endswith("per_s")
        if not least <= value <= MAX_CONSTANT or (is_rate and value < 1):
            raise TypedJsonError(f"{fit.kind}: {name} is {value}")


def save_profile(profile: MachineProfile, path: Path) -> None:
    """Write a profile in one piece. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, {"schema": PROFILE_SCHEMA, **profile.to_json()})


def find_profile_of_cluster(cluster: Cluster) -> MachineProfile | None:
    """The profile of this machine, if `phalanx bench` has written one; None without, and where the
    file is of another version."""
    try:
        return load_profile(get_profile_path(build_empty_profile(cluster)))
    except (OSError, UsageError):
        return None


def describe_calibration(profile: MachineProfile | None) -> str:
    """The words with which a plan says what its times are built on."""
    if profile is None or not profile.sections:
        return "uncalibrated: phalanx bench all measures this machine"
    words = f"calibrated by bench of {profile.measured_on}"
    shares = [section.busy_share for section in profile.sections.values()]
    if max(shares) > MAX_QUIET_BUSY_SHARE:
        words += f" (while other programs used {100 * max(shares):.0f} % of the machine)"
    return words


MAX_QUIET_BUSY_SHARE = 0.1
"""From this share of the machine on, a measurement says that others were using it."""


def evaluate_matmul_fit(
    values: Mapping[str, float], rows: float, cols: float, inner: float
) -> float:
    """Seconds of a [rows, inner] x [inner, cols] product by the constants of a fit.

    The rate falls when a dimension is short: by half where it is as long as `*_half`.
    """
    flops = 2.0 * rows * cols * inner
    share = (
        (rows / (rows + values["rows_half"]))
        * (cols / (cols + values["cols_half"]))
        * (inner / (inner + values["inner_half"]))
    )
    return values["overhead_s"] + flops / (values["flops_per_s"] * share)


def evaluate_linear_fit(values: Mapping[str, float], amount: float) -> float:
    """Seconds of moving or computing `amount` (bytes or FLOPs) by the constants of a fit."""
    return values["overhead_s"] + amount / values["per_s"]


def compute_median_residual(fits: Sequence[FittedRate]) -> float:
    """The median residual over fits, 0 without any."""
    residuals = sorted(fit.residual for fit in fits if fit.residual is not None)
    if not residuals:
        return 0.0
    return residuals[len(residuals) // 2]
