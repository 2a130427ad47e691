"""Whether the GPUs have room for what the plan predicts, before anything is built: others may
use them, too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.core.units import format_bytes
from phalanx.mesh.mesh import Mesh
from phalanx.plan.plan import Plan


def missing_room(mesh: Mesh, plan: Plan) -> str:
    """Says of which GPU less is free than its rank is predicted to need; empty if of none, and on
    CPUs.

    Collective.
    """
    if mesh.device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(mesh.device)
    found = mesh.gather_json([free, total])
    needed = [sum(plan.predicted_of(rank).values()) for rank in range(mesh.world_size)]
    return describe_missing_room([(free, total) for free, total in found], needed)


def describe_missing_room(room: Sequence[tuple[int, int]], needed: Sequence[int]) -> str:
    """Of each rank's GPU (bytes free, bytes in all), and the bytes that its rank needs."""
    short = [rank for rank, (free, _) in enumerate(room) if free < needed[rank]]
    if not short:
        return ""
    worst = max(short, key=lambda rank: needed[rank] - room[rank][0])
    free, total = room[worst]
    others = f", and {len(short) - 1} more ranks have too little" if len(short) > 1 else ""
    return (
        f"the GPU of rank {worst} has {format_bytes(free)} of {format_bytes(total)} free, and the"
        f" plan predicts {format_bytes(needed[worst])}{others}: another process may use it"
        " (nvidia-smi shows which)"
    )
