"""`StepStudy`: the steps under study, of which each cause that is found takes its seconds out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from phalanx.observe.events import OperatorsCounted
from phalanx.plan.calibrated.roofline import Roofline
from phalanx.plan.memory_rates import MemoryRates
from phalanx.report.bottleneck.cause import Cause
from phalanx.report.bottleneck.step_table import RankStep, StepTable
from phalanx.report.bottleneck.update_traffic import UpdateTraffic
from phalanx.report.bottleneck.what_if import (
    EditedSeconds,
    calculate_speedup,
    select_phase_seconds,
)
from phalanx.report.bubble import MeasuredPipeline
from phalanx.report.self_time import split_into_peers

COMPUTE_GROUPS = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class RunOutline:
    """The facts that a verdict needs besides the steps.

    `num_ranks` of the run, more than those in the table where files are missing (0: not known);
    `num_stages` of pipeline ranks; `evaluation_s`: seconds of evaluations between these steps;
    `operators`: what calling them costs, where it was counted; `sent_bytes` of a step by axis
    ("dp", "tp", ...); `degrees` by axis of the layout; `allows_unused`: DDP may find parameters
    without a gradient. `peak_flops_per_s`: of a device's data sheet, 0 where there is none.
    `tokens_per_s`: those that the model computes, of which not each has a target.
    `update`: the bytes of an update of the weights; `memory`: what memory gives these ranks;
    `roofline`: the least that a forward and backward take. None: not known.
    """

    device: str = ""
    num_ranks: int = 0
    num_stages: int = 1
    zero_stage: int = 0
    is_compiled: bool = False
    allows_unused: bool = False
    evaluation_s: float = 0.0
    num_evaluations: int = 0
    num_saves: int = 0
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)
    pipeline: MeasuredPipeline | None = None
    operators: OperatorsCounted | None = None
    flops_per_token: float = 0.0
    hardware_flops_per_token: float = 0.0
    peak_flops_per_s: float = 0.0
    tokens_per_s: float = 0.0
    global_batch_size: int = 0
    update: UpdateTraffic | None = None
    memory: MemoryRates | None = None
    roofline: Roofline | None = None

    def model_flops_per_s(self, num_ranks: int) -> float:
        """FLOP/s of the model on each rank, without recomputation; 0 where they are not known."""
        return self.flops_per_token * self.tokens_per_s / max(num_ranks, 1)

    def model_flops_utilization(self, num_ranks: int) -> float:
        """MFU, 0 to 1: FLOP/s of the model over `reference_flops_per_s`; 0 where one of them is
        not known."""
        if not self.reference_flops_per_s > 0:
            return 0.0
        return self.model_flops_per_s(num_ranks) / self.reference_flops_per_s

    @property
    def has_measured_reference(self) -> bool:
        """True where rank 0 has measured large products."""
        return self.operators is not None and self.operators.matmul_flops_per_s > 0

    @property
    def reference_flops_per_s(self) -> float:
        """FLOP/s of large products: as rank 0 measured them, else by the device's data sheet; 0
        where neither is known."""
        if self.operators is not None and self.has_measured_reference:
            return self.operators.matmul_flops_per_s
        return self.peak_flops_per_s

    def hardware_flops_utilization(self, num_ranks: int) -> float:
        """HFU, 0 to 1: as MFU, with what is recomputed; 0 where it is not known."""
        if not self.flops_per_token > 0:
            return 0.0
        share_of_all = self.hardware_flops_per_token / self.flops_per_token
        return share_of_all * self.model_flops_utilization(num_ranks)


class StepStudy:
    """The steps of a run, its outline, and the causes that were found so far.

    Causes are found one after the other, each in the steps without those before, so that no second
    is charged to two of them.
    """

    def __init__(self, table: StepTable, outline: RunOutline) -> None:
        self.table, self.outline = table, outline
        self.causes: list[Cause] = []
        self.not_judged: list[str] = []
        self.groups_taken_out: set[str] = set()
        self._seconds = EditedSeconds(table)

    @property
    def total_s(self) -> float:
        return self.table.total_s

    @property
    def num_ranks(self) -> int:
        """Ranks of the run, of which some may have left no file."""
        return max(self.outline.num_ranks, self.table.ranks[-1] + 1)

    @property
    def mean_step_s(self) -> float:
        return self.total_s / max(self.table.num_steps, 1)

    def take_out(self, seconds_of: Mapping[int, list[float]]) -> float:
        """Take seconds of each step out of ranks; returns the speed-up that they alone give."""
        before_s = self._seconds.total_s()
        self._seconds = self._seconds.without(seconds_of)
        saved_s = before_s - self._seconds.total_s()
        return calculate_speedup(self.table, self.total_s - saved_s)

    def remaining_seconds(self, rank: int, index: int) -> float:
        """A rank's own seconds of a step, without the causes that were found so far."""
        return self._seconds(rank, index)

    def take_out_groups(self, groups: Sequence[str]) -> float:
        """Take time groups out of all ranks; returns the speed-up that they alone give."""
        self.groups_taken_out |= set(groups)
        return self.take_out(
            {rank: select_phase_seconds(rows, groups) for rank, rows in self.table.rows.items()}
        )

    def group_comparable_ranks(self) -> list[tuple[int, ...]]:
        """Ranks that have the same work: those of one stage of a pipeline."""
        return split_into_peers(self.table.ranks, self.outline.num_stages, self.num_ranks)

    def typical_share(self, groups: Sequence[str]) -> float:
        """The share of the steps' time (0 to 1) of time groups, in the median over ranks that are
        no stragglers."""
        stragglers = {cause.rank for cause in self.causes if cause.kind == "straggler"}
        shares = []
        for rank, rows in self.table.rows.items():
            if rank not in stragglers:
                shares.append(sum(select_phase_seconds(rows, groups)) / self.total_s)
        return median(shares)

    def processor_share(self, rank: int) -> float:
        """The part of a rank's own seconds in which its process had a processor; above 1 with
        several threads, 0 where nobody counted."""
        rows = self.table.rows[rank]
        own_s = sum(row.self_s for row in rows)
        if own_s <= 0:
            return 0.0
        return sum(row.cpu_s for row in rows) / own_s

    def share_by_group(self) -> dict[str, float]:
        """Share of the steps' time by time group, in the mean over ranks."""
        shares: dict[str, float] = {}
        for rows in self.table.rows.values():
            for row in rows:
                for group, seconds in row.seconds.items():
                    shares[group] = shares.get(group, 0.0) + seconds
        whole_s = self.total_s * len(self.table.ranks)
        return {group: seconds / whole_s for group, seconds in shares.items() if seconds}


def sum_groups(seconds: Mapping[str, float], groups: Iterable[str]) -> float:
    return sum(seconds.get(group, 0.0) for group in groups)


def sum_compute_seconds(rows: Iterable[RankStep]) -> float:
    """Seconds in forward, backward and optimizer."""
    return sum(sum_groups(row.seconds, COMPUTE_GROUPS) for row in rows)
