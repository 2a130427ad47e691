"""A file of the newest checkpoint lost its end, as after a power cut, and then a rank is killed."""

from __future__ import annotations

from phalanx.resilience.checkpoint_damage import (
    EXPECTATION,
    find_largest_shard,
    kill_rank,
    rewrite,
)
from phalanx.resilience.fault import FaultSite

__all__ = ["EXPECTATION", "inject"]


def inject(site: FaultSite) -> None:
    """Cut the largest file of tensors to half of its bytes, and SIGKILL to this process."""
    rewrite(find_largest_shard(site.run_dir), lambda content: content[: len(content) // 2])
    kill_rank()
