"""The collectives of a training step, each as a call that a group of ranks makes together, and
products beside them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from phalanx.bench.items import BenchItem
from phalanx.bench.kernels import TimedCall
from phalanx.mesh.gloo_collectives import gather_rows, scatter_sum

# Rows, columns and inner dimension of the products that run beside an all-reduce: some 2 ms of a
# core, as a block of a small model takes.
BESIDE = (256, 512, 512)
GPU_BESIDE = (4096, 4096, 4096)


def build_collective(item: BenchItem, group: dist.ProcessGroup, device: torch.device) -> TimedCall:
    """The call that `item` measures, of `item.size[0]` bytes of fp32: of the whole message, as the
    gathered result of an all-gather, the input of a reduce-scatter."""
    if item.kind == "overlap":
        return _build_overlap(item, group, device)
    num_bytes = item.size[0]
    ranks = dist.get_world_size(group)
    rows = torch.randn(ranks, max(1, num_bytes // 4 // ranks), device=device)
    call = _COLLECTIVES[item.kind](rows, group)
    return TimedCall(call, num_bytes=float(rows.nbytes))


def _make_all_reduce(rows: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    # Zeros stay zeros however often they are added up.
    flat = torch.zeros_like(rows).view(-1)
    return lambda: dist.all_reduce(flat, group=group)


def _make_all_gather(rows: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    return lambda: gather_rows(rows, group)


def _make_reduce_scatter(rows: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    rows.zero_()
    if rows.device.type == "cpu":
        return lambda: scatter_sum(rows, group)
    part = torch.empty_like(rows[0])
    return lambda: dist.reduce_scatter_tensor(part, rows.view(-1), group=group)


def _make_all_to_all(rows: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    received = torch.empty_like(rows)
    return lambda: dist.all_to_all_single(received.view(-1), rows.view(-1), group=group)


def _make_send(rows: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """A message from the first rank to the last and back; of the others, nothing."""
    flat = rows.view(-1)
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    first_global, last_global = (dist.get_global_rank(group, each) for each in (0, last))

    def there_and_back() -> None:
        if rank == 0:
            dist.send(flat, last_global, group=group)
            dist.recv(flat, last_global, group=group)
        elif rank == last:
            dist.recv(flat, first_global, group=group)
            dist.send(flat, first_global, group=group)

    return there_and_back


_COLLECTIVES = {
    "all_reduce": _make_all_reduce,
    "all_gather": _make_all_gather,
    "reduce_scatter": _make_reduce_scatter,
    "all_to_all": _make_all_to_all,
    "send": _make_send,
}


def _build_overlap(item: BenchItem, group: dist.ProcessGroup, device: torch.device) -> TimedCall:
    """An all-reduce ("all_reduce"), products of about its length ("compute"), or both at once
    ("together")."""
    rows, cols, inner = BESIDE
    if device.type == "cuda":
        rows, cols, inner = GPU_BESIDE
    left, right = torch.randn(rows, inner, device=device), torch.randn(inner, cols, device=device)
    out = torch.empty(rows, cols, device=device)
    message = torch.zeros(item.size[0] // 4, device=device)
    # As many products as the message is long, within reason; equal on all ranks and in all modes.
    repeats = max(1, min(16, item.size[0] // (512 * 1024)))

    def compute() -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=out)

    def together() -> None:
        work = dist.all_reduce(message, group=group, async_op=True)
        compute()
        assert work is not None, "this rank is in the group"
        work.wait()

    calls: dict[str, Callable[[], object]] = {
        "compute": compute,
        "all_reduce": lambda: dist.all_reduce(message, group=group),
        "together": together,
    }
    flops = 0.0
    if item.mode != "all_reduce":
        flops = 2.0 * repeats * rows * cols * inner
    return TimedCall(calls[item.mode], flops, float(message.nbytes))
