"""A file of the newest checkpoint is gone, as after a careless clean-up, and then a rank is
killed."""

from __future__ import annotations

from phalanx.resilience.checkpoint_damage import (
    EXPECTATION,
    find_largest_shard,
    kill_rank,
)
from phalanx.resilience.fault import FaultSite

__all__ = ["EXPECTATION", "inject"]


def inject(site: FaultSite) -> None:
    """Remove the largest file of tensors, and SIGKILL to this process."""
    find_largest_shard(site.run_dir).unlink()
    kill_rank()
