"""All-gather and reduce-scatter by what is quickest: over gloo by its broadcasts and reductions,
which take half the time of its own.

Measured on two and four ranks of one machine (docs/benchmarks.md). All of them are started before
any is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from phalanx.mesh.devices import is_on_cpu
from phalanx.mesh.shared_memory.opening import gathers_in_one_call


def all_gather_rows_in_place(rows: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather the rows of all ranks in place: of `rows` [ranks, ...], contiguous, each rank has
    filled its own row before."""
    if not is_on_cpu(rows) or gathers_in_one_call(group):
        dist.all_gather_into_tensor(rows.view(-1), rows[dist.get_rank(group)].view(-1), group=group)
        return
    sources = _list_global_ranks(group)
    works = []
    for row, source in zip(rows, sources, strict=True):
        works.append(dist.broadcast(row, source, group=group, async_op=True))
    _wait_for_all_transfers(works)


def reduce_scatter_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks of this rank's row of `rows` [ranks, ...], on the CPU.

    `rows` is spent afterwards.
    """
    if gathers_in_one_call(group):
        total = torch.empty_like(rows[0])
        dist.reduce_scatter_tensor(total.view(-1), rows.view(-1), group=group)
        return total
    works = []
    for row, target in zip(rows, _list_global_ranks(group), strict=True):
        works.append(dist.reduce(row, target, group=group, async_op=True))
    _wait_for_all_transfers(works)
    return rows[dist.get_rank(group)]


def _list_global_ranks(group: dist.ProcessGroup) -> list[int]:
    # `broadcast` and `reduce` name ranks by their number in the world, whatever the group.
    return [dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group))]


def _wait_for_all_transfers(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        # None of a rank that takes no part, which torch's types allow and these calls never give.
        if work is not None:
            work.wait()
