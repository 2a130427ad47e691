"""Measures this machine: starts ranks, collects what they measure, fits it, and makes a profile.

Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from phalanx.bench.cpu_usage import CpuUsage, measure_share_of_other_programs
from phalanx.bench.items import (
    QUICK_SECTION_BUDGET_S,
    SECTION_BUDGET_S,
    BenchItem,
    BenchPayload,
    list_bench_items,
    list_group_sizes,
)
from phalanx.bench.rows import ROWS_FILE, MeasurementReader
from phalanx.bench.sections import choose_clock_basis, fit_section
from phalanx.bench.storage import measure_storage
from phalanx.core.errors import PhalanxError, UsageError
from phalanx.launch.launch_spec import LaunchSpec, RepeatedAttempts
from phalanx.launch.outcome import RunOutcome
from phalanx.launch.paths import next_attempt_number
from phalanx.launch.supervisor import supervise_ranks
from phalanx.observe.bus import Bus
from phalanx.plan.cluster import Cluster, detect_cluster
from phalanx.plan.profiles import (
    COMM_SECTION,
    GLOO,
    GLOO_COMM_SECTION,
    PROCESSOR,
    PROFILE_SECTIONS,
    MachineProfile,
    ProfileSection,
    TimedOperation,
    build_empty_profile,
)
from phalanx.run.launched import refuse_external_launcher
from phalanx.run.scratch import ScratchDirectory, open_scratch_directory
from phalanx.run.stop_signals import raising_on_stop_signals

# What ranks have not begun when their sections' seconds are over by this factor is left out: on a
# busy machine everything takes longer.
PATIENCE, PATIENCE_S = 1.2, 2.0
RANKS_START_S = 6.0
# How long we look whether the machine is quiet.
QUIET_CHECK_S = 0.5


@dataclass(frozen=True)
class BenchProgress:
    """`done_s` of `total_s` planned seconds are behind us; `running` says what is measured."""

    done_s: float
    total_s: float
    running: str


@dataclass(frozen=True)
class BenchRequest:
    """The measurement that is asked for: some of PROFILE_SECTIONS, of `ranks` ranks at most (None:
    as many as the machine is for), storage in `directory`."""

    sections: tuple[str, ...] = PROFILE_SECTIONS
    device: str = "auto"
    ranks: int | None = None
    directory: Path = field(default_factory=lambda: Path("runs"))
    is_quick: bool = False
    seconds: float | None = None
    """About how long ranks measure in all, in place of the usual time."""
    collectives: str = "auto"
    """"auto" or "gloo", as a job's parallel.collectives means them."""


@dataclass(frozen=True)
class BenchResult:
    """A profile of the sections that were measured; `stop_code` is the exit code of a stop, None
    without one. Nothing is saved here."""

    profile: MachineProfile
    wall_s: float
    stop_code: int | None = None


def bench_machine(
    request: BenchRequest, *, on_progress: Callable[[BenchProgress], None] = lambda progress: None
) -> BenchResult:
    """Measure `request.sections` of this machine and fit their constants.

    Raises PhalanxError where something refuses: a directory, a GPU, a rank that fails.
    """
    refuse_external_launcher("bench")
    unknown = set(request.sections) - set(PROFILE_SECTIONS)
    if unknown:
        raise UsageError(
            f"no section {min(unknown)!r}", fix=f"one of {', '.join(PROFILE_SECTIONS)}"
        )
    if request.collectives not in ("auto", GLOO):
        raise UsageError(f"collectives go through auto or gloo, not {request.collectives!r:.60}")
    with raising_on_stop_signals():
        cluster = detect_cluster(request.device)
    if request.collectives == GLOO and cluster.device != "cpu":
        raise UsageError("collectives of GPUs go through NCCL", fix="add --device cpu")
    if cluster.device != "cpu" and (request.ranks or 0) > cluster.num_devices:
        raise UsageError(f"{request.ranks} ranks, and there are {cluster.num_devices} GPUs")
    if request.sections == ("comm",) and not list_group_sizes(cluster, request.ranks):
        raise UsageError(
            "one rank has nobody to talk to", fix="measure collectives with --ranks 2 or more"
        )
    return _BenchRun(request, cluster, on_progress).run_sections()


