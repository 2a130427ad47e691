"""One rank of those that measure together: it goes through the items as all the others do."""

from __future__ import annotations

import json
import time
from dataclasses import astuple
from functools import partial

import torch
import torch.distributed as dist

from phalanx.bench.collectives import build_collective_call
from phalanx.bench.cpu_usage import CpuUsage
from phalanx.bench.items import BenchItem, BenchPayload
from phalanx.bench.kernels import TimedCall, build_timed_call
from phalanx.bench.rows import BUSY_SHARE_KEY, COLLECTIVES_KEY, ROWS_FILE, SKIPPED_ROW_LINE
from phalanx.bench.stopwatch import (
    RepeatedTime,
    keep_device_busy,
    time_exact_repeats,
    time_repeatedly,
)
from phalanx.core.errors import ExitCode
from phalanx.core.typed_json import JsonObject
from phalanx.launch.rank_link import RankLink
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.plan.layout import Layout
from phalanx.plan.profiles import GLOO, TimedOperation

LEAST_TOGETHER, MOST_TOGETHER = 3, 200


def main(document: JsonObject, link: RankLink) -> int:
    """Measure the items of a BenchPayload, of which `document` is the JSON, as one rank."""
    payload = BenchPayload.from_json(document)
    layout, choice = Layout(dp_replicate=payload.num_ranks), payload.collectives
    with open_mesh(
        layout, device=payload.device, collectives="gloo" if choice == GLOO else "auto"
    ) as mesh:
        RankBench(payload, mesh).measure_items()
    return ExitCode.OK


class RankBench:
    """The items of a payload as one rank of `mesh` measures them.

    Ranks without a part in an item go on to the next one that they have a part in, where they wait:
    what few measure is not held up by the others.
    """

    def __init__(self, payload: BenchPayload, mesh: Mesh) -> None:
        self._payload, self._mesh = payload, mesh
        self._began_s: dict[str, float] = {}
        self._groups: dict[int, dist.ProcessGroup | None] = {1: None}
        # `new_group` is collective over all ranks, in one order.
        for size in sorted({item.num_ranks for item in payload.items} - {1}):
            self._groups[size] = dist.new_group(list(range(size)))

    def measure_items(self) -> None:
        """Measure all items; rank 0 appends a row for each to the run's rows. Collective."""
        usage = CpuUsage()
        for item in self._payload.items:
            if self._mesh.rank >= item.num_ranks:
                continue
            group = self._groups[item.num_ranks]
            if self._is_time_up(item.section, group):
                self._append_line_on_rank_0(SKIPPED_ROW_LINE)
                continue
            timed, timed_call = self._measure_item(item, group)
            ranks = self._gather_times(timed, group)
            self._append_line_on_rank_0(
                json.dumps(_summarize_ranks_into_row(item, timed_call, ranks).to_json())
            )
        own_s = sum(self._mesh.gather_json(usage.own_cpu_seconds()))
        self._append_line_on_rank_0(
            json.dumps(
                {
                    BUSY_SHARE_KEY: usage.compute_share_of_others(own_s),
                    COLLECTIVES_KEY: self._mesh.describe_collectives(),
                }
            )
        )

    def _is_time_up(self, section: str, group: dist.ProcessGroup | None) -> bool:
        """True if the time of `section` is over on rank 0's clock. Collective over `group`."""
        began_s = self._began_s.setdefault(section, time.monotonic())
        is_up = time.monotonic() - began_s > self._payload.limits_s[section]
        if group is None:
            return is_up
        flag = torch.tensor([float(is_up)], device=self._mesh.device)
        dist.broadcast(flag, 0, group=group)
        return bool(flag.item() > 0)

    def _gather_times(
        self, timed: RepeatedTime, group: dist.ProcessGroup | None
    ) -> list[list[float]]:
        """The fields of all ranks' times, in rank order. Collective over `group`."""
        row = torch.tensor(astuple(timed), dtype=torch.float64, device=self._mesh.device)
        if group is None:
            return [row.tolist()]
        rows = [torch.zeros_like(row) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, row, group=group)
        return [each.tolist() for each in rows]

    def _measure_item(
        self, item: BenchItem, group: dist.ProcessGroup | None
    ) -> tuple[RepeatedTime, TimedCall]:
        """This rank's times, and what was timed."""
        device = self._mesh.device
        threads_before = torch.get_num_threads()
        if device.type == "cpu":
            torch.set_num_threads(item.num_threads)
        try:
            if item.section == "comm":
                assert group is not None, "a collective is of several ranks"
                timed_call = build_collective_call(item, group, device)
                return self._time_collective(item, timed_call, group), timed_call
            timed_call = build_timed_call(item, device)
            # Of "launch" the seconds of calling are what is measured.
            if item.kind == "launch":
                return time_repeatedly(timed_call.call, item.budget_s, device), timed_call
            busy = partial(keep_device_busy, device)
            return time_repeatedly(timed_call.call, item.budget_s, device, busy), timed_call
        finally:
            torch.set_num_threads(threads_before)

    def _time_collective(
        self, item: BenchItem, timed_call: TimedCall, group: dist.ProcessGroup
    ) -> RepeatedTime:
        device = self._mesh.device
        meeting = torch.zeros(1, device=device)

        def synchronize_ranks() -> None:
            keep_device_busy(device)
            dist.all_reduce(meeting, group=group)

        # The first call opens connections; the second says how often there is time for.
        time_exact_repeats(timed_call.call, 1, device, synchronize_ranks)
        once = time_exact_repeats(timed_call.call, 2, device, synchronize_ranks)
        slowest = torch.tensor([once.seconds], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        repeats = int(item.budget_s / max(1e-6, float(slowest.item())))
        repeats = max(LEAST_TOGETHER, min(MOST_TOGETHER, repeats))
        return time_exact_repeats(timed_call.call, repeats, device, synchronize_ranks)

    def _append_line_on_rank_0(self, line: str) -> None:
        if self._mesh.rank != 0:
            return
        # As each item ends: the process that started us reads along.
        with open(self._payload.run_dir / ROWS_FILE, "a") as file:
            file.write(line + "\n")


def _summarize_ranks_into_row(
    item: BenchItem, timed_call: TimedCall, ranks: list[list[float]]
) -> TimedOperation:
    """The row of an item: medians over the ranks that took part."""
    columns = [sorted(column) for column in zip(*ranks, strict=True)]
    middle = (len(ranks) - 1) // 2
    factor = 1.0
    if item.kind == "send":
        # There and back are two messages, and the ranks in between had none.
        columns = [sorted((ranks[0][index], ranks[-1][index])) for index in range(len(ranks[0]))]
        middle, factor = 0, 0.5
    return TimedOperation(
        kind=item.kind,
        mode=item.mode,
        dtype=item.dtype,
        size=item.size,
        num_ranks=item.num_ranks,
        num_threads=item.num_threads,
        seconds=factor * columns[0][middle],
        low_s=factor * columns[1][middle],
        high_s=factor * columns[2][middle],
        slowest_s=factor * columns[0][-1],
        cpu_s=factor * columns[3][middle],
        num_repeats=int(columns[4][0]),
        flops=timed_call.flops,
        num_bytes=timed_call.num_bytes,
    )
