"""The manifest of the newest checkpoint, which says what it consists of, is torn, and then a rank
is killed."""

from __future__ import annotations

from phalanx.resilience.checkpoint_damage import (
    EXPECTATION,
    find_manifest,
    kill_rank,
    rewrite,
)
from phalanx.resilience.fault import FaultSite

__all__ = ["EXPECTATION", "inject"]


def inject(site: FaultSite) -> None:
    """Cut the manifest to half of its bytes, and SIGKILL to this process."""
    rewrite(find_manifest(site.run_dir), lambda content: content[: len(content) // 2])
    kill_rank()
