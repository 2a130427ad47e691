"""The collectives of a training step, each as a call that a group of ranks makes together, and
products beside them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from phalanx.bench.items import BenchItem
from phalanx.bench.kernels import TimedCall
from phalanx.mesh.gloo_collectives import all_gather_rows_in_place, reduce_scatter_rows

# Rows, columns and inner dimension of the products that run beside an all-reduce: some 2 ms of a
# core, as a block of a small model takes.
OVERLAP_MATMUL_SIZE = (256, 512, 512)
GPU_OVERLAP_MATMUL_SIZE = (4096, 4096, 4096)


def build_collective_call(
    item: BenchItem, group: dist.ProcessGroup, device: torch.device
) -> TimedCall:
    """The call that `item` measures, of `item.size[0]` bytes of fp32: of the whole message, as the
    gathered result of an all-gather, the input of a reduce-scatter."""
    if item.kind == "overlap":
        return _build_overlap_call(item, group, device)
    num_bytes = item.size[0]
    ranks = dist.get_world_size(group)
    rows = torch.randn(ranks, max(1, num_bytes // 4 // ranks), device=device)
    call = _COLLECTIVE_CALL_BUILDERS[item.kind](rows, group)
    return TimedCall(call, num_bytes=float(rows.nbytes))


def _build_all_reduce_call(rows: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    # Zeros stay zeros however often they are added up.
    flat = torch.zeros_like(rows).view(-1)
    return lambda: dist.all_reduce(flat, group=group)


def _build_all_gather_call(rows: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    return lambda: all_gather_rows_in_place(rows, group)


def _build_reduce_scatter_call(
    rows: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], object]:
    rows.zero_()
    if rows.device.type == "cpu":
        return lambda: reduce_scatter_rows(rows, group)
    part = torch.empty_like(rows[0])
    return lambda: dist.reduce_scatter_tensor(part, rows.view(-1), group=group)


def _build_all_to_all_call(rows: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    received = torch.empty_like(rows)
    return lambda: dist.all_to_all_single(received.view(-1), rows.view(-1), group=group)


def _build_round_trip_call(rows: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """A message from the first rank to the last and back; of the others, nothing."""
    flat = rows.view(-1)
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    first_global, last_global = (dist.get_global_rank(group, each) for each in (0, last))

    def send_there_and_back() -> None:
        if rank == 0:
            dist.send(flat, last_global, group=group)
            dist.recv(flat, last_global, group=group)
        elif rank == last:
            dist.recv(flat, first_global, group=group)
            dist.send(flat, first_global, group=group)

    return send_there_and_back


_COLLECTIVE_CALL_BUILDERS = {
    "all_reduce": _build_all_reduce_call,
    "all_gather": _build_all_gather_call,
    "reduce_scatter": _build_reduce_scatter_call,
    "all_to_all": _build_all_to_all_call,
    "send": _build_round_trip_call,
}


def _build_overlap_call(
    item: BenchItem, group: dist.ProcessGroup, device: torch.device
) -> TimedCall:
    """An all-reduce ("all_reduce"), products of about its length ("compute"), or both at once
    ("together")."""
    rows, cols, inner = OVERLAP_MATMUL_SIZE
    if device.type == "cuda":
        rows, cols, inner = GPU_OVERLAP_MATMUL_SIZE
    lhs, rhs = torch.randn(rows, inner, device=device), torch.randn(inner, cols, device=device)
    out = torch.empty(rows, cols, device=device)
    message = torch.zeros(item.size[0] // 4, device=device)
    # As many products as the message is long, within reason; equal on all ranks and in all modes.
    repeats = max(1, min(16, item.size[0] // (512 * 1024)))

    def multiply_repeatedly() -> None:
        for _ in range(repeats):
            torch.mm(lhs, rhs, out=out)

    def reduce_beside_products() -> None:
        work = dist.all_reduce(message, group=group, async_op=True)
        multiply_repeatedly()
        assert work is not None, "this rank is in the group"
        work.wait()

    calls: dict[str, Callable[[], object]] = {
        "compute": multiply_repeatedly,
        "all_reduce": lambda: dist.all_reduce(message, group=group),
        "together": reduce_beside_products,
    }
    flops = 0.0
    if item.mode != "all_reduce":
        flops = 2.0 * repeats * rows * cols * inner
    return TimedCall(calls[item.mode], flops, float(message.nbytes))
