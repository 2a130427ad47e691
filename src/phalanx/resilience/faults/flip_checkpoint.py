"""A bit of the newest checkpoint flips on the disk, and then a rank is killed: the checkpoint is
needed."""

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
    """Flip a bit in the middle of the largest file of tensors, and SIGKILL to this process."""

    def flip(content: bytes) -> bytes:
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]

    rewrite(find_largest_shard(site.run_dir), flip)
    kill_rank()
