"""A check that the GPUs have room for the memory that the plan predicts, before anything is built:
other processes may use them, too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.core.units import format_bytes
from phalanx.mesh.mesh import Mesh
from phalanx.plan.plan import Plan


def describe_gpu_memory_shortage(mesh: Mesh, plan: Plan) -> str:
    """A message about the GPU that has less free memory than its rank is predicted to need; empty
    if there is none, and on CPUs. Collective."""
    if mesh.device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(mesh.device)
    # Gathered, so that every rank has the message.
    room_by_rank = mesh.gather_json([free, total])
    needed = [sum(plan.memory_of_rank(rank).values()) for rank in range(mesh.world_size)]
    return find_gpu_memory_shortage_of_any_rank(room_by_rank, needed)


def find_gpu_memory_shortage_of_any_rank(
    room: Sequence[Sequence[int]], needed: Sequence[int]
) -> str:
    """A message if some rank lacks memory; empty if none does.

    `room`: (free, total) bytes of each rank's GPU; `needed`: the bytes that each rank needs.
    """
    short = [rank for rank, (free, _) in enumerate(room) if free < needed[rank]]
    if not short:
        return ""
    worst = max(short, key=lambda rank: needed[rank] - room[rank][0])
    free, total = room[worst]
    more = ""
    if len(short) > 1:
        more = f", and {len(short) - 1} more ranks have too little"
    return (
        f"the GPU of rank {worst} has {format_bytes(free)} of {format_bytes(total)} free, and the"
        f" plan predicts {format_bytes(needed[worst])}{more}: another process may use it"
        " (nvidia-smi shows which)"
    )