class _BenchRun:
    def __init__(
        self,
        request: BenchRequest,
        cluster: Cluster,
        on_progress: Callable[[BenchProgress], None],
    ) -> None:
        self._request, self._cluster, self._on_progress = request, cluster, on_progress
        self._began_s = time.monotonic()
        sizes = list_group_sizes(cluster, request.ranks)
        self._num_ranks = max(sizes, default=1)
        # What is measured while others compute is judged by processor seconds, which say nothing of
        # threads that wait for each other.
        busy_share = 0.0
        if "gemm" in request.sections:
            busy_share = measure_share_of_other_programs(QUIET_CHECK_S)
        self._items = list_bench_items(
            cluster,
            request.sections,
            sizes,
            is_quick=request.is_quick,
            total_s=request.seconds,
            only_single_threads=choose_clock_basis(cluster, busy_share) == PROCESSOR,
        )
        seconds = SECTION_BUDGET_S
        if request.is_quick:
            seconds = QUICK_SECTION_BUDGET_S
        self._storage_s = seconds["storage"] if "storage" in request.sections else 0.0
        start_s = 0.0
        if self._items:
            start_s = RANKS_START_S
        planned_s = sum(item.budget_s for item in self._items)
        self._total_s = planned_s + self._storage_s + start_s
        self._done_s = 0.0

    def run_sections(self) -> BenchResult:
        """Storage first, while no rank disturbs it, then what ranks measure together."""
        sections: dict[str, ProfileSection] = {}
        stop_code = None
        with raising_on_stop_signals():
            if "storage" in self._request.sections:
                sections["storage"] = self._measure_storage()
        if self._items:
            by_ranks, stop_code = self._measure_in_ranks()
            sections |= by_ranks
        profile = build_empty_profile(self._cluster).with_sections(sections)
        return BenchResult(profile, time.monotonic() - self._began_s, stop_code)

    def _measure_storage(self) -> ProfileSection:
        usage = CpuUsage()

        def show_storage_progress(share: float) -> None:
            self._done_s = share * self._storage_s
            self._report_progress(f"storage in {self._request.directory}")

        rows = measure_storage(
            self._request.directory,
            limit_s=self._storage_s,
            is_quick=self._request.is_quick,
            on_progress=show_storage_progress,
        )
        self._done_s = self._storage_s
        return self._build_profile_section(
            rows, 0, usage.compute_share_of_others(usage.own_cpu_seconds())
        )

    def _measure_in_ranks(self) -> tuple[dict[str, ProfileSection], int | None]:
        rows: list[tuple[BenchItem, TimedOperation]] = []
        skipped: list[BenchItem] = []
        remaining = list(self._items)

        def add_row(row: TimedOperation | None) -> None:
            item = remaining.pop(0)
            self._done_s += item.budget_s
            if row is None:
                skipped.append(item)
            else:
                rows.append((item, row))

        with open_scratch_directory("bench") as scratch:
            reader = MeasurementReader(scratch.directory / ROWS_FILE, add_row)
            self._report_progress("starting ranks")

            def tick() -> None:
                reader.read_new_rows()
                if remaining and len(remaining) < len(self._items):
                    self._report_progress(_describe_item(remaining[0]))

            outcome = self._run_ranks(scratch, tick)
            reader.read_new_rows()
            self._require_ranks_succeeded(outcome, scratch)
        if outcome.status in ("interrupted", "preempted"):
            return {}, outcome.exit_code
        sections = {}
        for name in ("gemm", COMM_SECTION):
            of_section = [row for item, row in rows if item.section == name]
            num_skipped = sum(item.section == name for item in skipped)
            if not of_section:
                continue
            section = self._build_profile_section(of_section, num_skipped, reader.busy_share)
            if name == COMM_SECTION:
                section = replace(section, collectives=reader.collectives)
            sections[name] = section
        if self._request.collectives == GLOO and COMM_SECTION in sections:
            sections[GLOO_COMM_SECTION] = sections.pop(COMM_SECTION)
        return sections, None

    def _run_ranks(self, scratch: ScratchDirectory, tick: Callable[[], None]) -> RunOutcome:
        run_dir = scratch.directory
        limits_s: dict[str, float] = {}
        for item in self._items:
            planned_s = limits_s.get(item.section, PATIENCE_S)
            limits_s[item.section] = planned_s + PATIENCE * item.budget_s
        payload = BenchPayload(
            run_dir,
            self._num_ranks,
            self._cluster.device,
            limits_s,
            self._items,
            self._request.collectives,
        )
        spec = LaunchSpec(
            entry="phalanx.bench.rank:main",
            attempts=RepeatedAttempts(lambda: payload),
            num_ranks=self._num_ranks,
            run_dir=run_dir,
            preload=("torch", "phalanx.bench.rank"),
            stepless="measuring",
            grace_s=1.0,
        )
        bus = Bus(rank=-1, attempt=next_attempt_number(run_dir), run_dir=run_dir)
        try:
            return supervise_ranks(spec, bus=bus, on_tick=tick, say=lambda line: None)
        finally:
            bus.close()

    def _require_ranks_succeeded(self, outcome: RunOutcome, scratch: ScratchDirectory) -> None:
        if outcome.status != "failed":
            return
        refusal = scratch.find_error_that_rank_raised(outcome)
        raise refusal or PhalanxError(scratch.build_rank_failure_message(outcome))

    def _build_profile_section(
        self, rows: Sequence[TimedOperation], num_skipped: int, busy_share: float
    ) -> ProfileSection:
        basis = choose_clock_basis(self._cluster, busy_share)
        return ProfileSection(
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            busy_share=busy_share,
            is_quick=self._request.is_quick,
            num_skipped=num_skipped,
            basis=basis,
            fits=fit_section(rows, self._cluster, basis),
            rows=tuple(rows),
        )

    def _report_progress(self, running: str) -> None:
        self._on_progress(BenchProgress(self._done_s, self._total_s, running))


def _describe_item(item: BenchItem) -> str:
    words = [item.kind, item.mode, item.dtype, f"on {item.num_ranks}"]
    return " ".join(filter(None, words))
