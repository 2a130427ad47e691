"""Bytes of a bucket of gradients, or of updated weights."""

from __future__ import annotations

from phalanx.core.block_sizes import get_block_sizes
from phalanx.core.units import MIB
from phalanx.plan.plan import Plan


def choose_bucket_bytes(plan: Plan) -> int:
    """The bytes of a bucket: those that are in force, else those of the job's
    `parallel.bucket_mb`; in a compiled model at least 1 MiB."""
    size = get_block_sizes().bucket_bytes or int(plan.parallel.bucket_mb * MIB)
    # The first bucket that torch's compiler takes DDP to have, which it wants no other below.
    if plan.compile:
        return max(size, MIB)
    return size
